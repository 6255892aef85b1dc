"""Messages as JSON, the codec of ADAHI's test bed: arrays as nested lists, several times the size and the time."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from specact.errors import WireError

# Which array each field is; JSON itself knows only numbers.
_ARRAYS: dict[str, type[np.generic]] = {
    "state": np.float32,
    "goal": np.float32,
    "image": np.uint8,
    "draft_probs": np.float64,
    "draft_conditional": np.float64,
    "probs": np.float64,
    "conditional": np.float64,
    "offsets": np.float32,
    "codes": np.int64,
    "accepted": np.bool_,
    "rejection": np.float64,
    "chunk": np.float32,
}
_MOST_DIMENSIONS = 4


def encode(fields: dict[str, Any]) -> bytes:
    """A message as JSON text; float32 and float64 numbers are written so that they read back to the same bits."""
    return json.dumps(fields, default=_plain, allow_nan=False, separators=(",", ":")).encode()


def decode(payload: bytes) -> dict[str, Any]:
    """The message in a text that is already bounded in size.

    Raises:
        WireError: ``bad_message`` for anything that is not one object, or an array field that is not one array.
    """
    try:
        # Decoded here: given bytes, json would also take UTF-16, UTF-32 and halves of surrogate pairs.
        fields = json.loads(payload.decode(), parse_constant=_refuse)
    # UnicodeDecodeError and JSONDecodeError are ValueErrors; depth shows as RecursionError.
    except (ValueError, RecursionError) as error:
        raise WireError("bad_message", f"the body is not JSON ({type(error).__name__}: {error})"[:200]) from None
    if not isinstance(fields, dict):
        raise WireError("bad_message", "a message must be one JSON object")
    return {name: _array(name, value, _ARRAYS[name]) if name in _ARRAYS else value for name, value in fields.items()}


def _array(name: str, value: Any, dtype: type[np.generic]) -> Any:
    if not isinstance(value, list):
        return value
    kinds = {np.bool_: (bool,), np.int64: (int,), np.uint8: (int,)}.get(dtype, (int, float))
    if not _holds(value, kinds, _MOST_DIMENSIONS):
        raise WireError("bad_message", f"{name} is a nested list of {np.dtype(dtype)}, at most {_MOST_DIMENSIONS} deep")
    try:
        # Too large for float32 becomes infinite, which is refused where the field is read.
        with np.errstate(over="ignore"):
            return np.array(value, dtype=dtype)
    except (ValueError, OverflowError) as error:
        raise WireError("bad_message", f"{name} is not an array of {np.dtype(dtype)} ({error})"[:200]) from None


def _holds(value: Any, kinds: tuple[type, ...], depth: int) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_holds(entry, kinds, depth - 1) for entry in value)
    if isinstance(value, bool) and bool not in kinds:
        return False
    return isinstance(value, kinds) and (not isinstance(value, float) or math.isfinite(value))


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number of JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"cannot send {type(value).__name__}")
