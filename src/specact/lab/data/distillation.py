"""What a gate or a draft is taught from: states that gated policies lead to, and what both policies say there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.lab.data.frames import Frames, join_frames


class FrameWindows:
    """Windows of camera frames, uint8 ``[N, T, H, W, 3]``, which are read when an array is made of them.

    Args:
        frames: all of them.
        rows: which of them each window shows, ``[N, T]``, or ``[N]`` without a history.
    """

    def __init__(self, frames: Frames, rows: NDArray[np.int64]) -> None:
        self.frames, self.rows = frames, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: NDArray[Any]) -> FrameWindows:
        return FrameWindows(self.frames, self.rows[chosen])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.frames[self.rows], dtype=dtype)


Seen = NDArray[Any] | FrameWindows


@dataclass(frozen=True)
class DistillationData:
    """One row per inference.

    Attributes:
        episode: number of the episode, ``[N]``.
        observation: what the draft saw, by name, each ``[N, *window_shape]``; of an instruction its words, ``[N, L]``.
        said: what draft and target said, by name. Of action codes ``draft_probs`` and ``target_probs``, q and p,
            ``[N, G, K]``, and ``target_offsets``, float16 ``[N, G, K, n, A]``. Of chunks ``drafted``, the drafted
            actions that are executed, ``[N, n, A]``, ``distance``, ``[N]``, that of the target's from them, and
            ``wanted``, the target's chunk, ``[N, H, A]``. All normalised.
    """

    episode: NDArray[np.int64]
    observation: Mapping[str, Seen]
    said: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.episode)

    def select(self, rows: NDArray[Any]) -> DistillationData:
        """Some of the rows, given by number or as a mask ``[N]``; no frame is read."""
        seen = {name: column[rows] for name, column in self.observation.items()}
        return DistillationData(self.episode[rows], seen, {name: column[rows] for name, column in self.said.items()})

    def split(self, every: int = 20) -> tuple[DistillationData, DistillationData]:
        """Without and with the episodes whose number ``every`` divides: for training, and held out."""
        held_out = self.episode % every == 0
        return self.select(~held_out), self.select(held_out)


def join(parts: Sequence[DistillationData]) -> DistillationData:
    """Several as one."""
    first = parts[0]
    seen = {name: _joined([part.observation[name] for part in parts]) for name in first.observation}
    said = {name: np.concatenate([part.said[name] for part in parts]) for name in first.said}
    return DistillationData(np.concatenate([part.episode for part in parts]), seen, said)


def _joined(columns: Sequence[Seen]) -> Seen:
    windows = [column for column in columns if isinstance(column, FrameWindows)]
    if not windows:
        return np.concatenate([np.asarray(column) for column in columns])
    starts = np.cumsum([0, *(len(column.frames) for column in windows)])
    rows = [column.rows + start for column, start in zip(windows, starts, strict=False)]
    return FrameWindows(join_frames([column.frames for column in windows]), np.concatenate(rows))
