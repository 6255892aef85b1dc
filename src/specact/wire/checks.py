"""Strict checks of single fields from msgpack or JSON; values are never converted to another type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from specact.errors import WireError

PROTOCOL = 2


class ErrorCode(StrEnum):
    """Code of an error reply."""

    BAD_MESSAGE = "bad_message"
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"
    MISMATCH = "mismatch"
    UNAUTHORIZED = "unauthorized"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    EXPIRED = "expired"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


MAX_ID = 2**63 - 1
# Maximum for an array: a history of camera frames has four.
MAX_DIMENSIONS = 4


def check_head(fields: dict[str, Any], *types: str) -> str:
    """The message's type, one of ``types``, after checking its protocol version."""
    version, kind = fields.get("v"), fields.get("type")
    if not is_integer(version, 2**63) or version != PROTOCOL:
        raise WireError(
            ErrorCode.UNSUPPORTED_PROTOCOL,
            f"this side uses protocol {PROTOCOL}, but the message says {quoted(version)}; "
            "install the same version of specact on both",
        )
    if not isinstance(kind, str) or kind not in types:
        raise bad(f"expected a message of type {' or '.join(types)}, got {quoted(kind)}")
    return kind


def request_id(fields: dict[str, Any]) -> int | None:
    """The id of a message that may otherwise be malformed, or None."""
    value = fields.get("id")
    return value if is_integer(value, MAX_ID + 1) else None


def array(fields: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """An array of exactly this shape and dtype, with finite numbers."""
    value = fields.get(name)
    if isinstance(value, NestedList):
        value = value.array(name, dtype)
    if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
        found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise bad(f"{name} must be an array of {np.dtype(dtype)} {shape}, got {found}")
    if value.dtype.kind == "f" and np.count_nonzero(np.isfinite(value)) < value.size:
        raise bad(f"{name} holds NaN or infinite numbers")
    return value


class NestedList(list[Any]):
    """A list from a JSON message, which may encode an array."""

    def array(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        """The array that it encodes.

        Raises:
            WireError: ``bad_message`` if it does not encode one of this dtype.
        """
        kinds = {np.bool_: (bool,), np.int64: (int,), np.int16: (int,), np.uint8: (int,)}.get(dtype, (int, float))
        if not _holds(self, kinds, MAX_DIMENSIONS):
            raise bad(f"{name} is a nested list of {np.dtype(dtype)}, at most {MAX_DIMENSIONS} deep")
        try:
            # Numbers beyond float32 become infinite, which is refused when the field is read.
            with np.errstate(over="ignore"):
                return np.array(self, dtype=dtype)
        except (ValueError, OverflowError) as error:
            raise bad(f"{name} is not an array of {np.dtype(dtype)} ({error})"[:200]) from None


def _holds(value: Any, kinds: tuple[type, ...], depth: int) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_holds(entry, kinds, depth - 1) for entry in value)
    if isinstance(value, bool) and bool not in kinds:
        return False
    return isinstance(value, kinds) and (not isinstance(value, float) or math.isfinite(value))


def number(fields: dict[str, Any], name: str, low: float, high: float) -> float:
    """A number from ``low`` to ``high``, both finite."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad(f"{name} must be a number from {low:g} to {high:g}")
    return float(value)


def is_integer(value: Any, limit: int) -> TypeGuard[int]:
    """Whether it is an integer in [0, limit)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def is_plain(value: Any, depth: int = 6) -> bool:
    """Whether it is a number, text, boolean, None, or a list or map of these, nested at most ``depth`` deep."""
    if isinstance(value, list):
        return depth > 0 and all(is_plain(entry, depth - 1) for entry in value)
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and is_plain(entry, depth - 1) for key, entry in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def quoted(value: Any) -> str:
    """A peer's value for an error message, short and printable."""
    return ascii(value)[:32] if value is None or isinstance(value, int | float | str) else type(value).__name__


def printable(text: str, limit: int = 500) -> str:
    """A peer's text made safe for a terminal: truncated, with a question mark for each non-printable character."""
    return "".join(char if char.isprintable() else "?" for char in text[:limit])


def bad(message: str) -> WireError:
    """A ``bad_message`` error; the message should state what is allowed."""
    return WireError(ErrorCode.BAD_MESSAGE, message)
