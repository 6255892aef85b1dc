"""Rollouts in lock step and virtual time: batched policies, and for each robot the algorithm of the real robot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np

from specact.errors import BundleError
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.envs.task import Task
from specact.lab.rollout.families import FamilyRollout, rollout_of
from specact.lab.rollout.methods import Method
from specact.lab.rollout.steps import STAGES, Audit, Table
from specact.lab.rollout.timed import Prepared, Route, SharedClock, SimulatedTarget, TimedDrafter, TimedGate
from specact.links.link import load_link
from specact.load import load_pair
from specact.observation import ObservationSpec
from specact.pair import Pair, PairSource, Verifier
from specact.policy import SpeculativePolicy
from specact.rng import Role, stream
from specact.robot.loop import Robot as ControlledRobot
from specact.types import CLOCK, StepRecord, VirtualClock


@dataclass(frozen=True)
class Shard:
    """A few episodes of one method: the unit of parallel work and of resuming.

    Its size determines the batch size of the policies, so results are bit-reproducible only for the same size; they do
    not depend on the number of processes. A process with cached weights of another ``fingerprint`` rejects it. Number
    and ``seed`` of an episode determine its initial state, for all methods. ``draft_s``, ``target_s`` and ``gate_s``
    are accounted times of a proposal, an inference and a decision [s]; ``learning`` is whether the step table also has
    the training columns.
    """

    source: PairSource
    fingerprint: str
    env: str
    method: Method
    gate: GateSettings
    episodes: tuple[int, ...]
    seed: int
    link: str = "loopback"
    draft_s: float = 0.0
    target_s: float = 0.0
    gate_s: float = 0.0
    learning: bool = False

    @classmethod
    def of(
        cls, pair: Pair[Any], env: str, method: Method, gate: GateSettings, episodes: Iterable[int], seed: int
    ) -> Shard:
        """A shard of a pair as it was loaded, without a link and accounted times."""
        return cls(pair.source, pair.fingerprint, env, method, gate, tuple(episodes), seed)


class EpisodeRange(IntEnum):
    """The first numbers of ranges of episodes that are kept apart; each range ends where the next one begins."""

    EVALUATION = 0
    CALIBRATION = 1_000_000
    HELD_OUT = 2_000_000
    LESSONS = 10_000_000
    RECORDED = 20_000_000
    TOKEN_PATHS = 30_000_000
    FLOW_PATHS = 40_000_000

    def episodes(self, count: int, first: int = 0) -> range:
        """The numbers of ``count`` episodes of this range, from its episode ``first`` on."""
        following = min((purpose for purpose in EpisodeRange if purpose > self), default=10 * self)
        assert self + first + count <= following, "the episodes of two purposes would be the same"
        return range(self + first, self + first + count)


@dataclass(frozen=True)
class Outcome:
    """The result of one episode: the best score, and the accounted or measured time spent on choosing actions [s].

    ``task`` is which one of a suite it was; empty elsewhere.
    """

    episode: int
    success: bool
    score: float
    steps: int
    latency_s: float
    task: str = ""

    @classmethod
    def of(cls, episode: int, world: SimulatedRobot, latency_s: float) -> Outcome:
        """The outcome of an episode that has ended in this world."""
        return cls(episode, world.success, world.score, world.steps, latency_s, world.of_suite)


class World(ControlledRobot, Protocol):
    """The environment of a control loop; it pauses during inference. ``done`` is whether the episode is over."""

    @property
    def done(self) -> bool: ...


@dataclass(frozen=True)
class Robot:
    """A running episode, with slots for the outputs of draft and target if its policy does not query them itself."""

    policy: SpeculativePolicy
    world: World
    prepared: tuple[Prepared[Any], Prepared[Any]] | None = None


def control_step(
    robots: Sequence[Robot], family: FamilyRollout
) -> tuple[Sequence[StepRecord], Sequence[Any], Sequence[Any]]:
    """Runs one control step of every robot: observe, infer, act.

    Observations that no inference reads are not computed: a camera frame takes longer than the physics. Draft and
    target are evaluated for every inference in one batch: before the robots act if outputs are prepared, else
    afterwards, because their own times are measured. All robots ask before the first one acts, so that a target that
    they query themselves can answer in one batch. Returns the records of the inferences, and both outputs for each.
    """
    windows = {
        i: robot.policy.observe(robot.world.observe())
        for i, robot in enumerate(robots)
        if robot.policy.wants_observation
    }
    inferring = [i for i, robot in enumerate(robots) if robot.policy.wants_inference]
    inputs = [windows[i] for i in inferring], [robots[i].policy.address for i in inferring]
    drafts, targets = family.infer(*inputs) if inferring and robots[0].prepared else ([], [])
    for i, *outputs in zip(inferring, drafts, targets, strict=False):
        for slot, value in zip(robots[i].prepared or (), outputs, strict=True):
            slot.prepared = value
    for i, robot in enumerate(robots):
        robot.policy.ask(windows.get(i))
    for robot in robots:
        robot.world.act(robot.policy.finish())
    if inferring and not drafts:
        drafts, targets = family.infer(*inputs)
    return [record for i in inferring if (record := robots[i].policy.record) is not None], drafts, targets


def run_together(robots: Sequence[Robot], family: FamilyRollout, audit: Audit) -> None:
    """Runs the episodes of several robots to their end, in lock step."""
    while robots:
        audit.add(*control_step(robots, family))
        robots = [robot for robot in robots if not robot.world.done]


def begin(
    shard: Shard, family: FamilyRollout, world: SimulatedRobot, episode: int, verifier: Verifier | None = None
) -> Robot:
    """A robot at the start of an episode in virtual time; its world waits.

    In real time with a verifier, or where the family's times are measured: then draft and target run in this process.
    """
    pair, method = family.pair, shard.method
    clock, prepared = CLOCK, None
    if verifier is not None or family.measured:
        gate, drafter = shard.gate.build(pair), family.drafter()
        if verifier is None:
            clock = shared = SharedClock()
            verifier = family.measured_verifier(shared)
    else:
        clock, prepared = VirtualClock(), (Prepared[Any](), Prepared[Any]())
        (draft, remote), link = prepared, stream(shard.seed, Role.LINK, episode=episode)
        route = None if method.on_device else Route.of(load_link(shard.link), pair.exchange.contract, link)
        target = SimulatedTarget(remote, route, clock, shard.target_s)
        gate = TimedGate(shard.gate.build(pair, remote), clock, shard.gate_s)
        drafter = TimedDrafter(family.drafter(draft), clock, shard.draft_s if method.waits_for_draft else 0.0)
        verifier = family.verifier(target)
    policy = SpeculativePolicy(pair, gate, drafter=drafter, verifier=verifier, seed=shard.seed, clock=clock)
    policy.reset(episode)
    world.start(episode_seed(shard.seed, episode, world.task))
    return Robot(policy, world, prepared)


def episode_seed(seed: int, episode: int, task: Task) -> int:
    """The environment's seed for an episode, the same for every method."""
    return task.start(int(stream(seed, Role.ENVIRONMENT, episode=episode).integers(2**31)), episode)


def run_shard(shard: Shard) -> tuple[list[Outcome], Table]:
    """Runs a shard's episodes to their end.

    The target is evaluated for every inference, outside the method's accounted time, so that the exact rejection
    probability is known for skipped steps too. The time of a token or flow policy depends on what is accepted, so it
    is measured and not accounted, in this process and without a link. A token policy verifies the steps of all
    episodes in one batch, whose time is divided by their number: a shard of one episode has the time of one robot.
    Returns the outcomes, and the step table: one array per column, one row per inference.
    """
    family = rollout_of(_pair(shard.source, shard.fingerprint), shard.method)
    sees = family.pair.observation
    worlds = _worlds(shard.env, sees)
    while len(worlds) < len(shard.episodes):
        worlds.append(SimulatedRobot(load_task(shard.env, sees)))
    robots = {
        episode: begin(shard, family, world, episode) for world, episode in zip(worlds, shard.episodes, strict=False)
    }
    audit = Audit(family, learning=shard.learning)
    run_together(list(robots.values()), family, audit)
    table = audit.table()
    latencies_s = {episode: robot.policy.clock.now() for episode, robot in robots.items()}
    if family.measured:
        latencies_s = time_by_episode(table)
    ended = zip(shard.episodes, worlds, strict=False)
    return [Outcome.of(episode, world, latencies_s[episode]) for episode, world in ended], table


def time_by_episode(table: Table) -> dict[int, float]:
    """Total seconds of a step table's inferences, over all stages, by episode."""
    seconds = sum((table[f"{stage}_s"] for stage in STAGES), np.zeros(len(table["episode"])))
    return {int(episode): float(seconds[table["episode"] == episode].sum()) for episode in np.unique(table["episode"])}


def check_weights(source: str, fingerprint: str, expected: str) -> None:
    """Raises a BundleError if a bundle's fingerprint is not that of the one of this name in another process."""
    if fingerprint != expected:
        raise BundleError(
            f"{source} has fingerprint {fingerprint} here, and {expected} where the work was given out; copy it"
        )


@cache
def _pair(source: PairSource, fingerprint: str) -> Pair[Any]:
    pair = load_pair(source)
    check_weights(source.name_or_path, pair.fingerprint, fingerprint)
    return pair


@lru_cache(maxsize=1)  # a suite's take gigabytes: those of another environment go
def _worlds(env: str, sees: ObservationSpec) -> list[SimulatedRobot]:
    """The worlds of this process, cached across shards because some take a second to build."""
    return []
