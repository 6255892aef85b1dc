"""One episode of a sweep: plain values in, one row of its table out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from typing import Any

from specact.execution.strategy import Execution
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.wire import ChunkCodec
from specact.lab.envs import load_task
from specact.lab.envs.moving import MovingWorld
from specact.lab.envs.task import Idle
from specact.lab.rollout.episode import Episode, run_episode
from specact.lab.rollout.pair import Pairing, run_pair, run_rounds
from specact.lab.rollout.rollout import start_of
from specact.lab.rollout.simulated_target import Route
from specact.lab.tised.curves import ON_BOARD
from specact.lab.tised.drivers import (
    CodesDriver,
    Driver,
    FlowDriver,
    PairDriver,
    RoundsDriver,
    SplitDriver,
    check_bundle,
    looks_at,
)
from specact.links.link import load_link
from specact.observation import ObservationSpec
from specact.rng import Role, stream
from specact.types import Decision

Row = dict[str, Any]
Decided = Callable[[Decision, bool], None]
# What tells a setting at one place of a sweep from all others.
PLACE = ("lever", "strength", "pace", "idle", "hardware", "link")


@dataclass(frozen=True)
class Trial:
    """An episode to be run.

    Attributes:
        lever, strength: which setting of which lever.
        driver: drives the robot.
        execution: how a chunk policy's chunks are played; None for a pair.
        task, pace: where.
        idle: what the robot does while it waits, see :class:`~specact.lab.envs.moving.MovingWorld`.
        hardware, kappa: the profile, and its factor on latency.
        link: see :func:`~specact.links.link.load_link`; :data:`ON_BOARD` for a policy on the robot.
        latencies_s: of an inference on this hardware, see :func:`~specact.lab.tised.costs.measure_settings` [s].
        episode, seed: which episode; the same two give every setting the same start.
        fingerprint: of the driver's bundle; a process that finds another one refuses it.
    """

    lever: str
    strength: float
    driver: Driver
    execution: Execution | None
    task: str
    pace: float
    idle: Idle
    hardware: str
    kappa: float
    link: str
    latencies_s: tuple[float, ...]
    episode: int
    seed: int
    fingerprint: str

    @property
    def row(self) -> Row:
        """What a row says of the setting, before the episode has run."""
        execution = self.execution
        return {
            "lever": self.lever,
            "strength": self.strength,
            "task": self.task,
            "pace": self.pace,
            "idle": self.idle,
            "hardware": self.hardware,
            "kappa": self.kappa,
            "link": self.link,
            "execution": "pair" if execution is None else execution.kind,
            "overlap": 0 if execution is None else execution.overlap,
            "execute": 0 if execution is None else execution.execute,
            "episode": self.episode,
        }


def run_trial(trial: Trial, *, decided: Decided | None = None) -> Row:
    """Runs the episode; its row: the setting, and an :class:`~specact.lab.rollout.episode.Episode`.

    Args:
        trial: the episode.
        decided: told of a gate's decisions, see :func:`~specact.lab.rollout.pair.run_pair`.
    """
    check_bundle(trial.driver, trial.fingerprint)
    world = _world(trial.task, trial.pace, trial.idle, looks_at(trial.driver))
    address = {"start": start_of(trial.seed, trial.episode, world.task), "seed": trial.seed, "episode": trial.episode}
    if isinstance(trial.driver, PairDriver):
        ran = _run_pair(trial, trial.driver, world, address, decided)
    elif isinstance(trial.driver, RoundsDriver):
        ran = run_rounds(world, trial.driver.load(), trial.driver.takes(trial.latencies_s), **address)
    else:
        assert trial.execution is not None, "a chunk policy is told how its chunks are played"
        policy, inference_s = trial.driver.build(), sum(trial.latencies_s)
        route = _route(trial, trial.driver, policy.spec)
        took = inference_s if route is None else route.latency(inference_s)
        ran = run_episode(world, policy, trial.execution, took, **address)
    return trial.row | {"static": world.static} | asdict(ran)


def _route(trial: Trial, driver: FlowDriver | CodesDriver | SplitDriver, spec: ChunkSpec) -> Route | None:
    """To the server; None where all of the policy is on the device."""
    if trial.link == ON_BOARD or (isinstance(driver, SplitDriver) and not driver.cut):
        return None
    link, rng = load_link(trial.link), stream(trial.seed, Role.LINK, episode=trial.episode)
    if isinstance(driver, SplitDriver):
        return Route(link, *driver.crossing, rng)
    return Route.of(link, ChunkCodec(spec).dialect, rng)


def _run_pair(
    trial: Trial, driver: PairDriver, world: MovingWorld, address: dict[str, int], decided: Decided | None
) -> Episode:
    draft_s, target_s = trial.latencies_s
    link = load_link("loopback" if trial.link == ON_BOARD else trial.link)
    late_for_s = inf if driver.late else None
    pairing = Pairing(driver.gate, link, draft_s, target_s, late_for_s=late_for_s)
    return run_pair(world, driver.load(), pairing, decided=decided, **address)[0]


@cache
def _world(task: str, pace: float, idle: Idle, sees: ObservationSpec) -> MovingWorld:
    """Worlds of this process, kept between episodes: some take a second to build."""
    return MovingWorld(load_task(task, sees), idle=idle, pace=pace)
