"""Policies, gates and targets with accounted times, over a simulated link; and with measured ones, in lock step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.execution.schedule import NOW_S
from specact.families.tokens.pair import TokenParts
from specact.families.tokens.speculative import Tokens
from specact.families.tokens.verify import token_outcome
from specact.gates.gate import Gate
from specact.links.model import Link, round_trip
from specact.observation import Window
from specact.pair import Answer, Drafter, Follower, Pending, TargetPolicy, Verifier, checked
from specact.rng import StepAddress
from specact.systems.flash import Round
from specact.types import CLOCK, Clock, Miss, OffloadTimes, Outcome, Proposal, StepRecord
from specact.wire.exchange import Contract

A = TypeVar("A")


class _Forwarding(Follower):
    """Forwards everything to another follower."""

    _follower: Follower

    def reset(self) -> None:
        super().reset()
        self._follower.reset()

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        self._follower.on_action(drafted, executed)

    def on_inference(self, record: StepRecord) -> None:
        self._follower.on_inference(record)

    def on_verified(self, record: StepRecord) -> None:
        self._follower.on_verified(record)


class TimedDrafter(_Forwarding):
    """A :class:`~specact.pair.Drafter` whose proposals, another one's, take an accounted time on a clock."""

    def __init__(self, drafter: Drafter, clock: Clock, latency_s: float) -> None:
        self._drafter, self._clock, self._latency_s = drafter, clock, latency_s
        self._follower = drafter if isinstance(drafter, Follower) else Follower()

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The proposal of the drafter."""
        self._clock.sleep(self._latency_s)
        return self._drafter.propose(window, rng)


class TimedRounds:
    """A verifier of a flow policy whose rounds, those of another one, take the accounted time ``duration_s``."""

    def __init__(self, verifier: Verifier, clock: Clock, duration_s: Callable[[Round], float]) -> None:
        self._verifier, self._clock, self._duration_s = verifier, clock, duration_s

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """The answer of the verifier."""

        def spend(outcome: Outcome) -> Outcome:
            self._clock.sleep(self._duration_s(outcome.evidence))
            return outcome

        return self._verifier.submit(proposal, address).then(spend)


class TimedGate(_Forwarding, Gate):
    """A gate that decides as another one, with its threshold and limits, in an accounted time on a clock."""

    def __init__(self, gate: Gate, clock: Clock, latency_s: float) -> None:
        names = ("threshold", "tie_probability", "max_skips", "force_first", "audit_rate")
        super().__init__(**{name: getattr(gate, name) for name in names})
        self._follower = self._gate = gate
        self._clock, self._latency_s = clock, latency_s

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        """The score of the other gate."""
        self._clock.sleep(self._latency_s)
        return self._gate.score(proposal, rng)


class Prepared(Generic[A]):
    """A policy's output for the current step, which was computed before, in a batch with others."""

    def __init__(self) -> None:
        self.prepared: A | None = None

    def answer(self, window: Window, address: StepAddress) -> A:
        """The prepared output, for a :class:`~specact.pair.TargetPolicy`."""
        assert self.prepared is not None
        return self.prepared

    def infer(self, window: Window, rng: object = None) -> A:
        """The prepared output, for a policy of any family."""
        assert self.prepared is not None
        return self.prepared


@dataclass(frozen=True)
class Route:
    """A link with its randomness, and the sizes of request and reply of one inference, as float32."""

    link: Link
    up_bytes: int
    down_bytes: int
    rng: np.random.Generator

    @classmethod
    def of(cls, link: Link, contract: Contract, rng: np.random.Generator) -> Route:
        """The route of a family's requests and replies, counting arrays without message overhead."""
        return cls(link, *contract.array_bytes, rng)

    def round_trip_s(self, at: float) -> float:
        """Seconds on the link for a request that leaves at ``at`` [s] and its reply."""
        return round_trip(self.link, self.up_bytes, self.down_bytes, at, self.rng)

    def latency(self, inference_s: float) -> Callable[[float], float]:
        """The latency of a remote policy, link included, as a function of the request's time [s]."""
        return lambda at: self.round_trip_s(at) + inference_s


class SimulatedTarget(Generic[A]):
    """A :class:`~specact.pair.Target` over a route, or on the device; its inference takes ``target_s``, no miss."""

    def __init__(self, policy: TargetPolicy[A], route: Route | None, clock: Clock, target_s: float) -> None:
        self._policy, self._route, self._clock, self._target_s = policy, route, clock, target_s

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`~specact.pair.Target`."""
        clock, sent_at = self._clock, self._clock.now()
        network = 0.0 if self._route is None else self._route.round_trip_s(sent_at)
        total_s = network + self._target_s

        def result() -> Answer[A]:
            # Each stage counts with the share of its time that was waited for. An answer that is there takes no time,
            # not even a rounding error of it, in which a world would move.
            remaining = sent_at + total_s - clock.now()
            waited = remaining if remaining > NOW_S else 0.0
            clock.sleep(waited)
            share = waited / total_s if total_s > 0.0 else 0.0
            times = OffloadTimes(network=share * network, target=share * self._target_s)
            return Answer(self._policy.answer(window, address), times)

        return Pending(result, lambda: sent_at + total_s - clock.now() <= NOW_S)


class SharedClock(Clock):
    """The machine's clock for one of several robots, which can be set to leave out what it did for the others."""

    def __init__(self) -> None:
        self._others_s = 0.0

    def now(self) -> float:
        """See :class:`~specact.types.Clock`; monotonic if it is only set to times since the last reading."""
        return super().now() - self._others_s

    def set(self, now: float) -> None:
        """Sets the time [s]."""
        self._others_s += self.now() - now


class TokenBatch:
    """Answers all pending requests of several robots in one batch, at the first :meth:`Pending.result` of them.

    Attributes:
        greedy: tokens of the last batch's requests that were decoded greedily, because nothing was drafted, by address.
    """

    def __init__(self, parts: TokenParts) -> None:
        self._parts, self._target = parts, parts.target()
        self.greedy: dict[StepAddress, Tokens] = {}
        self.pending: list[_Request] = []

    # Finite numbers can still overflow on their way to an action.
    @np.errstate(over="ignore", invalid="ignore")
    def answer(self) -> None:
        """Answers the pending requests; each takes the time of the batch divided by their number."""
        requests, self.pending = self.pending, []
        started = CLOCK.now()
        prefilled = self._target.prefill([request.proposal.window for request in requests])
        decoded = prefilled.decode([request.proposal.evidence for request in requests])
        times = OffloadTimes(target=(CLOCK.now() - started) / len(requests))
        self.greedy = {}
        for request, chunk in zip(requests, decoded, strict=True):
            if sum(chunk.read) == len(chunk.read):
                self.greedy[request.address] = chunk.tokens
            outcome = token_outcome(chunk, self._parts, times)
            request.outcome = checked(outcome, request.proposal)


@dataclass
class BatchVerifier:
    """The :class:`~specact.pair.Verifier` of one robot; a request takes its share of the batch's time on its clock."""

    batch: TokenBatch
    clock: SharedClock

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """See :class:`~specact.pair.Verifier`."""
        request = _Request(proposal, address)
        self.batch.pending.append(request)

        def result() -> Outcome | Miss:
            started = self.clock.now()
            if request.outcome is None:
                self.batch.answer()
            assert request.outcome is not None
            self.clock.set(started + request.outcome.times.total)
            return request.outcome

        return Pending(result)


@dataclass
class _Request:
    proposal: Proposal
    address: StepAddress
    outcome: Outcome | Miss | None = None
