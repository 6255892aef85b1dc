"""Robots of fleets in virtual time: how they ask, their gates, their control steps, and what came of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from experiments.delay.corrected import CORRECTED, Chance
from experiments.delay.worlds import WORLDS
from experiments.fleet.server import Request, Server, SharedTarget
from experiments.grid import ROOT, Run
from experiments.measure import to_digits
from specact import SpeculativePolicy, load_pair
from specact.execution.player import WAIT, LateVerdicts
from specact.gates import Always, Controller, Gate, Never, RateBudget
from specact.gates.gate import Periodic
from specact.gates.settings import gate_settings
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.families import FamilyRollout, rollout_of
from specact.lab.rollout.methods import METHODS
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.timed import Prepared, TimedGate
from specact.links.link import LINKS
from specact.pair import Pair
from specact.rng import Role, stream
from specact.server.capacity import ServiceTime
from specact.types import Proposal, VirtualClock

# The pairs, and how often a second a robot of each infers; and how many robots share a server. One pair is a corrector
# of the study of delay, whose device does not see the goal, in the world of that study.
CHASE, CORRECTOR = "ball-chase", CORRECTED["corrected_hidden"]
PAIRS, FLEETS = {"ball": 4.0, "swarm": 2.5, CHASE: 20.0}, (1, 4, 16, 32, 64, 128)
# Robots of a cell in all its fleets; of each robot the episodes that do not count yet, those that count, and how many
# numbers its episodes have to themselves.
TOGETHER, WARM_UP, EPISODES, LIFE = max(FLEETS), 2, 6, 1000
HORIZON = 20.0  # inferences, of the controllers: shorter than a life; and of a corrector, which infers at every step
HORIZON_AT_EVERY_STEP = 100.0
# A target takes 38 ms for one request; a request holds a camera frame; LOAD of the server's throughput is shared out.
TARGET_S, MOST, REQUEST_BYTES, LOAD, LINK = 0.038, 8, 12_000, 0.7, LINKS["wifi-paper"]


@dataclass(frozen=True)
class Discipline:
    """How robots ask: where, by a score that is held at the fair share or granted by the server; None for everywhere.

    A robot waits for its reply, executes its draft until then (late), or sends its score and is granted.
    """

    about: str
    score: str | None = None
    asks: Literal["never", "waits", "late", "granted"] = "late"
    verifier: Literal["speculative", "target"] = "speculative"


SCORES = {"random": "at random", "adahi": "where the action deviates", "learned": "where a head expects rejection"}
# A corrector has these in their place; the random one, too, knows where there is no chunk.
CORRECTING = {
    "late staleness": Discipline("asks where the chunk is old or its correction large", "staleness"),
    "late chance": Discipline("asks at random, and where there is no chunk", f"{Chance.__module__}:Chance"),
    "late cadence": Discipline("asks every so many steps", "periodic"),
}
DISCIPLINES = {
    "draft": Discipline("the draft alone", asks="never"),
    "always": Discipline("asks at every inference and waits", asks="waits"),
    "late always": Discipline("asks at every inference; late verdicts"),
    "late target": Discipline("the target's own actions as soon as they are there", verifier="target"),
    **{score: Discipline(f"waits; asks {where} at the fair share", score, "waits") for score, where in SCORES.items()},
    **{f"late {score}": Discipline(f"asks {where} at the fair share", score) for score, where in SCORES.items()},
    **{f"central {score}": Discipline(f"granted {where}", score, "granted") for score, where in SCORES.items()},
    **CORRECTING,
}


def disciplines(name: str) -> list[str]:
    """The disciplines that a pair is measured with."""
    if name == CHASE:
        return ["draft", "late always", *CORRECTING]
    return [discipline for discipline in DISCIPLINES if discipline not in CORRECTING]


def service() -> ServiceTime:
    """The measured curve of the ball's target, in proportion, for one of TARGET_S."""
    rows = json.loads((ROOT / "experiments" / "speed" / "results" / "capacity.json").read_text())
    base, request = rows[0]["base_ms"], rows[0]["per_request_ms"]
    return ServiceTime(TARGET_S * base / (base + request), TARGET_S * request / (base + request))


def fair_share(name: str, robots: int, most: int = MOST) -> float:
    """The rate at which so many robots take LOAD of what a server does in batches of at most ``most``."""
    return min(1.0, LOAD * service().most_hz(most) / (robots * PAIRS[name]))


def granted_together() -> int:
    """The smallest batch at which the server's throughput is LOAD of its largest."""
    return next(size for size in range(1, MOST + 1) if size / service().seconds(size) >= LOAD * service().most_hz(MOST))


class Offering(TimedGate):
    """Offers every inference to the server, with another gate's score; the first of an episode before all others."""

    def __init__(self, gate: Gate, target: SharedTarget) -> None:
        super().__init__(gate, target.clock, 0.0)
        self.threshold, self._target = -math.inf, target

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        self._target.score = math.inf if self.forced else super().score(proposal, rng)
        return self._target.score


@dataclass
class Member:
    """A robot of a fleet, its ``place`` among all, and the ``phase`` of its control steps, of which it skips some.

    It ``waits`` if it holds until a reply is there; ``won`` are its episodes so far.
    """

    policy: SpeculativePolicy
    world: SimulatedRobot
    prepared: tuple[Prepared[Any], Prepared[Any]]
    target: SharedTarget
    place: int
    phase: float
    waits: bool
    won: list[bool] = field(default_factory=list)

    def begin(self) -> None:
        """The next episode; those that do not count have numbers of their own."""
        number = self.place * LIFE + len(self.won)
        self.policy.reset(number)
        self.target.request = None
        self.last = np.zeros(self.world.env.action_space.shape or (), np.float32)
        self.world.start(episode_seed(self.policy.address.seed, number, self.world.task))

    def act(self) -> None:
        """Its control step: it holds while its request is under way, or acts."""
        if self.waits and self.target.request is not None and not self.target.is_over(self.target.request):
            assert self.world.task.hold is not None
            self.last = self.world.task.hold(self.last)
        else:
            self.last, self.target.request = self.policy.finish(), None
        self.world.act(self.last)
        if self.world.done:
            self.won.append(self.world.success)
            self.begin()


def recruit(family: FamilyRollout, how: Discipline, server: Server, size: int, place: int, seed: int) -> Member:
    """A new member of a fleet, at the start of its first episode."""
    pair, clock, prepared = family.pair, VirtualClock(), (Prepared[Any](), Prepared[Any]())
    phase = phase_of(seed, place, pair)
    clock.sleep(phase % 1.0 / pair.rate_hz)
    # A reply to a corrector is of use until its chunk ends; its target infers for those that ask alone.
    answers = pair.target() if pair.corrects else prepared[1]
    target = SharedTarget(answers, server, clock, max(pair.execute, pair.corrects) / pair.rate_hz - 1e-6)
    name = CHASE if pair.corrects else pair.env
    share = fair_share(name, size, server.most)
    gate, task = gate_of(how, pair, share), load_task(pair.env)
    if pair.corrects:
        task = replace(task, make=partial(task.make, pace=WORLDS[CORRECTOR.world].pace))
    policy = SpeculativePolicy(
        pair, Offering(gate, target) if server.grants else gate, drafter=family.drafter(prepared[0]),
        verifier=family.verifier(target), verdicts=WAIT if how.asks == "waits" else LateVerdicts(math.inf),
        robot=place, clock=clock, seed=seed,
    )  # fmt: skip
    member = Member(policy, SimulatedRobot(task), prepared, target, place, phase, how.asks == "waits")
    member.begin()
    return member


def phase_of(seed: int, place: int, pair: Pair[Any]) -> float:
    """When a robot begins, in control steps."""
    return float(stream(seed, Role.LINK, robot=place).uniform(0.0, pair.execute))


def gate_of(how: Discipline, pair: Pair[Any], share: float) -> Gate:
    """The gate of a discipline, held at a share of the inferences, unless the server grants."""
    if how.score is None:
        return Never() if how.asks == "never" else Always()
    if how.score == "periodic":
        return Periodic(math.ceil(1.0 / share))
    gate = gate_settings(how.score, pair, ["max_skips=unlimited"] * (how.score != "random")).build(pair)
    gate.force_first = True
    if how.asks == "granted":
        return gate
    return Controller(gate, RateBudget(share), horizon=HORIZON_AT_EVERY_STEP if pair.corrects else HORIZON)


def control_step(members: Sequence[Member], family: FamilyRollout) -> None:
    """One control step of robots in the order of their phases; as in other rollouts, all infer in one batch."""
    fresh = [member for member in members if not (member.waits and member.target.request)]
    windows = {
        id(member): member.policy.observe(member.world.observe()) for member in fresh if member.policy.wants_observation
    }
    inferring = [member for member in fresh if member.policy.wants_inference]
    if inferring and not family.pair.corrects:
        addresses = [member.policy.address for member in inferring]
        outputs = family.infer([windows[id(member)] for member in inferring], addresses)
        for member, *values in zip(inferring, *outputs, strict=True):
            for slot, value in zip(member.prepared, values, strict=True):
                slot.prepared = value
    for member in fresh:
        member.policy.ask(windows.get(id(member)))
    for member in members:
        member.act()


def measure(name: str, discipline: str, size: int, near: bool, folder: Path, run: Run) -> dict[str, Any]:
    """Fleets of a size, together as many robots in every cell; ``near`` a server that answers one by one: no link."""
    if name == CHASE:
        run.result(CORRECTOR.needs)
    pair, how = load_pair(CORRECTOR.folder(run.out) if name == CHASE else name), DISCIPLINES[discipline]
    family = rollout_of(pair, replace(METHODS["hybrid"], verifier=how.verifier))
    robots, episodes = (size, 1) if run.quick else (TOGETHER, EPISODES)
    most = 1 if near else granted_together() if how.asks == "granted" else MOST
    link = (0.0, 0.0) if near else (LINK.busy(REQUEST_BYTES, True, 0.0), LINK.rtt_ms / 2e3)
    servers = [Server(service(), most, *link, how.asks == "granted") for _ in range(robots // size)]
    members = [recruit(family, how, servers[place // size], size, place, run.seed) for place in range(robots)]
    members.sort(key=lambda member: member.phase % 1.0)
    step, end, before = 0, WARM_UP + episodes, 0
    while left := sum(len(member.won) < end for member in members):
        if not before and all(len(member.won) >= WARM_UP for member in members):
            before = sum(member.policy.counts["steps"] for member in members)
            for server in servers:
                server.sent.clear()
        control_step([member for member in members if member.phase < step + 1], family)
        for member in members:
            member.policy.clock.sleep(1.0 / pair.rate_hz)
        step += 1
        run.update("robots", robots - left, robots)
    members.sort(key=lambda member: member.place)
    won = np.array([member.won[WARM_UP:end] for member in members], float)
    requests = [request for server in servers for request in server.sent]
    return summary(won, requests, sum(member.policy.counts["steps"] for member in members) - before)


def summary(won: NDArray[np.float64], requests: Sequence[Request], inferences: int) -> dict[str, Any]:
    """The result of a cell: ``won [robots, episodes]``, and shares and times of its requests."""
    served = [request for request in requests if np.isfinite(request.started)]
    queued = [1e3 * (request.started - request.arrived) for request in served]
    took = [1e3 * (request.replied - request.at) for request in served]
    return {
        "won": [to_digits(robot) for robot in won],
        "asked": len(requests) / inferences, "served": len(served) / inferences,
        "in_time": sum(request.replied <= request.due for request in served) / inferences,
        "queue_p99_ms": float(np.quantile(queued, 0.99)) if served else None,
        "reply_p50_ms": float(np.quantile(took, 0.5)) if served else None,
        "reply_p99_ms": float(np.quantile(took, 0.99)) if served else None,
    }  # fmt: skip
