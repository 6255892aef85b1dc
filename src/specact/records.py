"""Typed records: settings, recipes and manifests, checked against their annotations when read and when constructed."""

from __future__ import annotations

import json
import math
import re
import reprlib
import tomllib
from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta, inspect

from specact.errors import ConfigError, SpecactError, unknown_name

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# Of msgspec's types, for messages.
_NAMES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
          "object": "a table", "null": "nothing"}  # fmt: skip

Count = Annotated[int, Meta(ge=1, le=2**53)]
WholeNumber = Annotated[int, Meta(ge=0, le=2**53)]
Size = Annotated[int, Meta(ge=1, le=1 << 20)]  # of a window, vector, codebook or chunk: products of two do not overflow
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[float, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
InsideUnit = Annotated[float, Meta(gt=0, lt=1)]
RateHz = Annotated[float, Meta(ge=1e-3, le=1e6)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of settings that are read from files or given as options; its annotations are its ranges.

    A subclass that relates several fields overrides ``__post_init__`` and calls :func:`check_fields` first.

    Raises:
        ConfigError: for a value that its annotation does not allow, or a number that is not finite.
    """

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(record: object, error: type[SpecactError] = ConfigError) -> None:
    """Refuses a record or dataclass with a value that its annotation does not allow.

    Raises:
        SpecactError: of the given kind; names the field, what is allowed, and the value.
    """
    for name, hint in get_type_hints(type(record), include_extras=True).items():
        _convert(getattr(record, name), hint, name, error)


def validated(function: F) -> F:
    """A function or constructor that refuses arguments outside the ranges and choices of its annotations.

    Its ConfigError names the argument, what is allowed, and the value.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        hints = get_type_hints(function, include_extras=True)
        for name, value in signature(function).bind(*arguments, **options).arguments.items():
            if _is_limited(hints.get(name)):
                _convert(value, hints[name], name, ConfigError)
        return function(*arguments, **options)

    return cast(F, call)


def _is_limited(hint: Any) -> bool:
    return get_origin(hint) in (Annotated, Literal) or any(map(_is_limited, get_args(hint)))


def read_toml(path: Path, kind: type[T], what: str) -> T:
    """A record from a TOML file; ``what`` says in messages what the file holds.

    Raises:
        ConfigError: if the file cannot be read, or a value is missing, unknown or not allowed.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}; give the path of a TOML file") from None
    # UnicodeDecodeError, TOMLDecodeError and errors of invalid paths are ValueErrors.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return read_record(values, kind, str(path))


def read_json(content: bytes | str, kind: type[T], where: str, error: type[SpecactError] = ConfigError) -> T:
    """A record from JSON text.

    Raises:
        SpecactError: of the given kind, if it is no JSON, or a value is missing, unknown or not allowed.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as broken:  # invalid text, JSON or number; or too deep
        raise error(f"{where} is not valid JSON ({broken}); copy or make it again") from None
    return read_record(values, kind, where, error)


def read_record(values: Any, kind: type[T], where: str, error: type[SpecactError] = ConfigError) -> T:
    """A record, or any type that msgspec converts to, from plain values: lists become tuples, tables become records.

    Raises:
        SpecactError: of the given kind, for a value that is missing, unknown or not allowed, where it is.
    """
    record: T = _convert(values, kind, where, error, file=True)
    return record


def _convert(values: Any, kind: Any, where: str, error: type[SpecactError], *, file: bool = False) -> Any:
    if isinstance(values, np.generic):
        values = values.item()
    if isinstance(values, float) and not math.isfinite(values):
        raise error(f"{where} must be a finite number, got {values}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as failure:
        raise error(_explain(str(failure), values, inspect.type_info(kind), where, file)) from None
    except SpecactError as failure:  # of a record's own check
        raise error(f"{where}: {failure}" if file else str(failure)) from None


def _explain(failure: str, values: Any, kind: inspect.Type, where: str, file: bool) -> str:
    """Msgspec's message with the path in the file, the value that was found and the nearest valid name."""
    message, _, at = failure.partition(" - at `$")
    steps, path, found = re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", at.rstrip("`")), "", values
    for name, index in steps:
        kind = _inner(kind, name)
        if index == "...":  # msgspec does not say which entry of a table
            found = list(found.items()) if isinstance(found, dict) else list(enumerate(found))
            key, found = next((entry for entry in found if _fails(entry[1], kind)), found[0])
            path += f".{key}" if isinstance(key, str) else f"[{key}]"
        elif index:
            found, path = found[int(index)], f"{path}[{index}]"
        else:
            found, path = found[name], f"{path}.{name}"
    path = path.lstrip(".")
    between = ": " if file else "" if path.startswith("[") else "."
    place = f"{where}{between}{path}" if path else where
    fields = sorted(field.encode_name for field in getattr(_only(kind), "fields", ()))
    if unknown := re.search(r"unknown field `(.+)`", message):
        return str(unknown_name(f"key in {place}", unknown[1], fields))
    if missing := re.search(r"missing required field `(.+)`", message):
        return f"{place} has no {missing[1]!r}; its keys: {', '.join(fields)}"
    kind = _only(kind)
    if isinstance(kind, inspect.LiteralType):
        return str(unknown_name(f"value of {place}", str(found), map(str, kind.values)))
    wanted = re.sub(r"^Expected |, got .*$", "", message)
    wanted = re.sub(r"`(.+?)`", lambda name: " or ".join(_NAMES.get(n, n) for n in name[1].split(" | ")), wanted)
    return f"{place} must be {wanted}, got {reprlib.repr(found)}"


def _fails(value: Any, kind: inspect.Type) -> bool:
    try:
        msgspec.convert(value, getattr(_only(kind), "cls", Any))
    except (msgspec.ValidationError, SpecactError):
        return True
    return False


def _only(kind: inspect.Type) -> inspect.Type:
    """The type itself, or the one of an optional type that is not None."""
    if isinstance(kind, inspect.UnionType):
        return next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    return kind


def _inner(kind: inspect.Type, name: str) -> inspect.Type:
    kind = _only(kind)
    for field in getattr(kind, "fields", ()):
        if field.encode_name == name:
            return _only(field.type)
    for attribute in ("value_type", "item_type"):
        if hasattr(kind, attribute):
            return _only(getattr(kind, attribute))
    return kind
