"""Reader of recordings of ``specact run --record``, and their conversion to a LeRobot dataset."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError, ConfigError, DataError, WireError
from specact.lab.data.episodes import Episodes
from specact.lab.data.folder import locked
from specact.lab.data.frames import Frames
from specact.lab.data.lerobot_writing import Written, finish, write_part
from specact.observation import ObservationSpec, read_spec
from specact.records import RateHz, read_record
from specact.robot import ros
from specact.robot.recording import METADATA, TOPICS, VERSION, topic_of
from specact.wire.images import read_jpegs

_OBSERVATIONS = {kind.name: kind for kind in (ros.ARRAY, ros.IMAGE)}
# Metadata that are text or null.
_TEXTS = ("policy", "fingerprint", "gate", "robot", "env", "command", "began")
_LARGEST_RECORD = 1 << 30


@dataclass
class Step:
    """One control step: its number (a missing one is a dropped step), and the Unix time of its end [s].

    ``control``, ``inference`` (of a pair) and ``chunk`` (of a chunk policy alone) are messages, see
    :mod:`specact.robot.ros`; ``observation`` has arrays by name, camera frames as JPEG, and is empty if unusable;
    ``action`` is the executed one ``[A]`` in the environment's units, ``origin`` its
    :class:`~specact.types.Origin` by name, or empty.
    """

    number: int
    at_s: float = 0.0
    control: dict[str, Any] = field(default_factory=dict)
    observation: dict[str, Any] = field(default_factory=dict)
    instruction: str | None = None
    action: NDArray[np.float32] | None = None
    origin: str = ""
    inference: dict[str, Any] | None = None
    chunk: dict[str, Any] | None = None

    @property
    def usable(self) -> bool:
        """Whether it has an observation and an action."""
        return bool(self.observation) and self.action is not None


@dataclass(frozen=True)
class Recorded:
    """A recording: its control steps in order of time, and success and score of each judged episode, by its number.

    ``about`` has ``policy``, ``fingerprint``, ``units``, ``rate_hz``, ``env``, ``command`` and others; a truncated
    file is not ``whole``.
    """

    path: Path
    about: dict[str, Any]
    steps: list[Step]
    judged: dict[int, dict[str, Any]]
    whole: bool

    @property
    def spec(self) -> ObservationSpec:
        """The policies' observations."""
        return read_spec(self.about["observation"])

    @property
    def episodes(self) -> list[list[Step]]:
        """Control steps by episode."""
        return [list(steps) for _, steps in itertools.groupby(self.steps, lambda step: step.control["episode"])]

    @property
    def dropped(self) -> int:
        """Control steps that are missing within episodes."""
        pairs = (pair for steps in self.episodes for pair in itertools.pairwise(steps))
        return sum(after.number - before.number - 1 for before, after in pairs)

    @property
    def inferences(self) -> list[dict[str, Any]]:
        """The inferences of a pair, each with its final values and its ``episode``."""
        latest = {
            (step.control["episode"], step.inference["step"]): step.inference
            for step in self.steps
            if step.inference is not None
        }
        return [{"episode": episode, **inference} for (episode, _), inference in latest.items()]


def read_recording(path: Path) -> Recorded:
    """Reads a recording; of a truncated one, the intact part.

    Messages of a type that is not their topic's are ignored.

    Raises:
        DataError: if it is no recording, its metadata are damaged, or its actions are of several widths.
    """
    reader = _Reader()
    try:
        with path.open("rb") as file:
            whole, reason = reader.read(file)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; give a file that specact run --record wrote"
        ) from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if reader.about is None:
        raise DataError(f"{path} is no recording of a run: {reason}; specact run --record FILE makes one")
    fields = read_spec(reader.about["observation"]).fields
    names = {topic_of(name): name for name in fields}
    for step in reader.steps.values():
        step.observation = {
            names[topic]: seen
            for topic, seen in step.observation.items()
            if topic in names and isinstance(seen, bytes) == fields[names[topic]].is_image
        }
        if step.observation.keys() != fields.keys():
            step.observation = {}
    ordered = sorted((step for step in reader.steps.values() if step.control), key=lambda step: step.number)
    widths = sorted({len(step.action) for step in ordered if step.action is not None})
    if len(widths) > 1:
        raise DataError(
            f"{path} holds actions of {widths[0]} and of {widths[-1]} numbers; all must be equal: record it again"
        )
    return Recorded(path, reader.about, ordered, reader.judged, whole)


class _Reader:
    """Collects the messages of an MCAP file."""

    def __init__(self) -> None:
        self.about: dict[str, Any] | None = None
        self.steps: dict[int, Step] = {}
        self.judged: dict[int, dict[str, Any]] = {}
        self._schemas: dict[int, Any] = {}
        self._channels: dict[int, tuple[str, ros.MessageType]] = {}

    def read(self, file: BinaryIO) -> tuple[bool, str]:
        """Whether the file is whole, and what is wrong with it where nothing of specact is in it."""
        from mcap.stream_reader import StreamReader

        try:
            for record in StreamReader(file, validate_crcs=True, record_size_limit=_LARGEST_RECORD).records:
                self._take(record)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - a damaged file fails in any way that decoders can
            kind = type(error).__name__
            return False, "it is no MCAP file" if kind == "InvalidMagic" else f"it is damaged ({kind})"
        return True, "it has no metadata of specact"

    def _take(self, record: Any) -> None:
        kind = type(record).__name__
        if kind == "Metadata" and record.name == METADATA:
            self.about = _about(record.metadata)
        elif kind == "Schema":
            self._schemas[record.id] = record
        elif kind == "Channel":
            own = _type_of(record.topic, self._schemas.get(record.schema_id))
            if own is not None:
                self._channels[record.id] = record.topic, own
        elif kind == "Message" and record.channel_id in self._channels:
            topic, own = self._channels[record.channel_id]
            self._store(topic, record.sequence, record.log_time / 1e9, own.decode(record.data))

    def _store(self, topic: str, number: int, at_s: float, message: dict[str, Any]) -> None:
        """Stores a message in its step."""
        step = self.steps.setdefault(number, Step(number))
        if topic == "/control":
            step.control, step.at_s = message, at_s
        elif topic == "/action":
            step.action, step.origin = message["values"], message["origin"]
        elif topic == "/instruction":
            step.instruction = message["data"]
        elif topic == "/inference":
            step.inference = message
        elif topic == "/chunk":
            step.chunk = message
        elif topic == "/episode":
            if message["judged"]:
                self.judged[message["number"]] = message
        elif "data" in message:
            step.observation[topic] = message["data"].tobytes()
        else:
            step.observation[topic] = message["values"].reshape(message["shape"])


def _about(metadata: dict[str, str]) -> dict[str, Any]:
    if metadata.get("version") != VERSION:
        raise DataError(
            f"this is a recording of version {metadata.get('version')!r:.20}; this version of specact reads {VERSION}"
        )
    try:
        about = {name: json.loads(text) for name, text in metadata.items()}
        read_spec(about["observation"])
        about["rate_hz"] = read_record(about["rate_hz"], RateHz, "rate_hz", BundleError)
        for name in _TEXTS:
            if not isinstance(about.get(name), str | None):
                raise TypeError(f"{name} must be a text or null, got {about[name]!r:.60}")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, BundleError) as error:
        raise DataError(f"the recording's metadata are damaged ({type(error).__name__}: {error})") from None
    return about


def _type_of(topic: str, schema: Any) -> ros.MessageType | None:
    """The type of a channel's messages, with the fields of the version that wrote it; None if it is another topic's."""
    own = schema and (TOPICS[topic] if topic in TOPICS else _OBSERVATIONS.get(schema.name))
    if not own or own.name != schema.name:
        return None
    return ros.MessageType.of(own.name, *schema.data.decode().splitlines()) if own is ros.INFERENCE else own


def to_dataset(paths: Sequence[Path], out: Path, progress: Callable[[int, int], None]) -> tuple[Written, int, int]:
    """Converts recordings to a LeRobot dataset (v3.0): one step per observation and its action.

    An episode ends with the recording's, at missing or unusable control steps, and at changes of the instruction, so
    that successive steps of an episode are one control period apart. Also returns the number of unusable steps, and
    that of additional episodes.

    Raises:
        ConfigError: if there is a dataset already.
        DataError: if a file is no recording, none has a usable step, or their rates or observations differ.
    """
    if (out / "meta").exists():
        raise ConfigError(f"{out} holds a dataset already; choose another --out")
    with locked(out):
        first, number, left_out, cut, tasks = None, 0, 0, 0, dict[str, int]()
        for done, path in enumerate(paths):
            progress(done, len(paths))
            recorded = read_recording(path)
            first = first or recorded
            _check_alike(first, recorded)
            for steps in recorded.episodes:
                stretches = list(_stretches(steps))
                left_out += len(steps) - sum(map(len, stretches))
                cut += max(0, len(stretches) - 1)
                for stretch in stretches:
                    task = stretch[0].instruction or recorded.about.get("env") or recorded.about.get("policy") or "run"
                    episode = _episode(recorded, stretch)
                    index = tasks.setdefault(task, len(tasks))
                    write_part(out, number, episode, task=task, task_index=index, tried=1)
                    number += 1
        progress(len(paths), len(paths))
        if not number:
            raise DataError(
                "these recordings hold no control step with an observation and an action; nothing was written"
            )
        return finish(out, number), left_out, cut


def _check_alike(first: Recorded, other: Recorded) -> None:
    for name in ("rate_hz", "observation"):
        one, another = first.about[name], other.about[name]
        if name == "observation":
            # Histories may differ.
            one, another = ({n: (f["shape"], f["dtype"]) for n, f in each["fields"].items()} for each in (one, another))
        if one != another:
            raise DataError(
                f"{first.path} and {other.path} differ in {name}: {one} and {another}; convert them into two datasets"
            )


def _stretches(steps: list[Step]) -> Iterator[list[Step]]:
    """Runs of consecutive usable control steps with one instruction."""
    stretch: list[Step] = []
    for step in steps:
        follows = stretch and step.number == stretch[-1].number + 1 and step.instruction == stretch[-1].instruction
        if stretch and not (follows and step.usable):
            yield stretch
            stretch = []
        if step.usable:
            stretch.append(step)
    if stretch:
        yield stretch


def _episode(recorded: Recorded, steps: list[Step]) -> Episodes:
    observation: dict[str, Any] = {}
    try:
        for name, each in recorded.spec.fields.items():
            values = [step.observation[name] for step in steps]
            shape = (len(values), *each.shape)
            frames = _Jpegs(recorded.path, name, values, each.shape)
            observation[name] = Frames(shape, frames) if each.is_image else np.stack(values)
        action = np.stack([step.action for step in steps if step.action is not None])
    except ValueError as error:
        raise DataError(f"{recorded.path} holds a damaged observation or action: {error}") from None
    return Episodes(observation, action, np.array([len(steps)]), recorded.about["rate_hz"])


@dataclass(frozen=True)
class _Jpegs:
    """Decodes frames lazily."""

    path: Path
    name: str
    files: list[bytes]
    shape: tuple[int, ...]

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        try:
            return read_jpegs([self.files[row] for row in rows], self.name, (len(rows), *self.shape))
        except WireError as error:
            raise DataError(f"{self.path} holds a damaged frame: {error}") from None
