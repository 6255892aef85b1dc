"""The file of a recording: MCAP, whole at any time, and given up quietly where it cannot be written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from specact.errors import ConfigError, MissingExtraError
from specact.robot.ros import IMAGE, MessageType
from specact.wire.images import to_jpeg

# Name and version of the metadata that say what a recording is of.
METADATA, VERSION = "specact", "1"
JPEG_QUALITY = 95
FLUSHED_EVERY_S = 1.0
# An MCAP file without a summary ends so: data end, footer, magic.
_ENDING = (
    b"\x0f" + (4).to_bytes(8, "little") + bytes(4)
    + b"\x02" + (20).to_bytes(8, "little") + bytes(20)
    + b"\x89MCAP0\r\n"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a topic, made at a time [ns]."""

    topic: str
    at_ns: int
    values: Mapping[str, Any]


@dataclass(slots=True)
class Step:
    """What is written together or not at all, with its size, roughly."""

    number: int
    messages: list[Message] = field(default_factory=list)
    nbytes: int = 1 << 10


class RecordingFile:
    """A file of control steps; nothing but its making and :meth:`close` raises.

    Args:
        path: of the file; none may be there.
        channels: type of the messages of every topic; images are camera frames.
        about: what is recorded, as plain values.

    Attributes:
        kept: control steps that are in the file.
        taken_bytes: of all steps that were written or given up.
        error: why nothing more is written, or None.
    """

    def __init__(self, path: Path, channels: Mapping[str, MessageType], about: Mapping[str, Any]) -> None:
        try:
            from mcap.writer import Writer

            if IMAGE in channels.values():
                import PIL  # noqa: F401 - looked for before the robot moves
        except ModuleNotFoundError as error:
            raise MissingExtraError("pillow" if error.name == "PIL" else "mcap", "record") from error
        self._types = channels
        self.kept = self.taken_bytes = self._unflushed = 0
        self.error: str | None = None
        self._flushed_s = time.monotonic()
        try:
            self._file = _WholeFile(path)
            self._writer: Any = cast("Any", Writer)(cast("IO[bytes]", self._file))
            # What a file of ROS 2 messages calls itself; their readers refuse any other.
            self._writer.start(profile="ros2", library="specact")
            said = {name: json.dumps(value) for name, value in about.items()}
            self._writer.add_metadata(METADATA, {"version": VERSION} | said)
            self._writer.flush()
        except FileExistsError:
            raise ConfigError(f"{path} is there already; choose another name for the recording") from None
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; choose another place for the recording"
            ) from error
        schemas = {
            kind.name: self._writer.register_schema(kind.name, "ros2msg", kind.definition.encode())
            for kind in dict.fromkeys(channels.values())
        }
        self._channels = {
            topic: self._writer.register_channel(topic, "cdr", schemas[kind.name]) for topic, kind in channels.items()
        }

    def write(self, step: Step) -> None:
        """Adds a step; from time to time what was added is flushed."""
        if self.error is None:
            try:
                # In the order of time, which readers of a file without a summary expect.
                for message in sorted(step.messages, key=lambda message: message.at_ns):
                    content = self._types[message.topic].encode(self._values(message))
                    self._writer.add_message(
                        self._channels[message.topic], message.at_ns, content, message.at_ns, step.number
                    )
                    self._unflushed += message.topic == "/control"
                if time.monotonic() - self._flushed_s > FLUSHED_EVERY_S:
                    self.flush()
            except Exception as error:  # noqa: BLE001 - whatever it is, the robot goes on without a recording
                self.fail(error)
        self.taken_bytes += step.nbytes

    def flush(self) -> None:
        """Everything until now is in the file, which is whole."""
        if self.error is None and self._unflushed:
            try:
                self._writer.flush()
                self._flushed()
            except Exception as error:  # noqa: BLE001 - as above
                self.fail(error)

    def finish(self) -> None:
        """Adds the summary, by which tools find what they look for, and closes the file."""
        if self.error is None:
            try:
                self._writer.finish()
                self._file.flush(b"")
                self._flushed()
            except Exception as error:  # noqa: BLE001 - as above
                self.fail(error)
        self._file.close()

    def _flushed(self) -> None:
        self.kept, self._unflushed, self._flushed_s = self.kept + self._unflushed, 0, time.monotonic()

    def fail(self, error: Exception) -> None:
        """Nothing more is written, for this reason."""
        reason = error.strerror if isinstance(error, OSError) else None
        self.error = f"the recording ended early: {reason or f'{type(error).__name__}: {error}'}"

    def _values(self, message: Message) -> Mapping[str, Any]:
        array = message.values.get("array")
        if array is None:
            return message.values
        if self._types[message.topic] is not IMAGE:
            return {"shape": np.array(array.shape, np.uint32), "values": array}
        (data,) = to_jpeg(array[None], JPEG_QUALITY)
        sec, nanosec = divmod(message.at_ns, 10**9)
        frame_id = message.topic.rpartition("/")[2]
        return {"sec": sec, "nanosec": nanosec, "frame_id": frame_id, "format": "jpeg", "data": data}


class _WholeFile:
    """A stream whose flushed part is a whole MCAP file on disk at any time, whatever becomes of the process.

    Behind what was flushed there is always an ending, which the next flush overwrites: last, and in one small write.
    """

    def __init__(self, path: Path) -> None:
        self._file = FileIO(path, "x")
        self._buffer, self._end, self._ending = bytearray(), 0, 0

    def write(self, data: bytes) -> int:
        self._buffer += data
        return len(data)

    def tell(self) -> int:
        return self._end + len(self._buffer)

    def flush(self, ending: bytes = _ENDING) -> None:
        content = bytes(self._buffer) + ending
        try:
            self._put(content[self._ending :], self._end + self._ending)
            self._put(content[: self._ending], self._end)
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._end + self._ending)
            raise
        self._end += len(self._buffer)
        self._ending = len(ending)
        self._buffer.clear()

    def close(self) -> None:
        self._file.close()

    def _put(self, content: bytes, at: int) -> None:
        self._file.seek(at)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]
