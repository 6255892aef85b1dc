"""Reader of recordings of ``specact run --record``, and their conversion to a LeRobot dataset."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError, ConfigError, DataError, WireError
from specact.lab.data.episodes import Episodes
from specact.lab.data.folder import locked
from specact.lab.data.frames import Frames, Images
from specact.lab.data.lerobot_writing import Written, finish, write_part
from specact.lab.data.readers import check_size
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
            missing = reader.read(file)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; give a file that specact run --record wrote"
        ) from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if reader.about is None:
        why = missing or "it has no metadata of specact"
        raise DataError(f"{path} is no recording of a run: {why}; specact run --record FILE makes one")
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
    return Recorded(path, reader.about, ordered, reader.judged, whole=not missing)


class _Reader:
    """Collects the messages of an MCAP file."""

    def __init__(self) -> None:
        self.about: dict[str, Any] | None = None
        self.steps: dict[int, Step] = {}
        self.judged: dict[int, dict[str, Any]] = {}

    def read(self, file: BinaryIO) -> str:
        """Why the file is not whole; empty if it is."""
        schemas: dict[int, Any] = {}
        channels: dict[int, tuple[str, ros.MessageType]] = {}
        try:
            for record in _records(file):
                kind, entry = type(record).__name__, cast(Any, record)
                if kind == "Metadata" and entry.name == METADATA:
                    self.about = _about(entry.metadata)
                elif kind == "Schema":
                    schemas[entry.id] = entry
                elif kind == "Channel" and (layout := _type_of(entry.topic, schemas.get(entry.schema_id))) is not None:
                    channels[entry.id] = entry.topic, layout
                elif kind == "Message" and entry.channel_id in channels:
                    topic, layout = channels[entry.channel_id]
                    step = self.steps.setdefault(entry.sequence, Step(entry.sequence))
                    self._store(step, topic, entry.log_time / 1e9, layout.decode(entry.data))
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - a damaged file fails in any way that decoders can
            name = type(error).__name__
            return "it is no MCAP file" if name == "InvalidMagic" else f"it is damaged ({name})"
        return ""

    def _store(self, step: Step, topic: str, at_s: float, message: dict[str, Any]) -> None:
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


def _records(file: BinaryIO) -> Iterator[Any]:
    """The records of an MCAP file, those of its chunks as well, which are unpacked within a bound."""
    from mcap.stream_reader import StreamReader, breakup_chunk

    stored, size = os.fstat(file.fileno()).st_size, 0
    for record in StreamReader(file, validate_crcs=True, record_size_limit=_LARGEST_RECORD, emit_chunks=True).records:
        chunk: Any = record
        if type(record).__name__ != "Chunk":
            yield record
            continue
        size += chunk.uncompressed_size
        check_size("its content", max(size, len(chunk.data)), stored)
        if chunk.compression:
            import zstandard

            if chunk.compression != "zstd":
                raise DataError(f"it is compressed with {chunk.compression!r:.20}; zstd is supported")
            # Not more than is declared, whatever the compressed data say of themselves.
            with zstandard.ZstdDecompressor().stream_reader(chunk.data) as content:
                data = content.read(chunk.uncompressed_size + 1)
            if len(data) != chunk.uncompressed_size:
                raise ValueError
            chunk = replace(chunk, compression="", data=data)
        yield from breakup_chunk(chunk, validate_crc=True)


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
            read_record(about.get(name), cast(Any, str | None), name, BundleError)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, BundleError) as error:
        raise DataError(f"the recording's metadata are damaged ({type(error).__name__}: {error})") from None
    return about


def _type_of(topic: str, schema: Any) -> ros.MessageType | None:
    """The type of a channel's messages, with the fields of the version that wrote it; None if it is another topic's."""
    layout = schema and (TOPICS[topic] if topic in TOPICS else _OBSERVATIONS.get(schema.name))
    if not layout or layout.name != schema.name:
        return None
    return ros.MessageType.flat(layout.name, *schema.data.decode().splitlines()) if layout in ros.GREW else layout


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
        first, number, left_out, cut = None, 0, 0, 0
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
                    write_part(out, number, _episode(recorded, stretch), task)
                    number += 1
        progress(len(paths), len(paths))
        if not number:
            raise DataError(
                "these recordings hold no control step with an observation and an action; nothing was written"
            )
        return finish(out, number), left_out, cut


def _check_alike(first: Recorded, other: Recorded) -> None:
    for name in ("rate_hz", "observation"):
        left, right = first.about[name], other.about[name]
        if name == "observation":
            # Histories may differ.
            left, right = ({n: (f["shape"], f["dtype"]) for n, f in spec["fields"].items()} for spec in (left, right))
        if left != right:
            raise DataError(
                f"{first.path} and {other.path} differ in {name}: {left} and {right}; convert them into two datasets"
            )


def _stretches(steps: list[Step]) -> Iterator[list[Step]]:
    """Runs of consecutive usable control steps with one instruction."""
    usable = enumerate(step for step in steps if step.usable)
    for _, stretch in itertools.groupby(usable, lambda entry: (entry[1].number - entry[0], entry[1].instruction)):
        yield [step for _, step in stretch]


def _episode(recorded: Recorded, steps: list[Step]) -> Episodes:
    observation: dict[str, Any] = {}
    try:
        for name, spec in recorded.spec.fields.items():
            values = [step.observation[name] for step in steps]
            shape = (len(values), *spec.shape)
            read = partial(_jpegs, recorded.path, name, values, spec.shape)
            observation[name] = Frames(shape, read) if spec.is_image else np.stack(values)
        action = np.stack([step.action for step in steps if step.action is not None])
    except ValueError as error:
        raise DataError(f"{recorded.path} holds a damaged observation or action: {error}") from None
    return Episodes(observation, action, np.array([len(steps)]), recorded.about["rate_hz"])


def _jpegs(path: Path, name: str, files: list[bytes], shape: tuple[int, ...], rows: NDArray[np.int64]) -> Images:
    try:
        return read_jpegs([files[row] for row in rows], name, (len(rows), *shape))
    except WireError as error:
        raise DataError(f"{path} holds a damaged frame: {error}") from None
