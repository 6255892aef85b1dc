"""Demonstrations as training windows: which observations, which action chunk, which positions are real."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specact.lab.data.episodes import Episodes
from specact.lab.train.sees import positions
from specact.observation import ObservationSpec
from specact.rng import Role, stream


@dataclass(frozen=True)
class Batch:
    """Windows and what they should predict.

    Attributes:
        observation: by name, ``[B, T, ...]``, or ``[B, ...]`` for what has no history.
        step: index of the demonstration step behind every position that predicts, ``[B, P]``, see
            :func:`~specact.lab.train.sees.positions`.
        weight: 1 at real positions, 0 at padding before an episode's start, ``[B, P]``.
    """

    observation: dict[str, Tensor]
    step: Tensor
    weight: Tensor


class Windows:
    """All windows of a set of demonstrations.

    Windows that reach before an episode's start repeat its first observation, as the device does, and do not count
    there. Chunks that reach past an episode's end repeat its last action. Camera frames are read when they are drawn.

    Args:
        episodes: demonstrations in the environment's terms.
        chunk: n.
        centre: middle of each action dimension's range, ``[A]``.
        scale: half range of each action dimension, ``[A]``; chunks are divided by it after subtracting ``centre``.
    """

    def __init__(self, episodes: Episodes, chunk: int, centre: NDArray[np.float32], scale: NDArray[np.float32]) -> None:
        self.episodes = episodes
        lengths = np.diff(episodes.ends, prepend=0)
        self._starts, last = np.repeat(episodes.starts, lengths), np.repeat(episodes.ends - 1, lengths)
        ahead = np.minimum(np.arange(episodes.steps)[:, None] + np.arange(chunk), last[:, None])
        normalised = (episodes.action - centre) / scale
        self.chunks = torch.from_numpy(normalised[ahead].astype(np.float32))

    def __len__(self) -> int:
        return self.episodes.steps

    def showing(self, name: str, observed: NDArray[np.float32]) -> Windows:
        """The same windows with other values of an observation."""
        other = copy(self)
        other.episodes = replace(self.episodes, observation={**self.episodes.observation, name: observed})
        return other

    def draw(self, spec: ObservationSpec, seed: int, step: int, size: int) -> Batch:
        """The batch of one training step: a function of (seed, step) alone, which is what makes resuming exact."""
        return self.at(spec, stream(seed, Role.DATA, step=step).integers(len(self), size=size))

    def at(self, spec: ObservationSpec, chosen: NDArray[np.int64]) -> Batch:
        """The windows that end at these steps, as a policy sees them."""
        first = self._starts[chosen][:, None]

        def rows(length: int) -> NDArray[np.int64]:
            return chosen[:, None] + np.arange(1 - length, 1)

        observation = {}
        for name, field in spec.fields.items():
            index = np.maximum(rows(field.history), first) if field.history else chosen
            observation[name] = torch.from_numpy(self.episodes.observation[name][index])
        predicting = rows(positions(spec))
        step = torch.from_numpy(np.maximum(predicting, first))
        return Batch(observation, step, torch.from_numpy((predicting >= first).astype(np.float32)))
