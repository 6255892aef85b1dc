"""Copies of a robot in mid-episode, of which half ask at the next inference and half skip; all go on under a base gate.

The base gate asks at random. Copy k of both kinds has the same random streams; the draft's proposal is the same in all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.grid import Run
from specact import Pair, SpeculativePolicy
from specact.gates import Gate, Random
from specact.gates.settings import gate_settings
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.families import FamilyRollout
from specact.lab.rollout.rollout import Robot, control_step, episode_seed
from specact.lab.rollout.timed import Prepared
from specact.pair import LocalTarget, Pending, Verifier
from specact.rng import StepAddress
from specact.types import ActionUnits, Decision, Outcome, Proposal, StepRecord

# Of branches: continuations of each kind, and how many run in lock step.
CONTINUATIONS, TOGETHER = 8, 256
FIRST_SEED = 1000  # of the continuations; the episodes' is the run's
SCORES = {"deviation": "adahi", "uncertainty": "uncertainty", "learned": "learned", "rejection": "oracle"}


class BaseGate(Random):
    """Asks at random; other gates score along, and ``order`` decides the next inference instead, or a score ``by``."""

    def __init__(self, rate: float, others: Mapping[str, Gate] | None = None) -> None:
        super().__init__(rate)
        self.others, self.score_by = dict(others or {}), 0.0
        self.order: bool | None = None
        self.known: dict[str, NDArray[np.float64]] = {}  # about the last inference, as heads read it
        self.look: Callable[[Proposal], NDArray[np.float64]] = lambda proposal: np.zeros(0)  # at what no device sees
        self.by: Callable[[Mapping[str, Any], np.random.Generator], float] | None = None
        self.cut: tuple[float, float] | None = None  # its threshold and the probability at it; None for chance

    def reset(self) -> None:
        super().reset()
        self.past = np.zeros(3)  # inferences, requests, and inferences since the last one
        for gate in self.others.values():
            gate.reset()

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        for gate in self.others.values():
            gate.on_action(drafted, executed)

    def on_inference(self, record: StepRecord) -> None:
        for gate in self.others.values():
            gate.on_inference(record)

    def on_verified(self, record: StepRecord) -> None:
        for gate in self.others.values():
            gate.on_verified(record)

    def decide(self, proposal: Proposal, rng: np.random.Generator) -> Decision:
        decision, order, self.order = super().decide(proposal, rng), self.order, None
        if self.others:
            drafted = proposal.evidence
            seen = [*proposal.window.arrays.values(), drafted.draft.probs, proposal.actions]
            self.known = {
                "scores": np.array([gate.score(proposal, rng) for gate in self.others.values()]),
                "seen": np.concatenate([np.ravel(values) for values in seen]).astype(float),
                "past": self.past, "hidden": self.look(proposal),
            }  # fmt: skip
        if self.by is not None:
            self.score_by = self.by(self.known, rng)
            order = order if self.cut is None else above(self.score_by, self.cut, 1.0 - decision.score)
        decision = decision if order is None else replace(decision, transmit=order)
        number, asked, since = self.past
        self.past = np.array([number + 1, asked + decision.transmit, 0 if decision.transmit else since + 1])
        return decision


def above(score: float, cut: tuple[float, float], chance: float) -> bool:
    """Whether a score asks: if it is above the threshold, or at it with a probability."""
    return score > cut[0] or (score == cut[0] and chance < cut[1])


@dataclass
class Reseeded:
    """Another verifier, with the random streams of its own ``seed`` where it has one."""

    verifier: Verifier
    seed: int | None = None

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """The other's."""
        return self.verifier.submit(proposal, address if self.seed is None else address._replace(seed=self.seed))


@dataclass(frozen=True)
class Branchable(Robot):
    """A robot of which copies can be made; they share ``shared``, which no episode changes."""

    gate: BaseGate = field(kw_only=True)
    verifier: Reseeded = field(kw_only=True)
    shared: Sequence[Any] = field(kw_only=True)

    def copy(self) -> Branchable:
        """As it is now: simulator, windows, player, gate, and the next address; without the scores of other gates."""
        attributes = {name: vars(self.gate).pop(name) for name in ("others", "look")}
        self.gate.others = {}
        memo: dict[int, Any] = {id(part): part for part in (self.shared, *self.shared)}
        simulator = getattr(getattr(self.world, "env", None), "_sim", None)
        if simulator is not None:  # whose copies by itself would be at a start
            twin = memo[id(simulator)] = object.__new__(type(simulator))
            vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(simulator).items()})
        copied = copy.deepcopy(self, memo)
        vars(self.gate).update(attributes)
        return copied

    def branch(self, ask: bool, seed: int) -> Branchable:
        """A copy that asks, or skips, at the next inference."""
        branch = self.copy()
        branch.gate.order, branch.verifier.seed = ask, seed
        return branch


def begin(family: FamilyRollout, world: Any, gate: BaseGate, prepared: Any, seed: int, episode: int) -> Branchable:
    """A robot whose world is at the start of an episode."""
    pair, (draft, target) = family.pair, prepared
    verifier = Reseeded(family.verifier(LocalTarget(target)))
    policy = SpeculativePolicy(pair, gate, drafter=family.drafter(draft), verifier=verifier, seed=seed)
    policy.reset(episode)
    env = getattr(world, "env", None)
    simulator = getattr(env, "_sim", env)
    shared = [pair, pair.parts, *vars(pair.parts).values(), pair.units, pair.observation, getattr(world, "task", None)]
    views = ("model", "_renderer", "mujoco_renderer")
    shared += [value for name in views if (value := getattr(simulator, name, None)) is not None]
    return Branchable(policy, world, prepared, gate=gate, verifier=verifier, shared=shared)


def outcomes(robots: Sequence[Branchable], family: FamilyRollout, continuations: int) -> NDArray[np.bool_]:
    """Success after asking, and after skipping, the next inferences, ``[robots, continuations, 2]``."""
    seeds = range(FIRST_SEED, FIRST_SEED + continuations)
    branches = [robot.branch(ask, seed) for robot in robots for seed in seeds for ask in (True, False)]
    for first in range(0, len(branches), TOGETHER):
        part = branches[first : first + TOGETHER]
        control_step(part, family)
        for branch in part:
            assert branch.verifier.seed is not None
            branch.policy.address = branch.policy.address._replace(seed=branch.verifier.seed)
        to_end(part, family)
    success = [branch.world.success for branch in branches]  # type: ignore[attr-defined]
    return np.array(success, bool).reshape(len(robots), continuations, 2)


def differences(ends: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Of outcomes ``[..., 2]``: success after asking minus success after skipping."""
    return ends[..., 0].astype(float) - ends[..., 1]


def to_end(robots: Sequence[Branchable], family: FamilyRollout) -> None:
    """Runs episodes to their end, in lock step."""
    robots = [robot for robot in robots if not robot.world.done]
    while robots:
        control_step(robots, family)
        robots = [robot for robot in robots if not robot.world.done]


def robots_of(pair: Pair[Any], rate: float, seed: int, episodes: Sequence[int], family: FamilyRollout) -> list[Any]:
    """Robots at the starts of episodes, under the base gate, with every other score."""
    task, robots = load_task(pair.env), []
    for episode in episodes:
        prepared = (Prepared[Any](), Prepared[Any]())
        others = {name: gate_settings(gate, pair).build(pair, prepared[1]) for name, gate in SCORES.items()}
        world = SimulatedRobot(task)
        world.start(episode_seed(seed, episode, task))
        robots.append(begin(family, world, BaseGate(rate, others), prepared, seed, episode))
    return robots


def look(robot: Branchable, units: ActionUnits, proposal: Proposal) -> NDArray[np.float64]:
    """What a device does not see: the target's probabilities, and the world after the proposal."""
    env = copy.deepcopy(robot.world.env.unwrapped)  # type: ignore[attr-defined]
    probs = np.ravel(robot.prepared[1].infer(proposal.window).probs)  # type: ignore[index]
    for action in units.to_environment(proposal.actions):
        after, *_ = env.step(action)
    return np.concatenate([probs, *(np.ravel(values) for values in after.values())]).astype(float)


def branched(
    robots: Sequence[Branchable], family: FamilyRollout, rng: np.random.Generator, run: Run,
    states: int | None = None, cut: tuple[float, float] | None = None, continuations: int = CONTINUATIONS,
) -> dict[str, Any]:  # fmt: skip
    """Plays episodes and branches their inferences, or so many in each, on average; with a threshold the values decide.

    Returns columns: the episode, what is known there, the outcomes, and whether it asked.
    """
    live, rows, longest = robots, list[dict[str, Any]](), load_task(family.pair.env).max_steps / family.pair.execute
    while live:
        wanting = [robot for robot in live if robot.policy.wants_inference]
        sampled = [robot for robot in wanting if states is None or rng.random() < states / longest]
        ends = outcomes(sampled, family, continuations)
        if cut is not None:
            for robot, value in zip(sampled, differences(ends).mean(1), strict=True):
                robot.gate.order = above(float(value), cut, float(rng.random()))
        control_step(live, family)
        for robot, end in zip(sampled, ends, strict=True):
            record = robot.policy.record
            assert record is not None
            row = {"episode": record.address.episode, "asked": record.decision.transmit, "ends": end}
            rows.append(robot.gate.known | row | {"score": robot.gate.score_by})
        live = [robot for robot in live if not robot.world.done]
        run.update("branches", len(robots) - len(live), len(robots))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
