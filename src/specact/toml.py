"""Dataclasses from TOML, with errors for unknown keys, missing keys and wrong types."""

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

# Names of TOML's types; bool before int, because a Python bool is an int too.
_TYPE_NAMES: dict[type, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"
}  # fmt: skip


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file.

    Args:
        path: the file.
        what: what it holds, for messages.

    Raises:
        ConfigError: if the file is missing, cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}; give the path of a TOML file") from None
    # UnicodeDecodeError, TOMLDecodeError and errors of invalid paths are ValueErrors.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def build(kind: type[T], values: Any, what: str, table: str = "") -> T:
    """An instance of a dataclass from the values of a TOML table; nested dataclasses are built from nested tables.

    Args:
        kind: the dataclass, whose annotations define the types.
        values: the table.
        what: what the file holds, for messages.
        table: the table's name, for messages; empty for the top level of the file.

    Raises:
        ConfigError: for an unknown or missing key, or a value that the key does not allow.
    """
    hints = typing.get_type_hints(kind)
    where = f"[{table}]" if table else f"the {what}"
    prefix = f"{table}." if table else ""
    typed = {}
    for key, value in _instance(values, dict, table).items():
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
    """The value converted to the annotation: lists become tuples, tables become dataclasses.

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
        return build(typing.cast(type, hint), value, "", key)
    if origin is dict:
        table = _instance(value, dict, key)
        return {name: _typed(arguments[1], entry, f"{key}.{name}") for name, entry in table.items()}
    if origin is tuple:
        return _list(value, key, arguments[0], None if arguments[-1] is Ellipsis else len(arguments))
    return _instance(value, hint, key)


def _instance(value: Any, kind: type, key: str) -> Any:
    if not _is(value, kind):
        raise ConfigError(f"{key} must be {_TYPE_NAMES[kind]}, got {_found(value)}")
    return value


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))


def _list(value: Any, key: str, kind: type, size: int | None) -> tuple[Any, ...]:
    entries = {str: "strings", int: "integers", float: "numbers"}[kind]
    wanted = f"a list of {entries}" if size is None else f"a list of {size} {entries}"
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key} must be {wanted}, got {_found(value)}")
    if not all(_is(entry, kind) for entry in value) or size not in (None, len(value)):
        raise ConfigError(f"{key} must be {wanted}, got {reprlib.repr(list(value))}")
    return tuple(value)


def _found(value: Any) -> str:
    """A value's type in words, and the value."""
    word = next((words for kind, words in _TYPE_NAMES.items() if isinstance(value, kind)), type(value).__name__)
    return f"{'a boolean' if isinstance(value, bool) else word}: {reprlib.repr(value)}"
