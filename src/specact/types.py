"""The values that travel between the rooms: plain frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """What a policy looks at: the last T observations, oldest first, the first one repeated at an episode's start.

    Attributes:
        state: float32 ``[T, O]``, in the environment's units.
        goal: float32 ``[D]``, or None for policies without a goal.
        image: uint8 ``[T, H, W, 3]``, or None for policies without a camera.
    """

    state: NDArray[np.float32]
    goal: NDArray[np.float32] | None = None
    image: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class CodeDistribution:
    """What a policy answers: a distribution over action codes, and the offset that goes with each code.

    Attributes:
        probs: ``[G, K]``, every row a distribution over the K codes of one of G codebooks. With a sequential
            secondary head row 1 is the marginal over the primary codes.
        offsets: float32 ``[G, K, n, A]``, in normalised action units; the offsets of the chosen codes are summed.
        conditional: ``[K, K]``, row i the distribution of the secondary code given primary code i, or None where
            the codebooks are independent.
    """

    probs: Floats
    offsets: NDArray[np.float32]
    conditional: Floats | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying one step's codes.

    Attributes:
        codes: final codes, ``[G]``.
        accepted: whether each codebook kept the draft's code, bool ``[G]``.
        rejection: ``r_k(z_k) = 1 - min(1, p_k(z_k) / q_k(z_k))`` of each drafted code, ``[G]``, in [0, 1].
    """

    codes: Codes
    accepted: NDArray[np.bool_]
    rejection: Floats

    @property
    def rejected_any(self) -> float:
        """``R(z) = 1 - prod_k (1 - r_k(z_k))``: the probability that at least one drafted code is rejected."""
        return float(1.0 - np.prod(1.0 - self.rejection))


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the device knows when the gate decides.

    Attributes:
        window: the observations behind it.
        draft: the draft's distribution.
        codes: the codes sampled from it, ``[G]``.
        chunk: the draft's action chunk, float32 ``[n, A]``, in normalised action units.
    """

    window: Window
    draft: CodeDistribution
    codes: Codes
    chunk: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a gate decided, and on what ground.

    Attributes:
        transmit: whether the step goes to the target.
        score: the gate's score of this step.
        threshold: the score above which a step is transmitted.
        reason: ``score``, ``tie``, ``first`` (an episode's first step is always transmitted), ``max_skips``, or
            ``audit`` (it would have been skipped, and was transmitted by chance to learn what that would have cost).
    """

    transmit: bool
    score: float
    threshold: float
    reason: str


@dataclass(frozen=True, slots=True)
class OffloadTimes:
    """What a device waited for when it asked the target, in seconds; stages that did not happen are 0.

    Where the request left ahead of the draft, each stage counts with the share of it that was still waited for.

    Attributes:
        encode: writing and reading messages, on both ends.
        network: on the link, both ways.
        queue: at the server, until the target was free.
        target: the target's inference, and on a server sampling where it does that.
    """

    encode: float = 0.0
    network: float = 0.0
    queue: float = 0.0
    target: float = 0.0

    @property
    def total(self) -> float:
        """All stages together [s]."""
        return self.encode + self.network + self.queue + self.target


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where a step's time went, in seconds; stages that did not happen are 0.

    Attributes:
        draft: the draft's inference.
        gate: sampling and decoding the draft's codes, and the gate's decision.
        offload: asking the target.
        finish: sampling and decoding the final codes.
    """

    draft: float
    gate: float
    offload: OffloadTimes
    finish: float

    @property
    def total(self) -> float:
        """All stages together [s]."""
        return self.draft + self.gate + self.offload.total + self.finish


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One inference of a :class:`~specact.policy.SpeculativePolicy`.

    Attributes:
        episode, step: which inference, counted from 0; a step is one inference, not one control period.
        proposal: what the draft offered.
        decision: what the gate made of it.
        sent_ahead: whether a request left before the draft was computed, on a forecast of the gate.
        verdict: the verifier's outcome, or None if the step was skipped or missed.
        target: the target's distribution, or None if it is not known here.
        miss: why the target could not be had, or None. The fallback's action is executed then.
        codes: the codes that were executed, ``[G]``; the drafted ones where a fallback replaced the action.
        chunk: the action chunk that was executed, float32 ``[n, A]``, normalised.
        times: where the time went.
        unsent: whether the gate wanted a request that could not leave.
    """

    episode: int
    step: int
    proposal: Proposal
    decision: Decision
    sent_ahead: bool
    verdict: Verdict | None
    target: CodeDistribution | None
    miss: str | None
    codes: Codes
    chunk: NDArray[np.float32]
    times: StageTimes
    unsent: bool = False
