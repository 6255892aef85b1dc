"""Messages as msgpack with one extension type for arrays: compact, bit-exact, and safe for untrusted input."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from specact.errors import WireError
from specact.wire.checks import MAX_DIMENSIONS

# Supported dtypes by wire code, little-endian; no objects, no pickles.
_DTYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    1: np.dtype("<f8"),
    2: np.dtype("u1"),
    3: np.dtype("<i8"),
    4: np.dtype("?"),
    5: np.dtype("<i2"),
    6: np.dtype("<f2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_NDARRAY, _MAX_ENTRIES = 1, 64


def encode(fields: dict[str, Any]) -> bytes:
    """A message as bytes; arrays may be float16, 32 or 64, uint8, int16, int64 or bool, of at most 4 dimensions."""
    packed: bytes = msgpack.packb(fields, default=_pack_array)
    return packed


def decode(payload: bytes) -> dict[str, Any]:
    """The message in a frame of limited size; arrays are checked and copied.

    Raises:
        WireError: ``bad_message`` for anything that is not one map of plain values and arrays.
    """
    try:
        fields = msgpack.unpackb(
            payload, ext_hook=_unpack_array, max_map_len=_MAX_ENTRIES, max_array_len=_MAX_ENTRIES, timestamp=0
        )
    except WireError:
        raise
    # msgpack raises many subclasses of ValueError for malformed input.
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError("bad_message", f"the frame is not a msgpack message ({_short(error)})") from None
    if not isinstance(fields, dict) or not set(map(type, fields)) <= {str}:
        raise WireError("bad_message", "a message must be one map with text keys")
    return fields


def _pack_array(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype not in _CODES or value.ndim > MAX_DIMENSIONS:
        raise TypeError(f"cannot send {type(value).__name__} {getattr(value, 'dtype', '')}; see specact.wire.msgpack")
    header = struct.pack(f"<BB{value.ndim}I", _CODES[value.dtype], value.ndim, *value.shape)
    return msgpack.ExtType(_NDARRAY, header + value.tobytes())


def _unpack_array(kind: int, body: bytes) -> NDArray[Any]:
    if kind != _NDARRAY:
        raise WireError("bad_message", f"unknown extension type {kind}; arrays have type {_NDARRAY}")
    if len(body) < 2 or body[0] not in _DTYPES or body[1] > MAX_DIMENSIONS or len(body) < 2 + 4 * body[1]:
        raise WireError(
            "bad_message",
            f"an array must start with its dtype (0 to 6), dimensions (0 to {MAX_DIMENSIONS}) and shape",
        )
    dtype, shape = _DTYPES[body[0]], struct.unpack_from(f"<{body[1]}I", body, 2)
    start = 2 + 4 * body[1]
    # Python integers: a product of huge dimensions cannot overflow.
    if math.prod(shape) * dtype.itemsize != len(body) - start:
        raise WireError(
            "bad_message", f"an array of {dtype} {shape} does not have {len(body) - start} bytes of content"
        )
    if dtype.kind == "b" and max(body[start:], default=0) > 1:
        raise WireError("bad_message", "the bytes of a bool array must be 0 or 1")
    # A copy is aligned and does not reference the frame.
    array: NDArray[Any] = np.ndarray(shape, dtype, body, start).copy()
    return array


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:120]
