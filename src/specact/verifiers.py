"""What the target makes of a proposal: exact speculative verification, or simply the target's own codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from specact.clock import Clock, RealClock
from specact.families.codes.spec import CodePolicy
from specact.families.codes.tokenizer import ActionTokenizer
from specact.sampling import sample_codes, verify
from specact.types import CodeDistribution, OffloadTimes, Proposal, Verdict, Window

Cause = Literal["deadline", "disconnected", "overloaded", "expired", "refused", "invalid"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The target's distribution for one window, and where the time went."""

    target: CodeDistribution
    times: OffloadTimes


@dataclass(frozen=True, slots=True)
class Miss:
    """The target could not be had in time.

    Attributes:
        cause: ``deadline``: no reply in time; ``disconnected``: no connection when the step was due;
            ``overloaded``, ``expired``: the server had no room, or no time left, for it; ``refused``: the server
            answered with an error; ``invalid``: the reply was not one to act on, or decodes to no finite action.
        times: what was waited for.
        sent: whether a request left.
    """

    cause: Cause
    times: OffloadTimes
    sent: bool = True


class Target(Protocol):
    """The target policy, wherever it runs."""

    def prefetch(self, window: Window) -> bool:
        """Says that :meth:`ask` will probably follow for this very window, so that the request can leave now.

        Returns:
            Whether it could leave.
        """
        ...

    def pending(self, window: Window) -> bool:
        """Whether :meth:`ask` would have to wait for what was prefetched for this very window."""
        ...

    def ask(self, window: Window) -> Answer | Miss:
        """The target's distribution; the caller waits, but never longer than the target's deadline."""
        ...


class LocalTarget:
    """A target in this process.

    Args:
        policy: the target.
        clock: tells how long it took.
    """

    def __init__(self, policy: CodePolicy, clock: Clock | None = None) -> None:
        self._policy, self._clock = policy, RealClock() if clock is None else clock

    def prefetch(self, window: Window) -> bool:
        """Nothing is gained here: draft and target would share the processor."""
        return True

    def pending(self, window: Window) -> bool:
        """Never: it is computed when it is asked for."""
        return False

    def ask(self, window: Window) -> Answer:
        """See :class:`Target`; never misses."""
        start = self._clock.now()
        distribution = self._policy.infer(window)
        return Answer(distribution, OffloadTimes(target=self._clock.now() - start))


@dataclass(frozen=True, slots=True)
class Verification:
    """Final codes of a transmitted step.

    Attributes:
        verdict: the codes and which of them were accepted.
        chunk: what they decode to with the target's offsets, float32 ``[n, A]``, normalised.
        target: the target's distribution, or None where the server drew the codes and kept it.
        times: what was waited for.
    """

    verdict: Verdict
    chunk: NDArray[np.float32]
    target: CodeDistribution | None
    times: OffloadTimes


class Verifier(Protocol):
    """Turns a proposal into final codes."""

    def prefetch(self, window: Window) -> bool:
        """See :meth:`Target.prefetch`."""
        ...

    def pending(self, window: Window) -> bool:
        """See :meth:`Target.pending`."""
        ...

    def verify(self, proposal: Proposal, rng: np.random.Generator) -> Verification | Miss:
        """Final codes of a transmitted step; ``rng`` is the step's stream for verification, at its start."""
        ...


class DeviceVerifier(ABC):
    """A :class:`Verifier` that asks for the target's distribution and draws the final codes here.

    Args:
        target: where the target's distributions come from.
        tokenizer: turns codes into actions.
    """

    def __init__(self, target: Target, tokenizer: ActionTokenizer) -> None:
        self._target, self._tokenizer = target, tokenizer
        self.prefetch, self.pending = target.prefetch, target.pending

    def verify(self, proposal: Proposal, rng: np.random.Generator) -> Verification | Miss:
        """See :class:`Verifier`."""
        answer = self._target.ask(proposal.window)
        if isinstance(answer, Miss):
            return answer
        verdict = self._judge(answer.target, proposal, rng)
        chunk = self._tokenizer.decode(verdict.codes, answer.target.offsets)
        return Verification(verdict, chunk, answer.target, answer.times)

    @abstractmethod
    def _judge(self, target: CodeDistribution, proposal: Proposal, rng: np.random.Generator) -> Verdict:
        """The final codes."""


class SpeculativeVerifier(DeviceVerifier):
    """Accepts or replaces each drafted code so that the result follows the target's law (ADAHI, equation 7)."""

    def _judge(self, target: CodeDistribution, proposal: Proposal, rng: np.random.Generator) -> Verdict:
        return verify(target, proposal.draft, proposal.codes, rng)


class TargetSampler(DeviceVerifier):
    """Takes the target's own codes, whatever was drafted: the *remote target*, and gated with a gate.

    A code counts as accepted where the target happened to draw the drafted one.
    """

    def _judge(self, target: CodeDistribution, proposal: Proposal, rng: np.random.Generator) -> Verdict:
        codes = sample_codes(target, rng)
        kept = codes == proposal.codes
        return Verdict(codes, kept, 1.0 - kept)
