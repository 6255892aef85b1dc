"""Demonstrations as training windows: which observations, which action chunk, which positions are real."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specact.lab.data.episodes import Episodes
from specact.rng import Role, stream


@dataclass(frozen=True)
class Batch:
    """Windows and what they should predict; shapes as in :class:`~specact.types.Window` with a leading B.

    Attributes:
        state, goal, image: the observations.
        step: index of the demonstration step behind every position, ``[B, T]``.
        weight: 1 at real positions, 0 at padding before an episode's start, ``[B, T]``.
    """

    state: Tensor
    goal: Tensor | None
    image: Tensor | None
    step: Tensor
    weight: Tensor


class Windows:
    """All windows of a set of demonstrations.

    Windows that reach before an episode's start repeat its first observation, as the device does, and do not count
    there. Chunks that reach past an episode's end repeat its last action.

    Args:
        episodes: demonstrations in the environment's terms.
        window, chunk: T and n.
        scale: half range of each action dimension, ``[A]``; chunks are divided by it after subtracting ``centre``.
        centre: middle of each action dimension's range, ``[A]``.
    """

    def __init__(
        self, episodes: Episodes, window: int, chunk: int, centre: NDArray[np.float32], scale: NDArray[np.float32]
    ) -> None:
        self.episodes, self.window = episodes, window
        self.state = torch.from_numpy(episodes.state)
        self.goal = None if episodes.goal is None else torch.from_numpy(episodes.goal)
        lengths = np.diff(episodes.ends, prepend=0)
        starts, last = np.repeat(episodes.starts, lengths), np.repeat(episodes.ends - 1, lengths)
        steps = np.arange(episodes.steps)
        rows = steps[:, None] + np.arange(1 - window, 1)
        self._rows = torch.from_numpy(np.maximum(rows, starts[:, None]))
        self._real = torch.from_numpy((rows >= starts[:, None]).astype(np.float32))
        ahead = np.minimum(steps[:, None] + np.arange(chunk), last[:, None])
        normalised = (episodes.action - centre) / scale
        self.chunks = torch.from_numpy(normalised[ahead].astype(np.float32))

    def __len__(self) -> int:
        return len(self._rows)

    def draw(self, seed: int, step: int, size: int) -> Batch:
        """The batch of one training step: a function of (seed, step) alone, which is what makes resuming exact."""
        chosen = stream(seed, Role.DATA, step=step).integers(len(self), size=size)
        return self.at(torch.from_numpy(chosen))

    def at(self, chosen: Tensor) -> Batch:
        """The windows that end at these steps."""
        rows = self._rows[chosen]
        image = None
        if self.episodes.image is not None:
            frames = self.episodes.image[rows.flatten().numpy()]
            image = torch.from_numpy(np.asarray(frames)).unflatten(0, rows.shape)
        goal = None if self.goal is None else self.goal[chosen]
        return Batch(self.state[rows], goal, image, rows, self._real[chosen])
