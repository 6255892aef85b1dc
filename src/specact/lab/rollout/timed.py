"""Policies and gates that take time on a clock of ours, whatever they took in truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.clock import Clock
from specact.families.flash.verify import FlashVerifier, Round
from specact.families.freqcache.cached import FreqCached
from specact.gates.gate import Gate
from specact.observation import Window
from specact.pair import Drafter, FollowingDrafter
from specact.rng import StepAddress
from specact.types import Miss, Outcome, Proposal, StepRecord, value
from specact.verification import Pending, TargetPolicy

A = TypeVar("A")


class TimedDrafter:
    """A :class:`~specact.pair.Drafter` whose proposals take an accounted time.

    Args:
        drafter: gives the proposals.
        clock: on which the time goes by.
        latency_s: how much of it, >= 0.
    """

    def __init__(self, drafter: Drafter, clock: Clock, latency_s: float) -> None:
        self._drafter, self._clock, self._latency_s = drafter, clock, latency_s

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafter's."""
        self._clock.sleep(self._latency_s)
        return self._drafter.propose(window, rng)

    def reset(self) -> None:
        """The drafter's, as the following are, where it follows its robot."""
        if isinstance(self._drafter, FollowingDrafter):
            self._drafter.reset()

    def update(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        if isinstance(self._drafter, FollowingDrafter):
            self._drafter.update(drafted, executed)

    def learn(self, record: StepRecord) -> None:
        if isinstance(self._drafter, FollowingDrafter):
            self._drafter.learn(record)


class TimedTarget(Generic[A]):
    """A :class:`~specact.verification.TargetPolicy` whose answers take an accounted time; arguments as above."""

    def __init__(self, policy: TargetPolicy[A], clock: Clock, latency_s: float) -> None:
        self._policy, self._clock, self._latency_s = policy, clock, latency_s

    def answer(self, window: Window, address: StepAddress) -> A:
        """The policy's."""
        self._clock.sleep(self._latency_s)
        return self._policy.answer(window, address)


class TimedRounds:
    """The verifier of a flow in rounds, which take an accounted time.

    Args:
        verifier: gives the outcomes.
        clock: on which the time goes by.
        takes: the seconds of a round in which a share of the cameras' tokens was reused.
    """

    def __init__(self, verifier: FlashVerifier, clock: Clock, takes: Callable[[Round, float], float]) -> None:
        self._verifier, self._clock, self._takes = verifier, clock, takes

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """Nothing leaves ahead."""
        return False

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """The verifier's."""
        return _TimedRound(self, self._verifier.submit(proposal, address), proposal.evidence.question.parts)

    def spend(self, found: Round, reused: float) -> None:
        """Lets the time of a round go by."""
        self._clock.sleep(self._takes(found, reused))


@value
class _TimedRound:
    rounds: TimedRounds
    pending: Pending[Outcome]
    parts: FreqCached | None

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> Outcome | Miss:
        found = self.pending.result()
        if isinstance(found, Outcome):
            self.rounds.spend(found.evidence, 0.0 if self.parts is None else self.parts.share)
        return found


class TimedGate(Gate):
    """Another gate, whose decisions take an accounted time.

    Args:
        gate: gives the scores; its threshold and limits hold.
        clock: on which the time goes by.
        latency_s: how much of it per decision, >= 0.
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

    def update(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        self._gate.update(drafted, executed)

    def learn(self, record: StepRecord) -> None:
        self._gate.learn(record)


class Prepared(Generic[A]):
    """What a policy says of the present step, because it was asked beforehand, in a batch with others."""

    def __init__(self) -> None:
        self.prepared: A | None = None

    def answer(self, window: Window, address: StepAddress) -> A:
        """As a :class:`~specact.verification.TargetPolicy`."""
        assert self.prepared is not None
        return self.prepared

    def infer(self, window: Window, rng: object = None) -> A:
        """As a policy of any family."""
        assert self.prepared is not None
        return self.prepared
