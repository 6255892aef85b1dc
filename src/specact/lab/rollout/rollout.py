"""Episodes in lock step and virtual time: policies run batched, each robot's algorithm as it would on the robot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np

from specact.clock import VirtualClock
from specact.families.codes.verify import Offset
from specact.families.load import AnyPair, load_pair
from specact.gates.prefetch import PrefetchPredictor
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.envs.task import Task
from specact.lab.rollout.families import FamilyRollout, rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.simulated_target import Route, SimulatedTarget
from specact.lab.rollout.timed import Prepared, TimedDrafter, TimedGate, TimedTarget
from specact.links.link import load_link
from specact.observation import ObservationSpec, Window
from specact.policy import SpeculativePolicy
from specact.rng import Role, stream
from specact.verification import LocalTarget, Target

# The method that any gate is rolled out in, whether a method is named after it or not: the bundle's draft, and exact
# verification where the shard's gate asks for it.
COMPOSITION = "hybrid"


@dataclass(frozen=True)
class Shard:
    """A few episodes of one method: the unit of parallel work and of resuming.

    Its size decides how policies are batched, so it is part of what makes a result reproducible to the last bit; the
    number of processes is not.

    Attributes:
        bundle: name or path.
        fingerprint: of the bundle; a process that holds other weights of that name loads it again.
        env: the environment's name.
        method: see :data:`~specact.lab.rollout.methods.METHODS`.
        gate: its calibrated gate.
        episodes: numbers of the episodes; the same number and seed give every method the same start.
        seed: of everything random.
        link: name of a link preset.
        draft_s, target_s: what one proposal, and one inference of the target, is accounted with [s].
        offset: see :class:`~specact.families.codes.verify.CodeVerifier`.
        overlap: whether requests leave ahead of the draft where the prefetch predictor says so.
        gate_s: what one decision is accounted with [s].
        learning: whether the step table also holds what a learner needs, see
            :class:`~specact.lab.rollout.steps.CodeAudit`.
        named: draft and target of a pair of chunk policies, see :func:`~specact.families.load.load_pair`.
    """

    bundle: str
    fingerprint: str
    env: str
    method: str
    gate: GateSettings
    episodes: tuple[int, ...]
    seed: int
    link: str
    draft_s: float
    target_s: float
    offset: Offset = "target"
    overlap: bool = False
    gate_s: float = 0.0
    learning: bool = False
    named: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True)
class Outcome:
    """How one episode went.

    Attributes:
        episode: its number.
        success: whether it succeeded at any time.
        score: the best score reached, see :class:`~specact.lab.envs.task.Task`.
        steps: control steps.
        latency_s: accounted time spent on choosing actions.
        task: which task of a suite it was; empty elsewhere.
    """

    episode: int
    success: bool
    score: float
    steps: int
    latency_s: float
    task: str = ""


class Robot:
    """One episode under way."""

    def __init__(
        self, shard: Shard, pair: AnyPair, family: FamilyRollout, env: gym.Env[Any, Any], episode: int
    ) -> None:
        method = load_method(shard.method)
        self.episode, self._env = episode, env
        self.clock = VirtualClock()
        self.draft, self.target = Prepared[Any](), Prepared[Any]()
        target: Target[Any]
        if method.on_device:
            target = LocalTarget(TimedTarget(self.target, self.clock, shard.target_s), self.clock)
        else:
            link = stream(shard.seed, Role.LINK, episode=episode)
            route = Route.of(load_link(shard.link), pair.codec.dialect, link)
            target = SimulatedTarget(self.target, route, self.clock, shard.target_s)
        gate = TimedGate(shard.gate.build(pair, self.target), self.clock, shard.gate_s)
        draft_s = shard.draft_s if method.waits_for_draft else 0.0
        self.policy = SpeculativePolicy(
            pair,
            gate,
            drafter=TimedDrafter(family.drafter(self.draft), self.clock, draft_s),
            verifier=family.verifier(target),
            prefetch=PrefetchPredictor(gate) if shard.overlap else None,
            seed=shard.seed,
            clock=self.clock,
        )
        self.policy.reset(episode)
        self.observation, self.info = env.reset(seed=start_of(shard.seed, episode, load_task(shard.env)))
        self.steps, self.done = 0, False

    def prepare(self, draft: object, target: object) -> None:
        """What draft and target say of the coming inference."""
        self.draft.prepared, self.target.prepared = draft, target

    def advance(self, window: Window, max_steps: int) -> None:
        action = self.policy.act_on(window)
        self.observation, _, terminated, truncated, self.info = self._env.step(action)
        self.steps += 1
        self.done = terminated or truncated or self.steps >= max_steps

    def outcome(self) -> Outcome:
        success, score = bool(self.info["success"]), float(self.info["score"])
        return Outcome(self.episode, success, score, self.steps, self.clock.now(), self.info.get("task", ""))


def start_of(seed: int, episode: int, task: Task) -> int:
    """The environment's seed for an episode, the same for every method."""
    return task.start(int(stream(seed, Role.ENVIRONMENT, episode=episode).integers(2**31)), episode)


def run_shard(shard: Shard) -> tuple[list[Outcome], dict[str, np.ndarray]]:
    """Runs a shard's episodes to their end.

    The target is evaluated for every inference, outside the method's accounted time, so that the exact rejection
    probability is known for skipped steps too.

    Returns:
        The outcomes, and the step table: one array per column, one row per inference.
    """
    pair = _pair(shard.bundle, shard.fingerprint, shard.named)
    task = load_task(shard.env, pair.observation)
    family = rollout_of(pair, load_method(shard.method), shard.offset)
    envs = _environments(shard.env, pair.observation)
    while len(envs) < len(shard.episodes):
        envs.append(task.make())
    robots = [Robot(shard, pair, family, env, episode) for env, episode in zip(envs, shard.episodes, strict=False)]
    audit = family.audit(shard.seed, learning=shard.learning)
    active = robots
    while active:
        windows = [robot.policy.observe(robot.observation) for robot in active]
        thinking = [i for i, robot in enumerate(active) if robot.policy.wants_inference]
        if thinking:
            addresses = [active[i].policy.address for i in thinking]
            drafts, targets = family.infer([windows[i] for i in thinking], addresses)
            for i, draft, target in zip(thinking, drafts, targets, strict=True):
                active[i].prepare(draft, target)
        for robot, window in zip(active, windows, strict=True):
            robot.advance(window, task.max_steps)
        if thinking:
            records = [record for i in thinking if (record := active[i].policy.record) is not None]
            audit.add(records, drafts, targets)
        active = [robot for robot in active if not robot.done]
    return [robot.outcome() for robot in robots], audit.table()


@cache
def _pair(name_or_path: str, fingerprint: str, named: tuple[str | None, str | None]) -> AnyPair:
    return load_pair(name_or_path, draft=named[0], target=named[1])


@cache
def _environments(name: str, sees: ObservationSpec) -> list[gym.Env[Any, Any]]:
    """Environments of this process, kept between shards: some take a second to build."""
    return []
