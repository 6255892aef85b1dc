"""Gates that look at the answer: not deployable, but the most any gate of their kind can reach."""

from __future__ import annotations

from typing import Any

from specact.families.codes.spec import InfersCodes
from specact.families.codes.values import CodeDistribution
from specact.gates.gate import Gate
from specact.gates.rejection import RejectionGate
from specact.types import Proposal


class Oracle(RejectionGate):
    """Asks the target first and then decides whether asking was worth it.

    Args:
        threshold, tokenizer, on: see :class:`~specact.gates.rejection.RejectionGate`.
        target: the target policy; its time is not the method's.
    """

    def __init__(self, threshold: float, *, target: InfersCodes, **settings: Any) -> None:
        super().__init__(threshold, **settings)
        self._target = target

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, *, target: InfersCodes | None = None, **settings: Any) -> Gate:
        """With the pair's target, or the given one in its place."""
        return super().for_pair(pair, threshold, target=pair.target if target is None else target, **settings)

    def target(self, proposal: Proposal) -> CodeDistribution:
        """What the target says."""
        return self._target.infer(proposal.window)
