"""Training windows of demonstrations: observations, action chunks, and masks of padding."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specact.bundle.manifest import INSTRUCTION, Words
from specact.errors import ConfigError, unknown_name
from specact.lab.data.episodes import Episodes
from specact.lab.data.frames import Frames
from specact.lab.train.recipe import Recipe, Seeing
from specact.observation import Field, ObservationSpec
from specact.rng import Role, stream

# Mean and standard deviation of the training observations without camera frames, by name, each of the shape of one
# observation; the exported graph contains the normalisation.
Statistics = Mapping[str, tuple[Tensor, Tensor]]


def observation_of(policy: Seeing, recipe: Recipe, episodes: Episodes, who: str) -> ObservationSpec:
    """The observations of a policy, with shapes and histories.

    Args:
        policy, recipe: their settings of observations and histories.
        episodes: the recipe's demonstrations.
        who: the policy, for messages.

    Raises:
        ConfigError: if an observation is missing, or none has a history.
    """
    available = episodes.observation
    sees = policy.sees or tuple(
        name for name in available if name not in episodes.cameras and not name.startswith("privileged.")
    )
    for name in (*sees, *policy.history):
        if name not in available:
            raise unknown_name(f"observation of {who}", name, available)
    if not sees:
        raise ConfigError(
            f"these demonstrations hold camera frames alone ({', '.join(episodes.cameras)}); say which of them {who} "
            'sees, as in sees = ["image"]'
        )

    def field(name: str) -> Field:
        array, source = available[name], recipe.observations.get(name)
        history = policy.history.get(name, None if source is None else source.history)
        if history is None:
            history = 0 if name.partition(".")[0] == "goal" else recipe.window
        return Field(array.shape[1:], "uint8" if isinstance(array, Frames) else "float32", history)

    if policy.instruction and episodes.instructions is None:
        raise ConfigError(f"{who} is to follow an instruction, and these demonstrations do not say what they show")
    spec = ObservationSpec({name: field(name) for name in sees}, policy.instruction)
    if not any(field.history for field in spec.fields.values()):
        raise ConfigError(f"{who} needs at least one observation with a history of 1 or more")
    return spec


def positions(spec: ObservationSpec) -> int:
    """P: the number of newest positions that are covered by all histories; only those predict."""
    return min(field.history for field in spec.fields.values() if field.history)


@dataclass(frozen=True)
class Batch:
    """A batch of windows and their labels.

    Attributes:
        observation: by name, ``[B, T, ...]``, or ``[B, ...]`` without a history; of an instruction its words.
        step: index of the demonstration step of every predicting position, ``[B, P]``, see
            :func:`~specact.lab.train.windows.positions`.
        weight: 1 at real positions, 0 at padding before an episode's start and where the chunk does not count,
            ``[B, P]``.
    """

    observation: dict[str, Tensor]
    step: Tensor
    weight: Tensor


class Windows:
    """All windows of a set of demonstrations.

    Windows that reach before an episode's start are padded with its first observation, as on the device, with weight 0.
    Chunks that reach past an episode's end repeat its last action. Camera frames are read lazily.

    Args:
        episodes: demonstrations in the environment's units.
        chunk: n.
        centre: middle of each action dimension's range, ``[A]``.
        scale: half range of each action dimension, ``[A]``; chunks are divided by it after subtracting ``centre``.
        words: vocabulary of instructions, for policies that follow one.
        skip_disturbed: whether chunks that reach beyond a disturbed step do not count.

    Attributes:
        chunks: the normalised chunk that begins at each step, ``[N, n, A]``.
        counts: whether it counts, ``[N]``. Only windows at whose last step it counts are drawn.
    """

    def __init__(
        self,
        episodes: Episodes,
        chunk: int,
        centre: NDArray[np.float32],
        scale: NDArray[np.float32],
        words: Words | None = None,
        *,
        skip_disturbed: bool = False,
    ) -> None:
        self.episodes, self.words = episodes, words
        lengths = np.diff(episodes.ends, prepend=0)
        self._starts, last = np.repeat(episodes.starts, lengths), np.repeat(episodes.ends - 1, lengths)
        beyond = np.arange(episodes.steps)[:, None] + np.arange(chunk)
        ahead = np.minimum(beyond, last[:, None])
        normalised = (episodes.action - centre) / scale
        self.chunks = torch.from_numpy(normalised[ahead].astype(np.float32))
        self.counts: NDArray[np.bool_] = np.ones(episodes.steps, np.bool_)
        if skip_disturbed:
            self.counts = np.all(episodes.followed(chunk) | (beyond > last[:, None]), axis=1)
        self._drawn = np.flatnonzero(self.counts)

    def __len__(self) -> int:
        return self.episodes.steps

    @property
    def counted(self) -> Tensor:
        """The chunks that count, ``[M, n, A]``."""
        return self.chunks[self._drawn]

    def with_observation(self, name: str, observed: NDArray[np.float32]) -> Windows:
        """The windows with other values of an observation."""
        copied = copy(self)
        copied.episodes = replace(self.episodes, observation={**self.episodes.observation, name: observed})
        return copied

    def draw(self, spec: ObservationSpec, seed: int, step: int, size: int) -> Batch:
        """The batch of one training step: a function of (seed, step) only, so that resuming is exact."""
        drawn = stream(seed, Role.DATA, step=step).integers(len(self._drawn), size=size)
        return self.at(spec, self._drawn[drawn])

    def at(self, spec: ObservationSpec, chosen: NDArray[np.int64]) -> Batch:
        """The windows that end at these steps, with a policy's observations."""
        first = self._starts[chosen][:, None]

        def rows(length: int) -> NDArray[np.int64]:
            return chosen[:, None] + np.arange(1 - length, 1)

        observation = {}
        for name, field in spec.fields.items():
            index = np.maximum(rows(field.history), first) if field.history else chosen
            observation[name] = torch.from_numpy(self.episodes.observation[name][index])
        if spec.instruction:
            observation[INSTRUCTION] = self._instruction_tokens(chosen)
        predicting = rows(positions(spec))
        step = np.maximum(predicting, first)
        weight = ((predicting >= first) & self.counts[step]).astype(np.float32)
        return Batch(observation, torch.from_numpy(step), torch.from_numpy(weight))

    def instructions(self, chosen: NDArray[np.int64]) -> list[str]:
        """The instructions at these steps."""
        instructions = self.episodes.instructions
        assert instructions is not None, "checked by the caller"
        return [instructions[episode] for episode in np.searchsorted(self.episodes.ends, chosen, side="right")]

    def _instruction_tokens(self, chosen: NDArray[np.int64]) -> Tensor:
        assert self.words is not None, "checked by observation_of"
        return torch.from_numpy(self.words.numbers(self.instructions(chosen)))
