"""Messages as msgpack with one extension for arrays: small, exact to the last bit, and safe to read from strangers."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from specact.errors import WireError
from specact.wire.checks import MOST_DIMENSIONS

# Dtypes that may travel, by their code on the wire; little-endian. Never objects, never pickles.
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
_NDARRAY, _MOST_ENTRIES = 1, 64


def encode(fields: dict[str, Any]) -> bytes:
    """A message as bytes; arrays may be float16, 32 or 64, uint8, int16, int64 or bool, of at most 4 dimensions."""
    packed: bytes = msgpack.packb(fields, default=_pack_array)
    return packed


def decode(payload: bytes) -> dict[str, Any]:
    """The message in a frame that is already bounded in size; arrays are checked and copied.

    Raises:
        WireError: ``bad_message`` for anything that is not one map of plain values and arrays.
    """
    try:
        fields = msgpack.unpackb(
            payload, ext_hook=_unpack_array, max_map_len=_MOST_ENTRIES, max_array_len=_MOST_ENTRIES, timestamp=0
        )
    except WireError:
        raise
    # What msgpack raises for truncated, oversized, too deep or otherwise broken input has only ValueError in common.
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError("bad_message", f"the frame is not a msgpack message ({_short(error)})") from None
    if not isinstance(fields, dict) or not set(map(type, fields)) <= {str}:
        raise WireError("bad_message", "a message must be one map with text keys")
    return fields


def _pack_array(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype not in _CODES or value.ndim > MOST_DIMENSIONS:
        raise TypeError(f"cannot send {type(value).__name__} {getattr(value, 'dtype', '')}; see specact.wire.msgpack")
    header = struct.pack(f"<BB{value.ndim}I", _CODES[value.dtype], value.ndim, *value.shape)
    return msgpack.ExtType(_NDARRAY, header + value.tobytes())


def _unpack_array(kind: int, body: bytes) -> NDArray[Any]:
    if kind != _NDARRAY:
        raise WireError("bad_message", f"unknown extension type {kind}; arrays have type {_NDARRAY}")
    if len(body) < 2 or body[0] not in _DTYPES or body[1] > MOST_DIMENSIONS or len(body) < 2 + 4 * body[1]:
        raise WireError(
            "bad_message",
            f"an array must start with its dtype (0 to 6), dimensions (0 to {MOST_DIMENSIONS}) and shape",
        )
    dtype, shape = _DTYPES[body[0]], struct.unpack_from(f"<{body[1]}I", body, 2)
    start = 2 + 4 * body[1]
    # Plain integers: a product of huge dimensions cannot wrap around.
    if math.prod(shape) * dtype.itemsize != len(body) - start:
        raise WireError(
            "bad_message", f"an array of {dtype} {shape} does not have {len(body) - start} bytes of content"
        )
    if dtype.kind == "b" and max(body[start:], default=0) > 1:
        raise WireError("bad_message", "the bytes of a bool array must be 0 or 1")
    # A copy is aligned and keeps nothing else of the frame alive.
    array: NDArray[Any] = np.ndarray(shape, dtype, body, start).copy()
    return array


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:120]
