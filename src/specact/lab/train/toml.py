"""Dataclasses from TOML: unknown keys, missing keys and values of a wrong type are refused by name."""

from __future__ import annotations

import reprlib
import tomllib
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

from specact.errors import ConfigError, unknown_name

T = typing.TypeVar("T")

# TOML's types in words; bool before int, because a Python bool is an int too.
_WORDS: dict[type, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"
}  # fmt: skip


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a recipe's file.

    Raises:
        ConfigError: if the file is missing, cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe at {path}; the committed ones are in recipes/") from None
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}; give the path of a TOML file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def build(kind: type[T], values: dict[str, Any], table: str = "") -> T:
    """An instance of a dataclass from the values of a TOML table; nested dataclasses are built from nested tables.

    Args:
        kind: the dataclass. Its annotations say which types are allowed.
        values: by key.
        table: the table's name, for messages; empty for the top level of the file.

    Raises:
        ConfigError: for an unknown or missing key, or a value that the key does not allow.
    """
    hints = typing.get_type_hints(kind)
    where = f"[{table}]" if table else "the recipe"
    prefix = f"{table}." if table else ""
    typed = {}
    for key, value in values.items():
        if key not in hints:
            raise unknown_name(f"key in {where}", key, hints)
        typed[key] = _typed(hints[key], value, prefix + key)
    assert is_dataclass(kind)
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ConfigError(f"{where} has no {' and no '.join(missing)}; it needs {', '.join(needed)}")
    try:
        return kind(**typed)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if table else str(error)) from None


def _typed(hint: Any, value: Any, key: str) -> Any:
    """The value as the annotation has it: lists become tuples, tables become dataclasses.

    Raises:
        ConfigError: if it is of another type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is UnionType:  # TOML has no value for None, so it is the other one
        return _typed(next(kind for kind in arguments if kind is not NoneType), value, key)
    if origin is Literal:
        if value not in arguments:
            raise unknown_name(f"value of {key}", str(value), arguments)
        return value
    if is_dataclass(hint):
        return build(typing.cast(type, hint), _instance(value, dict, key), key)
    if origin is dict:
        table = _instance(value, dict, key)
        return {name: _typed(arguments[1], entry, f"{key}.{name}") for name, entry in table.items()}
    if origin is tuple:
        return _list(value, key, arguments[0], None if arguments[-1] is Ellipsis else len(arguments))
    return _instance(value, hint, key)


def _instance(value: Any, kind: type, key: str) -> Any:
    allowed = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{key} must be {_WORDS[kind]}, got {_found(value)}")
    return value


def _list(value: Any, key: str, kind: type, size: int | None) -> tuple[Any, ...]:
    entries = {str: "strings", int: "integers"}[kind]
    wanted = f"a list of {entries}" if size is None else f"a list of {size} {entries}"
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key} must be {wanted}, got {_found(value)}")
    other = [entry for entry in value if not isinstance(entry, kind) or isinstance(entry, bool)]
    if other or size not in (None, len(value)):
        raise ConfigError(f"{key} must be {wanted}, got {reprlib.repr(list(value))}")
    return tuple(value)


def _found(value: Any) -> str:
    """A value's type in words, and the value."""
    word = next((words for kind, words in _WORDS.items() if isinstance(value, kind)), type(value).__name__)
    return f"{'a boolean' if isinstance(value, bool) else word}: {reprlib.repr(value)}"
