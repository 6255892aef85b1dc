"""The stage in which an image encoder learns to tell an observation, such as a pose, from a camera's frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specact.errors import ConfigError, unknown_name
from specact.lab.data.episodes import Episodes
from specact.lab.envs.task import Task
from specact.lab.train.encoder import ImageEncoder
from specact.lab.train.loop import Metrics, Stage, autocast, cosine
from specact.lab.train.recipe import EncoderRecipe, Recipe
from specact.lab.train.stages import Dataset, decayed_apart
from specact.lab.train.windows import Windows
from specact.observation import ObservationSpec
from specact.rng import Role, stream

_AT_ONCE = 256  # frames that are encoded in one pass
_SMALL = 0.1  # errors below this many standard deviations count squared, larger ones as they are


class Telling(nn.Module):
    """An encoder with a linear readout of what it learns, in standard deviations."""

    def __init__(self, encoder: ImageEncoder, width: int, numbers: int) -> None:
        super().__init__()
        self.encoder, self.readout = encoder, nn.Linear(width, numbers)

    def forward(self, frames: Tensor) -> Tensor:
        told: Tensor = self.readout(self.encoder(frames))
        return told


class Scenes:
    """Random scenes of an environment, made when they are first asked for.

    Args:
        task: the environment.
        seed: decides what they show.
    """

    def __init__(self, task: Task | None, seed: int) -> None:
        self._task, self._seed = task, seed
        self._made: dict[int, dict[str, NDArray[Any]]] = {}

    def __call__(self, number: int) -> Mapping[str, NDArray[Any]]:
        """So many scenes: observations ``[number, ...]`` by name."""
        assert self._task is not None and self._task.scenes is not None, "learned has seen to it"
        if number not in self._made:
            self._made[number] = self._task.scenes(number, stream(self._seed, Role.DATA, episode=4))
        return self._made[number]


def learned(recipe: Recipe, specs: Mapping[str, ObservationSpec], episodes: Episodes, task: Task | None) -> set[str]:
    """Names of the observations that a recipe's encoders learn before their policies.

    Raises:
        ConfigError: if one is not there, is a camera's, or is learned for a policy without a camera; or if the
            environment shows no random scenes.
    """
    names = set()
    for name, policy in recipe.policies.items():
        encoder = policy.encoder
        if not encoder.learns:
            continue
        numbers = [there for there in episodes.observation if there not in episodes.cameras]
        if encoder.learns not in numbers:
            raise unknown_name(f"observation in encoder.learns of policy {name!r}", encoder.learns, numbers)
        if not specs[name].images:
            raise ConfigError(f"policy {name!r} has encoder.learns, but sees no camera; add one to sees")
        if encoder.scenes and (task is None or task.scenes is None):
            raise ConfigError(
                f"policy {name!r}: encoder.scenes needs an environment that shows random scenes, such as pusht-camera; "
                "leave it out to learn from the demonstrations' frames alone"
            )
        names.add(encoder.learns)
    return names


def encoder_stage(name: str, recipe: EncoderRecipe, camera: str, dataset: Dataset, scenes: Scenes, seed: int) -> Stage:
    """The encoder of one camera of a policy, to be trained before the policy and then frozen."""
    torch.manual_seed(int(stream(seed, Role.DATA, episode=5).integers(2**62)))
    mean, std = dataset.statistics[recipe.learns]
    model = Telling(ImageEncoder(recipe, dataset.train.episodes.frames(camera).shape[1:]), recipe.width, mean.numel())

    def some(seen: Mapping[str, Any], number: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Frames, and what is to be told from them."""
        rows = rng.integers(len(seen[camera]), size=number)
        told = (torch.from_numpy(seen[recipe.learns][rows]) - mean) / std
        return torch.from_numpy(seen[camera][rows]), told.flatten(1)

    def away(frames: Tensor, told: Tensor) -> Tensor:
        with autocast(recipe):
            found = model(frames)
        error: Tensor = found.float() - told
        return error

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rng = stream(seed, Role.DATA, episode=6, step=step)
        rendered = recipe.batch // 2 if recipe.scenes else 0
        frames, told = some(dataset.train.episodes.observation, recipe.batch - rendered, rng)
        if rendered:
            others, others_told = some(scenes(recipe.scenes), rendered, rng)
            frames, told = torch.cat([frames, others]), torch.cat([told, others_told])
        error = away(frames, told)
        loss = nn.functional.smooth_l1_loss(error, torch.zeros_like(error), beta=_SMALL)
        return loss, {"error": error.detach().abs().mean()}

    def validate(module: nn.Module) -> Metrics:
        rng = stream(seed, Role.DATA, episode=6)
        return {"error": float(away(*some(dataset.held_out.episodes.observation, 1024, rng)).abs().mean())}

    return Stage(
        name=name,
        module=model,
        optimizer=torch.optim.AdamW(decayed_apart(model, recipe.weight_decay), betas=(0.9, 0.99), fused=True),
        update=update,
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, 100, recipe.steps),
        seed=seed,
        average=recipe.average,
    )


@torch.no_grad()
def encoded(dataset: Dataset, camera: str, encoder: ImageEncoder) -> Dataset:
    """The same demonstrations with the encoder's features ``[N, width]`` in the place of a camera's frames."""

    def features(windows: Windows) -> Windows:
        frames = windows.episodes.frames(camera)
        parts = [encoder(torch.from_numpy(frames[at : at + _AT_ONCE])) for at in range(0, len(frames), _AT_ONCE)]
        return windows.showing(camera, torch.cat(parts).numpy())

    return replace(dataset, train=features(dataset.train), held_out=features(dataset.held_out))
