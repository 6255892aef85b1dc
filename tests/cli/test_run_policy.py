"""``specact run --policy``: a chunk policy alone on a simulated and on a real robot, in real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specact.lab.processes import ServerProcess, serving

Run = Callable[..., subprocess.CompletedProcess[str]]

ROBOT = """
import json
import numpy as np

LOG = open("life.jsonl", "a", buffering=1)

class Arm:
    def observe(self):
        return {"state": np.zeros(12)}

    def act(self, action):
        LOG.write(json.dumps([float(x) for x in action]) + "\\n")

class Modelled(Arm):
    def __init__(self):
        self.rolled = 0

    def roll_forward(self, observation, actions):
        assert actions.shape[1] == 2 and len(actions) <= 4
        self.rolled += 1
        return observation

    def stop(self):
        LOG.write(json.dumps({"rolled": self.rolled}) + "\\n")

class Jammed(Arm):
    def stop(self):
        raise OSError("the brake is stuck")
"""
BROKEN = """
import numpy as np, specact

made = 0

@specact.chunk_policy(observation={"state": (12,)}, chunk=4, actions=2, rate_hz=20.0)
def sick(inputs):
    global made
    made += 1
    # Two answers are asked for before the robot moves, and the next one is right.
    if made > 3:
        raise RuntimeError("the weights are gone")
    return np.zeros((len(inputs["state"]), 4, 2))

@specact.chunk_policy(observation={"state": (12,)}, chunk=4, actions=2, rate_hz=20.0)
def nan(inputs):
    return np.full((len(inputs["state"]), 4, 2), np.nan)
"""
STOP = ("--stop-action", "0.25", "-0.5")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("ball-chase-flow", "--steps", "2") as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(ROBOT)
    (tmp_path / "own.py").write_text(BROKEN)
    return tmp_path


def life(folder: Path) -> list[Any]:
    file = folder / "life.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


@pytest.mark.parametrize("execution", ["synchronous", "naive", "aligned", "roll_forward", "inpainting"])
def test_a_simulated_robot_runs_a_flow_policy_on_this_device(specact_run: Run, execution: str) -> None:
    done = specact_run(
        "run", "--policy", "ball-chase-flow", "--execution", execution, "--steps", "2", "--episodes", "1", "--json"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert len(summary["episodes"]) == 1 and summary["ticks"] >= 20 and summary["misses"] == {}
    assert 0 < summary["chunks"] <= summary["inferences"]
    assert summary["line"] is None and summary["observation_age_ms"] >= 0.0


@pytest.mark.parametrize(("scheme", "execution"), [("ws", "aligned"), ("http", "naive"), ("ws", "inpainting")])
def test_a_simulated_robot_runs_a_policy_on_a_server(
    specact_run: Run, server: ServerProcess, scheme: str, execution: str
) -> None:
    done = specact_run(
        "run", "--policy", f"{scheme}://127.0.0.1:{server.port}", "--env", "ball-chase", "--execution", execution,
        "--execute-actions", "10", "--overlap-actions", "6", "--episodes", "1", "--deadline-ms", "5000", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    # Also sent: what was under way at the end, and the question whether the policy inpaints.
    assert 0 < summary["inferences"] <= summary["line"]["sent"] <= summary["inferences"] + 2
    assert summary["misses"] == {} and summary["chunks"] > 0


def test_a_real_robot_with_a_model_of_itself_rolls_forward_and_is_stopped_in_its_own_way(
    specact_run: Run, folder: Path
) -> None:
    done = specact_run(
        "run", "--policy", "ball-chase-flow", "--robot", "toy:Modelled", "--execution", "roll_forward",
        "--execute-actions", "6", "--overlap-actions", "4", "--seconds", "3", "--json", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *actions, end = life(folder)
    assert end["rolled"] > 0 and all(len(action) == 2 for action in actions) and len(actions) > 10
    assert json.loads(done.stdout)["stopped_by"] == "stop()"


def test_a_robot_without_a_model_of_itself_cannot_roll_forward(specact_run: Run, folder: Path) -> None:
    done = specact_run(
        "run", "--policy", "ball-chase-flow", "--robot", "toy:Arm", "--execution", "roll_forward", cwd=folder
    )
    assert done.returncode == 2 and "give the robot a method roll_forward(observation, actions)" in done.stderr
    assert life(folder) == []


def test_a_robot_that_was_made_is_stopped_where_the_policy_does_not_fit_it(specact_run: Run, folder: Path) -> None:
    done = specact_run(
        "run", "--policy", "ball-chase-flow", "--robot", "toy:Modelled", "--execute-actions", "99", cwd=folder
    )
    assert done.returncode == 2 and "99" in done.stderr
    assert life(folder) == [{"rolled": 0}]
    # A stop that fails does not hide why there was one.
    jammed = specact_run(
        "run", "--policy", "ball-chase-flow", "--robot", "toy:Jammed", "--execute-actions", "99", cwd=folder
    )
    assert jammed.returncode == 2 and "99" in jammed.stderr
    assert "the robot could not be stopped after this: OSError: the brake is stuck" in jammed.stderr


def test_a_signal_ends_in_the_stop_action_and_a_summary(
    command: list[str], environment: dict[str, str], folder: Path
) -> None:
    words = [
        *command,
        "run",
        "--policy",
        "ball-chase-flow",
        "--robot",
        "toy:Arm",
        "--execution",
        "inpainting",
        "--json",
    ]
    process = subprocess.Popen(
        [*words, *STOP], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 60.0
    while len(life(folder)) < 10:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, remarks = process.communicate(timeout=60)
    assert process.returncode == 143 and "ended by SIGTERM" in remarks and "Traceback" not in remarks
    assert life(folder)[-1] == [0.25, -0.5] and json.loads(out)["ticks"] >= 9


def test_an_error_of_the_policy_ends_in_the_stop_action(specact_run: Run, folder: Path) -> None:
    done = specact_run("run", "--policy", "own:sick", "--robot", "toy:Arm", *STOP, "--json", cwd=folder)
    assert done.returncode == 2 and "the weights are gone" in done.stderr
    assert life(folder)[-1] == [0.25, -0.5] and json.loads(done.stdout)["chunks"] == 1


def test_answers_that_are_not_finite_never_move_the_robot(specact_run: Run, folder: Path) -> None:
    done = specact_run(
        "run", "--policy", "own:nan", "--robot", "toy:Arm", *STOP, "--max-consecutive-misses", "3", "--json", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["stopped"] and summary["misses"] == {"invalid": 4} and summary["chunks"] == 0
    assert set(map(tuple, life(folder))) == {(0.25, -0.5)}


def test_a_server_that_goes_away_is_missed_by_cause_and_stops_the_robot(
    command: list[str], environment: dict[str, str], folder: Path
) -> None:
    with serving("ball-chase-flow", "--steps", "2") as process:
        words = [
            *command, "run", "--policy", f"ws://127.0.0.1:{process.port}", "--robot", "toy:Arm", *STOP,
            "--max-consecutive-misses", "5", "--json",
        ]  # fmt: skip
        running = subprocess.Popen(
            words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        until = time.monotonic() + 60.0
        while [0.25, -0.5] in life(folder)[-1:] or len(life(folder)) < 10:
            assert running.poll() is None and time.monotonic() < until, running.communicate()
            time.sleep(0.005)
        process.kill()
    out, remarks = running.communicate(timeout=60)
    assert running.returncode == 0, remarks
    summary = json.loads(out)
    assert summary["stopped"] and sum(summary["misses"].values()) >= 6 and "disconnected" in summary["misses"]
    assert life(folder)[-1] == [0.25, -0.5]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "give either --bundle"),
        (("--bundle", "ball", "--policy", "ball-chase-flow"), "give either --bundle"),
        (("--bundle", "ball", "--execution", "aligned"), "a pair runs synchronous or late"),
        (("--bundle", "ball", "--idle", "stop_action"), "--idle is for a chunk policy alone"),
        (("--policy", "ball-chase-flow", "--execution", "late"), "is for a pair of policies (--bundle)"),
        (("--policy", "ball-chase-flow", "--gate", "never"), "--gate is for a pair of policies"),
        (("--policy", "ball-chase-flow", "--server", "ws://127.0.0.1:1"), "--policy ws://HOST:PORT"),
        (("--policy", "ball-chase-flow", "--execute-actions", "17"), "have 16 actions"),
        (("--policy", "ball-chase-flow", "--overlap-actions", "3"), "overlaps 0 to 0"),
        (("--policy", "ball-chase-flow", "--idle", "stop_action"), "needs a stop_action"),
        (("--policy", "ball-chase-flow", "--stop-action", "7", "7"), "--stop-action: "),
        (("--policy", "ball#target", "--execution", "inpainting"), "cannot inpaint"),
        (("--policy", "ws://127.0.0.1:9"), "no connection to ws://127.0.0.1:9"),
        (("--policy", "ball#target", "--env", "ball", "--stop-action", "0"), "must have shape [2]"),
        (("--policy", "ball"), "say which one: ball#draft or ball#target"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(specact_run: Run, flags: tuple[str, ...], why: str) -> None:
    done = specact_run("run", *flags)
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr, done.stderr
