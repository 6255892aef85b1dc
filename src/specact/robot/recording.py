"""Recording of observations and actions as an MCAP file of ROS 2 messages, concurrent with the control loop.

The control loop copies an observation and an action; a thread does everything else. If it cannot keep up, whole steps
are dropped and counted. The file is valid after every flush; a write error ends the recording but raises nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, MissingExtraError
from specact.observation import Observation, ObservationSpec, read_observation
from specact.robot.chunks import Finished
from specact.robot.loop import Acting, Robot, Tick
from specact.robot.ros import ACTION, ARRAY, CHUNK, CONTROL, EPISODE, IMAGE, INFERENCE, TEXT, MessageType
from specact.types import Miss, Origin, StepRecord
from specact.wire.images import to_jpeg

_CLOSE_TIMEOUT_S = 10.0
# Topics of messages other than observations, which are arrays or camera frames.
TOPICS = {
    "/instruction": TEXT, "/action": ACTION, "/inference": INFERENCE, "/chunk": CHUNK, "/control": CONTROL,
    "/episode": EPISODE,
}  # fmt: skip
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


def topic_of(name: str) -> str:
    """Topic of an observation: ``image.front`` is ``/observation/image/front``."""
    return "/observation/" + name.replace(".", "/")


@dataclass(slots=True)
class Step:
    """Messages that are written together or dropped: topic, time [ns] and values of each; and their rough size."""

    number: int
    messages: list[tuple[str, int, Mapping[str, Any]]] = field(default_factory=list)
    nbytes: int = 1 << 10
    is_control: bool = False


class Recorder:
    """Records a run to a file that must not exist. Use it as a context manager, or call :meth:`close`.

    From :meth:`begin` on it stands in for the robot. ``about`` is its metadata, as plain values. Steps beyond
    ``max_queued_bytes`` are dropped.

    Raises:
        ConfigError: if the file cannot be written, or exists.
        MissingExtraError: if mcap, or for cameras Pillow, is not installed.
    """

    def __init__(
        self, path: Path, observation: ObservationSpec, about: Mapping[str, Any], max_queued_bytes: int = 1 << 26
    ) -> None:
        self._robot: Any = None
        self._path, self._observation, self._max_queued_bytes = path, observation, max_queued_bytes
        channels = {topic_of(name): IMAGE if entry.is_image else ARRAY for name, entry in observation.fields.items()}
        self._file = _File(path, channels | TOPICS, dict(about) | {"observation": observation.describe()})
        # Offset from the performance counter to Unix time; the sum is monotonic.
        self._since_ns = time.time_ns() - time.perf_counter_ns()
        self._steps: SimpleQueue[Step | None] = SimpleQueue()
        self._step, self._ticks, self._queued_bytes, self._episode = Step(0), 0, 0, 0
        self._acting: Acting | None = None
        self._sent: tuple[int, NDArray[np.float32]] | None = None
        self._record: StepRecord | None = None
        self._ended: Finished | None = None
        self._thread = threading.Thread(target=self._write, name="specact recording", daemon=True)
        self._thread.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._robot, name)

    def begin(self, robot: Robot, acting: Acting, episode: int) -> Robot:
        """Begins an episode of this number; returns the robot for the control loop, whose steps are recorded."""
        self._robot, self._acting, self._episode = robot, acting, episode
        self._record = self._ended = None
        return self

    def observe(self) -> Observation:
        """The robot's observation, copied now: acting may change its arrays; an unusable one is not recorded."""
        seen: Observation = self._robot.observe()
        now = self._now()
        try:
            arrays, instruction = read_observation(seen, self._observation)
        except Exception:  # noqa: BLE001 - the policy raises the error next
            return seen
        for name, array in arrays.items():
            self._add(topic_of(name), now, {"array": array})
            self._step.nbytes += array.nbytes
        if instruction is not None:
            self._add("/instruction", now, {"data": instruction})
        return seen

    def act(self, action: NDArray[np.float32]) -> Any:
        """The robot's, of an action that is copied: robots may reuse their buffers."""
        self._sent = self._now(), np.array(action)
        return self._robot.act(action)

    def note(self, tick: Tick) -> None:
        """Records a control step after it has ended; never raises."""
        assert self._acting is not None, "begin comes first"
        try:
            self._add_tick(tick, self._acting)
        except Exception as error:  # noqa: BLE001 - the robot continues without a recording
            self._file.fail(error)
        self._ticks += 1
        self._put()

    def end(self, result: Mapping[str, Any]) -> None:
        """Ends the episode with ``success`` and ``score`` if known, otherwise with an empty result."""
        if self._acting is None:
            return
        self._acting = None
        # An action after the last control step is the stop action.
        self._add_action(Origin.FALLBACK)
        success, score = bool(result.get("success", False)), float(result.get("score", 0.0))
        values = {"number": self._episode, "judged": "success" in result, "success": success, "score": score}
        self._add("/episode", self._now(), values)
        self._put()

    def close(self, within_s: float = _CLOSE_TIMEOUT_S) -> dict[str, Any]:
        """Writes the queued steps within a timeout [s] and closes the file; one without a control step is removed.

        Returns:
            ``file``, its number of ``steps``, the number of ``dropped`` steps, and the first ``error``, or None.
        """
        self.end({})
        self._steps.put(None)
        self._thread.join(within_s)
        kept, error = self._file.kept, self._file.error
        if self._thread.is_alive():
            error = error or f"{self._path} could not be written within {within_s:g} s"
        elif self._ticks == 0:
            self._path.unlink(missing_ok=True)
        return {"file": str(self._path), "steps": kept, "dropped": self._ticks - kept, "error": error}

    def _now(self) -> int:
        return self._since_ns + time.perf_counter_ns()

    def _add(self, topic: str, at_ns: int, values: Mapping[str, Any]) -> None:
        self._step.messages.append((topic, at_ns, values))

    def _add_action(self, origin: Origin | None) -> None:
        if self._sent is not None:
            (at_ns, action), self._sent = self._sent, None
            name = (Origin.FALLBACK if origin is None else origin).name.lower()
            self._add("/action", at_ns, {"values": action, "origin": name})

    def _add_tick(self, tick: Tick, acting: Acting) -> None:
        now = self._now()
        if acting.record is not None and acting.record is not self._record:
            self._record = acting.record
            self._add("/inference", now, _of_inference(acting.record))
        # Of a chunk policy alone.
        ended = getattr(acting, "ended", None)
        if ended is not None and ended is not self._ended:
            self._ended = ended
            self._add("/chunk", now, _of_chunk(ended))
        self._add_action(acting.origin)
        unusable = "" if tick.unusable is None else tick.unusable.cause
        values = {name: getattr(tick, name) for name in ("late_s", "stall_s", "acted", "held", "starved_by")}
        self._add("/control", now, {"episode": self._episode, "unusable": unusable, **values})
        self._step.is_control = True

    def _put(self) -> None:
        """Queues the step, or drops it if the queue is full; never blocks."""
        step, queued_bytes = self._step, self._queued_bytes - self._file.processed_bytes
        # Messages outside a control step are small and needed to interpret the others, so they are always queued.
        if not step.is_control or queued_bytes + step.nbytes <= self._max_queued_bytes:
            self._queued_bytes += step.nbytes
            self._steps.put(step)
        self._step = Step(step.number + 1)

    def _write(self) -> None:
        while True:
            try:
                step = self._steps.get(timeout=FLUSH_INTERVAL_S)
            except Empty:
                self._file.flush()
                continue
            if step is None:
                self._file.finish()
                return
            self._file.write(step)


def _of_inference(record: StepRecord) -> dict[str, Any]:
    decision, outcome, times = record.decision, record.outcome, record.times
    verified, accepted, kept = (0, 0, np.nan) if outcome is None else (outcome.verified, outcome.accepted, outcome.kept)
    return {
        "step": record.address.step, "transmit": decision.transmit, "score": decision.score,
        "threshold": decision.threshold, "reason": decision.reason, "unsent": record.unsent, "miss": record.miss or "",
        "verified": verified, "accepted": accepted, "kept": kept,
        "drafted": record.proposal.actions, "executed": record.actions, "origins": record.origins,
        "draft_s": times.draft, "gate_s": times.gate, "finish_s": times.finish,
        **{f"{name}_s": getattr(times.offload, name) for name in ("encode", "network", "queue", "target")},
    }  # fmt: skip


def _of_chunk(ended: Finished) -> dict[str, Any]:
    answer = ended.answer
    miss, actions = (answer.cause, np.zeros((0, 0))) if isinstance(answer, Miss) else ("", answer)
    return {
        "step": ended.address.step, "took_s": ended.took_s, "miss": miss,
        "shape": np.array(actions.shape, np.uint32), "actions": actions,
    }  # fmt: skip


class _File:
    """A file of control steps: those kept, the bytes written or dropped, and its error; only construction raises."""

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

    A flush writes its new data behind the footer of the last one, and then overwrites that, in one small write.
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
