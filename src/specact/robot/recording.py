"""What a robot saw and did, as an MCAP file of ROS 2 messages, written beside the control loop.

The control loop copies an observation and an action; everything else happens in a thread. What that thread cannot keep
up with is dropped, step by step, and counted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, MissingExtraError
from specact.observation import Observation, ObservationSpec, read_observation
from specact.robot.chunks import ChunkRunner
from specact.robot.inference import Finished
from specact.robot.loop import Acting, Robot, Tick
from specact.robot.ros import ACTION, ARRAY, CHUNK, CONTROL, EPISODE, IMAGE, INFERENCE, TEXT, MessageType
from specact.types import Miss, Origin, StepRecord
from specact.wire.images import to_jpeg

# Name and version of the metadata that say what a recording is of.
METADATA, VERSION = "specact", "1"
JPEG_QUALITY = 95
_ROOM_BYTES = 1 << 26  # of what waits to be written
_STEP_BYTES = 1 << 10  # of a step besides its arrays, roughly
_FLUSHED_EVERY_S = 1.0
_WRITTEN_WITHIN_S = 10.0
# An MCAP file without a summary ends so: data end, footer, magic.
_ENDING = (
    b"\x0f" + (4).to_bytes(8, "little") + bytes(4)
    + b"\x02" + (20).to_bytes(8, "little") + bytes(20)
    + b"\x89MCAP0\r\n"
)  # fmt: skip


def topic_of(name: str) -> str:
    """Where observations of this name are: ``image.front`` in ``/observation/image/front``."""
    return "/observation/" + name.replace(".", "/")


@dataclass(frozen=True, slots=True)
class _Message:
    topic: str
    at_ns: int
    values: Mapping[str, Any]


@dataclass(slots=True)
class _Step:
    """What is written together or not at all."""

    number: int
    messages: list[_Message] = field(default_factory=list)
    nbytes: int = _STEP_BYTES


class Recorder:
    """Records a run. Use it as a context manager, or call :meth:`close`.

    Args:
        path: of the file; none may be there.
        observation: what is recorded of observations.
        about: what the run is, as plain values.
        room_bytes: how much may wait to be written.

    Raises:
        ConfigError: if the file cannot be written, or is there already.
        MissingExtraError: if mcap, or for cameras Pillow, is not installed.
    """

    def __init__(
        self, path: Path, observation: ObservationSpec, about: Mapping[str, Any], room_bytes: int = _ROOM_BYTES
    ) -> None:
        self._path, self._observation, self._room_bytes = path, observation, room_bytes
        channels = {topic_of(name): IMAGE if each.is_image else ARRAY for name, each in observation.fields.items()}
        channels |= {
            "/instruction": TEXT, "/action": ACTION, "/inference": INFERENCE, "/chunk": CHUNK, "/control": CONTROL,
            "/episode": EPISODE,
        }  # fmt: skip
        self._frames = {topic_of(name) for name in observation.images}
        self._writing = _Writing(path, channels, dict(about) | {"observation": observation.describe()}, self._frames)
        # Unix time that only goes forward.
        self._since_ns = time.time_ns() - time.perf_counter_ns()
        self._steps: SimpleQueue[_Step | None] = SimpleQueue()
        self._sequence = self._noted = self._given_bytes = self._episode = 0
        self._acting: Acting | None = None
        self._pending = _Step(0)
        self._sent: tuple[int, NDArray[np.float32]] | None = None
        self._record: StepRecord | None = None
        self._ended: Finished | None = None
        self._thread = threading.Thread(target=self._write, name="specact recording", daemon=True)
        self._thread.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, robot: Robot, acting: Acting, episode: int) -> Robot:
        """Begins an episode.

        Args:
            robot: the robot.
            acting: what chooses its actions.
            episode: its number.

        Returns:
            The robot to give to the control loop: what is observed and done there is recorded.
        """
        self._acting, self._episode = acting, episode
        self._record = self._ended = None
        return _Recorded(robot, self)

    def note(self, tick: Tick) -> None:
        """Records a control step, after it."""
        acting, now = self._acting, self._now()
        assert acting is not None, "begin comes first"
        if acting.record is not None and acting.record is not self._record:
            self._record = acting.record
            self._add("/inference", _of_inference(acting.record), now)
        ended = acting.ended if isinstance(acting, ChunkRunner) else None
        if ended is not None and ended is not self._ended:
            self._ended = ended
            self._add("/chunk", _of_chunk(ended), now)
        self._add_action(acting.origin)
        unusable = "" if tick.unusable is None else tick.unusable.cause
        self._add(
            "/control",
            {
                "episode": self._episode, "late_s": tick.late_s, "stall_s": tick.stall_s, "acted": tick.acted,
                "unusable": unusable,
            },
            now,
        )  # fmt: skip
        self._noted += 1
        self._put()

    def end(self, told: Mapping[str, Any]) -> None:
        """Ends the episode.

        Args:
            told: ``success`` and ``score`` where somebody judged it, otherwise nothing.
        """
        if self._acting is None:
            return
        self._acting = None
        # What was sent after the last control step is the stop action.
        self._add_action(Origin.FALLBACK)
        success, score = bool(told.get("success", False)), float(told.get("score", 0.0))
        self._add(
            "/episode", {"number": self._episode, "judged": "success" in told, "success": success, "score": score}
        )
        self._put()

    def close(self, within_s: float = _WRITTEN_WITHIN_S) -> dict[str, Any]:
        """Writes what waits, for at most so long [s], and ends the file; one without a control step is removed.

        Returns:
            ``file``, ``steps`` in it, how many were ``dropped``, and the first ``error``, or None.
        """
        self.end({})
        self._steps.put(None)
        self._thread.join(within_s)
        writing = self._writing
        error = writing.error
        if self._thread.is_alive():
            error = error or f"{self._path} could not be written within {within_s:g} s"
        elif self._noted == 0:
            self._path.unlink(missing_ok=True)
        return {
            "file": str(self._path), "steps": writing.kept, "dropped": self._noted - writing.kept, "error": error
        }  # fmt: skip

    def _now(self) -> int:
        return self._since_ns + time.perf_counter_ns()

    def _seen(self, observation: Observation) -> None:
        """Copies an observation; one that cannot be used is not recorded."""
        try:
            arrays, instruction = read_observation(observation, self._observation)
        except Exception:  # noqa: BLE001 - the policy is asked next, and says what is wrong; a recording ends no run
            return
        now = self._now()
        for name, array in arrays.items():
            self._add(topic_of(name), {"array": array}, now)
            self._pending.nbytes += array.nbytes
        if instruction is not None:
            self._add("/instruction", {"data": instruction}, now)

    def _did(self, action: NDArray[np.float32]) -> None:
        self._sent = self._now(), np.array(action, np.float32)

    def _add_action(self, origin: Origin | None) -> None:
        if self._sent is not None:
            at_ns, action = self._sent
            self._sent = None
            name = (Origin.FALLBACK if origin is None else origin).name.lower()
            self._add("/action", {"values": action, "origin": name}, at_ns)

    def _add(self, topic: str, values: Mapping[str, Any], at_ns: int | None = None) -> None:
        self._pending.messages.append(_Message(topic, self._now() if at_ns is None else at_ns, values))

    def _put(self) -> None:
        """Hands the step over, or drops it where there is no room; never waits."""
        step = self._pending
        control = any(message.topic == "/control" for message in step.messages)
        # What does not belong to a control step is little, and without it the others say nothing.
        if not control or self._given_bytes - self._writing.taken_bytes + step.nbytes <= self._room_bytes:
            self._given_bytes += step.nbytes
            self._steps.put(step)
        self._sequence += 1
        self._pending = _Step(self._sequence)

    def _write(self) -> None:
        while True:
            try:
                step = self._steps.get(timeout=_FLUSHED_EVERY_S)
            except Empty:
                self._writing.flush()
                continue
            if step is None:
                self._writing.finish()
                return
            self._writing.write(step)


class _Recorded:
    """A robot whose observations and actions are recorded; everything else is its own."""

    def __init__(self, robot: Robot, recorder: Recorder) -> None:
        self._robot, self._recorder = robot, recorder

    def observe(self) -> Observation:
        seen = self._robot.observe()
        # Now: acting may change its arrays.
        self._recorder._seen(seen)
        return seen

    def act(self, action: NDArray[np.float32]) -> Any:
        self._recorder._did(action)
        return self._robot.act(action)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._robot, name)


class _Writing:
    """The file, as the thread sees it.

    Attributes:
        kept: control steps that are in the file.
        taken_bytes: of all steps that were taken from the queue and written, or given up.
        error: why nothing more is written, or None.
    """

    def __init__(
        self, path: Path, channels: Mapping[str, MessageType], about: Mapping[str, Any], frames: set[str]
    ) -> None:
        try:
            from mcap.writer import Writer
        except ModuleNotFoundError as error:
            raise MissingExtraError("mcap", "record") from error
        if frames:
            try:
                import PIL  # noqa: F401 - looked for before the robot moves
            except ModuleNotFoundError as error:
                raise MissingExtraError("pillow", "record") from error
        self._types, self._frames = channels, frames
        self.kept = self.taken_bytes = self._unflushed = 0
        self.error: str | None = None
        self._flushed_s = time.monotonic()
        try:
            self._file = _WholeFile(path)
        except OSError as error:
            raise ConfigError(
                f"{path} is there already; choose another name for the recording" if isinstance(error, FileExistsError)
                else f"cannot write {path}: {error.strerror}; choose another place for the recording"
            ) from error  # fmt: skip
        self._writer = Writer(cast("IO[bytes]", self._file))
        # What a file of ROS 2 messages calls itself; its readers refuse any other.
        self._writer.start(profile="ros2", library="specact")
        self._writer.add_metadata(METADATA, {"version": VERSION} | {name: json.dumps(v) for name, v in about.items()})
        schemas = {kind.name: kind for kind in channels.values()}
        numbers = {
            name: self._writer.register_schema(name, "ros2msg", kind.definition.encode())
            for name, kind in schemas.items()
        }
        self._channels = {
            topic: self._writer.register_channel(topic, "cdr", numbers[kind.name]) for topic, kind in channels.items()
        }
        try:
            self._writer.flush()
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; choose another place for the recording"
            ) from error

    def write(self, step: _Step) -> None:
        if self.error is None:
            try:
                # In the order of time, which readers of a file without a summary expect.
                for message in sorted(step.messages, key=lambda message: message.at_ns):
                    content = self._types[message.topic].encode(self._values(message))
                    self._writer.add_message(
                        self._channels[message.topic], message.at_ns, content, message.at_ns, step.number
                    )
                    self._unflushed += message.topic == "/control"
                if time.monotonic() - self._flushed_s > _FLUSHED_EVERY_S:
                    self.flush()
            except Exception as error:  # noqa: BLE001 - whatever it is, the robot goes on without a recording
                self._fail(error)
        self.taken_bytes += step.nbytes

    def flush(self) -> None:
        """Everything until now is in the file, which is whole."""
        if self.error is None and self._unflushed:
            try:
                self._writer.flush()
                self._flushed()
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(error)

    def finish(self) -> None:
        """Adds the summary, by which tools find what they look for, and closes the file."""
        if self.error is None:
            try:
                self._writer.finish()
                self._file.flush(b"")
                self._flushed()
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(error)
        self._file.close()

    def _flushed(self) -> None:
        self.kept, self._unflushed, self._flushed_s = self.kept + self._unflushed, 0, time.monotonic()

    def _fail(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else None
        self.error = f"recording ended early: {reason or f'{type(error).__name__}: {error}'}"

    def _values(self, message: _Message) -> Mapping[str, Any]:
        array = message.values.get("array")
        if array is None:
            return message.values
        if message.topic not in self._frames:
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


def _of_inference(record: StepRecord) -> dict[str, Any]:
    decision, outcome, times = record.decision, record.outcome, record.times
    offload = times.offload
    return {
        "step": record.address.step, "transmit": decision.transmit, "score": decision.score,
        "threshold": decision.threshold, "reason": decision.reason, "sent_ahead": record.sent_ahead,
        "unsent": record.unsent, "miss": record.miss or "",
        "verified": 0 if outcome is None else outcome.verified, "accepted": 0 if outcome is None else outcome.accepted,
        "kept": np.nan if outcome is None else outcome.kept, "drafted": record.proposal.actions,
        "executed": record.actions, "origins": record.origins,
        "draft_s": times.draft, "gate_s": times.gate, "encode_s": offload.encode, "network_s": offload.network,
        "queue_s": offload.queue, "target_s": offload.target, "finish_s": times.finish,
    }  # fmt: skip


def _of_chunk(ended: Finished) -> dict[str, Any]:
    missed = isinstance(ended.answer, Miss)
    actions = np.zeros((0, 0), np.float32) if isinstance(ended.answer, Miss) else ended.answer
    return {
        "step": ended.address.step, "took_s": ended.took_s, "miss": ended.answer.cause if missed else "",
        "shape": np.array(actions.shape, np.uint32), "actions": actions,
    }  # fmt: skip
