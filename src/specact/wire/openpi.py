"""openpi's messages: msgpack maps with NumPy arrays as maps, in the three forms that are in use.

Arrays are written with openpi's own markers. Those of vLLM and of the package msgpack-numpy are read as well, with keys
as text or as bytes. Objects and pickles are refused; callers limit the size of a frame before decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import msgpack
from numpy.typing import NDArray

from specact.wire.exchange import Contract
from specact.wire.messages import bad

_DTYPES = {name: np.dtype(code)
           for code in ("?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
           for written in (np.dtype(code).str, np.dtype(code).name)
           for name in (written, written.encode())}  # fmt: skip
# Values of a message, each of which takes time; an array counts as four.
_MAX_VALUES, _MAX_DIMENSIONS = 4096, 4
_NESTED = (dict, list, msgpack.Ext)
# Name of a chunk among the arrays of a reply.
CHUNK = "chunk"


def encode(fields: Mapping[str, Any]) -> bytes:
    """A message as bytes; arrays and NumPy's scalars in openpi's form."""
    return msgpack.encode(fields, enc_hook=_pack)


def decode(payload: bytes | bytearray) -> dict[str, Any]:
    """The message in a frame that is already bounded in size; arrays are checked and copied, keys are text.

    Anything that is not one map of plain values and arrays is a WireError, ``bad_message``.
    """
    try:
        fields = msgpack.decode(payload)
        fields = _unpack(fields, [_MAX_VALUES]) if isinstance(fields, _NESTED) else fields
    # Other encodings are a ValueError, a list as key a TypeError, numbers beyond their type an OverflowError.
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise bad(f"this is no msgpack message of openpi's protocol ({type(error).__name__}: {error})"[:200]) from None
    if not isinstance(fields, dict):
        raise bad("a message must be one map, and no array")
    return fields


def serves_chunks(contract: Contract) -> bool:
    """Whether the reply to ``infer`` is a chunk ``[H, A]``, which openpi's clients can use."""
    return CHUNK in contract.kinds["infer"].reply.specs


def metadata(contract: Contract) -> dict[str, Any]:
    """What a specact server sees and answers, which must be as the device expects it."""
    horizon, actions = contract.kinds["infer"].reply.specs[CHUNK].shape
    seen, rate = contract.observation.describe(), contract.spec.get("rate_hz")
    said = {"action_horizon": horizon, "action_dim": actions, "observation": seen["fields"],
            "instruction": seen["instruction"]}  # fmt: skip
    return said if rate is None else said | {"rate_hz": rate}


def _pack(value: Any) -> dict[bytes, Any]:
    if isinstance(value, np.ndarray) and value.dtype.str in _DTYPES:
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic) and value.dtype.str in _DTYPES:
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"cannot send {type(value).__name__} {getattr(value, 'dtype', '')}")


def _unpack(value: Any, left: list[int]) -> Any:
    """A map, list or extension; ``left`` is how many values the message may have yet."""
    if isinstance(value, msgpack.Ext):
        raise bad(f"unknown extension type {value.code}; arrays are maps here")
    left[0] -= len(value)
    if left[0] < 0:
        raise bad(f"a message has at most {_MAX_VALUES} values")
    if isinstance(value, list):
        return [_unpack(entry, left) if isinstance(entry, _NESTED) else entry for entry in value]
    fields: dict[str, Any] = {}
    for key, entry in value.items():
        name = str(key, "ascii") if isinstance(key, bytes) else key
        if not isinstance(name, str):
            raise bad("the keys of a map must be text")
        fields[name] = _unpack(entry, left) if isinstance(entry, _NESTED) else entry
    if (data := fields.get("data")) is None:
        return fields
    if "__ndarray__" in fields:
        return _array(_dtype(fields.get("dtype")), fields.get("shape"), data)
    if "__npgeneric__" in fields:
        if not isinstance(data, bool | int | float):
            raise bad("a NumPy scalar needs data, a number")
        with np.errstate(over="ignore"):
            return _dtype(fields.get("dtype")).type(data)
    if "nd" in fields and "type" in fields:
        return _array(_dtype(fields["type"]), fields.get("shape") if fields["nd"] else [], data)[()]
    return fields


def _array(dtype: np.dtype[Any], shape: Any, data: Any) -> NDArray[Any]:
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not whole or len(shape) > _MAX_DIMENSIONS or not isinstance(data, bytes):
        raise bad(f"an array needs data (bytes) and shape (at most {_MAX_DIMENSIONS} integers of at least 0)")
    # Python integers: a product of huge dimensions cannot overflow.
    if math.prod(shape) * dtype.itemsize != len(data):
        raise bad(f"an array of {dtype} {ascii(shape)[:60]} does not have {len(data)} bytes of content")
    if dtype.kind == "b" and max(data, default=0) > 1:
        raise bad("the bytes of a bool array must be 0 or 1")
    # A copy is aligned, writable, and does not reference the frame.
    return np.ndarray(shape, dtype, data).copy()


def _dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str | bytes) or name not in _DTYPES:
        raise bad(f"an array's dtype is bool, or little-endian integers or floats of NumPy; got {ascii(name)[:32]}")
    return _DTYPES[name]
