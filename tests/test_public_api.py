"""What ``import specact`` offers, and that all of it is documented."""

import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import specact

# What the documentation may use by name.
DOCUMENTED = (
    "load_bundle", "Bundle", "SpeculativePolicy", "SpeculativePolicy.act", "SpeculativePolicy.reset",
    "calibrated_gate", "SpecactError", "sampling.verify_codes", "sampling.residual", "sampling.softmax",
    "sampling.rejection_probability", "sampling.total_variation", "sampling.sample_codes", "sampling.verify",
    "gates.ActionDeviation", "gates.Always", "gates.Never", "gates.Random", "gates.Uncertainty", "gates.Oracle",
    "gates.Learned", "gates.Gate", "__version__",
)  # fmt: skip
MODULES = sorted(found.name for found in pkgutil.walk_packages(specact.__path__, "specact."))


def public(module: ModuleType) -> set[str]:
    """Names without underscore, but for submodules that are there only because something imported them."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (not inspect.ismodule(value) or name in module.__all__)
    }


@pytest.mark.parametrize("name", ["specact", "specact.gates"])
def test_all_is_what_the_module_exposes(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(public(module))
    assert sorted(module.__all__, key=str.casefold) == sorted(set(module.__all__), key=str.casefold)


def test_all_is_what_we_meant() -> None:
    """A new public name is a promise: make it here too."""
    assert set(specact.__all__) == {
        "Bundle", "SpecactError", "SpeculativePolicy", "calibrated_gate", "gates", "load_bundle", "sampling",
    }  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_names_exist(name: str) -> None:
    value: object = specact
    for part in name.split("."):
        value = getattr(value, part)
    assert value is not None


def test_every_module_of_the_source_is_found() -> None:
    files = {path for path in Path(specact.__path__[0]).rglob("*.py") if path.name != "__init__.py"}
    assert len(files) == len([name for name in MODULES if not hasattr(importlib.import_module(name), "__path__")])
    assert len(files) > 40


@pytest.mark.parametrize("name", MODULES)
def test_every_public_class_and_function_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):
        assert module.__doc__, f"the module {name} says nothing about itself"
    undocumented = []
    for own, value in vars(module).items():
        if own.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        # A dataclass without a docstring is given its signature as one.
        if not value.__doc__ or value.__doc__.startswith(f"{own}("):
            undocumented.append(own)
    assert not undocumented


@pytest.mark.parametrize("kind", [specact.SpeculativePolicy, specact.Bundle, specact.gates.Gate])
def test_the_methods_of_the_public_classes_are_documented(kind: type) -> None:
    for name, value in vars(kind).items():
        if not name.startswith("_") and inspect.isfunction(value):
            assert inspect.getdoc(value), f"{kind.__name__}.{name}"
