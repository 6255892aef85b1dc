"""Number of parameters of an exported network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

# Fields of ONNX's protocol buffers, and the element types that hold no weights.
_GRAPH, _INITIALIZER, _DIMS, _TYPE = 7, 5, 1, 2
_INDICES = (6, 7, 9)  # int32, int64, bool: shapes, axes and masks


def count_parameters(path: Path) -> int:
    """The number of weights in an ONNX file, constants of the normalisation included.

    ONNX Runtime does not report them, and an evaluation does not depend on the ``onnx`` package.

    Args:
        path: a file that ONNX Runtime has loaded.
    """
    content = path.read_bytes()
    return sum(
        _size_of(tensor)
        for field, graph in _fields(content)
        if field == _GRAPH and isinstance(graph, bytes)
        for part, tensor in _fields(graph)
        if part == _INITIALIZER and isinstance(tensor, bytes)
    )


def _size_of(tensor: bytes) -> int:
    dims: list[int] = []
    for field, value in _fields(tensor):
        if field == _TYPE and value in _INDICES:
            return 0
        if field == _DIMS:
            # Repeated numbers are separate fields, or packed into one.
            dims += [value] if isinstance(value, int) else _packed(value)
    return math.prod(dims)


def _packed(value: bytes) -> list[int]:
    numbers, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        numbers.append(number)
    return numbers


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protocol buffer; fixed-width numbers as their bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        else:
            length = {1: 8, 5: 4}[kind]
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number in base 128, least significant digit first, and where it ends."""
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
