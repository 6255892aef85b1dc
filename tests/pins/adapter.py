"""The only file of the pins that names the package's parts: who moves one changes a line here, and no stored value."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from experiments.flash.methods import METHODS as FLASH
from experiments.freqcache import METHODS as FREQCACHE
from experiments.split.simulated import LatencyApart
from tests.decodings import DECODINGS
from tests.tiny import needs_bundle

from specact.errors import ObservationError
from specact.execution.player import WAIT, LateVerdicts
from specact.execution.schedule import Execution
from specact.families.chunks.pair import PairSettings
from specact.families.chunks.policy import Inpainting
from specact.families.codes.sampling import CodeDistribution, sample_codes, verify
from specact.gates.audit import DriftAlarm, RunningMean, expected_true_skip
from specact.gates.calibration import calibrated_gate, threshold_for_rate
from specact.gates.controller import Controller, RateBudget
from specact.gates.gate import Gate
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.calibrate import find_threshold
from specact.lab.rollout.steps import REASONS
from specact.lab.rollout.timed import TimedDrafter
from specact.lab.tised.equations import chunk_s, exact_task_s, optimum, stall_s, task_s
from specact.lab.train.split import split_bundle
from specact.load import load_pair, load_policy, make_pair
from specact.observation import ObservationHistory
from specact.pair import Answer, LocalTarget, Pending, checked
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, stream
from specact.robot.chunks import ChunkRunner
from specact.robot.inference import Finished, LocalSource
from specact.safety import Fallback
from specact.systems import freqcache as frequency
from specact.systems.heisd import VerifySkip
from specact.systems.roboecc import (
    MAX_EXCHANGES,
    RoboeccRule,
    SmallestTotal,
    StageCosts,
    adjusted_cut,
    best_cut,
    total_s,
)
from specact.systems.staged import SplitExchange, kind_at, unpack
from specact.types import Miss, OffloadTimes, Outcome, StepRecord, VirtualClock
from specact.wire.exchange import Request, VerifyingExchange
from specact.wire.messages import Reply, ask, encode, read_ask, read_reply, request_of

# Used by the cases as they are.
__all__ = [
    "CodeDistribution", "Role", "StageCosts", "adjusted_cut", "best_cut",
    "calibrated_gate", "chunk_s", "exact_task_s", "expected_true_skip", "optimum",
    "sample_codes", "stall_s", "stream", "task_s", "threshold_for_rate", "total_s", "verify",
]  # fmt: skip


_METHODS = {**FLASH, **FREQCACHE}
# By name: draft, target, executed actions, tolerance, overlap.
CHUNK_PAIRS = {
    "chunks-whole": ("metaworld-draft", "metaworld-flow", 4, 0.0, "drop"),
    "chunks-regression": ("metaworld-draft", "metaworld-flow", 3, 0.045, "drop"),
    "chunks-average": ("metaworld-draft", "metaworld-flow", 2, 0.04, "average"),
    "chunks-codes": ("pusht#draft", "pusht-flow", 4, 0.12, "drop"),
}


@cache
def pair(source: str) -> Any:
    """A packaged pair, ``NAME``; of tokens or a flow with a system, ``NAME/SYSTEM``; or one of :data:`CHUNK_PAIRS`."""
    name, _, system = source.partition("/")
    if name in CHUNK_PAIRS:
        draft, target, execute, within, overlap = CHUNK_PAIRS[name]
        settings = PairSettings(execute, within, overlap, target_steps=3)  # type: ignore[arg-type]
        with TemporaryDirectory() as folder:
            return make_pair(Path(folder) / "pair", draft, target, settings)
    found = _loaded(name, "metaworld-draft" if "policy" in system else None)
    if not system:
        return found
    # Loading once for all systems saves time.
    parts = {"decoding": DECODINGS[system]} if name.endswith("tokens") else {"rounds": _METHODS[system].composition}
    return found.composed(**parts)


@cache
def _loaded(name: str, draft: str | None) -> Any:
    needs_bundle(name)
    return load_pair(name, draft=draft)


def gate(pair: Any, name: str, threshold: float = 0.0, max_skips: int | None = None, **options: Any) -> Gate:
    """A gate for a pair with a threshold of our own (for ``random`` its rate)."""
    return GateSettings(name, threshold, max_skips=max_skips, options=tuple(options.items())).build(pair)


def policy(pair: Any, decides: Gate, *, seed: int) -> Any:
    """A robot's policy with the pair's target in this process."""
    return SpeculativePolicy(pair, decides, seed=seed)


def own_gate(pair: Any) -> Gate:
    """The gate that a decoding names."""
    composition = getattr(pair.parts, "decoding", None) or pair.parts.rounds
    return gate(pair, composition.gate, 0.5)


def evidence(record: StepRecord) -> dict[str, Any]:
    """What the families know of a step beyond its actions."""
    drafted, outcome = record.proposal.evidence, record.outcome
    found = None if outcome is None else outcome.evidence
    if hasattr(drafted, "codes"):
        known = {"drafted codes": drafted.codes, "draft's probabilities": drafted.draft.probs[0]}
        verdict = None if found is None else found.verdict
        return known | {name: getattr(verdict, name, None) for name in ("codes", "rejection")}
    if drafted is None:
        return {}
    asked, names = getattr(drafted, "request", drafted), {}
    if hasattr(drafted, "feature"):
        known = {"retrieved": drafted.retrieved, "tolerance": asked.rule.each}
        known |= {name: getattr(asked, name) for name in ("candidates", "tail")}
        names = {"passes": "accepted"} | {name: name for name in ("tokens", "sources", "read", "rejected")}
    else:
        known = {"full asked": asked.full, "held": asked.held, "reused": None if found is None else found.reused}
        names = {"kept": "accepted"} | {name: name for name in ("full", "checked", "switches", "deviation")}
    return known | ({} if found is None else {key: getattr(found, name) for key, name in names.items()})


def simulate(env: str, pair: Any, observation: Any, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Observations of one episode in which a pair acts, hybrid, in its simulator."""
    robot = SimulatedRobot(load_task(env, observation))
    policy = SpeculativePolicy(pair, gate(pair, "always"), seed=seed)
    robot.start(seed)
    for _ in range(steps):
        observed = robot.observe()
        yield {name: np.copy(observed[name]) for name in observation.fields} | (
            {"instruction": observed["instruction"]} if observation.instruction else {}
        )
        robot.act(policy.act(observed))
    robot.close()


def with_grippers(flow: Any, *dimensions: int) -> Any:
    """A flow policy's pair, with dimensions of its actions taken as grippers by FLASH's guards."""
    return flow.composed(settings=replace(flow.parts.settings, grippers=dimensions))


def frequencies(before: Any, now: Any, grid: tuple[int, int]) -> dict[str, Any]:
    """FreqCache's choice of tokens between two frames, step by step."""
    planes = [frequency.luma(frame) for frame in (before, now)]
    spectra, shape = [frequency.spectrum(plane) for plane in planes], planes[0].shape
    motion = frequency.phase_correlation(spectra[0], spectra[1], shape)
    earlier = frequency.source_patches(motion, (shape[0] // grid[0], shape[1] // grid[1]), grid)
    edges, entropy = (
        frequency.edge_energy(frequency.patches_of(planes[1], grid)),
        frequency.spectral_entropy(spectra[1]),
    )
    budget = frequency.reuse_budget(entropy, 0.2, 0.9)
    moved = [motion.rows, motion.columns, min(motion.confidence, 1e3)]
    mask = frequency.reused(earlier, edges, budget, 0.3)
    return {"motion": moved, "earlier": earlier, "edges": edges, "entropy": entropy, "budget": budget, "reused": mask}


# ---- inpainting ------------------------------------------------------------------------------------------------------


@cache
def chunk_policy(source: str, steps: int) -> Any:
    """A chunk policy by itself; ``steps`` of a flow."""
    return load_policy(source, steps=steps).policy


def infer(policy: Any, seen: Any, step: int, old: Any = None, weights: Any = None) -> Any:
    """The chunk of a policy for the window that ends with the last observation, inpainted where there is an old one."""
    window = windows_of(policy.spec.observation, seen)[-1]
    given = None if old is None else Inpainting(np.asarray(old, np.float32), np.asarray(weights, np.float32))
    return policy.infer(window, stream(0, Role.VERIFY, step=step), given)


def windows_of(spec: Any, seen: Any) -> list[Any]:
    """The windows that end with each observation."""
    history = ObservationHistory(spec)
    return [history.push(observation) for observation in seen]


# ---- time: a link, late verdicts, real-time chunking, misses ---------------------------------------------------------


@dataclass
class Behind:
    """A target behind a link of a virtual clock: ``took_s`` says how long an answer takes; infinity is a miss."""

    policy: Any
    clock: VirtualClock
    took_s: Callable[[int], float]
    deadline_s: float = math.inf

    def submit(self, window: Any, address: Any) -> Pending[Any]:
        missed = self.took_s(address.step) > self.deadline_s
        arrives_s = self.clock.now() + min(self.took_s(address.step), self.deadline_s)

        def result() -> Any:
            waited = max(0.0, arrives_s - self.clock.now())
            self.clock.sleep(waited)
            times = OffloadTimes(network=waited)
            return Miss("deadline", times) if missed else Answer(self.policy.answer(window, address), times)

        return Pending(result, lambda: arrives_s - self.clock.now() <= 1e-9)


def remote(
    pair: Any, gate_of: Gate, took_s: Callable[[int], float], *, deadline_s: float = math.inf, draft_s: float = 0.0,
    late_for_s: float | None = None, on_miss: Any = "execute_draft", stops_after: int | None = None,
    max_chunk_age_ms: float | None = None, seed: int = 0, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A pair whose target is behind a link, its clock, and the rule for misses; the robot stands still with zeros."""
    clock = VirtualClock()
    still = np.zeros(len(pair.units.centre), np.float32)
    policy = SpeculativePolicy(
        pair,
        gate_of,
        drafter=TimedDrafter(pair.drafter(), clock, draft_s),
        verifier=pair.verifier(Behind(pair.target(), clock, took_s, deadline_s)),
        verdicts=WAIT if late_for_s is None else LateVerdicts(late_for_s),
        fallback=Fallback(on_miss, stops_after, tuple(still), max_chunk_age_ms),
        seed=seed,
        clock=clock,
        **options,
    )
    return policy, clock


def act_blind(policy: Any) -> Any:
    """A control step whose observation cannot be used."""
    return policy.safety.hold(ObservationError("not finite", "not_finite"))


@dataclass
class _Chunks:
    """Inferences of a chunk policy that take the virtual time of a script, one after the other."""

    source: Any
    clock: VirtualClock
    took_s: Callable[[int], float]

    def begin(self, window: Any, address: Any, inpainting: Any) -> Pending[Finished]:
        took = self.took_s(address.step)
        finished, there_s = (
            Finished(address, self.source.ask(window, address, inpainting), took),
            self.clock.now() + took,
        )
        return Pending(lambda: finished, lambda: there_s <= self.clock.now() + 1e-9)

    def wait(self, seconds: float) -> bool:
        return False


def runner(
    policy: Any, kind: Any, execute: int, overlap: int, took_s: Callable[[int], float],
    *, stops_after: int | None = None, max_chunk_age_ms: float | None = None, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A chunk policy on a robot, whose inferences take virtual time; its model of the robot moves by the actions."""
    clock = VirtualClock()
    model = None
    if kind == "roll_forward":
        model = lambda seen, actions: {**seen, "state": seen["state"] + np.float32(0.01) * actions.sum()}  # noqa: E731
    inference = _Chunks(LocalSource(policy), clock, took_s)
    fallback = Fallback("execute_draft", stops_after, (0.0,) * policy.spec.actions, max_chunk_age_ms)
    execution = Execution(kind, execute, overlap)
    return ChunkRunner(inference, execution, roll_forward=model, fallback=fallback, clock=clock, **options), clock


# ---- budgets, drift, calibration -------------------------------------------------------------------------------------


def controlled(pair: Any, name: str, rate: float, **options: Any) -> Gate:
    """A gate under the controller of a transmission rate."""
    return Controller(gate(pair, name, **options), RateBudget(rate), window=8, horizon=4.0)


def audited(of: Gate, rate: float) -> Gate:
    """A gate that audits a share of the steps it would skip."""
    of.audit_rate = rate
    return of


def verify_skip(threshold: float, reach: int | None) -> Gate:
    """HeiSD's gate with bounds of our own."""
    return VerifySkip(threshold, reach=reach)


def alarm(values: Any, level: float, **options: Any) -> int | None:
    """After how many values the drift alarm is raised."""
    found = DriftAlarm(level, **options)
    return next((index for index, value in enumerate(values) if found.take(value)), None)


def running_mean(values: Any) -> list[float | None]:
    """Mean and confidence interval of values in [0, 1]."""
    mean = RunningMean()
    for value in values:
        mean.take(value)
    found = mean.estimate()
    return [found.mean, found.low, found.high]


def find_gate(
    pair: Any, name: str, rate: float, rounds: int, scores: Callable[[Gate], list[Any]], **options: Any
) -> Any:
    """A calibration on decisions that a function of the tried gate gives; thresholds, ties and rates of its rounds."""

    def roll(settings: GateSettings, number: int) -> dict[str, Any]:
        made = scores(settings.build(pair))
        return {
            "score": np.array([one.score for one in made]),
            "reason": np.array([REASONS.index(one.reason) for one in made]),
            "transmitted": np.array([one.transmit for one in made]),
        }

    found = find_threshold(GateSettings(name, options=tuple(options.items())), rate, rounds, roll)
    tried = [*((one.settings, one.rate) for one in found.rounds), (found.settings, found.checked["transmitted"].mean())]
    return [[settings.threshold, settings.tie_probability, rate] for settings, rate in tried]


# ---- stages, planner -------------------------------------------------------------------------------------------------


@cache
def staged(bundle: str) -> Any:
    """A packaged target in stages, as ``specact split`` makes them."""
    with TemporaryDirectory() as folder:
        return split_bundle(bundle, Path(folder) / "stages")


def at_cut(stages: Any, window: Any, cut: int, precision: Any) -> list[Any]:
    """The network's outputs where a server has run ``cut`` stages and sent what it has at a precision."""
    if cut == 0:
        return list(stages.run([window]))
    arrays = _exchange(
        SplitExchange(stages), kind_at(stages.spec, cut, precision), Request(window, StepAddress(0, 0, 0, 0))
    )
    if cut == stages.spec.stages:
        return [arrays[name].reshape(1, *shape) for name, shape in stages.spec.outputs.items()]
    return list(stages.finish(unpack(arrays, stages.spec.activations[cut - 1]), cut))


def chosen_cuts(costs: dict[str, Any], chooser: str, bandwidths: Any, latency_s: float, **options: Any) -> list[int]:
    """The cuts of successive inferences on a link of given bandwidths."""
    known = StageCosts(**costs)
    pool = range(known.stages + 1)
    kind = (
        RoboeccRule if chooser == "roboecc" else LatencyApart if options.pop("latency_apart", False) else SmallestTotal
    )
    choose, past, cut, cuts = kind(known, pool, **options), deque[tuple[float, float]](maxlen=MAX_EXCHANGES), 0, []
    for bytes_s in bandwidths:
        cut = choose(cut, past)
        cuts.append(cut)
        crossing = known.crossing()[cut]
        if cut:
            past.append((crossing, latency_s + crossing / bytes_s))
    return cuts


# ---- the wire --------------------------------------------------------------------------------------------------------


def _exchange(exchange: Any, kind: str, request: Request) -> Any:
    """A request as bytes to an exchange's server side, and the arrays of its reply as bytes back."""
    contract = exchange.contract
    (arrays,) = exchange.answer(kind, [request_of(read_ask(encode(ask(request, contract, kind, 1, 100.0))), contract)])
    if isinstance(arrays, Exception):
        raise arrays
    layout = contract.kinds[kind].reply
    reply = read_reply(encode(Reply(1, 0.0, 1.0, 1.0, 1, layout.pack(arrays))))
    assert isinstance(reply, Reply)
    return layout.unpack(reply.arrays)


@dataclass
class _Served:
    pair: Any

    def answer(self, window: Any, address: Any) -> Any:
        exchange = self.pair.exchange
        return exchange.read(_exchange(exchange, "infer", Request(window, address)))


def over_the_wire(pair: Any, record: StepRecord) -> dict[str, Outcome]:
    """The outcome of a step's proposal by a server in this process, by the place where it is sampled."""
    exchange, proposal, address = pair.exchange, record.proposal, record.address
    found = {}
    if exchange.contract.step_kind == "infer":
        found["device"] = pair.verifier(LocalTarget(_Served(pair))).submit(proposal, address).result()
    if isinstance(exchange, VerifyingExchange):
        arrays = _exchange(exchange, "verify", Request(proposal.window, address, exchange.request(proposal)))
        found["server"] = checked(exchange.outcome(arrays, OffloadTimes()), proposal)
    return found
