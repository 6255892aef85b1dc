"""What a gate or a draft is taught from: states that gated policies lead to, and what both policies say there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DistillationData:
    """One row per inference.

    Attributes:
        episode: number of the episode, ``[N]``.
        observation: what the draft saw but camera frames, by name, each ``[N, *window_shape]``.
        draft_probs, target_probs: q and p, ``[N, G, K]``.
        target_offsets: float16 ``[N, G, K, n, A]``, normalised.
    """

    episode: NDArray[np.int64]
    observation: Mapping[str, NDArray[np.float32]]
    draft_probs: NDArray[np.float32]
    target_probs: NDArray[np.float32]
    target_offsets: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.episode)

    def select(self, rows: NDArray[Any]) -> DistillationData:
        """Some of the rows, given by number or as a mask ``[N]``."""
        seen = {name: column[rows] for name, column in self.observation.items()}
        kept: dict[str, Any] = {name: column[rows] for name, column in vars(self).items() if name != "observation"}
        return DistillationData(observation=seen, **kept)

    def split(self, every: int = 20) -> tuple[DistillationData, DistillationData]:
        """Without and with the episodes whose number ``every`` divides: for training, and held out."""
        held_out = self.episode % every == 0
        return self.select(~held_out), self.select(held_out)


def join(parts: Sequence[DistillationData]) -> DistillationData:
    """Several as one."""
    first = parts[0]
    seen = {name: np.concatenate([part.observation[name] for part in parts]) for name in first.observation}
    joined: dict[str, Any] = {
        name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(first) if name != "observation"
    }
    return DistillationData(observation=seen, **joined)
