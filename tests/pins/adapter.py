"""What the cases play and pin: observations, packaged pairs, targets behind links of a virtual clock, the wire."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from experiments.flash import METHODS as FLASH
from experiments.freqcache import METHODS as FREQCACHE
from numpy.typing import NDArray
from tests.decodings import DECODINGS
from tests.served import served
from tests.tiny import needs_bundle

from specact.execution.player import WAIT, LateVerdicts
from specact.execution.schedule import Execution
from specact.families.chunks.pair import PairSettings
from specact.families.chunks.policy import Inpainting
from specact.gates.gate import Gate
from specact.gates.settings import GateSettings
from specact.lab.rollout.timed import TimedDrafter
from specact.load import load_pair, load_policy, make_pair
from specact.observation import ObservationHistory
from specact.pair import Answer, LocalTarget, Pending, checked
from specact.policy import SpeculativePolicy
from specact.rng import Role, stream
from specact.robot.chunks import ChunkRunner, Finished, LocalSource
from specact.safety import Fallback
from specact.types import Miss, OffloadTimes, Outcome, StepRecord, VirtualClock
from specact.wire.exchange import Request, VerifyingExchange

OBSERVATIONS = Path(__file__).parent / "observations"
Values = dict[str, Any]
# Relative noise on the observations, and its seed; only while recording.
observation_noise: tuple[float, int] = (0.0, 0)
_METHODS = {**FLASH, **FREQCACHE}
# By name: draft, target, executed actions, tolerance, overlap.
CHUNK_PAIRS = {
    "chunks-whole": ("metaworld-draft", "metaworld-flow", 4, 0.0, "drop"),
    "chunks-regression": ("metaworld-draft", "metaworld-flow", 3, 0.045, "drop"),
    "chunks-average": ("metaworld-draft", "metaworld-flow", 2, 0.04, "average"),
    "chunks-codes": ("pusht#draft", "pusht-flow", 4, 0.12, "drop"),
}


@cache
def _arrays(name: str) -> dict[str, NDArray[Any]]:
    with np.load(OBSERVATIONS / f"{name}.npz", allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def observations(name: str, count: int, skip: int = 0, episode: int = 0) -> list[dict[str, Any]]:
    """Consecutive observations of a recorded episode."""
    scale, seed = observation_noise
    rng, rows = np.random.default_rng(seed), []
    for step in range(skip, skip + count):
        row: dict[str, Any] = {key: array[episode, step] for key, array in _arrays(name).items()}
        for key, value in row.items():
            if value.dtype == np.float32 and scale:
                row[key] = (value * (1.0 + scale * rng.standard_normal(value.shape))).astype(np.float32)
            elif value.dtype.kind == "U":
                row[key] = str(value)
        rows.append(row)
    assert len(rows) == count
    return rows


def play(policy: Any, seen: Sequence[Any], before: Callable[[int], object] = lambda step: None) -> Values:
    """One observation per control step; the pinned values by control step, and by inference."""
    actions, origins, records = [], [], {}
    for step, observation in enumerate(seen):
        before(step)
        actions.append(policy.act(observation))
        origins.append(None if policy.origin is None else policy.origin.name)
        if policy.record is not None:
            # A late verdict replaces the record of its inference.
            records[policy.record.address.step] = policy.record
    inferences = [_inference(records[step]) for step in sorted(records)]
    # Which tokens were reused was pinned for the last inference only, and so stands at each.
    if reused := inferences[-1].get("reused"):
        inferences = [inference | {"reused": reused} for inference in inferences]
    return {
        "actions": actions,
        "origins": origins,
        "counts": dict(sorted(policy.counts.items())),
        "inferences": inferences,
    }


def _inference(record: Any) -> Values:
    decision, outcome = record.decision, record.outcome
    return {
        "transmit": decision.transmit,
        "reason": decision.reason,
        "score": decision.score,
        "drafted": record.proposal.actions[0],
        "origins": sorted(set(record.origins.tolist())),
        "length": len(record.actions),
        "miss": record.miss,
        "verified": None if outcome is None else [outcome.verified, outcome.accepted, outcome.kept],
        **evidence(record),
    }


@cache
def pair_of(source: str) -> Any:
    """A packaged pair, ``NAME``; of tokens or a flow with a system, ``NAME/SYSTEM``; or one of :data:`CHUNK_PAIRS`."""
    name, _, system = source.partition("/")
    if name in CHUNK_PAIRS:
        draft, target, execute, within, overlap = CHUNK_PAIRS[name]
        settings = PairSettings(execute, within, overlap, target_steps=3)  # type: ignore[arg-type]
        with TemporaryDirectory() as folder:
            return make_pair(Path(folder) / "pair", draft, target, settings)
    pair = _loaded(name, "metaworld-draft" if "policy" in system else None)
    if not system:
        return pair
    # Loading once for all systems saves time.
    parts = {"decoding": DECODINGS[system]} if name.endswith("tokens") else {"rounds": _METHODS[system].composition}
    return pair.composed(**parts)


@cache
def _loaded(name: str, draft: str | None) -> Any:
    needs_bundle(name)
    return load_pair(name, draft=draft)


def gate_of(pair: Any, name: str, threshold: float = 0.0, max_skips: int | None = None, **options: Any) -> Gate:
    """A gate for a pair with a threshold of our own (for ``random`` its rate)."""
    return GateSettings(name, threshold, max_skips=max_skips, options=tuple(options.items())).build(pair)


def evidence(record: StepRecord) -> dict[str, Any]:
    """What the families know of a step beyond its actions."""
    drafted, outcome = record.proposal.evidence, record.outcome
    answer = None if outcome is None else outcome.evidence
    if hasattr(drafted, "codes"):
        known = {"drafted codes": drafted.codes, "draft's probabilities": drafted.draft.probs[0]}
        return known | {name: getattr(answer, name, None) for name in ("codes", "rejection")}
    if drafted is None:
        return {}
    names = {}
    if hasattr(drafted, "feature"):
        known = {name: getattr(drafted, name) for name in ("retrieved", "candidates", "tail")}
        known["tolerance"] = drafted.rule.each
        names = {"passes": "accepted"} | {name: name for name in ("tokens", "sources", "read", "rejected")}
    else:
        known = {"full asked": drafted.full, "held": drafted.held, "reused": None if answer is None else answer.reused}
        names = {"kept": "accepted"} | {name: name for name in ("full", "checked", "switches", "deviation")}
    return known | ({} if answer is None else {key: getattr(answer, name) for key, name in names.items()})


@cache
def chunk_policy(source: str, steps: int) -> Any:
    """A chunk policy by itself; ``steps`` of a flow."""
    return load_policy(source, steps=steps).policy


def infer(policy: Any, seen: Any, step: int, old: Any = None, weights: Any = None) -> Any:
    """The chunk of a policy for the window that ends with the last observation, inpainted where there is an old one."""
    given = None if old is None else Inpainting(np.asarray(old, np.float32), np.asarray(weights, np.float32))
    return policy.infer(window_of(policy.spec.observation, seen), stream(0, Role.VERIFY, step=step), given)


def window_of(spec: Any, seen: Any) -> Any:
    """The window that ends with the last observation."""
    history = ObservationHistory(spec)
    return [history.push(observation) for observation in seen][-1]


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
    pair: Any, gate: Gate, took_s: Callable[[int], float], *, deadline_s: float = math.inf, draft_s: float = 0.0,
    late_for_s: float | None = None, on_miss: Any = "execute_draft", stops_after: int | None = None,
    max_chunk_age_ms: float | None = None, seed: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """A pair whose target is behind a link, and its clock; the robot stands still with zeros."""
    clock = VirtualClock()
    still = np.zeros(len(pair.units.centre), np.float32)
    policy = SpeculativePolicy(
        pair, gate, drafter=TimedDrafter(pair.drafter(), clock, draft_s),
        verifier=pair.verifier(Behind(pair.target(), clock, took_s, deadline_s)),
        verdicts=WAIT if late_for_s is None else LateVerdicts(late_for_s),
        fallback=Fallback(on_miss, stops_after, tuple(still), max_chunk_age_ms), seed=seed, clock=clock,
    )  # fmt: skip
    return policy, clock


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


def runner_of(
    policy: Any, kind: Any, execute: int, overlap: int, took_s: Callable[[int], float],
    *, stops_after: int | None = None, max_chunk_age_ms: float | None = None, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A chunk policy on a robot, whose inferences take virtual time; its model of the robot moves by the actions."""
    clock = VirtualClock()
    model = None
    if kind == "roll_forward":
        model = lambda seen, actions: {**seen, "state": seen["state"] + np.float32(0.01) * actions.sum()}  # noqa: E731
    fallback = Fallback("execute_draft", stops_after, (0.0,) * policy.spec.actions, max_chunk_age_ms)
    inference: Any = _Chunks(LocalSource(policy), clock, took_s)
    execution = Execution(kind, execute, overlap)
    return ChunkRunner(inference, execution, roll_forward=model, fallback=fallback, clock=clock, **options), clock


# ---- the wire --------------------------------------------------------------------------------------------------------


def exchanged(exchange: Any, kind: str, request: Request) -> Any:
    """The arrays of a server's reply; request and reply are bytes in between."""
    (arrays,) = served(exchange, kind, [request])
    if isinstance(arrays, Exception):
        raise arrays
    return arrays


@dataclass
class _Served:
    exchange: Any

    def answer(self, window: Any, address: Any) -> Any:
        return self.exchange.read(exchanged(self.exchange, "infer", Request(window, address)))


def over_the_wire(pair: Any, record: StepRecord) -> dict[str, Outcome]:
    """The outcome of a step's proposal by a server in this process, by the place where it is sampled."""
    exchange, proposal, address = pair.exchange, record.proposal, record.address
    outcomes: dict[str, Any] = {}
    if exchange.contract.step_kind == "infer":
        outcomes["device"] = pair.verifier(LocalTarget(_Served(exchange))).submit(proposal, address).result()
    if isinstance(exchange, VerifyingExchange):
        arrays = exchanged(exchange, "verify", Request(proposal.window, address, exchange.request(proposal)))
        outcomes["server"] = checked(exchange.outcome(arrays, OffloadTimes()), proposal)
    return outcomes


# ---- comparison: values as those of JSON -----------------------------------------------------------------------------

# Stands for a value that is not pinned, because it hangs on the last bits of a processor.
LEFT_OUT = "*"
# Of numbers, times their magnitude where that is above 1.
TOLERANCE = 1e-4


def plain(value: Any) -> Any:
    """As values of JSON, numbers with eight significant digits."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    return float(f"{value:.8g}") if isinstance(value, float) else value


def differences(stored: Any, values: Any, numbers: float = TOLERANCE, path: str = "") -> list[str]:
    """What differs, one line each: everything exactly, but for numbers with a fraction."""
    if stored == LEFT_OUT:
        return []
    if isinstance(stored, dict) and isinstance(values, dict) and stored.keys() == values.keys():
        return [line for key in stored for line in differences(stored[key], values[key], numbers, f"{path}/{key}")]
    if isinstance(stored, list) and isinstance(values, list) and len(stored) == len(values):
        pairs = enumerate(zip(stored, values, strict=True))
        return [line for index, both in pairs for line in differences(*both, numbers, f"{path}/{index}")]
    if type(stored) is float and type(values) is float:
        same = stored == values or abs(stored - values) <= numbers * max(1.0, abs(stored))
    else:
        same = type(stored) is type(values) and stored == values
    return [] if same else [f"{path}: {stored!r:.60} was pinned, {values!r:.60} was found"]
