"""``specact train`` of a flow policy: from demonstrations to a bundle; stopped, it goes on where it was."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specact import __version__
from specact.families.chunks.flow import FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import LoadedPolicy
from specact.lab.train import stages
from specact.lab.train.flow import Flow
from specact.lab.train.flow_export import write_flow_bundle
from specact.lab.train.flow_recipe import FlowRecipe
from specact.lab.train.folder import check_free, claim, last_lines
from specact.lab.train.loop import Metrics, Stage, adamw, autocast, cosine, run
from specact.lab.train.stages import Progress
from specact.lab.train.teacher import check_teacher, forget_answers, teach
from specact.lab.train.train import Trained
from specact.lab.train.windows import Batch, Dataset, Windows, observation_of
from specact.locks import locked
from specact.rng import Role, stream

NAME = "flow"


def units_of(dataset: Dataset) -> FlowUnits:
    """The units of a policy trained on these demonstrations."""
    action, centre, scale = dataset.train.episodes.action, dataset.centre.numpy(), dataset.scale.numpy()
    return FlowUnits(action.mean(0), np.maximum(action.std(0), 1e-6), centre - scale, centre + scale)


def flow_stage(dataset: Dataset, recipe: FlowRecipe, spec: ChunkSpec) -> Stage:
    """Trains encoder, prefix and expert together.

    With noise ``x_0``, data ``x_1`` and ``x_t = (1 - t) x_0 + t x_1`` the expert learns ``x_1 - x_0`` by least squares,
    at times drawn uniformly. Steps of a chunk past its episode's end were never demonstrated, and do not count.
    """
    torch.manual_seed(int(stream(recipe.seed, Role.DATA, episode=2).integers(2**62)))
    model = Flow(spec, recipe, dataset.statistics)
    units = units_of(dataset)
    data = {id(windows): _chunks(windows, dataset, units) for windows in (dataset.train, dataset.held_out)}

    def loss_on(windows: Windows, batch: Batch, draws: int) -> Tensor:
        chunks, real = data[id(windows)]
        ends_at = batch.step[:, -1]
        clean, weight = chunks[ends_at].repeat(draws, 1, 1), real[ends_at].repeat(draws, 1)
        noise, time = torch.randn_like(clean), torch.rand(len(clean))
        noisy = torch.lerp(noise, clean, time[:, None, None])
        with autocast(recipe):
            cache = model.cache(batch.observation)
            velocity = model.expert(noisy, time, cache.repeat(draws, *(1,) * (cache.dim() - 1)))
        error = (velocity.float() - (clean - noise)).square().mean(-1)
        loss: Tensor = (weight * error).sum() / weight.sum()
        return loss

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        return loss_on(
            dataset.train, dataset.train.draw(spec.observation, recipe.seed, step, recipe.batch), recipe.draws
        ), {}

    def validate(module: nn.Module) -> Metrics:
        torch.manual_seed(recipe.seed)
        batch = dataset.held_out.draw(spec.observation, recipe.seed, 0, min(1024, 4 * len(dataset.held_out)))
        return {"velocity_mse": float(loss_on(dataset.held_out, batch, 4))}

    return Stage(
        name=NAME,
        module=model,
        optimizer=adamw(model, recipe.weight_decay),
        update=update,
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, recipe.warmup, recipe.steps),
        seed=recipe.seed,
        average=recipe.average,
    )


def _chunks(windows: Windows, dataset: Dataset, units: FlowUnits) -> tuple[Tensor, Tensor]:
    """Chunks in the flow's units ``[N, H, A]``, and which of their steps lie within the episode, ``[N, H]``."""
    actions = dataset.centre + dataset.scale * windows.chunks
    ends = windows.episodes.ends
    left = np.repeat(ends, np.diff(ends, prepend=0)) - np.arange(len(windows))
    real = np.arange(windows.chunks.shape[1]) < left[:, None]
    return torch.from_numpy(units.to_flow(actions.numpy())), torch.from_numpy(real.astype(np.float32))


def train_flow(
    recipe: FlowRecipe,
    data: Path,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    teacher: LoadedPolicy | None = None,
) -> Trained:
    """Makes the flow policy of a recipe; arguments and errors as for :func:`~specact.lab.train.train.train`.

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
        check_teacher(teacher, recipe.chunk, spec.actions, spec.rate_hz, set(made.observation))
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
    recipe: FlowRecipe,
    dataset: Dataset,
    spec: ChunkSpec,
    out: Path,
    progress: Progress,
    asked: dict[str, Any],
) -> Trained:
    stage = flow_stage(dataset, recipe, spec)
    stage.module.load_state_dict(run(stage, out, lambda done: progress(NAME, done, recipe.steps)))
    assert isinstance(stage.module, Flow)
    folder = out / "bundles" / recipe.bundle
    manifest = {
        "name": recipe.bundle,
        "env": recipe.env or "",
        "specact": __version__,
        "recipe": asked,
        "training": last_lines(out),
    }
    write_flow_bundle(
        folder, manifest=manifest, model=stage.module, units=units_of(dataset), half=recipe.precision == "float16"
    )
    return Trained([folder], last_lines(out))
