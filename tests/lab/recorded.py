"""Runs of a simulated hand that are recorded, and what it really saw and did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.lab import toys

from specact import SpeculativePolicy
from specact.gates import Random
from specact.lab.envs.robot import SimulatedRobot
from specact.robot.loop import Acting, Robot, Tick, run_loop
from specact.robot.recording import Recorder
from specact.types import VirtualClock

PERIOD_S = 0.05
ABOUT = {"policy": "hand", "fingerprint": "hand", "rate_hz": 20.0, "env": "toy", "robot": None, "command": "a test"}


@dataclass
class Truth:
    """What happened, by episode."""

    seen: list[list[dict[str, Any]]] = field(default_factory=list)
    done: list[list[NDArray[np.float32]]] = field(default_factory=list)
    ticks: list[list[Tick]] = field(default_factory=list)


class Watched:
    """The robot behind the recorder, which reuses its arrays; it sees nothing usable in the steps ``blind``."""

    def __init__(self, robot: SimulatedRobot, truth: Truth, blind: frozenset[int]) -> None:
        self._robot, self._truth, self._blind = robot, truth, blind
        self._buffers: dict[str, Any] = {}

    def observe(self) -> Any:
        seen = self._robot.observe()
        self._truth.seen[-1].append({name: np.copy(value) for name, value in seen.items()})
        for name, value in seen.items():
            if isinstance(value, np.ndarray):
                self._buffers.setdefault(name, value.copy())[:] = value
        seen = seen | self._buffers
        return seen | {"state": None} if len(self._truth.seen[-1]) - 1 in self._blind else seen

    def act(self, action: NDArray[np.float32]) -> None:
        self._truth.done[-1].append(action.copy())
        self._robot.act(action)
        for buffer in self._buffers.values():
            buffer[:] = 77


def drive(
    recorder: Recorder,
    episodes: int = 4,
    *,
    blind: frozenset[int] = frozenset(),
    judged: bool = True,
    acting: Callable[[VirtualClock], Acting] | None = None,
) -> Truth:
    """Records episodes of the hand, half of whose inferences are verified."""
    clock, truth = VirtualClock(), Truth()
    policy: Any = SpeculativePolicy(toys.pair, Random(0.5), clock=clock) if acting is None else acting(clock)
    hand = SimulatedRobot(toys.SUITE.seeing(toys.pair.observation.fields))
    for episode in range(episodes):
        for column in (truth.seen, truth.done, truth.ticks):
            column.append([])
        hand.start(episode)
        policy.reset(episode)
        robot: Robot = recorder.begin(Watched(hand, truth, blind), policy, episode)
        run_loop(robot, policy, PERIOD_S, clock, lambda: not hand.done, _both(recorder, truth))
        recorder.end(hand.outcome if judged else {})
    return truth


def _both(recorder: Recorder, truth: Truth) -> Callable[[Tick], None]:
    def note(tick: Tick) -> None:
        truth.ticks[-1].append(tick)
        recorder.note(tick)

    return note


def record(path: Path, episodes: int = 4, **options: Any) -> Truth:
    """Records to a file, to its end."""
    with Recorder(path, toys.pair.observation, ABOUT) as recorder:
        return drive(recorder, episodes, **options)
