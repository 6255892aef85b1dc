"""One episode of a sweep: from plain values to one row of its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from typing import Any

from specact.execution.strategy import Execution
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.wire import ChunkExchange
from specact.lab.envs import load_task
from specact.lab.envs.moving import MovingWorld
from specact.lab.envs.task import Idle
from specact.lab.rollout.episode import Episode, run_episode
from specact.lab.rollout.pair import Pairing, run_pair, run_rounds
from specact.lab.rollout.rollout import episode_seed
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
    observation_spec_of,
)
from specact.links.link import load_link
from specact.observation import ObservationSpec
from specact.rng import Role, stream
from specact.types import Decision

Row = dict[str, Any]
OnDecision = Callable[[Decision, bool], None]
# The columns that identify a setting at one place of a sweep.
PLACE = ("lever", "strength", "pace", "idle", "hardware", "link")


@dataclass(frozen=True)
class Trial:
    """The settings of one episode.

    Attributes:
        lever, strength: name and strength of the lever.
        driver: the policy.
        execution: how a chunk policy's chunks are executed; None for a pair.
        task, pace: the world.
        idle: the robot's behaviour while it waits, see :class:`~specact.lab.envs.moving.MovingWorld`.
        hardware, kappa: the profile, and its factor on latency.
        link: see :func:`~specact.links.link.load_link`; :data:`ON_BOARD` for a policy on the robot.
        latencies_s: of an inference on this hardware, see :func:`~specact.lab.tised.costs.measure_settings` [s].
        episode, seed: they determine the initial state, for all settings.
        fingerprint: expected one of the driver's bundle.
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
        """The row's columns of the setting."""
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


def run_trial(trial: Trial, *, on_decision: OnDecision | None = None) -> Row:
    """Runs the episode; returns a row of the setting and the :class:`~specact.lab.rollout.episode.Episode`.

    Args:
        trial: the episode.
        on_decision: called with the gate's decisions, see :func:`~specact.lab.rollout.pair.run_pair`.
    """
    check_bundle(trial.driver, trial.fingerprint)
    world = _world(trial.task, trial.pace, trial.idle, observation_spec_of(trial.driver))
    address = {
        "start": episode_seed(trial.seed, trial.episode, world.task),
        "seed": trial.seed,
        "episode": trial.episode,
    }
    if isinstance(trial.driver, PairDriver):
        result = _run_pair(trial, trial.driver, world, address, on_decision)
    elif isinstance(trial.driver, RoundsDriver):
        result = run_rounds(world, trial.driver.load(), trial.driver.round_duration(trial.latencies_s), **address)
    else:
        assert trial.execution is not None, "a chunk policy has an execution"
        policy, inference_s = trial.driver.build(), sum(trial.latencies_s)
        route = _route(trial, trial.driver, policy.spec)
        latency = inference_s if route is None else route.latency(inference_s)
        result = run_episode(world, policy, trial.execution, latency, **address)
    return trial.row | {"static": world.static} | asdict(result)


def _route(trial: Trial, driver: FlowDriver | CodesDriver | SplitDriver, spec: ChunkSpec) -> Route | None:
    """The route to the server; None where the whole policy is on the device."""
    if trial.link == ON_BOARD or (isinstance(driver, SplitDriver) and not driver.cut):
        return None
    link, rng = load_link(trial.link), stream(trial.seed, Role.LINK, episode=trial.episode)
    if isinstance(driver, SplitDriver):
        return Route(link, *driver.crossing, rng)
    return Route.of(link, ChunkExchange(spec).contract, rng)


def _run_pair(
    trial: Trial, driver: PairDriver, world: MovingWorld, address: dict[str, int], on_decision: OnDecision | None
) -> Episode:
    draft_s, target_s = trial.latencies_s
    link = load_link("loopback" if trial.link == ON_BOARD else trial.link)
    late_for_s = inf if driver.late else None
    pairing = Pairing(driver.gate, link, draft_s, target_s, late_for_s=late_for_s)
    return run_pair(world, driver.load(), pairing, on_decision=on_decision, **address)[0]


@cache
def _world(task: str, pace: float, idle: Idle, sees: ObservationSpec) -> MovingWorld:
    """A world, cached across episodes because some take a second to build."""
    return MovingWorld(load_task(task, sees), idle=idle, pace=pace)
