"""The values of the codes family: distributions over action codes, and verdicts on drafted codes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specact.types import Codes, Floats, StepRecord, value


@value
class CodeDistribution:
    """A policy's output: a distribution over action codes, and an offset for each code.

    Attributes:
        probs: ``[G, K]``, every row a distribution over the K codes of one of G codebooks. With a sequential
            secondary head row 1 is the marginal over the primary codes.
        offsets: float32 ``[G, K, n, A]``, in normalised action units; the offsets of the chosen codes are summed.
        conditional: ``[K, K]``, row i the distribution of the secondary code given primary code i, or None if the
            codebooks are independent.
    """

    probs: Floats
    offsets: NDArray[np.float32]
    conditional: Floats | None = None

    def rows_given(self, codes: Codes) -> Floats:
        """The rows ``[G, K]`` that verification compares: a sequential secondary's is the one given the first code."""
        if self.conditional is None:
            return self.probs
        return np.stack([self.probs[0], self.conditional[codes[0]]])


@value
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
        rejections: list[float] = self.rejection.tolist()
        return 1.0 - math.prod([1.0 - rejection for rejection in rejections])


@value
class Drafted:
    """Evidence of a proposal: the draft's distribution, and the codes sampled from it, ``[G]``."""

    draft: CodeDistribution
    codes: Codes


@value
class Verified:
    """Evidence of an outcome: the verdict, and the target's distribution, None if the server verified."""

    verdict: Verdict
    target: CodeDistribution | None


def executed_codes(record: StepRecord) -> Codes:
    """The codes of an executed chunk, ``[G]``; the drafted ones if a fallback replaced the actions."""
    codes: Codes = record.proposal.evidence.codes if record.outcome is None else record.outcome.evidence.verdict.codes
    return codes
