"""ROS 2 messages as bytes (CDR, little endian), and the types of a recording.

Recordings use ROS 2 messages because every MCAP tool reads them; ROS itself is not needed. They are serialised here,
because mcap-ros2-support writes arrays element by element: 17 ms of the robot's processor for a frame of 50 kB.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specact.errors import DataError

_HEADER = b"\x00\x01\x00\x00"  # little endian, no options
_NUMBERS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {"bool": "?", "int32": "i", "uint32": "I", "float64": "d"}.items()
}  # fmt: skip
_ARRAYS: dict[str, np.dtype[Any]] = {
    "uint8[]": np.dtype("u1"), "uint32[]": np.dtype("<u4"), "float32[]": np.dtype("<f4"),
}  # fmt: skip
_LENGTH = _NUMBERS["uint32"]


@dataclass(frozen=True, eq=False)
class MessageType:
    """A type of messages.

    Attributes:
        name, definition: in ROS 2's form.
        fields: kind of every serialised field by name, in order; those of composite types stand in their place.
    """

    name: str
    fields: Mapping[str, str]
    definition: str

    @classmethod
    def flat(cls, name: str, *fields: str) -> MessageType:
        """A type whose fields, each ``KIND NAME``, are all primitive."""
        kinds = {field: kind for kind, field in map(str.split, fields)}
        return cls(name, kinds, "\n".join(fields) + "\n")

    def encode(self, values: Mapping[str, Any]) -> bytes:
        """Serialises a message; every field needs a value."""
        out = bytearray()
        for name, kind in self.fields.items():
            value, number = values[name], _NUMBERS.get(kind)
            if number is not None:
                out += bytes(-len(out) % number.size) + number.pack(value)
                continue
            if kind == "string":
                content = value.encode() + b"\0"
                length = len(content)
            else:
                array = np.frombuffer(value, "u1") if isinstance(value, bytes) else np.ravel(value)
                content, length = array.astype(_ARRAYS[kind], copy=False).tobytes(), array.size
            out += bytes(-len(out) % _LENGTH.size) + _LENGTH.pack(length) + content
        return _HEADER + bytes(out)

    def decode(self, message: bytes) -> dict[str, Any]:
        """The values of a message, arrays as NumPy's; DataError if it is not a message of this type."""
        if message[:4] != _HEADER:
            raise DataError(f"a message of type {self.name} is not little-endian CDR")
        body, at, values = message[4:], 0, dict[str, Any]()
        try:
            for name, kind in self.fields.items():
                number = _NUMBERS.get(kind, _LENGTH)
                at += -at % number.size
                value: Any = number.unpack_from(body, at)[0]
                at += number.size
                if kind not in _NUMBERS:
                    array = np.frombuffer(body, _ARRAYS.get(kind, "u1"), value, at)
                    value, at = array if kind in _ARRAYS else array[:-1].tobytes().decode(), at + array.nbytes
                values[name] = value
        except (struct.error, ValueError) as error:
            raise DataError(f"a message of type {self.name} is damaged: {error}") from None
        return values


_RULE = "=" * 80
ARRAY = MessageType.flat("specact_msgs/msg/Array", "uint32[] shape", "float32[] values")
IMAGE = MessageType(
    "sensor_msgs/msg/CompressedImage",
    {"sec": "int32", "nanosec": "uint32", "frame_id": "string", "format": "string", "data": "uint8[]"},
    f"std_msgs/Header header\nstring format\nuint8[] data\n{_RULE}\nMSG: std_msgs/Header\n"
    f"builtin_interfaces/Time stamp\nstring frame_id\n{_RULE}\n"
    "MSG: builtin_interfaces/Time\nint32 sec\nuint32 nanosec\n",
)
TEXT = MessageType.flat("std_msgs/msg/String", "string data")
# An action as sent to the robot, in the environment's units.
ACTION = MessageType.flat("specact_msgs/msg/Action", "float32[] values", "string origin")
# One inference of a pair, see specact.types.StepRecord, with normalised chunks; repeated after a late verdict.
INFERENCE = MessageType.flat(
    "specact_msgs/msg/Inference",
    "uint32 step", "bool transmit", "float64 score", "float64 threshold", "string reason", "bool unsent",
    "string miss", "uint32 verified", "uint32 accepted", "float64 kept", "float32[] drafted", "float32[] executed",
    "uint8[] origins",
    "float64 draft_s", "float64 gate_s", "float64 encode_s", "float64 network_s", "float64 queue_s", "float64 target_s",
    "float64 finish_s",
)  # fmt: skip
# One inference of a chunk policy; the chunk is empty after a miss.
CHUNK = MessageType.flat(
    "specact_msgs/msg/Chunk", "uint32 step", "float64 took_s", "string miss", "uint32[] shape", "float32[] actions"
)
# One control step, see specact.robot.loop.Tick.
CONTROL = MessageType.flat(
    "specact_msgs/msg/Control", "uint32 episode", "float64 late_s", "float64 stall_s", "bool acted", "string unusable",
    "bool held", "string starved_by",
)  # fmt: skip
GREW = (INFERENCE, CONTROL)  # a file has the fields of the version that wrote it
# At an episode's end; success and score are valid if judged is true.
EPISODE = MessageType.flat("specact_msgs/msg/Episode", "uint32 number", "bool judged", "bool success", "float64 score")
