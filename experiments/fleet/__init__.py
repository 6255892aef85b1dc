"""One server, many robots: does it pay to select inferences, or is it enough to limit their rate?

Real policies in virtual time, in lock step by control step: the world does not wait, robots have phases of their own,
and all share one uplink and one target. A robot that waits for a reply holds; one with late verdicts executes its draft
until the verdict comes. A reply is due before the chunk's end; without one the draft is executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from experiments.fleet import tables
from experiments.fleet.server import Request, Server, SharedTarget
from experiments.grid import ROOT, Cell, Run
from experiments.report import Report, glossary
from specact import SpeculativePolicy, load_pair
from specact.execution.player import WAIT, LateVerdicts
from specact.gates import Always, Controller, Gate, Never, RateBudget
from specact.gates.settings import gate_settings
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.families import FamilyRollout, rollout_of
from specact.lab.rollout.methods import METHODS
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.timed import Prepared, TimedGate
from specact.links.link import LINKS
from specact.rng import Role, stream
from specact.server.capacity import ServiceTime
from specact.types import Proposal, VirtualClock

# Pairs with the inferences of a robot a second, and robots that share a server.
PAIRS, FLEETS = {"ball": 4.0, "swarm": 2.5}, (1, 4, 16, 64, 128)
# Robots of a cell, in fleets; episodes of each before those that count, and of these; and room for their numbers.
TOGETHER, WARM_UP, EPISODES, LIFE = max(FLEETS), 2, 6, 1000
HORIZON = 20.0  # inferences, of the controllers: shorter than a life
# A target of 38 ms alone, whose batches grow as measured; a camera frame; the share of the server that is shared out.
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
DISCIPLINES = {
    "draft": Discipline("the draft alone", asks="never"),
    "always": Discipline("asks at every inference and waits", asks="waits"),
    "late always": Discipline("asks at every inference; late verdicts"),
    "late target": Discipline("the target's own actions as soon as they are there", verifier="target"),
    **{score: Discipline(f"waits; asks {where} at the fair share", score, "waits") for score, where in SCORES.items()},
    **{f"late {score}": Discipline(f"asks {where} at the fair share", score) for score, where in SCORES.items()},
    **{f"central {score}": Discipline(f"granted {where}", score, "granted") for score, where in SCORES.items()},
}


def plan(run: Run) -> Iterator[Cell]:
    """A cell per pair, discipline and size of the fleets; the draft asks nobody, and a small fleet may always ask."""
    for size in reversed(FLEETS):
        for name in PAIRS:
            scarce = fair_share(name, size) < 1.0
            for discipline, how in DISCIPLINES.items():
                if (scarce or how.score is None) and (size == 1 or how.asks != "never"):
                    yield Cell(f"{name}/{discipline}/{size}", partial(measure, name, discipline, size))


def report(results: Mapping[str, Any]) -> Report:
    """Success over sizes, contrasts, and what the disciplines are."""
    found = tables.report(results)
    return replace(found, tables=[*found.tables, glossary(DISCIPLINES, "disciplines")])


def service() -> ServiceTime:
    """The measured curve of the ball's target, in proportion, for one of TARGET_S."""
    rows = json.loads((ROOT / "experiments" / "speed" / "results" / "capacity.json").read_text())
    base, each = rows[0]["base_ms"], rows[0]["per_request_ms"]
    return ServiceTime(TARGET_S * base / (base + each), TARGET_S * each / (base + each))


def fair_share(name: str, robots: int) -> float:
    """The rate at which so many robots take LOAD of the server's most."""
    return min(1.0, LOAD * service().most_hz(MOST) / (robots * PAIRS[name]))


def granted_together() -> int:
    """The smallest batch whose throughput is that share."""
    return next(size for size in range(1, MOST + 1) if size / service().of(size) >= LOAD * service().most_hz(MOST))


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


def member(family: FamilyRollout, how: Discipline, server: Server, size: int, place: int, seed: int) -> Member:
    """A robot at the start of its first episode."""
    pair, clock, prepared = family.pair, VirtualClock(), (Prepared[Any](), Prepared[Any]())
    phase = float(stream(seed, Role.LINK, robot=place).uniform(0.0, pair.execute))
    clock.sleep(phase % 1.0 / pair.rate_hz)
    target = SharedTarget(prepared[1], server, clock, pair.execute / pair.rate_hz - 1e-6)
    gate: Gate = Never() if how.asks == "never" else Always()
    if how.score is not None:
        options = ["max_skips=unlimited"] * (how.score != "random")
        inner = gate_settings(how.score, pair, options).build(pair)
        inner.force_first = True
        held = RateBudget(fair_share(pair.env, size))
        gate = Offering(inner, target) if server.grants else Controller(inner, held, horizon=HORIZON)
    policy = SpeculativePolicy(
        pair, gate, drafter=family.drafter(prepared[0]), verifier=family.verifier(target), clock=clock, seed=seed,
        verdicts=WAIT if how.asks == "waits" else LateVerdicts(math.inf), robot=place,
    )  # fmt: skip
    found = Member(policy, SimulatedRobot(load_task(pair.env)), prepared, target, place, phase, how.asks == "waits")
    found.begin()
    return found


def control_step(members: Sequence[Member], family: FamilyRollout) -> None:
    """One control step of robots in the order of their phases; as in other rollouts, all infer in one batch."""
    fresh = [each for each in members if not (each.waits and each.target.request)]
    windows = {id(each): each.policy.observe(each.world.observe()) for each in fresh if each.policy.wants_observation}
    inferring = [each for each in fresh if each.policy.wants_inference]
    if inferring:
        outputs = family.infer([windows[id(each)] for each in inferring], [each.policy.address for each in inferring])
        for each, *of in zip(inferring, *outputs, strict=True):
            for slot, value in zip(each.prepared, of, strict=True):
                slot.prepared = value
    for each in fresh:
        each.policy.ask(windows.get(id(each)))
    for each in members:
        each.act()


def measure(name: str, discipline: str, size: int, folder: Path, run: Run) -> dict[str, Any]:
    """Fleets of a size, together as many robots in every cell."""
    pair, how = load_pair(name), DISCIPLINES[discipline]
    family = rollout_of(pair, replace(METHODS["hybrid"], verifier=how.verifier))
    robots, episodes = (size, 1) if run.quick else (TOGETHER, EPISODES)
    most = granted_together() if how.asks == "granted" else MOST
    one = partial(Server, service(), most, LINK.busy(REQUEST_BYTES, True, 0.0), LINK.rtt_ms / 2e3)
    servers = [one(how.asks == "granted") for _ in range(robots // size)]
    members = [member(family, how, servers[place // size], size, place, run.seed) for place in range(robots)]
    members.sort(key=lambda each: each.phase % 1.0)
    step, end, before = 0, WARM_UP + episodes, 0
    while left := sum(len(each.won) < end for each in members):
        if not before and all(len(each.won) >= WARM_UP for each in members):
            before = sum(each.policy.counts["steps"] for each in members)
            for server in servers:
                server.sent.clear()
        control_step([each for each in members if each.phase < step + 1], family)
        for each in members:
            each.policy.clock.sleep(1.0 / pair.rate_hz)
        step += 1
        run.update("robots", robots - left, robots)
    members.sort(key=lambda each: each.place)
    return summary(
        np.array([each.won[WARM_UP:end] for each in members], float),
        [request for server in servers for request in server.sent],
        sum(each.policy.counts["steps"] for each in members) - before,
    )


def summary(won: NDArray[np.float64], requests: Sequence[Request], inferences: int) -> dict[str, Any]:
    """Of ``won [robots, episodes]``, all requests and the number of inferences."""
    served = [request for request in requests if np.isfinite(request.started)]
    queued = [1e3 * (request.started - request.arrived) for request in served]
    took = [1e3 * (request.replied - request.at) for request in served]
    return {
        "won": ["".join(str(int(each)) for each in row) for row in won],
        "asked": len(requests) / inferences, "served": len(served) / inferences,
        "in_time": sum(request.replied <= request.due for request in served) / inferences,
        "queue_p99_ms": float(np.quantile(queued, 0.99)) if served else None,
        "reply_p50_ms": float(np.quantile(took, 0.5)) if served else None,
        "reply_p99_ms": float(np.quantile(took, 0.99)) if served else None,
    }  # fmt: skip
