"""Gates on what verification would change: exactly as the oracles know it, or as a head on the device estimates it."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specact.families.codes.policy import ActionTokenizer, InfersCodes
from specact.families.codes.sampling import CodeDistribution, rejection_probability, residual
from specact.gates.gate import Gate
from specact.gates.heads import DistanceHead, TargetHead, check_calibrated_head, load_distance_head, load_head
from specact.records import check_arguments
from specact.types import Proposal

Quantity = Literal["rejection", "action_change"]


class RejectionGate(Gate):
    """The expected effect of verification on the drafted step, given a subclass's target distribution.

    ``rejection``: ``R(z)``, the probability that any drafted code would be rejected. ``action_change``: the expected
    distance between the drafted action and the one verification would give, over verification's randomness (mean
    over the chunk, normalised units).

    Args:
        threshold: see :class:`~specact.gates.gate.Gate`; ``tie_probability``, ``max_skips`` and ``force_first`` too.
        tokenizer: turns codes into actions.
        on: which of the two.

    Raises:
        ConfigError: for an unknown quantity.
    """

    family = "codes"

    def __init__(
        self, threshold: float, *, tokenizer: ActionTokenizer, on: Quantity = "rejection", **limits: Any
    ) -> None:
        super().__init__(threshold, **limits)
        self.on = on
        check_arguments(RejectionGate.__init__, {"on": on})
        self._tokenizer = tokenizer

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
        likely = np.flatnonzero(joint > 1e-6)
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
    """Evaluates the target to decide whether to transmit; a reference for comparison, not deployable.

    Args:
        threshold, tokenizer, on: see :class:`~specact.gates.learned.RejectionGate`.
        target: the target policy; its time is excluded from the method's.
    """

    def __init__(self, threshold: float, *, target: InfersCodes, **settings: Any) -> None:
        super().__init__(threshold, **settings)
        self._target = target

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, *, target: InfersCodes | None = None, **settings: Any) -> Gate:
        return super().for_pair(pair, threshold, target=pair.parts.target if target is None else target, **settings)

    def target(self, proposal: Proposal) -> CodeDistribution:
        return self._target.infer(proposal.window)


class Learned(RejectionGate):
    """Rejection estimated with a head's estimate ``p^`` of the target's distribution.

    ``R^(z) = 1 - prod_k min(1, p^_k(z_k) / q_k(z_k))``, which is exact if ``p^`` equals the target's distribution. For
    ``action_change`` the codes are decoded with the draft's offsets, since the target's are unknown.

    Args:
        threshold, tokenizer, on: see :class:`~specact.gates.learned.RejectionGate`.
        head: estimates the target's distribution.
    """

    def __init__(self, threshold: float, *, head: TargetHead, **settings: Any) -> None:
        super().__init__(threshold, **settings)
        self.weights = head.fingerprint
        self._head = head

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        """With the head in the pair's bundle.

        Raises:
            BundleError: if the head's fingerprint is not the setting ``weights``.
            ConfigError: if the bundle has none.
        """
        check_calibrated_head(pair, settings.pop("weights"))
        return super().for_pair(pair, threshold, head=load_head(pair), **settings)

    def target(self, proposal: Proposal) -> CodeDistribution:
        return CodeDistribution(
            self._head.estimate(proposal.window, proposal.evidence.draft), proposal.evidence.draft.offsets
        )


class LearnedDistance(Gate):
    """Transmits if a head estimates a large distance between the target's and the drafted actions.

    Args:
        threshold: see :class:`~specact.gates.gate.Gate`; ``tie_probability``, ``max_skips`` and ``force_first`` too.
        head: estimates the distance.
    """

    family = "chunks"

    def __init__(self, threshold: float, *, head: DistanceHead, **limits: Any) -> None:
        super().__init__(threshold, **limits)
        self._head = head

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        """With the head in the pair's folder.

        Raises:
            BundleError: if the head's fingerprint is not the setting ``weights``.
            ConfigError: if the pair has none.
        """
        check_calibrated_head(pair, settings.pop("weights"))
        return cls(threshold, head=load_distance_head(pair), **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return self._head.estimate(proposal.window, proposal.actions)
