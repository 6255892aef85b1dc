"""Training data of a gate or a draft: states visited by gated policies, and the outputs of both policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.lab.data.frames import Frames, join_frames


class FrameWindows:
    """Windows of camera frames, uint8 ``[N, T, H, W, 3]``, which are read lazily on conversion to an array.

    Args:
        frames: all of them.
        rows: indices of each window's frames, ``[N, T]``, or ``[N]`` without a history.
    """

    def __init__(self, frames: Frames, rows: NDArray[np.int64]) -> None:
        self.frames, self.rows = frames, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: NDArray[Any]) -> FrameWindows:
        return FrameWindows(self.frames, self.rows[chosen])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.frames[self.rows], dtype=dtype)


Column = NDArray[Any] | FrameWindows


@dataclass(frozen=True)
class DistillationData:
    """One row per inference.

    Attributes:
        episode: number of the episode, ``[N]``.
        observation: the draft's, by name, each ``[N, *window_shape]``; of an instruction its words, ``[N, L]``.
        outputs: of draft and target, by name. Of action codes ``draft_probs`` and ``target_probs``, q and p,
            ``[N, G, K]``, and ``target_offsets``, float16 ``[N, G, K, n, A]``. Of chunks ``drafted``, the executed part
            of the drafted chunk, ``[N, n, A]``, ``drafted_distance``, ``[N]``, of the target's from it, and ``wanted``,
            the target's chunk, ``[N, H, A]``. All normalised.
    """

    episode: NDArray[np.int64]
    observation: Mapping[str, Column]
    outputs: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.episode)

    def select(self, rows: NDArray[Any]) -> DistillationData:
        """A subset of the rows, by index or as a mask ``[N]``; no frame is read."""
        observation = {name: column[rows] for name, column in self.observation.items()}
        return DistillationData(
            self.episode[rows], observation, {name: column[rows] for name, column in self.outputs.items()}
        )

    def split(self, every: int = 20) -> tuple[DistillationData, DistillationData]:
        """Training and held-out set; the latter are the episodes whose number ``every`` divides."""
        held_out = self.episode % every == 0
        return self.select(~held_out), self.select(held_out)


def join(parts: Sequence[DistillationData]) -> DistillationData:
    """Concatenates several."""
    first = parts[0]
    observation = {name: _concatenated([part.observation[name] for part in parts]) for name in first.observation}
    outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in first.outputs}
    return DistillationData(np.concatenate([part.episode for part in parts]), observation, outputs)


def _concatenated(columns: Sequence[Column]) -> Column:
    windows = [column for column in columns if isinstance(column, FrameWindows)]
    if not windows:
        return np.concatenate([np.asarray(column) for column in columns])
    starts = np.cumsum([0, *(len(column.frames) for column in windows)])
    rows = [column.rows + start for column, start in zip(windows, starts, strict=False)]
    return FrameWindows(join_frames([column.frames for column in windows]), np.concatenate(rows))
