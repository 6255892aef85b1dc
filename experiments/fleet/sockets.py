"""Robots that share one target over real sockets in real time; it sleeps for as long as a larger one would compute."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from experiments.fleet import robots as fleet
from experiments.fleet.robots import EPISODES, WARM_UP
from experiments.grid import Run
from experiments.measure import CONNECT_S, connected, slowed, to_digits
from specact import SpeculativePolicy, load_pair
from specact.execution.player import LateVerdicts
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.processes import serving
from specact.lab.rollout.rollout import episode_seed
from specact.remote.target import remote_verifier
from specact.wire.exchange import Exchange

# So many robots ask more than a target can answer one by one.
PAIR, ROBOTS = "ball", 16
SENT = ("late always", "late random", "late adahi", "late learned")


def sleeping() -> Exchange[Any]:
    """What a server of the target answers, which sleeps; ``specact serve`` finds it by the name of this function."""
    exchange = load_pair(PAIR).exchange
    slow = slowed(exchange.answer, lambda kind, requests: fleet.service().seconds(len(requests)))
    kept = {name: getattr(exchange, name) for name in ("contract", "name", "read")}
    return cast(Exchange[Any], SimpleNamespace(**kept, answer=slow))


class Fleet:
    """Robots ``first``, ``first`` + 1, ... at one server, until all have had so many ``episodes``.

    ``won`` are those of every robot; ``late_s``: how late control steps began.
    """

    def __init__(self, discipline: str, port: int, first: int, episodes: int, seed: int) -> None:
        self._pair, self._how, self._port = load_pair(PAIR), fleet.DISCIPLINES[discipline], port
        self._first, self._episodes, self._seed = first, episodes, seed
        self._began, self._stopped = Barrier(ROBOTS), Event()
        self.won: list[list[bool]] = [[] for _ in range(ROBOTS)]
        self.late_s = list[float]()

    def play(self) -> list[SpeculativePolicy]:
        """Plays all episodes; returns the policies, with their counts."""
        with ThreadPoolExecutor(ROBOTS) as threads:
            robots = [threads.submit(self._drive, number) for number in range(ROBOTS)]
            try:
                for robot in as_completed(robots):
                    robot.result()
            finally:
                self._stopped.set()
                self._began.abort()
        return [robot.result() for robot in robots]

    def _drive(self, number: int) -> SpeculativePolicy:
        pair, place, world = self._pair, self._first + number, SimulatedRobot(load_task(PAIR))
        share, period_s = fleet.fair_share(PAIR, ROBOTS, 1), 1.0 / pair.rate_hz
        with connected(self._port, pair.exchange.contract, f"robot {place}") as client:
            policy = SpeculativePolicy(
                pair, fleet.gate_of(self._how, pair, share), verdicts=LateVerdicts(math.inf), robot=place,
                verifier=remote_verifier(client, pair, 1e3 * period_s * pair.execute), seed=self._seed,
            )  # fmt: skip
            self._began.wait(CONNECT_S)
            tick = time.monotonic() + fleet.phase_of(self._seed, place, pair) * period_s
            while min(map(len, self.won)) < self._episodes and not self._stopped.is_set():
                episode = place * fleet.LIFE + len(self.won[number])
                policy.reset(episode)
                world.start(episode_seed(self._seed, episode, world.task))
                while not world.done:
                    time.sleep(max(0.0, tick - time.monotonic()))
                    self.late_s.append(time.monotonic() - tick)
                    world.act(policy.act(world.observe()))
                    tick += period_s
                self.won[number].append(world.success)
        return policy


def measure(discipline: str, folder: Path, run: Run) -> dict[str, Any]:
    """Plays as many robots as in virtual time, one fleet after the other, in the same episodes."""
    robots, end = (ROBOTS, WARM_UP + 1) if run.quick else (fleet.TOGETHER, WARM_UP + EPISODES)
    won, late_s, policies = list[list[bool]](), list[float](), list[SpeculativePolicy]()
    with serving(f"{__name__}:sleeping", "--max-batch", "1") as served:
        for first in range(0, robots, ROBOTS):
            players = Fleet(discipline, served.port, first, end, run.seed)
            policies += players.play()
            won += players.won
            late_s += players.late_s
            run.update("robots", first + ROBOTS, robots)
    counts = {name: sum(policy.counts[name] for policy in policies) for name in ("steps", "transmitted", "in_time")}
    return {
        "won": [to_digits(robot[WARM_UP:end]) for robot in won],
        "asked": counts["transmitted"] / counts["steps"], "in_time": counts["in_time"] / counts["steps"],
        "late_p99_ms": 1e3 * float(np.quantile(late_s, 0.99)),
    }  # fmt: skip
