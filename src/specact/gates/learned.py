"""A gate that learned what the target would say: a small head predicts its distribution from what the device has."""

from __future__ import annotations

from typing import Any

from specact.families.codes.head import TargetHead
from specact.families.codes.values import CodeDistribution
from specact.gates.rejection import Lookahead
from specact.types import Proposal


class Learned(Lookahead):
    """Asks where verification would probably change something, by a head's estimate ``p^`` of the target.

    ``R^(z) = 1 - prod_k min(1, p^_k(z_k) / q_k(z_k))``, the exact rejection probability were ``p^`` the target's
    distribution; for ``action_change`` the recovered codes are decoded with the draft's offsets, the only ones known.

    Args:
        threshold, tokenizer, on: see :class:`~specact.gates.rejection.Lookahead`.
        head: estimates the target's distribution.
    """

    def __init__(self, threshold: float, *, head: TargetHead, **settings: Any) -> None:
        super().__init__(threshold, **settings)
        self.weights = head.fingerprint
        self._head = head

    def target(self, proposal: Proposal) -> CodeDistribution:
        """The head's estimate of what the target would say."""
        return CodeDistribution(
            self._head.estimate(proposal.window, proposal.evidence.draft), proposal.evidence.draft.offsets
        )
