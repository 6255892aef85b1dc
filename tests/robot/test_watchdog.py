"""Robots whose own code hangs, and signals that must not leave them on an ordinary action."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.children import wait_for

from specact.errors import StallError
from specact.robot.chunks import ActionRange
from specact.robot.loop import Journal, run_loop
from specact.safety import Fallback, Safety
from specact.types import Clock, Origin, StepRecord

PATIENCE_S = 60.0
STILL = (0.0,)


class Constant:
    """Source of the same action, or of half of it where what it acts on is too old: then a policy infers anew."""

    record: StepRecord | None = None
    origin = Origin.REPLACED
    seam, starved_by = False, ""

    def __init__(self, fallback: Fallback) -> None:
        self.safety = Safety(fallback, ActionRange([-1.0], [1.0]), Clock(), 60.0)

    def reset(self, episode: int) -> None:
        pass

    def act(self, observation: Any) -> np.ndarray:
        size = 0.5 if self.safety.expired else 1.0
        self.safety.see(Clock().now())
        return self.safety.send(np.full(1, size, np.float32))

    def wait(self, seconds: float) -> bool:
        return False


class Hanging:
    """A robot whose camera hangs at the fourth frame until it is let go."""

    concurrent = False

    def __init__(self) -> None:
        self.frames, self.actions, self.stopped_by = 0, list[tuple[float, str]](), list[str]()
        self.let_go = threading.Event()

    def observe(self) -> np.ndarray:
        self.frames += 1
        if self.frames == 4:
            self.let_go.wait(PATIENCE_S)
        return np.zeros(1)

    def act(self, action: np.ndarray) -> None:
        self.actions.append((float(action[0]), threading.current_thread().name))


class Braked(Hanging):
    def stop(self) -> None:
        self.stopped_by.append(threading.current_thread().name)


class Concurrent(Hanging):
    concurrent = True


FALLBACK = Fallback(stop_action=STILL, max_stall_ms=200.0)


@pytest.mark.parametrize("kind", [Hanging, Braked, Concurrent])
def test_a_camera_that_hangs_does_not_leave_the_last_action_in_force(kind: type[Hanging]) -> None:
    robot = kind()
    with pytest.raises(StallError, match="observe"):
        run_loop(robot, Constant(FALLBACK), 0.01, Clock(), lambda: True, lambda tick: None)
    main = threading.current_thread().name
    assert not robot.let_go.is_set(), "the call itself was interrupted"
    assert [value for value, _ in robot.actions[:3]] == [1.0] * 3
    if isinstance(robot, Braked):
        assert robot.stopped_by == ["specact watchdog", main] and len(robot.actions) == 3
    else:
        others = ["specact watchdog"] * robot.concurrent
        assert robot.actions[3:] == [(0.0, name) for name in (*others, main)]


def test_a_call_that_cannot_be_interrupted_ends_the_loop_once_it_returns() -> None:
    robot, errors = Braked(), list[BaseException]()

    def run() -> None:
        try:
            run_loop(robot, Constant(FALLBACK), 0.01, Clock(), lambda: True, lambda tick: None)
        except StallError as error:
            errors.append(error)

    # A signal interrupts the main thread alone.
    thread = threading.Thread(target=run, name="loop")
    thread.start()
    wait_for(lambda: robot.stopped_by)
    assert robot.stopped_by == ["specact watchdog"] and thread.is_alive()
    robot.let_go.set()
    thread.join(PATIENCE_S)
    assert len(errors) == 1 and robot.stopped_by == ["specact watchdog", "loop"]


def test_a_slow_camera_is_in_the_summary() -> None:
    class Slow(Hanging):
        def observe(self) -> np.ndarray:
            time.sleep(0.05)
            return np.zeros(1)

    journal, ticks = Journal(0.01), 3
    run_loop(Slow(), Constant(FALLBACK), 0.01, Clock(), lambda: journal.summary()["periods"] < ticks, journal.note)
    assert journal.summary()["longest_observation_ms"] >= 50.0


SCRIPT = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
    signal.signal(number, signal.SIG_DFL)  # they may be ignored where the tests run
sys.path[:0] = [{folder!r}, {root!r}]
import numpy as np
from specact.types import Clock
from specact.interrupts import Interrupted
from specact.robot.loop import run_loop
from tests.robot.test_watchdog import FALLBACK, Constant

class Arm:
    def observe(self):
        return np.zeros(1)
    def act(self, action):
        os.write(1, f"{{float(action[0])}}\\n".encode())  # whole, also where a signal comes

class Braked(Arm):
    def stop(self):
        os.write(1, b"stop\\n")

try:
    run_loop({kind}(), Constant(FALLBACK), 0.01, Clock(), lambda: True, lambda tick: None)
except Interrupted as error:
    sys.exit(error.exit_status)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(("kind", "still"), [("Arm", "0.0"), ("Braked", "stop")])
def test_a_suspended_robot_stands_still_and_goes_on_unless_it_stopped_itself(
    kind: str, still: str, tmp_path: Path
) -> None:
    out, root = tmp_path / "actions", Path(__file__).parents[2]
    script = SCRIPT.format(kind=kind, folder=str(root / "src"), root=str(root))
    with out.open("w") as file, subprocess.Popen([sys.executable, "-c", script], stdout=file, text=True) as process:
        try:
            wait_for(lambda: out.read_text().count("1.0") > 3)
            process.send_signal(signal.SIGTSTP)
            wait_for(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            lines = out.read_text().splitlines()
            assert lines[-1] == still
            process.send_signal(signal.SIGCONT)
            if kind == "Arm":
                wait_for(lambda: len(out.read_text().splitlines()) > len(lines) + 3)
                assert out.read_text().splitlines()[len(lines) :][:2] == ["0.5", "1.0"]
                process.send_signal(signal.SIGQUIT)
            # One with a stop of its own is not moved again.
            ended_by = signal.SIGQUIT if kind == "Arm" else signal.SIGTSTP
            assert process.wait(PATIENCE_S) == 128 + ended_by and out.read_text().splitlines()[-1] == still
            assert kind == "Arm" or out.read_text().splitlines()[len(lines) :] == ["stop"]
        finally:
            process.kill()
