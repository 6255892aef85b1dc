"""What a package offers by name, imported when it is first used: importing the package itself costs next to nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """A package's ``__getattr__`` and ``__all__`` from the imports in the stub beside it, ``__init__.pyi``.

    So type checkers and the interpreter read one list (Scientific Python's SPEC 1).

    Args:
        package, file: the package's ``__name__`` and ``__file__``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    found = {
        alias.asname or alias.name: (node.module or package, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own = found[name]
        # A submodule becomes an attribute of its package only when it is imported.
        value = None if module == package else getattr(import_module(module), own, None)
        value = import_module(f"{module}.{own}") if value is None else value
        setattr(sys.modules[package], name, value)
        return value

    return load, sorted(found)
