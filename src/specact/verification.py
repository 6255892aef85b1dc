"""The seam to the target: a proposal goes out, an outcome or a miss comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

import numpy as np

from specact.clock import Clock, RealClock
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import Chunk, Miss, OffloadTimes, Outcome, Proposal, value

# Length of a normalised chunk; demonstrated actions lie near [-1, 1]. Means, differences and squares of numbers up to
# this are finite in float32, so that nothing after decoding can overflow.
_LONGEST = 1e15

A = TypeVar("A")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Something that was asked for."""

    def done(self) -> bool:
        """Whether :meth:`result` would return at once; False for no longer than the target's deadline."""
        ...

    def result(self) -> T_co | Miss:
        """What came of it; the caller waits, but never longer than the target's deadline. To be called once."""
        ...


class Verifier(Protocol):
    """Turns a proposal into the actions to execute."""

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """Says that :meth:`submit` will probably follow for this address, so that the request can leave now.

        Returns:
            Whether it left; never waits.
        """
        ...

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """Asks about a step; takes up what was prefetched for this address."""
        ...


@value
class Answer(Generic[A]):
    """What the target said of one window, and where the time went."""

    value: A
    times: OffloadTimes


class Target(Protocol[A]):
    """The target policy, wherever it runs; A is what its family answers with."""

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """See :meth:`Verifier.prefetch`."""
        ...

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """Asks about one window; takes up what was prefetched for this address."""
        ...


class TargetPolicy(Protocol[T_co]):
    """The pure function behind a :class:`Target`."""

    def answer(self, window: Window, address: StepAddress) -> T_co:
        """What the target says of a window; the address is that of its random stream, where it needs one."""
        ...


class LocalTarget(Generic[A]):
    """A target in this process; it is computed when its result is wanted.

    Args:
        policy: the target.
        clock: tells how long it took.
    """

    def __init__(self, policy: TargetPolicy[A], clock: Clock | None = None) -> None:
        self._policy, self._clock = policy, RealClock() if clock is None else clock

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """Nothing is gained here: draft and target would share the processor."""
        return True

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`Target`; never misses."""
        return _Local(self._policy, self._clock, window, address)


@value
class _Local(Generic[A]):
    policy: TargetPolicy[A]
    clock: Clock
    window: Window
    address: StepAddress

    def done(self) -> bool:
        return True

    def result(self) -> Answer[A]:
        start = self.clock.now()
        value = self.policy.answer(self.window, self.address)
        return Answer(value, OffloadTimes(target=self.clock.now() - start))


class TargetVerifier(ABC, Generic[A]):
    """A :class:`Verifier` that asks for the target's answer and judges the proposal here.

    Args:
        target: where the answers come from.
    """

    def __init__(self, target: Target[A]) -> None:
        self._target = target
        self.prefetch = target.prefetch

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """See :class:`Verifier`."""
        return _Judged(self, self._target.submit(proposal.window, address), proposal, address)

    @abstractmethod
    def judge(self, answer: Answer[A], proposal: Proposal, address: StepAddress) -> Outcome:
        """What is to be executed, given what the target says."""


@value
class _Judged(Generic[A]):
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
        outcome = self.judged(answer)
        return outcome if sound(outcome.actions) else Miss("invalid", answer.times)

    # Finite numbers can still overflow on their way to an action.
    @np.errstate(over="ignore", invalid="ignore")
    def judged(self, answer: Answer[A]) -> Outcome:
        return self.verifier.judge(answer, self.proposal, self.address)


def sound(actions: Chunk) -> bool:
    """Whether every normalised action ``[n, A]`` is a number that what follows can compute with; NaN is none."""
    return bool(np.vdot(actions, actions) <= _LONGEST**2)
