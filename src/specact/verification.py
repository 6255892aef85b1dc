"""The interface to the target: a verifier takes a proposal and returns an outcome or a miss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
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
B = TypeVar("B")
T_co = TypeVar("T_co", covariant=True)


@value
class Pending(Generic[T_co]):
    """A request to the target whose result is not known yet.

    Attributes:
        result: the result, or a miss; blocks until it is there, at most until the target's deadline. Call it once.
        done: whether ``result`` would return without blocking; always True after the deadline.
        sent: whether the request could be sent.
    """

    result: Callable[[], T_co | Miss]
    done: Callable[[], bool] = lambda: True
    sent: bool = True

    def then(self, read: Callable[[T_co], B | Miss]) -> Pending[B]:
        """The request whose result is what ``read`` makes of this one's; a miss remains a miss."""

        def result() -> B | Miss:
            found = self.result()
            return found if isinstance(found, Miss) else read(found)

        return Pending(result, self.done, self.sent)


class Verifier(Protocol):
    """Turns a proposal into the actions to execute."""

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """Requests the verification of a step; does not wait for it."""
        ...


@value
class Answer(Generic[A]):
    """The target's answer for one window, and the time of each stage."""

    value: A
    times: OffloadTimes


class Target(Protocol[A]):
    """The target policy, local or remote; A is its family's type of answer."""

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """Requests the answer for one window; does not wait for it."""
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

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`Target`; misses only where the policy asks a server of its own, and that misses."""

        def result() -> Answer[A] | Miss:
            start = self._clock.now()
            try:
                value = self._policy.answer(window, address)
            except MissError as error:
                return Miss.of(error, OffloadTimes(target=self._clock.now() - start))
            return Answer(value, OffloadTimes(target=self._clock.now() - start))

        return Pending(result)


class TargetVerifier(ABC, Generic[A]):
    """A :class:`Verifier` that requests the target's answer and verifies the proposal on the device.

    Args:
        target: local or remote.
    """

    def __init__(self, target: Target[A]) -> None:
        self._target = target

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        request = self._target.submit(proposal.window, address)
        return request.then(lambda answer: self._outcome(answer, proposal, address))

    # Finite numbers can still overflow on their way to an action.
    @np.errstate(over="ignore", invalid="ignore")
    def _outcome(self, answer: Answer[A], proposal: Proposal, address: StepAddress) -> Outcome | Miss:
        return checked(self.judge(answer, proposal, address), proposal)

    @abstractmethod
    def judge(self, answer: Answer[A], proposal: Proposal, address: StepAddress) -> Outcome:
        """The outcome of a proposal, given the target's answer."""


def checked(outcome: Outcome, proposal: Proposal) -> Outcome | Miss:
    """The outcome with its probability of acceptance, or a miss if its actions cannot be executed."""
    outcome = with_kept(outcome, proposal)
    return outcome if is_valid(outcome.actions) else Miss("invalid", outcome.times)


def with_kept(outcome: Outcome, proposal: Proposal) -> Outcome:
    """The outcome; in families without a probability of ``kept``, 1 if its actions are the proposed ones, else 0."""
    if not math.isnan(outcome.kept):
        return outcome
    return replace(outcome, kept=float(np.array_equal(outcome.actions, proposal.actions[: len(outcome.actions)])))


def is_valid(actions: Chunk) -> bool:
    """Whether the normalised actions ``[n, A]`` are finite and their norm is small enough not to overflow later."""
    return bool(np.vdot(actions, actions) <= _MAX_NORM**2)
