"""Gates on distributions over action codes: the draft's own uncertainty, and what verification would change.

The latter as an oracle knows it, or as a head on the device estimates it (:mod:`specact.gates.learned`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specact.families.codes.policy import ActionTokenizer, InfersCodes
from specact.families.codes.sampling import CodeDistribution, rejection_probability, residual, sample, softmax
from specact.gates.gate import Gate
from specact.records import Count, Positive, validated
from specact.types import Floats, Proposal

Kind = Literal["disagreement", "temperature", "entropy", "one_minus_q"]
Quantity = Literal["rejection", "action_change"]


class Uncertainty(Gate):
    """Asks where the draft is unsure of the codes z that it sampled from q; one forward pass, no target.

    ``temperature`` (U-HLM): of M codes, each sampled at a temperature uniform in (0, T_max], the share that differs
    from z in any codebook. With several codebooks it is 1 in many steps, which a gate cannot tell apart.
    ``disagreement``: the same in expectation, ``1 - mean_T prod_k q_k^(T)(z_k)`` over M evenly spaced temperatures.
    ``entropy``: ``sum_k H(q_k)`` in nats. ``one_minus_q``: ``1 - prod_k q_k(z_k)``. The bundle's own temperature, often
    below 1, is applied before, so that a T_max of 2 flattens less than it would a plain softmax.
    """

    family = "codes"

    @validated
    def __init__(
        self,
        threshold: float,
        *,
        kind: Kind = "disagreement",
        perturbations: Count = 20,
        max_temperature: Positive = 2.0,
        **limits: Any,
    ) -> None:
        super().__init__(threshold, **limits)
        self.kind, self.perturbations, self.max_temperature = kind, perturbations, max_temperature

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        codes, books = proposal.evidence.codes, np.arange(len(proposal.evidence.codes))
        rows = proposal.evidence.draft.rows_given(codes)
        if self.kind == "one_minus_q":
            return float(1.0 - np.prod(rows[books, codes]))
        logs = np.log(np.maximum(rows, 1e-300))
        if self.kind == "entropy":
            return float(-(rows * logs).sum())
        if self.kind == "disagreement":
            middles = (np.arange(self.perturbations) + 0.5) / self.perturbations
            kept = _tempered(logs, self.max_temperature * middles)[:, books, codes].prod(axis=-1)
            return float(1.0 - kept.mean())
        tempered = _tempered(logs, self.max_temperature * (1.0 - rng.random(self.perturbations)))
        drawn = sample(tempered, rng.random((self.perturbations, len(rows))))
        return float((drawn != codes).any(axis=-1).mean())


def _tempered(logs: Floats, temperatures: Floats) -> Floats:
    """The distributions ``[M, G, K]`` at M temperatures, from logarithms ``[G, K]``."""
    return softmax(logs / temperatures[:, None, None])


class RejectionGate(Gate):
    """The expected effect of verification on the drafted step, given a subclass's target distribution.

    ``rejection``: ``R(z)``, the probability that any drafted code would be rejected. ``action_change``: the expected
    distance between the drafted action and the one verification would give, over verification's randomness (mean
    over the chunk, normalised units).
    """

    family = "codes"

    @validated
    def __init__(
        self, threshold: float, *, tokenizer: ActionTokenizer, on: Quantity = "rejection", **limits: Any
    ) -> None:
        super().__init__(threshold, **limits)
        self.on, self._tokenizer = on, tokenizer

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        return cls(threshold, tokenizer=pair.parts.tokenizer, **settings)

    @abstractmethod
    def target(self, proposal: Proposal) -> CodeDistribution:
        """The target distribution that the draft's is compared with."""

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        target, codes = self.target(proposal), proposal.evidence.codes
        p, q = target.rows_given(codes), proposal.evidence.draft.rows_given(codes)
        rejection = rejection_probability(p, q, codes)
        if self.on == "rejection":
            return float(1.0 - math.prod((1.0 - rejection).tolist()))
        distribution = residual(p, q) * rejection[:, None]
        distribution[np.arange(len(distribution)), codes] += 1.0 - rejection
        return self._expected_change(_joint(distribution, target, proposal), target, proposal.actions)

    def _expected_change(
        self, joint: NDArray[np.float64], target: CodeDistribution, chunk: NDArray[np.float32]
    ) -> float:
        offsets = target.offsets[0]
        for added in target.offsets[1:]:
            offsets = offsets[..., None, :, :] + added
        likely = np.flatnonzero(~(joint <= 1e-6))  # with those that are not finite, whose score asks
        actions = self._tokenizer.table[likely] + offsets.reshape(-1, *chunk.shape)[likely]
        distances = np.linalg.norm(actions - chunk, axis=-1).mean(axis=-1)
        return float(joint.ravel()[likely] @ distances)


def _joint(distribution: NDArray[np.float64], target: CodeDistribution, proposal: Proposal) -> NDArray[np.float64]:
    """The joint distribution ``[K, ..., K]`` of the verified codes, from each codebook's own ``[G, K]``."""
    if target.conditional is None:
        joint: NDArray[np.float64] = distribution[0]
        for row in distribution[1:]:
            joint = np.multiply.outer(joint, row)
        return joint
    # If the primary is replaced, the secondary is sampled from the target's conditional.
    primary = proposal.evidence.codes[0]
    joint = distribution[0][:, None] * target.conditional
    joint[primary] = distribution[0][primary] * distribution[1]
    return joint


class Oracle(RejectionGate):
    """Asks after it has evaluated the target, in a time that does not count: a bound, not deployable."""

    def __init__(self, threshold: float, *, target: InfersCodes, **settings: Any) -> None:
        super().__init__(threshold, **settings)
        self._target = target

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, *, target: InfersCodes | None = None, **settings: Any) -> Gate:
        return super().for_pair(pair, threshold, target=pair.parts.target if target is None else target, **settings)

    def target(self, proposal: Proposal) -> CodeDistribution:
        return self._target.infer(proposal.window)
