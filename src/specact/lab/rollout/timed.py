"""Policies, gates and targets with accounted times on a virtual clock, over a simulated link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.execution.schedule import NOW_S
from specact.gates.gate import Gate
from specact.links.model import Link, round_trip
from specact.observation import Window
from specact.pair import Answer, Drafter, Follower, Pending, TargetPolicy, Verifier
from specact.rng import StepAddress
from specact.systems.flash import Round
from specact.systems.freqcache import FreqCached
from specact.types import Clock, OffloadTimes, Outcome, Proposal, StepRecord
from specact.wire.exchange import Contract

A = TypeVar("A")


class TimedDrafter(Follower):
    """A :class:`~specact.pair.Drafter` whose proposals take an accounted time.

    Args:
        drafter: makes the proposals.
        clock: is advanced.
        latency_s: time of a proposal, >= 0.
    """

    def __init__(self, drafter: Drafter, clock: Clock, latency_s: float) -> None:
        self._drafter, self._clock, self._latency_s = drafter, clock, latency_s
        self._follower = drafter if isinstance(drafter, Follower) else Follower()

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafter's."""
        self._clock.sleep(self._latency_s)
        return self._drafter.propose(window, rng)

    def reset(self) -> None:
        self._follower.reset()

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        self._follower.on_action(drafted, executed)

    def on_inference(self, record: StepRecord) -> None:
        self._follower.on_inference(record)

    def on_verified(self, record: StepRecord) -> None:
        self._follower.on_verified(record)


class TimedTarget(Generic[A]):
    """A :class:`~specact.pair.TargetPolicy` whose answers take an accounted time; arguments as above."""

    def __init__(self, policy: TargetPolicy[A], clock: Clock, latency_s: float) -> None:
        self._policy, self._clock, self._latency_s = policy, clock, latency_s

    def answer(self, window: Window, address: StepAddress) -> A:
        """The policy's."""
        self._clock.sleep(self._latency_s)
        return self._policy.answer(window, address)


class TimedRounds:
    """The verifier of a flow policy, whose rounds take an accounted time.

    Args:
        verifier: makes the outcomes.
        clock: is advanced.
        duration_s: seconds of a round, given it and the reused share of the cameras' tokens.
    """

    def __init__(self, verifier: Verifier, clock: Clock, duration_s: Callable[[Round, float], float]) -> None:
        self._verifier, self._clock, self._duration_s = verifier, clock, duration_s

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """The verifier's."""
        parts: FreqCached | None = proposal.evidence.parts

        def spend(outcome: Outcome) -> Outcome:
            self._clock.sleep(self._duration_s(outcome.evidence, 0.0 if parts is None else parts.share))
            return outcome

        return self._verifier.submit(proposal, address).then(spend)


class TimedGate(Gate):
    """Another gate, whose decisions take an accounted time.

    Args:
        gate: makes the scores; its threshold and limits hold.
        clock: is advanced.
        latency_s: time of a decision, >= 0.
    """

    def __init__(self, gate: Gate, clock: Clock, latency_s: float) -> None:
        super().__init__(
            gate.threshold,
            tie_probability=gate.tie_probability,
            max_skips=gate.max_skips,
            force_first=gate.force_first,
            audit_rate=gate.audit_rate,
        )
        self._gate, self._clock, self._latency_s = gate, clock, latency_s

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        """The other gate's."""
        self._clock.sleep(self._latency_s)
        return self._gate.score(proposal, rng)

    def reset(self) -> None:
        super().reset()
        self._gate.reset()

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        self._gate.on_action(drafted, executed)

    def on_inference(self, record: StepRecord) -> None:
        self._gate.on_inference(record)

    def on_verified(self, record: StepRecord) -> None:
        self._gate.on_verified(record)


class Prepared(Generic[A]):
    """A policy's output for the current step, which was computed before, in a batch with others."""

    def __init__(self) -> None:
        self.prepared: A | None = None

    def answer(self, window: Window, address: StepAddress) -> A:
        """As a :class:`~specact.pair.TargetPolicy`."""
        assert self.prepared is not None
        return self.prepared

    def infer(self, window: Window, rng: object = None) -> A:
        """As a policy of any family."""
        assert self.prepared is not None
        return self.prepared


@dataclass(frozen=True)
class Route:
    """A link, and the payload of one inference, as float32.

    Attributes:
        link: the link.
        up_bytes, down_bytes: sizes of request and reply.
        rng: for the link's randomness.
    """

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
    """A :class:`~specact.pair.Target` over a route; it never misses.

    Args:
        policy: the target.
        route: to it.
        clock: on which the caller waits.
        target_s: time of the target's inference [s].
    """

    def __init__(self, policy: TargetPolicy[A], route: Route, clock: Clock, target_s: float) -> None:
        self._policy, self._route, self._clock, self._target_s = policy, route, clock, target_s

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`~specact.pair.Target`."""
        clock, sent_at = self._clock, self._clock.now()
        network = self._route.round_trip_s(sent_at)
        took = network + self._target_s

        def result() -> Answer[A]:
            # Each stage counts with the share of its time that was waited for. An answer that is there takes no time,
            # not even a rounding error of it, in which a world would move.
            remaining = sent_at + took - clock.now()
            waited = remaining if remaining > NOW_S else 0.0
            clock.sleep(waited)
            share = waited / took if took > 0.0 else 0.0
            times = OffloadTimes(network=share * network, target=share * self._target_s)
            return Answer(self._policy.answer(window, address), times)

        return Pending(result, lambda: sent_at + took - clock.now() <= NOW_S)
