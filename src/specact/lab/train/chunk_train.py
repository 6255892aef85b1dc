"""``specact train`` of a chunk policy: from demonstrations to a bundle; stopped, it goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specact import __version__
from specact.families.chunks.flow import FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import LoadedPolicy
from specact.lab.train import stages
from specact.lab.train.chunk_export import WRITERS
from specact.lab.train.chunk_recipe import ChunkRecipe
from specact.lab.train.flow import Flow
from specact.lab.train.folder import check_free, claim, last_lines
from specact.lab.train.loop import Metrics, Stage, adamw, autocast, cosine, run
from specact.lab.train.stages import Progress
from specact.lab.train.teacher import check_teacher, forget_answers, teach
from specact.lab.train.train import Trained
from specact.lab.train.windows import Dataset, Statistics, Windows, observation_of
from specact.locks import locked
from specact.rng import Role, stream

# How the loss is called on what was held out.
_LOSS = {"flow": "velocity_mse", "regression": "action_l1"}


def units_of(dataset: Dataset) -> FlowUnits:
    """The units of a policy trained on these demonstrations."""
    action, centre, scale = dataset.train.episodes.action, dataset.centre.numpy(), dataset.scale.numpy()
    return FlowUnits(action.mean(0), np.maximum(action.std(0), 1e-6), centre - scale, centre + scale)


class Lesson(NamedTuple):
    """A batch to learn from.

    Attributes:
        observation: arrays ``[B, *window_shape]``, by name.
        chunk: what to answer, in the flow's units, ``[B, H, A]``.
        real: which of its actions count, ``[B, H]``.
    """

    observation: Mapping[str, Tensor]
    chunk: Tensor
    real: Tensor


def demonstrated_stage(dataset: Dataset, recipe: ChunkRecipe, spec: ChunkSpec) -> Stage:
    """Trains the policy of a recipe on demonstrations, see :func:`chunk_stage`.

    Steps of a chunk past its episode's end were never demonstrated, and do not count.
    """
    units = units_of(dataset)
    data = {id(windows): _chunks(windows, dataset, units) for windows in (dataset.train, dataset.held_out)}

    def drawn(windows: Windows, step: int, count: int) -> Lesson:
        batch = windows.draw(spec.observation, recipe.seed, step, count)
        chunks, real = data[id(windows)]
        return Lesson(batch.observation, chunks[batch.step[:, -1]], real[batch.step[:, -1]])

    return chunk_stage(
        recipe.kind, recipe, spec, dataset.statistics,
        lambda step: drawn(dataset.train, step, recipe.batch),
        lambda: drawn(dataset.held_out, 0, min(1024, 4 * len(dataset.held_out))),
    )  # fmt: skip


def chunk_stage(
    name: str,
    recipe: ChunkRecipe,
    spec: ChunkSpec,
    statistics: Statistics,
    draw: Callable[[int], Lesson],
    held_out: Callable[[], Lesson],
) -> Stage:
    """Trains encoder, prefix and expert together.

    With noise ``x_0``, data ``x_1`` and ``x_t = (1 - t) x_0 + t x_1`` a flow's expert learns ``x_1 - x_0`` by least
    squares, at times drawn uniformly. Regression learns ``x_1`` at ``x_0 = 0`` and ``t = 0`` by least absolute errors,
    as ACT does (Zhao et al. 2023).

    Args:
        name: of the stage.
        recipe: the networks' sizes and the optimizer's settings.
        spec: what the policy sees and answers.
        statistics: of the observations.
        draw: the batch of a step.
        held_out: a batch to validate on.
    """
    torch.manual_seed(int(stream(recipe.seed, Role.DATA, episode=2).integers(2**62)))
    model = Flow(spec, recipe, statistics)

    def loss_on(lesson: Lesson, draws: int) -> Tensor:
        if recipe.kind == "regression":
            with autocast(recipe):
                found = model.regressed(lesson.observation)
            return _mean((found.float() - lesson.chunk).abs(), lesson.real)
        clean, weight = lesson.chunk.repeat(draws, 1, 1), lesson.real.repeat(draws, 1)
        noise, time = torch.randn_like(clean), torch.rand(len(clean))
        noisy = torch.lerp(noise, clean, time[:, None, None])
        with autocast(recipe):
            cache = model.cache(lesson.observation)
            velocity = model.expert(noisy, time, cache.repeat(draws, *(1,) * (cache.dim() - 1)))
        return _mean((velocity.float() - (clean - noise)).square(), weight)

    def validate(module: nn.Module) -> Metrics:
        torch.manual_seed(recipe.seed)
        return {_LOSS[recipe.kind]: float(loss_on(held_out(), 4))}

    return Stage(
        name=name,
        module=model,
        optimizer=adamw(model, recipe.weight_decay),
        update=lambda step: (loss_on(draw(step), recipe.draws), {}),
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, recipe.warmup, recipe.steps),
        seed=recipe.seed,
        average=recipe.average,
    )


def _mean(error: Tensor, weight: Tensor) -> Tensor:
    """The mean of errors ``[B, H, A]`` over the actions that count, by weights ``[B, H]``."""
    mean: Tensor = (weight * error.mean(-1)).sum() / weight.sum()
    return mean


def _chunks(windows: Windows, dataset: Dataset, units: FlowUnits) -> tuple[Tensor, Tensor]:
    """Chunks in the flow's units ``[N, H, A]``, and which of their steps lie within the episode, ``[N, H]``."""
    actions = dataset.centre + dataset.scale * windows.chunks
    ends = windows.episodes.ends
    left = np.repeat(ends, np.diff(ends, prepend=0)) - np.arange(len(windows))
    real = np.arange(windows.chunks.shape[1]) < left[:, None]
    return torch.from_numpy(units.to_flow(actions.numpy())), torch.from_numpy(real.astype(np.float32))


def train_chunks(
    recipe: ChunkRecipe,
    data: Path,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    teacher: LoadedPolicy | None = None,
) -> Trained:
    """Makes the chunk policy of a recipe; arguments and errors as for :func:`~specact.lab.train.train.train`.

    Args:
        teacher: a policy whose answers to the demonstrated observations are learned, instead of the demonstrated
            actions.
    """
    torch.set_num_threads(threads)
    asked = asdict(recipe) | ({} if teacher is None else {"teacher": [teacher.name, teacher.fingerprint]})
    check_free(out, asked)
    made = stages.demonstrated(recipe, stages.task_of(recipe), data, progress)
    observation = observation_of(recipe, recipe, made, "the policy")
    made = stages.needed(made, [observation] if teacher is None else [observation, teacher.policy.spec.observation])
    dataset = stages.prepare(made, recipe)
    assert made.rate_hz is not None, "the recipe or its task says it"
    spec = ChunkSpec(observation, recipe.chunk, made.action.shape[1], made.rate_hz)
    if teacher is not None:
        check_teacher(teacher, recipe.chunk, spec.actions, spec.rate_hz, made)
    with locked(out):
        claim(out, asked)
        with stages.frames_at_hand(made, out / "frames", progress) as made:
            dataset = stages.prepare(made, recipe) if made.cameras else dataset
            if teacher is not None:
                teach(dataset, teacher, recipe.chunk, out, recipe.seed, progress)
            trained = _train(recipe, dataset, spec, out, progress, asked)
        forget_answers(out)
        return trained


def _train(
    recipe: ChunkRecipe,
    dataset: Dataset,
    spec: ChunkSpec,
    out: Path,
    progress: Progress,
    asked: dict[str, Any],
) -> Trained:
    stage = demonstrated_stage(dataset, recipe, spec)
    stage.module.load_state_dict(run(stage, out, lambda done: progress(recipe.kind, done, recipe.steps)))
    assert isinstance(stage.module, Flow)
    folder = out / "bundles" / recipe.bundle
    manifest = {
        "name": recipe.bundle,
        "env": recipe.env or "",
        "specact": __version__,
        "recipe": asked,
        "training": last_lines(out),
    }
    WRITERS[recipe.kind](
        folder, manifest=manifest, model=stage.module, units=units_of(dataset), half=recipe.precision == "float16"
    )
    return Trained([folder], last_lines(out))
