"""The learned gate of chunk pairs: how far verification would move the action, estimated by a head."""

from __future__ import annotations

from typing import Any

import numpy as np

from specact.families.chunks.head import DistanceHead, load_distance_head
from specact.families.head import check_calibrated_head
from specact.gates.gate import Gate
from specact.types import Proposal


class LearnedDistance(Gate):
    """Asks where the target's actions are probably far from the drafted ones, by a head's estimate.

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
            BundleError: if that head is not the one of the fingerprint ``weights``, a setting.
            ConfigError: if the pair has none.
        """
        check_calibrated_head(pair, settings.pop("weights"))
        return cls(threshold, head=load_distance_head(pair), **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        """The estimated distance, at least 0; see :class:`~specact.families.chunks.head.DistanceHead`."""
        return self._head.estimate(proposal.window, proposal.actions)
