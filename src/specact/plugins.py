"""User-defined environments, gates, robots and policies, by name: ``MODULE:NAME``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from specact.errors import ConfigError


def is_plugin(name: str) -> bool:
    """Whether a name has the form ``MODULE:NAME``; the package's own names have no colon."""
    return ":" in name


def load_object(name: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """Imports the object ``MODULE:NAME``, also from the current directory.

    Only for names given by the user: importing runs code, so a name from a third-party file such as a bundle must not
    be loaded.

    Args:
        name: such as ``my_arms:Arm``.
        kind: what it must be, for messages, such as ``robot, a class without required arguments``.
        fits: whether an object is of that kind.

    Raises:
        ConfigError: if there is no such module or object, the module cannot be imported, or it is of another kind.
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
    found = getattr(loaded, attribute, None)
    if fits(found):
        return found
    # Suggestions for the message.
    there = [own for own, value in vars(loaded).items() if not own.startswith("_") and fits(value)]
    has = f"{module} has {', '.join(sorted(there)[:10])}" if there else f"{module} has none"
    if not hasattr(loaded, attribute):
        raise ConfigError(f"{module} has no {attribute!r}. It must be a {kind}; {has}")
    raise ConfigError(f"{name!r} is {found!r:.100}. It must be a {kind}; {has}")


def load_maker(name: str, kind: str) -> Callable[[], Any]:
    """The class or function ``MODULE:NAME`` that makes an object without arguments; not called.

    Args:
        name: such as ``my_arms:Arm``.
        kind: of the object, for messages, such as ``robot``.

    Raises:
        ConfigError: if it cannot be loaded or called.
    """
    found: Callable[[], Any] = load_object(name, f"class that makes a {kind} without arguments", callable)
    return found


def make_object(name: str, kind: str, methods: Sequence[str]) -> Any:
    """The instance that the class or function ``MODULE:NAME`` returns without arguments.

    Args:
        name: such as ``my_arms:Arm``.
        kind: of the instance, for messages, such as ``robot``.
        methods: that it must have.

    Raises:
        ConfigError: if it cannot be loaded or called, or the instance lacks a method.
    """
    make = load_maker(name, kind)
    try:
        made = make()
    except Exception as error:
        raise ConfigError(
            f"the {kind} {name!r} cannot be created: {type(error).__name__}: {error}; {name.replace(':', '.')}() must "
            "work without arguments; check that its device is connected and not in use"
        ) from error
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        refused = ConfigError(f"the {kind} {name!r} has no method {missing[0]!r}; it must have {' and '.join(methods)}")
        _release(made, refused)
        raise refused
    return made


def _release(made: object, refused: ConfigError) -> None:
    """Stops what is refused: a robot may hold torque once it is made."""
    stop = getattr(made, "stop", None)
    if not callable(stop):
        return
    try:
        stop()
    except Exception as error:  # noqa: BLE001 - a robot's own code can raise anything
        refused.add_note(f"it could not be stopped either: {type(error).__name__}: {error}")
