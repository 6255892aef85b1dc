"""What ``import specact`` offers, and that all of it is documented."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest

import specact

# Packages and modules whose ``__all__`` is what others may use.
FACES = (
    "specact", "specact.execution", "specact.families.chunks", "specact.families.codes",
    "specact.families.tokens", "specact.gates", "specact.links", "specact.observation", "specact.remote",
    "specact.lab.tised", "specact.robot", "specact.server",
)  # fmt: skip
# What a device does not have.
OPTIONAL = ("gymnasium", "h5py", "matplotlib", "mujoco", "onnx", "pyarrow", "picows", "scipy", "torch")
ARRAYS = re.compile(r"NDArray|ArrayLike|\b(Chunk|Floats|Codes)\b")


def test_all_is_what_we_meant() -> None:
    """A new public name is a promise: make it here too."""
    assert set(importlib.import_module("specact").__all__) == {
        "Pair", "RemotePolicy", "SpecactError", "SpeculativePolicy", "calibrated_gate", "chunk_policy", "connect",
        "errors", "gates", "load_pair", "sampling",
    }  # fmt: skip


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_exists_and_says_what_it_is_with_shapes_and_units(face: str) -> None:
    module = importlib.import_module(face)
    assert module.__doc__ and sorted(set(module.__all__)) == sorted(module.__all__)
    silent = []
    for name in module.__all__:
        value = getattr(module, name)
        assert value is not None, name
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        said = inspect.getdoc(value) or ""
        annotations = " ".join(map(str, getattr(value, "__annotations__", {}).values()))
        # Shapes and units are in brackets: ``[H, A]``, [s].
        if not said or said.startswith(f"{name}(") or (ARRAYS.search(annotations) and "[" not in said):
            silent.append(name)
    assert not silent


@pytest.mark.parametrize("face", FACES)
def test_no_public_name_is_hidden_by_a_module_of_the_same_name(face: str) -> None:
    """An imported submodule becomes an attribute of its package, and would take the name's place."""
    module = importlib.import_module(face)
    modules = {submodule.name for submodule in pkgutil.iter_modules(getattr(module, "__path__", []))}
    assert all(inspect.ismodule(getattr(module, name)) for name in modules & set(module.__all__))


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match=r"module 'specact\.lab\.tised' has no attribute 'chunk_h'"):
        importlib.import_module("specact.lab.tised").chunk_h  # noqa: B018


def fresh(code: str) -> None:
    """Runs code in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_a_package_imports_nothing_that_is_not_used() -> None:
    packages = [name for name in FACES if hasattr(importlib.import_module(name), "__path__")]
    fresh(
        f"import sys, {', '.join(packages)}\n"
        "heavy = {'numpy', 'onnxruntime', 'websockets', 'msgpack', 'picows', 'torch', 'gymnasium'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )


def test_every_public_name_of_a_device_is_there_without_optional_packages() -> None:
    fresh(
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL}))  # importing one of them fails\n"
        f"for face in {[face for face in FACES if face != 'specact.server']}:\n"
        "    module = importlib.import_module(face)\n"
        "    # A PyTorch module needs PyTorch.\n"
        "    assert all(getattr(module, name) is not None for name in module.__all__ if name != 'torch_policy')\n"
    )


@pytest.mark.parametrize("kind", [specact.SpeculativePolicy, specact.Pair, specact.gates.Gate])
def test_the_methods_of_the_public_classes_are_documented(kind: type) -> None:
    for name, value in vars(kind).items():
        if not name.startswith("_") and inspect.isfunction(value):
            assert inspect.getdoc(value), f"{kind.__name__}.{name}"
