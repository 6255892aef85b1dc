"""The two kinds of stage: the tokenizer, and a policy on top of the frozen tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import demonstrations
from specact.lab.envs.task import Task
from specact.lab.train import tokenizer as rvq
from specact.lab.train.flow_recipe import FlowRecipe
from specact.lab.train.loop import Metrics, Stage, cosine
from specact.lab.train.losses import Targets, policy_loss
from specact.lab.train.recipe import PolicyRecipe, Recipe
from specact.lab.train.tokenizer import ResidualVQ
from specact.lab.train.vqbet import Shapes, Statistics, VQBeT
from specact.lab.train.windows import Batch, Windows
from specact.rng import Role, stream

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Dataset:
    """Demonstrations ready for training.

    Attributes:
        train, held_out: windows of the episodes trained on, and of those kept back.
        statistics: of the training observations.
        centre, scale: action normalisation, ``[A]``: ``normalised = (action - centre) / scale`` lies in [-1, 1].
    """

    train: Windows
    held_out: Windows
    statistics: Statistics
    centre: Tensor
    scale: Tensor


def demonstrated(recipe: Recipe | FlowRecipe, task: Task, data: Path, progress: Progress) -> Episodes:
    """The demonstrations of a recipe: read from files below ``data``, or made by the task's scripted expert.

    Camera frames are left out unless the recipe says ``image = true``.

    Raises:
        DataError: if they cannot be read, do not fit the task, or lack the frames that the recipe asks for.
    """
    made = demonstrations(
        task,
        tuple(data / name for name in recipe.data),
        recipe.generate_episodes,
        recipe.generate_noise,
        recipe.seed,
        lambda done: progress("demonstrations", done, recipe.generate_episodes),
    )
    if not (isinstance(recipe, Recipe) and recipe.image):
        return replace(made, image=None)
    if made.image is None:
        raise DataError("the recipe says image = true, but these demonstrations have no camera frames")
    return made


def prepare(episodes: Episodes, recipe: Recipe | FlowRecipe) -> Dataset:
    """Splits by episode (the same split for every stage), normalises actions by their range.

    Raises:
        DataError: if there are too few episodes, or values too large to compute with.
    """
    train, held_out = episodes.split(recipe.held_out, recipe.seed)
    low, high = train.action.min(0), train.action.max(0)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is refused below
        centre, scale = (low + high) / 2, np.maximum((high - low) / 2, 1e-6)

    def moments(values: np.ndarray | None) -> tuple[Tensor, Tensor]:
        if values is None:
            return torch.zeros(0), torch.ones(0)
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy(values.mean(0)), torch.from_numpy(np.maximum(values.std(0), 1e-3))

    statistics = Statistics(*moments(train.state), *moments(train.goal))
    tensors = [torch.from_numpy(centre), torch.from_numpy(scale)]
    if not all(bool(part.isfinite().all()) for part in (*tensors, *vars(statistics).values())):
        raise DataError(
            "these demonstrations hold values so large that their range or standard deviation overflows; rescale them"
        )
    windows = [Windows(part, recipe.window, recipe.chunk, centre, scale) for part in (train, held_out)]
    return Dataset(windows[0], windows[1], statistics, *tensors)


def tokenizer_stage(dataset: Dataset, recipe: Recipe) -> Stage:
    """The residual VQ, to be trained before any policy and then frozen."""
    settings, chunks = recipe.tokenizer, dataset.train.chunks
    torch.manual_seed(recipe.seed)
    model = ResidualVQ(settings, recipe.chunk, chunks.shape[-1])
    generator = torch.Generator().manual_seed(recipe.seed)
    model.initialise(chunks[_some(recipe.seed, 0, len(chunks), 4096)], generator)

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        loss, error, _ = model.losses(chunks[_some(recipe.seed, step, len(chunks), settings.batch)])
        return loss, {"error": error}

    def revive(step: int) -> None:
        # Not in the last fifth: a code moved then would have no time to settle.
        if step % 100 == 99 and step < 0.8 * settings.steps:
            generator.manual_seed(recipe.seed + step)
            model.revive_dead_codes(chunks[_some(recipe.seed, step, len(chunks), settings.batch)], generator)

    def validate(module: nn.Module) -> Metrics:
        metrics = rvq.measure(model, dataset.held_out.chunks)
        over_all = rvq.measure(model, chunks[_some(recipe.seed, 0, len(chunks), 65536)])
        return {
            "error": metrics.error,
            "baseline": metrics.baseline,
            **{f"used_{g}": used for g, used in enumerate(over_all.used)},
            **{f"dead_{g}": dead for g, dead in enumerate(over_all.dead)},
        }

    return Stage(
        name="tokenizer",
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), weight_decay=1e-4),
        update=update,
        validate=validate,
        steps=settings.steps,
        learning_rate=cosine(settings.learning_rate, 100, settings.steps),
        seed=recipe.seed,
        after_update=revive,
    )


def decoder_table(tokenizer: ResidualVQ) -> Tensor:
    """The decoder over all code tuples, ``[K ** G, n, A]``: what the device needs of it."""
    codes = range(tokenizer.recipe.codes)
    tuples = torch.tensor(list(itertools.product(codes, repeat=tokenizer.recipe.codebooks)))
    with torch.no_grad():
        return tokenizer.decode(tuples)


def shapes_of(dataset: Dataset, recipe: Recipe) -> Shapes:
    """The sizes every policy of a recipe shares."""
    episodes = dataset.train.episodes
    image = None if episodes.image is None else (episodes.image.shape[1], episodes.image.shape[2])
    return Shapes(
        window=recipe.window,
        state=episodes.state.shape[1],
        goal=0 if episodes.goal is None else episodes.goal.shape[1],
        image=image,
        codebooks=recipe.tokenizer.codebooks,
        codes=recipe.tokenizer.codes,
        chunk=recipe.chunk,
        actions=episodes.action.shape[1],
        goal_mode=recipe.goal,
    )


def policy_stage(name: str, settings: PolicyRecipe, dataset: Dataset, recipe: Recipe, tokenizer: ResidualVQ) -> Stage:
    """One VQ-BeT policy on the frozen tokenizer."""
    torch.manual_seed(int(stream(recipe.seed, Role.DATA, episode=2).integers(2**62)))
    model = VQBeT(shapes_of(dataset, recipe), settings, dataset.statistics)
    decoded = decoder_table(tokenizer)
    codes = {id(windows): tokenizer.encode(windows.chunks) for windows in (dataset.train, dataset.held_out)}

    def loss_on(windows: Windows, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = Targets(codes[id(windows)][batch.step], windows.chunks[batch.step], batch.weight, decoded)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
            prediction = model(batch.state, batch.goal, batch.image)
        return policy_loss(model, prediction, targets)

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        return loss_on(dataset.train, dataset.train.draw(recipe.seed, step, settings.batch))

    def validate(module: nn.Module) -> Metrics:
        torch.manual_seed(recipe.seed)
        _, parts = loss_on(dataset.held_out, dataset.held_out.draw(recipe.seed, 0, 2048))
        return {part: float(value) for part, value in parts.items()}

    return Stage(
        name=name,
        module=model,
        optimizer=torch.optim.AdamW(decayed_apart(model, settings.weight_decay), betas=(0.9, 0.99)),
        update=update,
        validate=validate,
        steps=settings.steps,
        learning_rate=cosine(settings.learning_rate, settings.warmup, settings.steps),
        seed=recipe.seed,
        average=settings.average,
        snapshot_at=round(settings.snapshot * settings.steps),
    )


def decayed_apart(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: biases, norms and other vectors are not decayed."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _some(seed: int, step: int, total: int, size: int) -> Tensor:
    """Indices of a batch of chunks: a function of (seed, step) alone."""
    drawn = stream(seed, Role.DATA, episode=3, step=step).integers(total, size=min(size, total))
    return torch.from_numpy(drawn)
