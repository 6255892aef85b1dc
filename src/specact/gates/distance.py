"""The learned gate of chunks, tokens and flows: the distance of the target's actions, estimated by a head."""

from __future__ import annotations

from typing import Any

import numpy as np

from specact.families.distance import DistanceHead, load_distance_head
from specact.families.head import check_calibrated_head
from specact.gates.gate import Gate
from specact.types import Proposal


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
