"""What a gate or a draft is taught from: states that gated policies lead to, and what both policies say there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Lessons:
    """One row per inference.

    Attributes:
        episode: number of the episode, ``[N]``.
        state, goal: the window's, ``[N, T, O]`` and ``[N, D]`` or None.
        draft_probs, target_probs: q and p, ``[N, G, K]``.
        target_offsets: float16 ``[N, G, K, n, A]``, normalised.
    """

    episode: NDArray[np.int64]
    state: NDArray[np.float32]
    goal: NDArray[np.float32] | None
    draft_probs: NDArray[np.float32]
    target_probs: NDArray[np.float32]
    target_offsets: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.state)

    def select(self, rows: NDArray[Any]) -> Lessons:
        """Some of the rows, given by number or as a mask ``[N]``."""
        kept: dict[str, Any] = {name: column if column is None else column[rows] for name, column in vars(self).items()}
        return Lessons(**kept)

    def split(self, every: int = 20) -> tuple[Lessons, Lessons]:
        """Without and with the episodes whose number ``every`` divides: for training, and held out."""
        held_out = self.episode % every == 0
        return self.select(~held_out), self.select(held_out)


def join(parts: Sequence[Lessons]) -> Lessons:
    """Several as one."""
    joined: dict[str, Any] = {
        name: first if first is None else np.concatenate([vars(part)[name] for part in parts])
        for name, first in vars(parts[0]).items()
    }
    return Lessons(**joined)
