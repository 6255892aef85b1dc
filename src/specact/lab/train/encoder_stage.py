"""The stage in which an image encoder learns to tell a number that demonstrations have, such as a pose, from a frame."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specact.errors import ConfigError
from specact.lab.envs.task import Task
from specact.lab.train.encoder import ImageEncoder
from specact.lab.train.loop import Metrics, Stage, cosine, decayed_apart
from specact.lab.train.recipe import EncoderRecipe
from specact.lab.train.vqbet import Statistics
from specact.lab.train.windows import Windows
from specact.rng import Role, stream

_AT_ONCE = 256  # frames that are encoded in one pass
_SMALL = 0.1  # errors below this many standard deviations count squared, larger ones as they are


class Telling(nn.Module):
    """An encoder with a linear readout of what it learns, in standard deviations."""

    def __init__(self, encoder: ImageEncoder, recipe: EncoderRecipe, numbers: int) -> None:
        super().__init__()
        self.encoder, self.readout = encoder, nn.Linear(recipe.width, numbers)

    def forward(self, frames: Tensor) -> Tensor:
        told: Tensor = self.readout(self.encoder(frames))
        return told


@dataclass(frozen=True)
class Pictures:
    """Frames ``[N, H, W, 3]`` and what is to be told from them, ``[N, ...]``."""

    frames: Any
    told: NDArray[np.float32]

    def some(self, rng: np.random.Generator, number: int) -> tuple[Tensor, NDArray[np.float32]]:
        rows = rng.integers(len(self.told), size=number)
        return torch.from_numpy(np.asarray(self.frames[rows])), self.told[rows]


def rendered(task: Task | None, recipe: EncoderRecipe, camera: str, seed: int) -> Pictures | None:
    """The random scenes that a recipe asks for.

    Raises:
        ConfigError: if the environment has none, or they lack what the encoder needs.
    """
    if not recipe.scenes:
        return None
    if task is None or task.scenes is None:
        raise ConfigError(
            "encoder.scenes needs an environment that shows random scenes, such as pusht-camera; leave it out to learn "
            "from the demonstrations' frames alone"
        )
    made = task.scenes(recipe.scenes, stream(seed, Role.DATA, episode=4))
    for name in (camera, recipe.learns):
        if name not in made:
            raise ConfigError(f"the random scenes of {task.name!r} have no {name!r}; they have {', '.join(made)}")
    return Pictures(made[camera], made[recipe.learns])


def encoder_stage(
    name: str,
    recipe: EncoderRecipe,
    camera: str,
    train: Windows,
    held_out: Windows,
    statistics: Statistics,
    scenes: Pictures | None,
    seed: int,
) -> Stage:
    """The encoder of one camera of a policy, to be trained before the policy and then frozen."""
    torch.manual_seed(int(stream(seed, Role.DATA, episode=5).integers(2**62)))
    shown, kept = (
        Pictures(windows.episodes.frames(camera), windows.episodes.numbers(recipe.learns))
        for windows in (train, held_out)
    )
    mean, std = statistics[recipe.learns]
    encoder = ImageEncoder(recipe, *shown.frames.shape[1:3])
    model = Telling(encoder, recipe, mean.numel())

    def error(frames: Tensor, told: NDArray[np.float32]) -> Tensor:
        wanted = ((torch.from_numpy(told) - mean) / std).flatten(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
            found = model(frames)
        return found.float() - wanted

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rng = stream(seed, Role.DATA, episode=6, step=step)
        drawn = [shown.some(rng, recipe.batch - (0 if scenes is None else recipe.batch // 2))]
        if scenes is not None:
            drawn.append(scenes.some(rng, recipe.batch // 2))
        frames, told = zip(*drawn, strict=True)
        away = error(torch.cat(frames), np.concatenate(told))
        loss = nn.functional.smooth_l1_loss(away, torch.zeros_like(away), beta=_SMALL)
        return loss, {"error": away.detach().abs().mean()}

    def validate(module: nn.Module) -> Metrics:
        return {"error": float(error(*kept.some(stream(seed, Role.DATA, episode=6), 1024)).abs().mean())}

    return Stage(
        name=name,
        module=model,
        optimizer=torch.optim.AdamW(decayed_apart(model, recipe.weight_decay), betas=(0.9, 0.99)),
        update=update,
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, 100, recipe.steps),
        seed=seed,
        average=recipe.average,
    )


@torch.no_grad()
def encoded(windows: Windows, camera: str, encoder: ImageEncoder) -> Windows:
    """The same windows with the encoder's features ``[N, width]`` in the place of a camera's frames."""
    frames = windows.episodes.frames(camera)
    parts = [encoder(torch.from_numpy(frames[at : at + _AT_ONCE])) for at in range(0, len(frames), _AT_ONCE)]
    episodes = windows.episodes
    seen = {**episodes.observation, camera: torch.cat(parts).numpy()}
    return windows.showing(replace(episodes, observation=seen))
