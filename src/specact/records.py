"""Typed records: settings, recipes and manifests, checked against their annotations when read and when constructed."""

from __future__ import annotations

import json
import math
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import wraps
from inspect import signature
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

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
    except msgspec.ValidationError:
        raise error(str(_explain(values, kind, where, ": " if file else "."))) from None
    except SpecactError as failure:  # of a record's own check
        raise error(f"{where}: {failure}" if file else str(failure)) from None


def _explain(values: Any, kind: Any, where: str, between: str = ".") -> str | None:
    """What is wrong with a value, and where; msgspec names neither the value nor the nearest valid name."""
    try:
        msgspec.convert(values, kind)
        return None
    except SpecactError as failure:
        return f"{where}: {failure}"
    except msgspec.ValidationError as failure:
        message = str(failure).partition(" - at ")[0]
    words = [repr(word) for part in get_args(kind) if get_origin(part) is Literal for word in get_args(part)]
    kind, hints = _only(kind), dict[str, Any]()
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind)):
        hints = get_type_hints(kind, include_extras=True)
    for step, value, inner in _inside(values, kind, hints):
        place = f"{where}[{step}]" if isinstance(step, int) else f"{where}{between}{step}"
        if (found := _explain(value, inner, place)) is not None:
            return found
    if unknown := re.search(r"unknown field `(.+)`", message):
        return str(unknown_name(f"key in {where}", unknown[1], hints))
    if missing := re.search(r"missing required field `(.+)`", message):
        return f"{where} has no {missing[1]!r}; its keys: {', '.join(sorted(hints))}"
    if get_origin(kind) is Literal:
        return str(unknown_name(f"value of {where}", str(values), map(str, get_args(kind))))
    names = _NAMES | {"str": " or ".join(words) or _NAMES["str"]}
    # Of a number or a word msgspec tells of the word alone.
    wanted = re.sub(r"^Expected |, got .*$", "", message.replace("Invalid enum value", "Expected `int | str`, got"))
    wanted = re.sub(r"`(.+?)`", lambda name: " or ".join(names.get(n, n) for n in name[1].split(" | ")), wanted)
    return f"{where} must be {wanted}, got {reprlib.repr(values)}"


def _only(kind: Any) -> Any:
    """The type itself, without its limits, or the one of an optional type that is not None."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return kind


def _inside(values: Any, kind: Any, hints: Mapping[str, Any]) -> Iterator[tuple[str | int, Any, Any]]:
    """What a table or list holds: key or index, value, and type."""
    inner = get_args(kind)
    if isinstance(values, dict):
        yield from ((key, value, hints.get(key, inner[-1] if inner else Any)) for key, value in values.items())
    elif isinstance(values, list | tuple) and inner:
        kinds = repeat(inner[0]) if len(inner) == 1 or inner[1] is Ellipsis else inner
        yield from ((at, *entry) for at, entry in enumerate(zip(values, kinds, strict=False)))
