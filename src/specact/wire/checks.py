"""Checks of single fields, strict about types: what msgpack or JSON delivered is taken as it is or refused."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from specact.errors import WireError
from specact.families.codes.spec import PolicySpec
from specact.wire.protocol import PROTOCOL, ErrorCode

LARGEST_ID = 2**63 - 1


def check_head(fields: dict[str, Any], *types: str) -> str:
    """The message's type, one of ``types``, after its protocol version was found to be ours."""
    version, kind = fields.get("v"), fields.get("type")
    if not is_integer(version, 2**63) or version != PROTOCOL:
        raise WireError(
            ErrorCode.UNSUPPORTED_PROTOCOL,
            f"this side uses protocol {PROTOCOL}, but the message says {said(version)}; "
            "install the same version of specact on both",
        )
    if not isinstance(kind, str) or kind not in types:
        raise bad(f"expected a message of type {' or '.join(types)}, got {said(kind)}")
    return kind


def request_id(fields: dict[str, Any]) -> int | None:
    """The id of a message that may be broken elsewhere, or None."""
    value = fields.get("id")
    return value if is_integer(value, LARGEST_ID + 1) else None


def law(fields: dict[str, Any], name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """An array of float64 whose last axis holds distributions."""
    rows: NDArray[np.float64] = array(fields, name, shape, np.float64)
    # In this order: the sum of huge numbers could overflow.
    if (rows < 0.0).any() or (rows > 2.0).any() or (np.abs(rows.sum(axis=-1) - 1.0) > 1e-6).any():
        raise bad(f"every row of {name} must be a distribution: no negative values, sum 1")
    return rows


def conditional_law(fields: dict[str, Any], name: str, spec: PolicySpec) -> NDArray[np.float64] | None:
    """The secondary code's distribution given each primary one, ``[K, K]``; None where the policies give none."""
    if spec.sequential:
        return law(fields, name, (spec.codes, spec.codes))
    if name in fields:
        raise bad(f"{name} belongs to policies with a sequential secondary head, these have none: leave it out")
    return None


def array(fields: dict[str, Any], name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """An array of exactly this shape and dtype, with finite numbers."""
    value = fields.get(name)
    if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
        found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise bad(f"{name} must be an array of {np.dtype(dtype)} {shape}, got {found}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise bad(f"{name} holds NaN or infinite numbers")
    return value


def number(fields: dict[str, Any], name: str, low: float, high: float) -> float:
    """A number from ``low`` to ``high``, both finite."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad(f"{name} must be a number from {low:g} to {high:g}")
    return float(value)


def is_integer(value: Any, limit: int) -> TypeGuard[int]:
    """Whether it is an integer in [0, limit)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def is_plain(value: Any) -> bool:
    """Whether it is a number, a boolean, nothing, or a list of numbers."""
    if isinstance(value, list):
        return all(isinstance(entry, int | float) and not isinstance(entry, bool) for entry in value)
    return value is None or isinstance(value, bool | int | float)


def said(value: Any) -> str:
    """What a stranger said, in few and printable characters."""
    return ascii(value)[:32] if value is None or isinstance(value, int | float | str) else type(value).__name__


def printable(text: str, limit: int = 500) -> str:
    """A stranger's text as a terminal may show it: its first characters, with a question mark for what controls one."""
    return "".join(char if char.isprintable() else "?" for char in text[:limit])


def bad(message: str) -> WireError:
    """A ``bad_message`` that says what is allowed."""
    return WireError(ErrorCode.BAD_MESSAGE, message)
