"""Recordings of runs: what two independent readers find there, and what a run does where none can be written."""

from __future__ import annotations

import itertools
import json
import resource
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader
from rosbags.highlevel import AnyReader
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from tests.children import wait_for
from tests.lab import toys
from tests.lab.recorded import ABOUT, drive, record

from specact import SpeculativePolicy
from specact.errors import ConfigError, DataError
from specact.execution.player import LateVerdicts
from specact.execution.schedule import Execution
from specact.gates import Always
from specact.lab.data.recordings import read_recording
from specact.pair import LocalTarget, Pending
from specact.robot import recording, ros
from specact.robot.chunks import ChunkRunner, Finished, Inference, LocalSource
from specact.robot.recording import Recorder
from specact.types import Miss, OffloadTimes, Origin, VirtualClock
from specact.wire.images import to_jpeg

TYPES = [ros.ARRAY, ros.IMAGE, ros.TEXT, ros.ACTION, ros.INFERENCE, ros.CHUNK, ros.CONTROL, ros.EPISODE]


def by_mcap(path: Path) -> tuple[dict[str, list[bytes]], dict[str, str]]:
    """Messages by topic, and our metadata."""
    messages: dict[str, list[bytes]] = {}
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        for _, channel, message in reader.iter_messages():
            messages.setdefault(channel.topic, []).append(message.data)
        (about,) = (record.metadata for record in reader.iter_metadata())
    return messages, about


def by_rosbags(path: Path) -> dict[str, list[Any]]:
    """Messages by topic, read by what the file says of their types."""
    messages: dict[str, list[Any]] = {}
    with AnyReader([path]) as reader:
        for connection, _, raw in reader.messages():
            messages.setdefault(connection.topic, []).append(reader.deserialize(raw, connection.msgtype))
    return messages


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_messages_are_what_ros_makes_of_the_same_values(kind: ros.MessageType) -> None:
    """Byte by byte, also where texts of any length shift what comes after them."""
    store = get_typestore(Stores.EMPTY)
    standard = get_typestore(Stores.ROS2_HUMBLE)
    if kind.name.startswith("specact"):
        store.register(get_types_from_msg(kind.definition, kind.name))
    else:
        store = standard
    rng = np.random.default_rng(0)
    draws: dict[str, Callable[[], Any]] = {
        "bool": lambda: bool(rng.integers(2)),
        "int32": lambda: int(rng.integers(-(2**31), 2**31)),
        "uint32": lambda: int(rng.integers(2**32)),
        "float64": rng.normal,
        "string": lambda: "ü" * int(rng.integers(6)),
        "uint8[]": lambda: rng.integers(256, size=rng.integers(6)).astype(np.uint8),
        "uint32[]": lambda: rng.integers(2**32, size=rng.integers(6)).astype(np.uint32),
        "float32[]": lambda: rng.normal(size=rng.integers(6)).astype(np.float32),
    }
    for _ in range(30):
        values = {name: draws[dtype]() for name, dtype in kind.fields.items()}
        made = kind.encode(values)
        if kind is ros.IMAGE:
            parts = {name: values[name] for name in ("sec", "nanosec", "frame_id")}
            stamp = store.types["builtin_interfaces/msg/Time"](parts["sec"], parts["nanosec"])
            header = store.types["std_msgs/msg/Header"](stamp, parts["frame_id"])
            message = store.types[kind.name](header, values["format"], values["data"])
        else:
            message = store.types[kind.name](**values)
        assert made == bytes(store.serialize_cdr(message, kind.name))
        for name, value in kind.decode(made).items():
            np.testing.assert_array_equal(value, values[name])


# ---- what is recorded -----------------------------------------------------------------------------------------------


def test_both_readers_find_what_the_robot_saw_and_did(tmp_path: Path) -> None:
    truth = record(tmp_path / "run.mcap")
    topics, (raw, about) = by_rosbags(tmp_path / "run.mcap"), by_mcap(tmp_path / "run.mcap")
    assert {topic: len(messages) for topic, messages in topics.items()} == {
        topic: len(messages) for topic, messages in raw.items()
    }
    seen = list(itertools.chain(*truth.seen))
    for message, observation in zip(topics["/observation/state"], seen, strict=True):
        assert message.values.tolist() == observation["state"].tolist() and message.shape.tolist() == [2]
    for message, observation in zip(topics["/observation/image/top"], seen, strict=True):
        assert message.format == "jpeg" and message.header.stamp.sec > 1_700_000_000
        files = to_jpeg(observation["image.top"][None], recording.JPEG_QUALITY)
        assert [message.data.tobytes()] == files
    assert [message.data for message in topics["/instruction"]] == [str(row["instruction"]) for row in seen]
    done = list(itertools.chain(*truth.done))
    assert [message.values.tolist() for message in topics["/action"]] == [action.tolist() for action in done]
    ticks = list(itertools.chain(*truth.ticks))
    records = [tick.record for tick in ticks if tick.record is not None]
    for message, step in zip(topics["/inference"], records, strict=True):
        assert (message.transmit, message.score, message.threshold, message.reason) == (
            step.decision.transmit, step.decision.score, step.decision.threshold, step.decision.reason,
        )  # fmt: skip
        assert message.executed.tolist() == step.actions.ravel().tolist()
        assert message.origins.tolist() == step.origins.tolist()
    # Two actions of a chunk are executed, one a control step.
    by_step = iter(topics["/action"])
    for episode in truth.ticks:
        now: list[str] = []
        for tick in episode:
            now = now[1:] if tick.record is None else [Origin(o).name.lower() for o in tick.record.origins]
            assert next(by_step).origin == now[0]
    assert {message.origin for message in topics["/action"]} == {"drafted", "replaced"}
    assert [message.episode for message in topics["/control"]] == [
        number for number, steps in enumerate(truth.ticks) for _ in steps
    ]
    assert [message.success for message in topics["/episode"]] == [True, True, True, False]
    assert json.loads(about["fingerprint"]) == "hand" and json.loads(about["rate_hz"]) == 20.0


def test_an_unusable_observation_is_told_with_the_action_that_was_held(tmp_path: Path) -> None:
    record(tmp_path / "run.mcap", 1, blind=frozenset({3}))
    steps = read_recording(tmp_path / "run.mcap").steps
    assert [step.control["unusable"] for step in steps] == ["", "", "", "shape", *[""] * (len(steps) - 4)]
    assert steps[3].observation == {} and steps[3].origin == "fallback"
    assert steps[3].action is not None and steps[2].action is not None
    np.testing.assert_array_equal(steps[3].action, steps[2].action)


class Later:
    """A verifier whose outcomes are there one control step after they were asked for."""

    def __init__(self, verifier: Any) -> None:
        self._verifier = verifier

    def submit(self, proposal: Any, address: Any) -> Any:
        pending, polls = self._verifier.submit(proposal, address), iter((False,))
        return Pending(pending.result, lambda: next(polls, True))


def test_a_late_verdict_changes_what_is_known_of_its_inference(tmp_path: Path) -> None:
    def late(clock: VirtualClock) -> SpeculativePolicy:
        verifier = Later(toys.pair.verifier(LocalTarget(toys.pair.target(), clock)))
        return SpeculativePolicy(toys.pair, Always(), verifier=verifier, verdicts=LateVerdicts(np.inf), clock=clock)

    record(tmp_path / "run.mcap", 1, acting=late)
    recorded = read_recording(tmp_path / "run.mcap")
    assert len(by_rosbags(tmp_path / "run.mcap")["/inference"]) > len(recorded.inferences)
    # The last one may have ended with its episode.
    assert {tuple(inference["origins"]) for inference in recorded.inferences[:-1]} == {(0, 2)}
    assert [step.origin for step in recorded.steps[:4]] == ["drafted", "replaced"] * 2


class Instant(Inference):
    """Inferences that end at once; every third is a miss."""

    def __init__(self) -> None:
        super().__init__(LocalSource(toys.seeing))
        self._count = 0

    def begin(self, window: Any, address: Any, inpainting: Any) -> Pending[Finished]:
        self._count += 1
        answer = Miss("invalid", OffloadTimes()) if self._count % 3 == 0 else self.source.ask(window, address)
        return Pending(lambda: Finished(address, answer, 0.25))

    def wait(self, seconds: float) -> bool:
        return False


def test_a_chunk_policy_alone_is_recorded_with_its_misses(tmp_path: Path) -> None:
    def alone(clock: VirtualClock) -> ChunkRunner:
        return ChunkRunner(Instant(), Execution("synchronous", 2, 0), clock=clock)

    record(tmp_path / "run.mcap", 1, acting=alone)
    steps = read_recording(tmp_path / "run.mcap").steps
    chunks = [step.chunk for step in steps if step.chunk is not None]
    assert [chunk["miss"] for chunk in chunks[:4]] == ["", "", "invalid", ""]
    assert all(chunk["took_s"] == 0.25 for chunk in chunks)
    for step in steps:
        missed = step.chunk is not None and step.chunk["miss"]
        assert step.origin == ("fallback" if missed else "replaced")
        assert step.control["starved_by"] == ("invalid" if missed else "")
        if step.chunk is not None and not missed:
            assert step.action is not None and step.action.tolist() == step.chunk["actions"][:2].tolist()


# ---- what cannot be written -----------------------------------------------------------------------------------------


def test_a_slow_disk_drops_steps_and_never_stalls_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop comes to its end while the first step is still being written."""
    entered, resumed, write = threading.Event(), threading.Event(), recording._File.write

    def slow(self: Any, step: Any) -> None:
        entered.set()
        assert resumed.wait(60.0)
        write(self, step)

    monkeypatch.setattr(recording._File, "write", slow)
    recorder = Recorder(tmp_path / "run.mcap", toys.pair.observation, ABOUT, max_queued_bytes=1 << 14)
    truth = drive(recorder)
    assert entered.wait(60.0) and not resumed.is_set()
    resumed.set()
    told = recorder.close()
    count = sum(map(len, truth.ticks))
    assert told["steps"] + told["dropped"] == count and 0 < told["steps"] < count and told["error"] is None
    recorded = read_recording(tmp_path / "run.mcap")
    assert len(recorded.steps) == told["steps"] and recorded.whole
    np.testing.assert_array_equal(recorded.steps[0].action, truth.done[0][0])


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    """The kernel refuses to let the file grow, as a full disk does."""
    recorder = Recorder(tmp_path / "run.mcap", toys.pair.observation, ABOUT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
    try:
        # A flush a step.
        recorder._file._flushed_s = -np.inf
        truth = drive(recorder, 1)
        wait_for(lambda: recorder._steps.empty())
        recorder._file._flushed_s = -np.inf
        more = drive(recorder, 3)
        told = recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    count = sum(map(len, [*truth.ticks, *more.ticks]))
    assert told["steps"] + told["dropped"] == count and told["dropped"] > 0
    assert told["error"] == "the recording ended early: File too large"
    recorded = read_recording(tmp_path / "run.mcap")
    assert recorded.whole and len(recorded.steps) == told["steps"]
    assert len(by_rosbags(tmp_path / "run.mcap").get("/control", [])) == told["steps"]


def test_a_recording_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "run.mcap").write_text("precious")
    with pytest.raises(ConfigError, match="is there already; choose another name"):
        Recorder(tmp_path / "run.mcap", toys.pair.observation, ABOUT)
    with pytest.raises(ConfigError, match="No such file or directory; choose another place"):
        Recorder(tmp_path / "nowhere/run.mcap", toys.pair.observation, ABOUT)
    assert (tmp_path / "run.mcap").read_text() == "precious"


@pytest.mark.usefixtures("nothing_left")
def test_a_run_without_a_control_step_leaves_no_file(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run.mcap", toys.pair.observation, ABOUT):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_is_flushed_is_a_whole_file_in_the_middle_of_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes are made in parts, and after each a reader finds every step flushed before; a small write is one part."""
    counts: list[int] = []
    put = recording._ValidFile._put

    def in_parts(self: Any, content: bytes, at: int) -> None:
        for first in range(0, len(content), 200):
            put(self, content[first : first + 200], at + first)
            if self._end:
                recorded = read_recording(tmp_path / "run.mcap")
                assert recorded.whole and len(recorded.steps) >= recorder._file.kept
                counts.append(len(recorded.steps))

    monkeypatch.setattr(recording._ValidFile, "_put", in_parts)
    monkeypatch.setattr(recording, "FLUSH_INTERVAL_S", 0.0)
    recorder = Recorder(tmp_path / "run.mcap", toys.pair.observation, ABOUT)
    truth = drive(recorder, 1)
    told = recorder.close(within_s=300.0)
    assert told["error"] is None and told["steps"] == len(truth.ticks[0]) == counts[-1]
    assert counts == sorted(counts)


# ---- real runs ------------------------------------------------------------------------------------------------------

ARM = """
import numpy as np

class Arm:
    steps = 0

    def observe(self):
        return {"state": np.full(8, 0.001 * self.steps), "goal": np.array([0.2, 0.1])}

    def act(self, action):
        self.steps += 1
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_in_the_middle_leaves_a_file_that_both_readers_read(
    tmp_path: Path, command: list[str], environment: dict[str, str], number: signal.Signals
) -> None:
    (tmp_path / "toy.py").write_text(ARM)
    path, words = tmp_path / "run.mcap", ["play", "ball#target", "--robot", "toy:Arm", "--record", "run.mcap"]
    words += ["--json", "--seconds", "600", "--stop-action", "0", "0"]
    run = subprocess.Popen([*command, *words], cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE)
    try:

        def flushed() -> bool:
            assert run.poll() is None, run.communicate()
            with suppress(DataError):  # it is not there yet, or has just been made
                return len(read_recording(path).steps) >= 10
            return False

        wait_for(flushed)
        before = len(read_recording(path).steps)
        run.send_signal(number)
        out, _ = run.communicate(timeout=300)
    finally:
        run.kill()
    (raw, about), topics, steps = by_mcap(path), by_rosbags(path), read_recording(path).steps
    states = [message.values.tolist() for message in topics["/observation/state"]]
    assert len(states) >= before
    assert states == [np.full(8, 0.001 * step, np.float32).tolist() for step in range(len(states))]
    assert {topic: len(messages) for topic, messages in raw.items()} == {
        topic: len(messages) for topic, messages in topics.items()
    }
    # The last one may have been interrupted when the robot had seen something and not acted yet.
    assert [step.number for step in steps] == list(range(len(steps))) and len(states) - len(steps) in (0, 1)
    assert json.loads(about["command"]).startswith("specact play ")
    if number == signal.SIGTERM:
        # Nothing is missing, and the stop action comes last.
        summary = json.loads(out)
        assert run.returncode == 143 and len(steps) == summary["periods"] == summary["recording"]["steps"]
        assert topics["/action"][-1].values.tolist() == [0.0, 0.0] and topics["/action"][-1].origin == "fallback"
