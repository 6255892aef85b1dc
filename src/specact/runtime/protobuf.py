"""A parser of the protocol buffer wire format, to check an ONNX file before it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}


@dataclass(frozen=True)
class Field:
    """One field of a message.

    Attributes:
        number: of the field.
        kind: its wire type, one of VARINT, FIXED64, BYTES and FIXED32.
        value: of a varint, as unsigned 64-bit number; else 0.
        content: of the other kinds; else empty.
        raw: the whole field, with its tag.
    """

    number: int
    kind: int
    value: int
    content: memoryview
    raw: memoryview


def fields(message: memoryview) -> Iterator[Field]:
    """The fields of a message, in order.

    Raises:
        ValueError: if it is truncated or malformed; groups, which ONNX does not use, count as malformed.
    """
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if tag >= 1 << 32 or number == 0:
            raise ValueError(f"no field has the tag {tag}")
        value, size = 0, 0
        if kind == VARINT:
            value, at = _varint(message, at)
        elif kind == BYTES:
            size, at = _varint(message, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"no field has the wire type {kind}")
        if size > len(message) - at:
            raise ValueError("a field is truncated")
        yield Field(number, kind, value, message[at : at + size], message[start : at + size])
        at += size


def numbers(found: Field, most: int) -> list[int]:
    """The first ``most`` integers of a repeated field, which may be packed."""
    if found.kind != BYTES:
        return [_signed(found.value)]
    values: list[int] = []
    at = 0
    while at < len(found.content) and len(values) < most:
        value, at = _varint(found.content, at)
        values.append(_signed(value))
    return values


def field(number: int, content: bytes) -> bytes:
    """A field that holds bytes, a text or a message."""
    return _to_varint(number << 3 | BYTES) + _to_varint(len(content)) + content


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("a number is truncated")


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
