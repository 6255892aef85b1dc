"""A gate that learned what the target would say: a small head predicts its distribution from what the device has."""

from __future__ import annotations

from typing import Any

from specact.errors import BundleError
from specact.families.codes.head import HEAD, TargetHead, load_head
from specact.families.codes.values import CodeDistribution
from specact.gates.gate import Gate
from specact.gates.rejection import RejectionGate
from specact.types import Proposal


class Learned(RejectionGate):
    """Asks where verification would probably change something, by a head's estimate ``p^`` of the target.

    ``R^(z) = 1 - prod_k min(1, p^_k(z_k) / q_k(z_k))``, the exact rejection probability were ``p^`` the target's
    distribution; for ``action_change`` the recovered codes are decoded with the draft's offsets, the only ones known.

    Args:
        threshold, tokenizer, on: see :class:`~specact.gates.rejection.RejectionGate`.
        head: estimates the target's distribution.
    """

    def __init__(self, threshold: float, *, head: TargetHead, **settings: Any) -> None:
        super().__init__(threshold, **settings)
        self.weights = head.fingerprint
        self._head = head

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        """With the head that the pair's bundle holds.

        Raises:
            BundleError: if that head is not the one of the fingerprint ``weights``, a setting.
            ConfigError: if the bundle has none.
        """
        head, weights = load_head(pair), settings.pop("weights")
        if head.fingerprint != weights:
            raise BundleError(
                f"{pair.path / HEAD} has fingerprint {head.fingerprint}, but the gate was calibrated for {weights}; "
                f"calibrate again with: specact calibrate --bundle {pair.path} --gate learned"
            )
        return super().for_pair(pair, threshold, head=head, **settings)

    def target(self, proposal: Proposal) -> CodeDistribution:
        """The head's estimate of what the target would say."""
        return CodeDistribution(
            self._head.estimate(proposal.window, proposal.evidence.draft), proposal.evidence.draft.offsets
        )
