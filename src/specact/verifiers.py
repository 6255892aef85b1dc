"""What the target makes of a proposal: exact speculative verification, or simply the target's own codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specact.clock import Clock, RealClock
from specact.policies.policy import CodePolicy
from specact.sampling import sample_codes, verify
from specact.types import CodeDistribution, Proposal, Verdict


@dataclass(frozen=True, slots=True)
class Verification:
    """A verdict and what it cost.

    Attributes:
        verdict: final codes.
        target: the target's distribution.
        network, target_time: seconds on the link and in the target.
    """

    verdict: Verdict
    target: CodeDistribution
    network: float
    target_time: float


class Verifier(Protocol):
    """Turns a proposal into final codes."""

    def verify(self, proposal: Proposal, rng: np.random.Generator) -> Verification:
        """Final codes of a transmitted step; ``rng`` is the step's stream for verification."""
        ...


class SpeculativeVerifier:
    """Accepts or replaces each drafted code so that the result follows the target's law (ADAHI, equation 7).

    Args:
        target: the target policy.
        clock: tells how long it took.
    """

    def __init__(self, target: CodePolicy, clock: Clock | None = None) -> None:
        self._target, self._clock = target, RealClock() if clock is None else clock

    def verify(self, proposal: Proposal, rng: np.random.Generator) -> Verification:
        """See :class:`Verifier`."""
        start = self._clock.now()
        target = self._target.infer(proposal.window)
        spent = self._clock.now() - start
        return Verification(verify(target, proposal.draft, proposal.codes, rng), target, 0.0, spent)


class TargetSampler:
    """Takes the target's own codes, whatever was drafted: the *remote target*, and gated with a gate.

    Args:
        target: the target policy.
        clock: tells how long it took.
    """

    def __init__(self, target: CodePolicy, clock: Clock | None = None) -> None:
        self._target, self._clock = target, RealClock() if clock is None else clock

    def verify(self, proposal: Proposal, rng: np.random.Generator) -> Verification:
        """See :class:`Verifier`; a code counts as accepted where the target happened to draw the drafted one."""
        start = self._clock.now()
        target = self._target.infer(proposal.window)
        spent = self._clock.now() - start
        codes = sample_codes(target, rng)
        kept = codes == proposal.codes
        return Verification(Verdict(codes, kept, 1.0 - kept), target, 0.0, spent)
