"""What a gate or a draft is taught from: states that gated policies lead to, and what both policies say there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Lessons:
    """One row per inference.

    Attributes:
        episode: number of the episode, ``[N]``.
        observation: what the policies saw, by name, each with a leading ``[N]``.
        draft_probs, target_probs: q and p, ``[N, G, K]``.
        target_offsets: float16 ``[N, G, K, n, A]``, normalised.
    """

    episode: NDArray[np.int64]
    observation: Mapping[str, NDArray[Any]]
    draft_probs: NDArray[np.float32]
    target_probs: NDArray[np.float32]
    target_offsets: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.episode)

    def select(self, rows: NDArray[Any]) -> Lessons:
        """Some of the rows, given by number or as a mask ``[N]``."""
        return _each([self], lambda columns: columns[0][rows])

    def split(self, every: int = 20) -> tuple[Lessons, Lessons]:
        """Without and with the episodes whose number ``every`` divides: for training, and held out."""
        held_out = self.episode % every == 0
        return self.select(~held_out), self.select(held_out)


def join(parts: Sequence[Lessons]) -> Lessons:
    """Several as one."""
    return _each(parts, np.concatenate)


def _each(parts: Sequence[Lessons], change: Callable[[list[NDArray[Any]]], NDArray[Any]]) -> Lessons:
    """What becomes of every column, given that of all parts."""
    columns: dict[str, Any] = {
        field.name: change([getattr(part, field.name) for part in parts])
        for field in fields(Lessons)
        if field.name != "observation"
    }
    seen = {name: change([part.observation[name] for part in parts]) for name in parts[0].observation}
    return Lessons(observation=seen, **columns)
