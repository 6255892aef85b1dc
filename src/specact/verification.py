"""The interface to the target: a verifier takes a proposal and returns an outcome or a miss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from specact.clock import Clock, RealClock
from specact.errors import MissError
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import Chunk, Miss, OffloadTimes, Outcome, Proposal, value

# Limit on the norm of a normalised chunk; demonstrated actions lie near [-1, 1]. Means, differences and squares of
# numbers up to this are finite in float32, so that computations after decoding cannot overflow.
_MAX_NORM = 1e15

A = TypeVar("A")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A request in flight."""

    def done(self) -> bool:
        """Whether :meth:`result` would return without blocking; always True after the target's deadline."""
        ...

    def result(self) -> T_co | Miss:
        """The result; blocks until it is there, at most until the target's deadline. Call it once."""
        ...


class Verifier(Protocol):
    """Turns a proposal into the actions to execute."""

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """Sends the request ahead of :meth:`submit` for this address, which will probably follow.

        Returns:
            Whether it was sent; never blocks.
        """
        ...

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """Requests the verification of a step; reuses a request that was prefetched for this address."""
        ...

    def submit_now(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome] | None:
        """As :meth:`submit`, but None if the request cannot be sent without blocking."""
        ...


@value
class Answer(Generic[A]):
    """The target's answer for one window, and the time of each stage."""

    value: A
    times: OffloadTimes


class Target(Protocol[A]):
    """The target policy, local or remote; A is its family's type of answer."""

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """See :meth:`Verifier.prefetch`."""
        ...

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """Requests the answer for one window; reuses a request that was prefetched for this address."""
        ...


class TargetPolicy(Protocol[T_co]):
    """The pure function behind a :class:`Target`."""

    def answer(self, window: Window, address: StepAddress) -> T_co:
        """The target's answer for a window; ``address`` selects the random stream of a target that samples."""
        ...


class LocalTarget(Generic[A]):
    """A target in this process; it is computed when its result is requested.

    Args:
        policy: the target.
        clock: measures the inference time.
    """

    def __init__(self, policy: TargetPolicy[A], clock: Clock | None = None) -> None:
        self._policy, self._clock = policy, RealClock() if clock is None else clock

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """True, and nothing is sent: draft and target would share the processor."""
        return True

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`Target`; misses only where the policy asks a server of its own, and that misses."""
        return _PendingAnswer(self._policy, self._clock, window, address)


@value
class _PendingAnswer(Generic[A]):
    policy: TargetPolicy[A]
    clock: Clock
    window: Window
    address: StepAddress

    def done(self) -> bool:
        return True

    def result(self) -> Answer[A] | Miss:
        start = self.clock.now()
        try:
            value = self.policy.answer(self.window, self.address)
        except MissError as error:
            return Miss.of(error, OffloadTimes(target=self.clock.now() - start))
        return Answer(value, OffloadTimes(target=self.clock.now() - start))


class TargetVerifier(ABC, Generic[A]):
    """A :class:`Verifier` that requests the target's answer and verifies the proposal on the device.

    Args:
        target: local or remote.
    """

    def __init__(self, target: Target[A]) -> None:
        self._target = target
        self.prefetch = target.prefetch

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """See :class:`Verifier`."""
        return _PendingOutcome(self, self._target.submit(proposal.window, address), proposal, address)

    def submit_now(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome] | None:
        """See :class:`Verifier`."""
        return self.submit(proposal, address) if self.prefetch(proposal.window, address) else None

    @abstractmethod
    def judge(self, answer: Answer[A], proposal: Proposal, address: StepAddress) -> Outcome:
        """The outcome of a proposal, given the target's answer."""


@value
class _PendingOutcome(Generic[A]):
    verifier: TargetVerifier[A]
    pending: Pending[Answer[A]]
    proposal: Proposal
    address: StepAddress

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> Outcome | Miss:
        answer = self.pending.result()
        if isinstance(answer, Miss):
            return answer
        outcome = with_kept(self._judge(answer), self.proposal)
        return outcome if is_valid(outcome.actions) else Miss("invalid", answer.times)

    # Finite numbers can still overflow on their way to an action.
    @np.errstate(over="ignore", invalid="ignore")
    def _judge(self, answer: Answer[A]) -> Outcome:
        return self.verifier.judge(answer, self.proposal, self.address)


def with_kept(outcome: Outcome, proposal: Proposal) -> Outcome:
    """The outcome; in families without a probability of ``kept``, 1 if its actions are the proposed ones, else 0."""
    if not math.isnan(outcome.kept):
        return outcome
    return replace(outcome, kept=float(np.array_equal(outcome.actions, proposal.actions[: len(outcome.actions)])))


def is_valid(actions: Chunk) -> bool:
    """Whether the normalised actions ``[n, A]`` are finite and their norm is small enough not to overflow later."""
    return bool(np.vdot(actions, actions) <= _MAX_NORM**2)
