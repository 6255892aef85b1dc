"""The MCAP file of a recording: valid after every flush; a write error ends the recording but raises nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, MissingExtraError
from specact.robot.ros import IMAGE, MessageType
from specact.wire.images import to_jpeg

# Name and version of the metadata record.
METADATA, VERSION = "specact", "1"
JPEG_QUALITY = 95
FLUSH_INTERVAL_S = 1.0
# End of an MCAP file without a summary: data end, footer, magic.
_FOOTER = (
    b"\x0f" + (4).to_bytes(8, "little") + bytes(4)
    + b"\x02" + (20).to_bytes(8, "little") + bytes(20)
    + b"\x89MCAP0\r\n"
)  # fmt: skip


@dataclass(slots=True)
class Step:
    """Messages that are written together or dropped: topic, time [ns] and values of each; and their rough size."""

    number: int
    messages: list[tuple[str, int, Mapping[str, Any]]] = field(default_factory=list)
    nbytes: int = 1 << 10

    @property
    def is_control(self) -> bool:
        """Whether it is a control step."""
        return any(topic == "/control" for topic, _, _ in self.messages)


class RecordingFile:
    """A file of control steps; only its construction raises.

    Args:
        path: of the file, which must not exist.
        channels: message type of every topic; images are camera frames.
        about: metadata of the recording, as plain values.

    Attributes:
        kept: number of control steps in the file.
        processed_bytes: size of all steps that were written or dropped.
        error: why the recording ended early, or None.
    """

    def __init__(self, path: Path, channels: Mapping[str, MessageType], about: Mapping[str, Any]) -> None:
        try:
            from mcap.writer import Writer

            if IMAGE in channels.values():
                import PIL  # noqa: F401 - checked before the robot moves
        except ModuleNotFoundError as error:
            raise MissingExtraError("pillow" if error.name == "PIL" else "mcap", "record") from error
        self._types = channels
        self.kept = self.processed_bytes = self._unflushed = 0
        self.error: str | None = None
        self._flushed_s = time.monotonic()
        try:
            self._file = _ValidFile(path)
            writer: Any = cast("Any", Writer)(cast("IO[bytes]", self._file))
            # The profile of ROS 2 messages, which their readers require.
            writer.start(profile="ros2", library="specact")
            writer.add_metadata(METADATA, {"version": VERSION} | {name: json.dumps(at) for name, at in about.items()})
            writer.flush()
        except FileExistsError:
            raise ConfigError(f"{path} is there already; choose another name for the recording") from None
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; choose another place for the recording"
            ) from error
        schemas = {
            kind: writer.register_schema(kind.name, "ros2msg", kind.definition.encode())
            for kind in dict.fromkeys(channels.values())
        }
        self._channels = {
            topic: writer.register_channel(topic, "cdr", schemas[kind]) for topic, kind in channels.items()
        }
        self._writer = writer

    def write(self, step: Step) -> None:
        """Adds a step; flushes once per interval."""
        self._attempt(lambda: self._add(step))
        if time.monotonic() - self._flushed_s > FLUSH_INTERVAL_S:
            self.flush()
        self.processed_bytes += step.nbytes

    def flush(self) -> None:
        """Writes all buffered steps; the file is valid afterwards."""
        if self._unflushed:
            self._attempt(self._writer.flush, self._count_flushed)

    def finish(self) -> None:
        """Adds the summary with the index and closes the file."""
        self._attempt(self._writer.finish, lambda: self._file.flush(b""), self._count_flushed)
        self._file.close()

    def fail(self, error: Exception) -> None:
        """Ends the recording with this error."""
        reason = error.strerror if isinstance(error, OSError) else None
        self.error = f"the recording ended early: {reason or f'{type(error).__name__}: {error}'}"

    def _attempt(self, *actions: Callable[[], object]) -> None:
        try:
            for action in actions if self.error is None else ():
                action()
        except Exception as error:  # noqa: BLE001 - the robot continues without a recording
            self.fail(error)

    def _count_flushed(self) -> None:
        self.kept, self._unflushed, self._flushed_s = self.kept + self._unflushed, 0, time.monotonic()

    def _add(self, step: Step) -> None:
        # In chronological order, which readers of a file without a summary expect.
        for topic, at_ns, values in sorted(step.messages, key=lambda message: message[1]):
            kind = self._types[topic]
            if "array" in values:
                values = _of_array(values["array"], topic, at_ns, kind)
            self._writer.add_message(self._channels[topic], at_ns, kind.encode(values), at_ns, step.number)
        self._unflushed += step.is_control


def _of_array(array: NDArray[Any], topic: str, at_ns: int, kind: MessageType) -> Mapping[str, Any]:
    """The values of a message that holds an array of an observation."""
    if kind is not IMAGE:
        return {"shape": np.array(array.shape, np.uint32), "values": array}
    (data,) = to_jpeg(array[None], JPEG_QUALITY)
    sec, nanosec = divmod(at_ns, 10**9)
    return {"sec": sec, "nanosec": nanosec, "frame_id": topic.rpartition("/")[2], "format": "jpeg", "data": data}


class _ValidFile:
    """A stream whose flushed part is always a valid MCAP file on disk, even if the process is killed.

    Flushed data is always followed by a footer. The next flush writes its new data first and then overwrites the old
    footer, in one small write.
    """

    def __init__(self, path: Path) -> None:
        self._file = FileIO(path, "x")
        self._buffer, self._end, self._footer_bytes = bytearray(), 0, 0

    def write(self, data: bytes) -> int:
        self._buffer += data
        return len(data)

    def tell(self) -> int:
        return self._end + len(self._buffer)

    def flush(self, ending: bytes = _FOOTER) -> None:
        content = bytes(self._buffer) + ending
        try:
            self._put(content[self._footer_bytes :], self._end + self._footer_bytes)
            self._put(content[: self._footer_bytes], self._end)
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._end + self._footer_bytes)
            raise
        self._end += len(self._buffer)
        self._footer_bytes = len(ending)
        self._buffer.clear()

    def close(self) -> None:
        self._file.close()

    def _put(self, content: bytes, at: int) -> None:
        self._file.seek(at)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]
