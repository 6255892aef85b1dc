"""Recordings read again, and made into datasets: what a run saw and did is what a reader of the dataset gets."""

from __future__ import annotations

import json
import subprocess
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from mcap.data_stream import RecordBuilder
from mcap.records import Chunk
from mcap.writer import Writer
from tests.lab import toys
from tests.lab.recorded import ABOUT, Truth, drive, record

from specact.errors import ConfigError, DataError
from specact.lab.data import readers
from specact.lab.data.episodes import Episodes
from specact.lab.data.lerobot_writing import Written
from specact.lab.data.readers import read
from specact.lab.data.recordings import read_recording, to_dataset
from specact.lab.report.recordings import tables_of
from specact.lab.report.tables import NONE
from specact.robot import ros
from specact.robot.recording import JPEG_QUALITY, Recorder
from specact.wire.images import read_jpegs, to_jpeg

SpecactRun = Callable[..., subprocess.CompletedProcess[str]]


def convert(out: Path, *paths: Path) -> tuple[tuple[Written, int, int], Episodes]:
    """The dataset that recordings make, with what is left out and cut, and what a reader finds in it."""
    return to_dataset(paths, out, lambda done, total: None), read(out)


def check(dataset: Episodes, truth: Truth, spans: Sequence[tuple[int, int, int]]) -> None:
    """That the episodes found are these parts of the true ones: (episode, first step, end)."""
    np.testing.assert_array_equal(dataset.ends, np.cumsum([end - first for _, first, end in spans]))
    seen = [row for episode, first, end in spans for row in truth.seen[episode][first:end]]
    done = [row for episode, first, end in spans for row in truth.done[episode][first:end]]
    np.testing.assert_array_equal(dataset.numbers("state"), np.stack([row["state"] for row in seen]))
    np.testing.assert_array_equal(dataset.action, np.stack(done))
    assert dataset.instructions == tuple(str(truth.seen[episode][first]["instruction"]) for episode, first, _ in spans)
    frames = np.stack([row["image.top"] for row in seen])
    shown = dataset.frames("image.top")[:]
    # JPEG loses something, and nothing else does.
    np.testing.assert_array_equal(shown, read_jpegs(to_jpeg(frames, JPEG_QUALITY), "frames", frames.shape))
    assert np.abs(shown.astype(int) - frames).mean() < 3.0
    assert dataset.rate_hz == 20.0


def test_a_recording_of_a_simulated_robot_becomes_the_dataset_of_what_it_saw_and_did(tmp_path: Path) -> None:
    truth = record(tmp_path / "run.mcap")
    made, dataset = convert(tmp_path / "out", tmp_path / "run.mcap")
    check(dataset, truth, [(episode, 0, len(steps)) for episode, steps in enumerate(truth.ticks)])
    assert made[1:] == (0, 0)
    assert made[0].kept == {"go left": 2, "go right": 2} and made[0].steps == dataset.steps


def test_an_episode_ends_where_nothing_usable_was_seen(tmp_path: Path) -> None:
    truth = record(tmp_path / "run.mcap", 2, blind=frozenset({3, 4}))
    made, dataset = convert(tmp_path / "out", tmp_path / "run.mcap")
    ends = [len(steps) for steps in truth.ticks]
    check(dataset, truth, [(0, 0, 3), (0, 5, ends[0]), (1, 0, 3), (1, 5, ends[1])])
    assert made[1:] == (4, 2)


def test_an_episode_ends_where_steps_were_dropped(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run.mcap", toys.pair.observation, ABOUT) as recorder:
        put, count = recorder._put, 0

        def forgetful() -> None:
            nonlocal count
            count += 1
            recorder._max_queued_bytes = 0 if count == 3 else 1 << 26
            put()

        recorder._put = forgetful  # type: ignore[method-assign]
        truth = drive(recorder, 1)
    recorded = read_recording(tmp_path / "run.mcap")
    assert recorded.dropped == 1
    made, dataset = convert(tmp_path / "out", tmp_path / "run.mcap")
    check(dataset, truth, [(0, 0, 2), (0, 3, len(truth.ticks[0]))])
    assert made[1:] == (0, 1)


def test_a_recording_that_is_cut_off_anywhere_gives_what_is_there(tmp_path: Path) -> None:
    truth = record(tmp_path / "run.mcap")
    content = (tmp_path / "run.mcap").read_bytes()
    whole = read_recording(tmp_path / "run.mcap")
    assert whole.whole and len(whole.steps) == sum(map(len, truth.ticks))
    for length in [*range(0, len(content), 997), len(content) - 1]:
        path = tmp_path / "torn.mcap"
        path.write_bytes(content[:length])
        try:
            torn = read_recording(path)
        except DataError as error:
            assert "is no recording of a run" in str(error) and length < 3000
            continue
        assert not torn.whole and len(torn.steps) <= len(whole.steps)
        for step, wanted in zip(torn.steps, whole.steps, strict=False):
            assert step.number == wanted.number and step.action is not None and wanted.action is not None
            assert step.action.tolist() == wanted.action.tolist()


def test_a_damaged_recording_is_refused_or_cut_off_and_never_a_crash(tmp_path: Path) -> None:
    record(tmp_path / "run.mcap", 1)
    content, rng = (tmp_path / "run.mcap").read_bytes(), np.random.default_rng(0)
    path = tmp_path / "bad.mcap"
    for _ in range(100):
        bad = bytearray(content)
        for at in rng.integers(len(bad), size=3):
            bad[at] = rng.integers(256)
        path.write_bytes(bad)
        try:
            read_recording(path)
        except DataError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("kind", "declared", "said"),
    [("zstd", 1 << 26, "GB of memory"), ("zstd", 1 << 10, "no recording"), ("lz4", 1 << 10, "lz4")],
)
def test_a_chunk_that_unpacks_to_any_size_is_refused(
    kind: str, declared: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it declares, or beyond that."""
    monkeypatch.setattr(readers, "_UNPACKED_BYTES", 1 << 20)
    content = b"\x80" + ((1 << 26) - 9).to_bytes(8, "little") + bytes((1 << 26) - 9)
    builder: Any = RecordBuilder()
    Chunk(kind, zstandard.compress(content), 0, 0, 0, declared).write(builder)
    record(tmp_path / "run.mcap", 1)
    whole = (tmp_path / "run.mcap").read_bytes()
    (tmp_path / "bad.mcap").write_bytes(whole[:8] + builder.end() + whole[8:])
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"bad\.mcap.*{said}"):
        read_recording(tmp_path / "bad.mcap")
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


Message = tuple[str, ros.MessageType, Mapping[str, Any]]
SPEC = {"fields": {"state": {"shape": [2], "dtype": "float32", "history": 1}}, "instruction": False}
STATE: Message = ("/observation/state", ros.ARRAY, {"shape": np.array([2]), "values": np.zeros(2)})
CONTROL: Message = (
    "/control", ros.CONTROL,
    {"episode": 0, "late_s": 0.0, "stall_s": 0.0, "acted": True, "unusable": "", "held": True, "starved_by": ""},
)  # fmt: skip
FRAME = {"sec": 0, "nanosec": 0, "frame_id": "", "format": "jpeg", "data": b"\xff"}


def action(*values: float) -> Message:
    return "/action", ros.ACTION, {"values": np.array(values), "origin": "drafted"}


def written(path: Path, *steps: Sequence[Message], record: str = "specact", **about: Any) -> Path:
    """A recording of these messages, whose metadata say something else."""
    with path.open("wb") as file:
        writer: Any = Writer(file)
        writer.start(profile="ros2", library="a test")
        metadata = {"version": 1, "rate_hz": 10.0, "policy": "hand", "observation": SPEC} | about
        writer.add_metadata(record, {name: json.dumps(value) for name, value in metadata.items()})
        for number, step in enumerate(steps):
            for topic, kind, values in step:
                schema = writer.register_schema(kind.name, "ros2msg", kind.definition.encode())
                channel = writer.register_channel(topic, "cdr", schema)
                writer.add_message(channel, number, kind.encode(values), number, number)
        writer.finish()
    return path


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a recording")
    for path, says in (
        (tmp_path / "notes.txt", r"notes\.txt is no recording of a run: it is no MCAP file; specact run --record"),
        (
            written(tmp_path / "chatter.mcap", [("/chatter", ros.TEXT, {"data": "x"})], record="theirs"),
            "is no recording of a run: it has no metadata of specact",
        ),
        (written(tmp_path / "newer.mcap", version=7), "of version '7'; this version of specact reads 1"),
        (written(tmp_path / "odd.mcap", observation={}), "metadata are damaged"),
        (tmp_path / "nothing.mcap", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(DataError, match=says):
            read_recording(path)


def test_recordings_of_earlier_versions_are_read_with_the_fields_that_they_have(tmp_path: Path) -> None:
    topic, kind, values = CONTROL
    earlier = ros.MessageType.flat(kind.name, *kind.definition.splitlines()[:-2])
    (new,) = read_recording(written(tmp_path / "new.mcap", [STATE, action(0.0, 1.0), CONTROL])).steps
    (old,) = read_recording(written(tmp_path / "old.mcap", [STATE, action(0.0, 1.0), (topic, earlier, values)])).steps
    assert new.control == {**old.control, "held": True, "starved_by": ""} == values and old.usable
    control = next(tables_of(read_recording(tmp_path / "old.mcap")))
    assert ["stood still", NONE] in [list(row) for row in control.rows]


def test_messages_of_another_type_than_their_topics_are_ignored(tmp_path: Path) -> None:
    good = [STATE, action(0.0, 1.0), CONTROL]
    for topic in ("/control", "/inference", "/chunk", "/action", "/episode"):
        odd = written(tmp_path / "odd.mcap", good, [(topic, ros.TEXT, {"data": "x"})])
        recorded = read_recording(odd)
        assert recorded.whole and len(recorded.steps) == 1 and recorded.dropped == 0 and recorded.inferences == []
    # An array where a frame belongs, and the other way round, is no observation.
    image = {"fields": {"image": {"shape": [8, 8, 3], "dtype": "uint8", "history": 1}}, "instruction": False}
    array = ("/observation/image", ros.ARRAY, {"shape": np.array([8, 8, 3]), "values": np.zeros((8, 8, 3))})
    frame = ("/observation/state", ros.IMAGE, FRAME)
    for odd in (
        written(tmp_path / "array.mcap", [array, *good[1:]], observation=image),
        written(tmp_path / "frame.mcap", [frame, *good[1:]]),
    ):
        (step,) = read_recording(odd).steps
        assert step.observation == {} and not step.usable


def test_metadata_of_other_types_and_actions_of_several_widths_are_refused(tmp_path: Path) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        *(({"rate_hz": rate}, "rate_hz") for rate in (0, 1e308, float("nan"), 10**400, None)),
        ({"env": ["ball"]}, r"env must be a text.*ball"),
        ({"gate": {"name": "shape"}}, "gate must be a text"),
    )
    for about, says in wrong:
        path = written(tmp_path / "odd.mcap", [STATE, action(0.0), CONTROL], **about)
        with pytest.raises(DataError, match=rf"odd\.mcap: the recording's metadata are damaged .*{says}"):
            read_recording(path)
    path = written(tmp_path / "odd.mcap", [STATE, action(0.0, 1.0), CONTROL], [STATE, action(0.0, 1.0, 2.0), CONTROL])
    with pytest.raises(DataError, match=r"odd\.mcap holds actions of 2 and of 3 numbers; all must be equal"):
        read_recording(path)


def test_recordings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    record(tmp_path / "a.mcap", 1)
    with Recorder(tmp_path / "b.mcap", toys.pair.observation, ABOUT | {"rate_hz": 10.0}) as recorder:
        drive(recorder, 1)
    with pytest.raises(DataError, match=r"b\.mcap differ in rate_hz: 20\.0 and 10\.0; convert them into two datasets"):
        convert(tmp_path / "out", tmp_path / "a.mcap", tmp_path / "b.mcap")
    # What was begun is no dataset, and does not stand in the way of the next attempt.
    _, dataset = convert(tmp_path / "out", tmp_path / "a.mcap")
    assert len(dataset) == 1
    with pytest.raises(ConfigError, match="holds a dataset already; choose another --out"):
        convert(tmp_path / "out", tmp_path / "a.mcap")


def test_a_recording_without_a_usable_step_makes_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="state"):
        record(tmp_path / "run.mcap", 1, blind=frozenset({0}))
    assert not (tmp_path / "run.mcap").exists()
    path = written(tmp_path / "empty.mcap")
    with pytest.raises(DataError, match="hold no control step with an observation and an action"):
        convert(tmp_path / "out", path)
