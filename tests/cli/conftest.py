"""Servers, and robots that write down their life, for the verbs that drive one as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specact.cli.main import main
from specact.lab.rollout.processes import ServerProcess, serving

ROBOTS = """
import json, time
from functools import partial
import numpy as np

LOG = open("life.jsonl", "a", buffering=1)
rng = np.random.default_rng(0)

def fail(error):
    raise error

class Arm:
    size = 8

    def __init__(self, seen=lambda n, seen: seen):
        self.seen, self.observed, self.acted, self.rolled = seen, 0, 0, 0
        self.after_stall, self.before = False, None

    def observe(self):
        self.observed += 1
        now = time.monotonic()
        # After a long pause the world looks different.
        self.after_stall = self.after_stall or (self.before is not None and now - self.before > 0.8)
        self.before = now
        state = np.full(self.size, 0.4 if self.after_stall else 0.1)
        return self.seen(self.observed, {"state": state, "goal": np.array([0.2, 0.1])})

    def act(self, action):
        self.acted += 1
        LOG.write(json.dumps({"action": [float(x) for x in action], "after_stall": self.after_stall}) + "\\n")

class Braked(Arm):
    def stop(self):
        LOG.write(json.dumps({"stop": True}) + "\\n")

class Stuck(Arm):
    def stop(self):
        fail(OSError("the brake is stuck"))

class Wide(Arm):
    size = 12  # for the flow policy

class Modelled(Wide):
    def roll_forward(self, observation, actions):
        assert actions.shape[1] == 2 and len(actions) <= 4
        self.rolled += 1
        return observation

    def stop(self):
        LOG.write(json.dumps({"rolled": self.rolled}) + "\\n")

class Jammed(Arm):
    def act(self, action):
        super().act(action)
        if self.acted == 5:
            fail(OSError("the gear is jammed"))

class Seen(dict):
    def __getitem__(self, key):
        fail(RuntimeError("within the policy"))

Blind = partial(Arm, lambda n, seen: {"state": seen["state"]} if n == 1 else seen)
Dazzled = partial(Arm, lambda n, seen: None if n in (4, 5) else seen | {"state": np.zeros(7)} if n == 7 else seen)
Deaf = partial(Arm, lambda n, seen: seen if n < 4 else None)
Cursed = partial(Arm, lambda n, seen: Seen(seen) if n == 5 else seen)
Noisy = partial(Arm, lambda n, seen: seen | {"state": rng.normal(0.0, 0.3, 8)})
Absent = partial(fail, OSError("no such device: /dev/arm0"))
"""
POLICIES = """
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
def moody(inputs):
    if inputs["state"].any():
        raise RuntimeError("the weights are gone")
    return np.zeros((len(inputs["state"]), 4, 2))

@specact.chunk_policy(observation={"state": (12,)}, chunk=4, actions=2, rate_hz=20.0)
def nan(inputs):
    return np.full((len(inputs["state"]), 4, 2), np.nan)
"""


class Ended(NamedTuple):
    status: int
    out: str
    remarks: str

    @property
    def summary(self) -> dict[str, Any]:
        """The result, without anything else on stdout."""
        assert self.status == 0 or self.out, self.remarks
        result: dict[str, Any] = strictly(self.out)
        return result

    def refuses(self, *parts: str) -> None:
        """Asserts that it ended with one sentence with these parts, and nothing else at its end."""
        said = [line for line in self.remarks.splitlines() if line.strip()]
        assert (self.status, self.out) == (2, ""), self.remarks
        assert [line for line in said if line.startswith("specact: ")] == said[-1:] and "Traceback" not in self.remarks
        assert all(part in said[-1] for part in parts), said[-1]


Typed = Callable[..., Ended]
# Width of the terminal.
COLUMNS = "1000"


def strictly(text: str) -> Any:
    """Parses JSON as the standard has it: without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


class Life:
    """A robot that a verb drives in ``folder``."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str]) -> None:
        self._folder, self._command, self._environment = folder, command, environment
        (folder / "toy.py").write_text(ROBOTS)
        (folder / "own.py").write_text(POLICIES)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *words], cwd=self._folder, env=self._environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str) -> Ended:
        return self.end(self.start(*words))

    def end(self, process: subprocess.Popen[str], *signals: signal.Signals) -> Ended:
        for number in signals:
            process.send_signal(number)
        out, remarks = process.communicate(timeout=600)
        return Ended(process.returncode, out, remarks)

    @property
    def log(self) -> list[dict[str, Any]]:
        file = self._folder / "life.jsonl"
        # The last line may be in the making.
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    @property
    def actions(self) -> list[list[float]]:
        return [entry["action"] for entry in self.log if "action" in entry]

    def wait(self, process: subprocess.Popen[str], done: Callable[[], bool]) -> None:
        until = time.monotonic() + 300.0
        while not done():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.005)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs ``specact WORDS`` in this process."""

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["specact", *map(str, words)])
        monkeypatch.setenv("COLUMNS", COLUMNS)
        capsys.readouterr()
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
        else:
            status = 0
        assert isinstance(status, int)
        return Ended(status, *capsys.readouterr())

    return run


@pytest.fixture
def life(tmp_path: Path, command: list[str], environment: dict[str, str]) -> Life:
    return Life(tmp_path, command, environment)


@pytest.fixture(scope="session")
def ball_server() -> Iterator[ServerProcess]:
    with serving("ball") as process:
        yield process


@pytest.fixture(scope="session")
def ball(ball_server: ServerProcess) -> tuple[str, ...]:
    """The words of a run of the pair ``ball``, with its server."""
    return ("run", "ball", "--server", f"ws://127.0.0.1:{ball_server.port}", "--json")
