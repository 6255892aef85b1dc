"""How ``specact run`` ends, and what it does after a stall: real processes, with a robot that writes down its life."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specact import SpeculativePolicy, load_bundle
from specact.gates import Never
from specact.lab.processes import ServerProcess, serving

Run = Callable[..., subprocess.CompletedProcess[str]]

STILL = [0.25, -0.5]
ROBOT = """
import json, time
import numpy as np

LOG = open("life.jsonl", "a", buffering=1)

class Arm:
    def __init__(self):
        self.observed = self.acted = 0
        self.after_stall, self.before = False, None

    def observe(self):
        self.observed += 1
        now = time.monotonic()
        # After a long pause the world looks different.
        self.after_stall = self.after_stall or (self.before is not None and now - self.before > 0.8)
        self.before = now
        return {"state": np.full(8, 0.4 if self.after_stall else 0.1), "goal": np.array([0.2, 0.1])}

    def act(self, action):
        self.acted += 1
        LOG.write(json.dumps({"action": [float(x) for x in action], "after_stall": self.after_stall}) + "\\n")

class Braked(Arm):
    def stop(self):
        LOG.write(json.dumps({"stop": True}) + "\\n")

class Stuck(Arm):
    def stop(self):
        raise OSError("the brake is stuck")

class Blind(Arm):
    def observe(self):
        seen = super().observe()
        return {"state": seen["state"]} if self.observed == 1 else seen

class Dazzled(Arm):
    def observe(self):
        seen = super().observe()
        n = self.observed
        return None if n in (4, 5) else seen | {"state": np.zeros(7)} if n == 7 else seen

class Deaf(Arm):
    def observe(self):
        seen = super().observe()
        return seen if self.observed < 4 else None

class Unplugged(Arm):
    def observe(self):
        if self.observed == 5:
            raise OSError("the cable is out")
        return super().observe()

class Jammed(Arm):
    def act(self, action):
        super().act(action)
        if self.acted == 5:
            raise OSError("the gear is jammed")

class Cursed(Arm):
    def observe(self):
        class Seen(dict):
            def __getitem__(self, key):
                raise RuntimeError("within the policy")
        seen = super().observe()
        return Seen(seen) if self.observed == 5 else seen

class Absent:
    def __init__(self):
        raise OSError("no such device: /dev/arm0")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("ball") as child:
        yield child


class Life:
    """A robot that ``specact run`` drives in ``folder``."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str], port: int) -> None:
        self._folder, self._command, self._environment, self._port = folder, command, environment, port
        (folder / "toy.py").write_text(ROBOT)

    def start(self, robot: str, *options: str) -> subprocess.Popen[str]:
        words = [
            *self._command, "run", "--bundle", "ball", "--server", f"ws://127.0.0.1:{self._port}", "--robot",
            f"toy:{robot}", "--json", *options,
        ]  # fmt: skip
        return subprocess.Popen(
            words, cwd=self._folder, env=self._environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, robot: str, *options: str) -> tuple[int, str, str]:
        """Exit status, output and remarks of a run to its end."""
        process = self.start(robot, *options)
        out, remarks = process.communicate(timeout=600)
        return process.returncode, out, remarks

    @property
    def log(self) -> list[dict[str, Any]]:
        file = self._folder / "life.jsonl"
        # The last line may be in the making.
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def wait(self, process: subprocess.Popen[str], lines: int) -> None:
        """Until the robot has written as many lines."""
        until = time.monotonic() + 300.0
        while len(self.log) < lines:
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.005)


@pytest.fixture
def life(tmp_path: Path, command: list[str], environment: dict[str, str], server: ServerProcess) -> Life:
    return Life(tmp_path, command, environment, server.port)


STOP = ("--stop-action", *map(str, STILL))


# ---- every exit ends in the stop action -----------------------------------------------------------------------------


@pytest.mark.parametrize("robot", ["Arm", "Braked", "Stuck"])
def test_the_end_of_the_time_ends_in_a_stop(life: Life, robot: str) -> None:
    status, out, remarks = life.run(robot, "--seconds", "0.5", *STOP)
    # Not whether it had stalled before: a busy machine may make it.
    ends = [entry for entry in life.log if entry.get("stop") or entry["action"] == STILL]
    assert ends == life.log[-1:] and ("stop" in ends[0]) == (robot == "Braked")
    assert json.loads(out)["stopped_by"] == ("stop_action" if robot == "Arm" else "stop()")
    # A brake that fails is an error, but the stop action was sent.
    assert status == (1 if robot == "Stuck" else 0) and ("the brake is stuck" in remarks) == (robot == "Stuck")


def test_without_a_stop_action_the_summary_says_that_the_last_action_stays_in_force(life: Life) -> None:
    status, out, _ = life.run("Arm", "--seconds", "0.3", "--no-json")
    assert status == 0 and "its last action stays in force; give --stop-action" in out


@pytest.mark.parametrize("robot", ["Arm", "Braked"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_in_a_stop_and_a_summary(life: Life, robot: str, number: signal.Signals, status: int) -> None:
    process = life.start(robot, *STOP)
    life.wait(process, 6)
    process.send_signal(number)
    process.send_signal(number)  # somebody is impatient
    out, remarks = process.communicate(timeout=600)
    assert process.returncode == status
    assert life.log[-1].get("action") == (None if robot == "Braked" else STILL)
    assert ("stop" in life.log[-1]) == (robot == "Braked")
    assert json.loads(out)["ticks"] >= 5
    assert f"ended by {number.name}" in remarks and "same command again" not in remarks and "Traceback" not in remarks


@pytest.mark.parametrize(
    ("robot", "why"),
    [("Unplugged", "the cable is out"), ("Jammed", "the gear is jammed"), ("Cursed", "within the policy")],
)
def test_an_error_of_robot_or_policy_ends_in_a_stop(life: Life, robot: str, why: str) -> None:
    status, out, remarks = life.run(robot, *STOP)
    assert status == 1 and why in remarks
    assert life.log[-1]["action"] == STILL and len(life.log) in (5, 6)
    assert json.loads(out)["ticks"] >= 4


def test_misses_that_stop_the_robot_end_in_a_stop(life: Life) -> None:
    process = life.start("Arm", "--gate", "always", "--on-miss", "stop", "--deadline-ms", "0.001", *STOP)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and json.loads(out)["stopped"]
    assert [entry["action"] for entry in life.log] == [STILL, STILL]


# ---- observations that cannot be used -------------------------------------------------------------------------------


def test_a_first_observation_that_cannot_be_used_ends_the_run_before_the_robot_moves(life: Life) -> None:
    status, out, remarks = life.run("Blind", *STOP)
    assert status == 2 and out == ""
    assert "the observation has no 'goal'; this policy needs goal [2]" in remarks and "Traceback" not in remarks
    assert [entry["action"] for entry in life.log] == [STILL]


def test_later_ones_hold_the_last_action_and_are_told_of_once(life: Life) -> None:
    status, out, remarks = life.run("Dazzled", "--seconds", "3", "--max-chunk-age-ms", "60000", *STOP)
    assert status == 0
    assert json.loads(out)["unusable"] == {"absent": 2, "shape": 1}
    assert remarks.count("the observation is None") == 1 and remarks.count("state has shape (7,)") == 1
    actions = [entry["action"] for entry in life.log]
    assert actions[2] == actions[3] == actions[4] and actions[5] == actions[6]


def test_too_many_in_a_row_stop_the_robot(life: Life) -> None:
    status, out, _ = life.run("Deaf", "--gate", "never", "--max-consecutive-misses", "3", *STOP)
    summary = json.loads(out)
    assert status == 0 and summary["stopped"] and summary["unusable"] == {"absent": 4}
    actions = [entry["action"] for entry in life.log]
    assert actions[2] == actions[3] == actions[4] == actions[5] and actions[6:] == [STILL, STILL]


# ---- a stalled process ----------------------------------------------------------------------------------------------


def test_a_process_that_stood_still_does_not_play_on_from_an_old_chunk(life: Life) -> None:
    ball = load_bundle("ball")
    process = life.start("Arm", "--gate", "never", "--seconds", "60", *STOP)
    try:
        # In the middle of a chunk.
        life.wait(process, ball.spec.execute + 2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        life.wait(process, len(life.log) + 2 * ball.spec.execute)
    finally:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=600)
    summary, played = json.loads(out), [entry["after_stall"] for entry in life.log].index(True)
    assert summary["overruns"] >= 10 and summary["longest_lateness_ms"] > 800.0
    # The draft, asked anew about what is seen now.
    policy = SpeculativePolicy(ball, Never())
    for _ in range(played):
        policy.act({"state": np.full(8, 0.1), "goal": np.array([0.2, 0.1])})
    policy._player.reset()
    for entry in life.log[played : played + ball.spec.execute]:
        action = policy.act({"state": np.full(8, 0.4), "goal": np.array([0.2, 0.1])})
        assert entry["action"] == [float(x) for x in action]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [("deadline-ms", "0"), ("deadline-ms", "inf"), ("max-chunk-age-ms", "0"), ("seconds", "-1")],
)
def test_settings_that_make_no_sense_are_refused(life: Life, option: str, value: str) -> None:
    status, out, remarks = life.run("Arm", f"--{option}", value)
    assert status == 2 and out == "" and life.log == []
    assert f"--{option} must be positive and finite, got {value}" in remarks and "Traceback" not in remarks


def test_a_robot_that_cannot_be_made_is_an_error_that_says_what_to_do(life: Life) -> None:
    status, _, remarks = life.run("Absent")
    assert status == 2 and "Traceback" not in remarks
    assert "'toy:Absent' cannot be created: OSError: no such device: /dev/arm0; toy.Absent() must work" in remarks
