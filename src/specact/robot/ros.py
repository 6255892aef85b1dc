"""ROS 2 messages as bytes (CDR, little endian), and the types of a recording.

Recordings use ROS 2 messages because every MCAP tool reads them; ROS itself is not needed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specact.errors import DataError

_HEADER = b"\x00\x01\x00\x00"  # little endian, no options
_PRIMITIVES = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        "bool": "?", "uint8": "B", "int32": "i", "uint32": "I", "uint64": "Q", "float32": "f", "float64": "d",
    }.items()
}  # fmt: skip
_ARRAYS: dict[str, np.dtype[Any]] = {
    "uint8[]": np.dtype("u1"),
    "uint32[]": np.dtype("<u4"),
    "float32[]": np.dtype("<f4"),
}
_LENGTH = _PRIMITIVES["uint32"]


@dataclass(frozen=True, eq=False)
class MessageType:
    """A type of messages.

    Attributes:
        name: in ROS 2's form, ``PACKAGE/msg/NAME``.
        definition: one field per line, ``KIND NAME``. Lines after a line of ``=`` define the types of the fields in
            :attr:`inlined`.
        inlined: fields of composite types, with the fields of that type, which CDR serialises in their place.
    """

    name: str
    definition: str
    inlined: Mapping[str, Mapping[str, str]]

    @cached_property
    def fields(self) -> dict[str, str]:
        """Kind of every serialised field by name, in order."""
        lines = re.split(r"^=+$", self.definition, maxsplit=1, flags=re.MULTILINE)[0].split("\n")
        found: dict[str, str] = {}
        for kind, name in (line.split() for line in lines if line):
            found |= self.inlined.get(name, {name: kind})
        return found

    def encode(self, values: Mapping[str, Any]) -> bytes:
        """Serialises a message; every field needs a value."""
        out = bytearray()
        for name, kind in self.fields.items():
            value = values[name]
            if kind in _PRIMITIVES:
                packed = _PRIMITIVES[kind]
                out += bytes(-len(out) % packed.size) + packed.pack(value)
                continue
            out += bytes(-len(out) % _LENGTH.size)
            if kind == "string":
                text = value.encode() + b"\0"
                out += _LENGTH.pack(len(text)) + text
            else:
                array = np.frombuffer(value, "u1") if isinstance(value, bytes) else np.ravel(value)
                out += _LENGTH.pack(array.size) + array.astype(_ARRAYS[kind], copy=False).tobytes()
        return _HEADER + bytes(out)

    def decode(self, message: bytes) -> dict[str, Any]:
        """The values of a message; arrays are NumPy's.

        Raises:
            DataError: if it is not a message of this type.
        """
        if message[:4] != _HEADER:
            raise DataError(f"a message of type {self.name} is not little-endian CDR")
        body, at = message[4:], 0
        values: dict[str, Any] = {}
        try:
            for name, kind in self.fields.items():
                packed = _PRIMITIVES.get(kind, _LENGTH)
                at += -at % packed.size
                value: Any = packed.unpack_from(body, at)[0]
                at += packed.size
                if kind == "string":
                    text = body[at : at + value]
                    if len(text) != value:
                        raise ValueError("it ends within a text")
                    value, at = text[:-1].decode(), at + value
                elif kind in _ARRAYS:
                    value = np.frombuffer(body, _ARRAYS[kind], value, at)
                    at += value.nbytes
                values[name] = value
        except (struct.error, ValueError) as error:
            raise DataError(f"a message of type {self.name} is damaged: {error}") from None
        return values


def _message_type(name: str, *fields: str) -> MessageType:
    return MessageType(f"specact_msgs/msg/{name}", "\n".join(fields) + "\n", {})


ARRAY = _message_type("Array", "uint32[] shape", "float32[] values")
IMAGE = MessageType(
    "sensor_msgs/msg/CompressedImage",
    "std_msgs/Header header\nstring format\nuint8[] data\n"
    + "=" * 80
    + "\nMSG: std_msgs/Header\nbuiltin_interfaces/Time stamp\nstring frame_id\n"
    + "=" * 80
    + "\nMSG: builtin_interfaces/Time\nint32 sec\nuint32 nanosec\n",
    {"header": {"sec": "int32", "nanosec": "uint32", "frame_id": "string"}},
)
TEXT = MessageType("std_msgs/msg/String", "string data\n", {})
# An action as sent to the robot, in the environment's units.
ACTION = _message_type("Action", "float32[] values", "string origin")
# One inference of a pair, see specact.types.StepRecord, with normalised chunks; repeated after a late verdict.
INFERENCE = _message_type(
    "Inference",
    "uint32 step", "bool transmit", "float64 score", "float64 threshold", "string reason", "bool unsent",
    "string miss", "uint32 verified", "uint32 accepted", "float64 kept", "float32[] drafted", "float32[] executed",
    "uint8[] origins",
    "float64 draft_s", "float64 gate_s", "float64 encode_s", "float64 network_s", "float64 queue_s", "float64 target_s",
    "float64 finish_s",
)  # fmt: skip
# One inference of a chunk policy; the chunk is empty after a miss.
CHUNK = _message_type("Chunk", "uint32 step", "float64 took_s", "string miss", "uint32[] shape", "float32[] actions")
# One control step, see specact.robot.loop.Tick.
CONTROL = _message_type(
    "Control", "uint32 episode", "float64 late_s", "float64 stall_s", "bool acted", "string unusable"
)
# At an episode's end; success and score are valid if judged is true.
EPISODE = _message_type("Episode", "uint32 number", "bool judged", "bool success", "float64 score")
