"""``specact train`` of a chunk policy: trains a bundle on demonstrations; resumable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specact import __version__
from specact.bundle.words import Words
from specact.errors import unknown_name
from specact.families.chunks.flow import FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import LoadedPolicy
from specact.families.tokens.bins import BINS
from specact.lab.data.episodes import Episodes
from specact.lab.data.locks import locked
from specact.lab.train import checkpoint, stages
from specact.lab.train.attention import perceptron
from specact.lab.train.chunk_export import WRITERS, ChunkModel
from specact.lab.train.chunk_recipe import ChunkRecipe
from specact.lab.train.flow import Flow
from specact.lab.train.folder import check_free, claim, last_lines
from specact.lab.train.loop import Accelerator, Metrics, Stage, accelerator, adamw, autocast, cosine, device_of, run
from specact.lab.train.stages import Progress
from specact.lab.train.teacher import check_teacher, forget_answers, teach
from specact.lab.train.tokens import TokenModel
from specact.lab.train.train import TrainingResult
from specact.lab.train.windows import Dataset, Statistics, Windows, observation_of
from specact.rng import Role, stream

_SMALL = 0.1  # beta of the auxiliary loss, in standard deviations


def units_of(dataset: Dataset, kind: str) -> FlowUnits:
    """The action units of a policy: bins divide the range of the demonstrations; a flow's are standardised."""
    action, centre, scale = dataset.train.episodes.action, dataset.centre.numpy(), dataset.scale.numpy()
    if kind == "tokens":
        return FlowUnits(centre, scale, centre - scale, centre + scale)
    return FlowUnits(action.mean(0), np.maximum(action.std(0), 1e-6), centre - scale, centre + scale)


class TrainingBatch(NamedTuple):
    """A training batch.

    Attributes:
        observation: arrays ``[B, *window_shape]``, by name.
        chunk: labels in the policy's units, ``[B, H, A]``.
        real: 1 for actions that count in the loss, else 0, ``[B, H]``.
        auxiliary: labels of the recipe's auxiliary observation, standardised, ``[B, D]``; None without one.
    """

    observation: Mapping[str, Tensor]
    chunk: Tensor
    real: Tensor
    auxiliary: Tensor | None = None

    def to(self, device: torch.device) -> TrainingBatch:
        """The batch on another device."""
        observation = {name: values.to(device) for name, values in self.observation.items()}
        auxiliary = None if self.auxiliary is None else self.auxiliary.to(device)
        return TrainingBatch(observation, self.chunk.to(device), self.real.to(device), auxiliary)


def demonstrated_stage(dataset: Dataset, recipe: ChunkRecipe, spec: ChunkSpec) -> Stage:
    """The stage that trains the policy of a recipe on demonstrations, see :func:`chunk_stage`.

    Steps of a chunk past its episode's end are masked.
    """
    units = units_of(dataset, recipe.kind)
    data = {
        id(windows): _chunks(windows, dataset, units, recipe.skip_disturbed)
        for windows in (dataset.train, dataset.held_out)
    }

    def draw_batch(windows: Windows, step: int, count: int) -> TrainingBatch:
        batch = windows.draw(spec.observation, recipe.seed, step, count)
        chunks, real = data[id(windows)]
        last = batch.step[:, -1]
        auxiliary = None
        if recipe.auxiliary:
            mean, std = dataset.statistics[recipe.auxiliary]
            labels = torch.from_numpy(windows.episodes.numbers(recipe.auxiliary)[last.numpy()])
            auxiliary = ((labels - mean) / std).flatten(1)
        return TrainingBatch(batch.observation, chunks[last], real[last], auxiliary)

    return chunk_stage(
        recipe.kind, recipe, spec, dataset.statistics, dataset.words,
        lambda step: draw_batch(dataset.train, step, recipe.batch),
        lambda: draw_batch(dataset.held_out, 0, min(1024, 4 * len(dataset.held_out))),
        auxiliary=dataset.statistics[recipe.auxiliary][0].numel() if recipe.auxiliary else 0,
    )  # fmt: skip


def chunk_stage(
    name: str,
    recipe: ChunkRecipe,
    spec: ChunkSpec,
    statistics: Statistics,
    words: Words | None,
    draw: Callable[[int], TrainingBatch],
    held_out: Callable[[], TrainingBatch],
    *,
    auxiliary: int = 0,
) -> Stage:
    """The stage that trains all networks of a policy jointly.

    Args:
        name: of the stage.
        recipe: the networks' sizes and the optimizer's settings.
        spec: of the policy's observations and chunks.
        statistics: of the observations.
        words: of the instructions, or None.
        draw: the batch of a step.
        held_out: a batch to validate on.
        auxiliary: D, the number of auxiliary labels; a readout of the prefix, which is not exported, predicts them.
    """
    torch.manual_seed(int(stream(recipe.seed, Role.DATA, episode=2).integers(2**62)))
    model: ChunkModel = (TokenModel if recipe.kind == "tokens" else Flow)(spec, recipe, statistics, words)
    if auxiliary:
        model.readout = perceptron(2 * recipe.width, recipe.width, auxiliary)
    measure, loss_of = _LOSSES[recipe.kind]

    def losses(batch: TrainingBatch, draws: int) -> tuple[Tensor, dict[str, Tensor]]:
        batch = batch.to(device_of(model))
        loss, prefix = loss_of(model, batch, recipe, draws)
        return loss, {} if batch.auxiliary is None else {"auxiliary": _auxiliary_loss(model, prefix, batch.auxiliary)}

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        loss, parts = losses(draw(step), recipe.draws)
        return loss + sum(parts.values(), loss.new_zeros(())), {name: part.detach() for name, part in parts.items()}

    def validate(module: nn.Module) -> Metrics:
        torch.manual_seed(recipe.seed)
        loss, parts = losses(held_out(), 4)
        return {measure: float(loss), **{name: float(part) for name, part in parts.items()}}

    return Stage(
        name=name,
        module=model,
        optimizer=adamw(model, recipe.weight_decay),
        update=update,
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, recipe.warmup, recipe.steps),
        seed=recipe.seed,
        average=recipe.average,
        averages_at=tuple(recipe.steps * part // (recipe.snapshots + 1) for part in range(1, recipe.snapshots + 1)),
    )


def _flow_loss(model: Flow, batch: TrainingBatch, recipe: ChunkRecipe, draws: int) -> tuple[Tensor, Tensor]:
    """Flow matching with noise ``x_0``, data ``x_1``, ``x_t = (1 - t) x_0 + t x_1``: squared error to ``x_1 - x_0``.

    This and the other losses also return the cache of the observation's tokens ``[B, L, 2, heads, N, W / heads]``.
    """
    clean, weight = batch.chunk.repeat(draws, 1, 1), batch.real.repeat(draws, 1)
    noise, time = torch.randn_like(clean), torch.rand(len(clean), device=clean.device)
    noisy = torch.lerp(noise, clean, time[:, None, None])
    with autocast(recipe, batch.chunk.device):
        cache = model.cache(batch.observation)
        velocity = model.expert(noisy, time, cache, draws)
    return _mean((velocity.float() - (clean - noise)).square(), weight), cache


def _regression_loss(model: Flow, batch: TrainingBatch, recipe: ChunkRecipe, draws: int) -> tuple[Tensor, Tensor]:
    """L1 error of ``x_1`` at ``x_0 = 0`` and ``t = 0``, as in ACT (Zhao et al. 2023)."""
    with autocast(recipe, batch.chunk.device):
        cache = model.cache(batch.observation)
        predicted = model.regressed(cache)
    return _mean((predicted.float() - batch.chunk).abs(), batch.real), cache


def nearest_bins(chunk: Tensor) -> Tensor:
    """:func:`~specact.families.tokens.bins.to_tokens` for tensors on any device."""
    return ((chunk.clamp(-1.0, 1.0) + 1.0) * ((BINS - 1) / 2)).round().long()


def _token_loss(model: TokenModel, batch: TrainingBatch, recipe: ChunkRecipe, draws: int) -> tuple[Tensor, Tensor]:
    """Cross entropy of every token given those before it."""
    tokens = nearest_bins(batch.chunk)
    with autocast(recipe, batch.chunk.device):
        logits, cache = model.logits(batch.observation, tokens.flatten(1))
    labels = soft_bins(batch.chunk.flatten(1), recipe.smooth) if recipe.smooth else tokens.flatten(1)
    entropy = nn.functional.cross_entropy(logits.float().movedim(-1, 1), labels.movedim(-1, 1), reduction="none")
    return _mean(entropy.reshape(tokens.shape), batch.real), cache


def soft_bins(values: Tensor, std: float) -> Tensor:
    """Distributions ``[..., 256]`` over the bins around values in [-1, 1]: normal, with this deviation in bins.

    Neighbouring bins are nearly the same action, which one-hot labels do not say (Imani and White 2018).
    """
    centres = torch.arange(BINS, device=values.device)
    places = (values.clamp(-1.0, 1.0)[..., None] + 1.0) * ((BINS - 1) / 2)
    return (-0.5 * ((places - centres) / std).square()).softmax(-1)


def _auxiliary_loss(model: ChunkModel, cache: Tensor, labels: Tensor) -> Tensor:
    """Smooth L1 error of the readout of the last layer's keys and values, averaged over the observation's tokens."""
    assert isinstance(model.readout, nn.Module)
    predicted = model.readout(cache[:, -1].float().mean(-2).flatten(1))
    return nn.functional.smooth_l1_loss(predicted, labels, beta=_SMALL)


# Name of the validation metric, and loss function, by kind.
_LOSSES: dict[str, tuple[str, Callable[[Any, TrainingBatch, ChunkRecipe, int], tuple[Tensor, Tensor]]]] = {
    "flow": ("velocity_mse", _flow_loss),
    "regression": ("action_l1", _regression_loss),
    "tokens": ("cross_entropy", _token_loss),
}


def _mean(error: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean of errors ``[B, H, A]``, with weights ``[B, H]``."""
    mean: Tensor = (weight * error.mean(-1)).sum() / weight.sum()
    return mean


def _chunks(windows: Windows, dataset: Dataset, units: FlowUnits, skip_disturbed: bool) -> tuple[Tensor, Tensor]:
    """Chunks in the policy's units ``[N, H, A]``, and which of their steps count, ``[N, H]``."""
    actions = dataset.centre + dataset.scale * windows.chunks
    episodes = windows.episodes if skip_disturbed else replace(windows.episodes, disturbed=None)
    real = episodes.followed(windows.chunks.shape[1])
    return torch.from_numpy(units.to_flow(actions.numpy())), torch.from_numpy(real.astype(np.float32))


def check_auxiliary(recipe: ChunkRecipe, episodes: Episodes) -> None:
    """Checks that demonstrations hold the numbers that a recipe's readout is to predict.

    Raises:
        ConfigError: if they do not.
    """
    numbers = [name for name in episodes.observation if name not in episodes.cameras]
    if recipe.auxiliary and recipe.auxiliary not in numbers:
        raise unknown_name("observation in auxiliary", recipe.auxiliary, numbers)


def train_chunks(
    recipe: ChunkRecipe,
    data: Path,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    teacher: LoadedPolicy | None = None,
    on: Accelerator = "cpu",
) -> TrainingResult:
    """Trains the chunk policy of a recipe; arguments and errors as for :func:`~specact.lab.train.train.train`.

    Args:
        teacher: a policy whose answers to the demonstrated observations are the labels, in place of the demonstrated
            actions.
    """
    torch.set_num_threads(threads)
    device = accelerator(on)
    request = asdict(recipe) | ({} if teacher is None else {"teacher": [teacher.name, teacher.fingerprint]})
    check_free(out, request)
    episodes = stages.demonstrated(recipe, stages.task_of(recipe), data, progress)
    observation = observation_of(recipe, recipe, episodes, "the policy")
    check_auxiliary(recipe, episodes)
    episodes = stages.needed(
        episodes,
        [observation] if teacher is None else [observation, teacher.policy.spec.observation],
        [recipe.auxiliary],
    )
    dataset = stages.prepare(episodes, recipe)
    assert episodes.rate_hz is not None, "given by the recipe or its task"
    spec = ChunkSpec(observation, recipe.chunk, episodes.action.shape[1], episodes.rate_hz)
    if teacher is not None:
        check_teacher(teacher, recipe.chunk, spec.actions, spec.rate_hz, episodes)
    with locked(out):
        claim(out, request)
        with stages.frames_at_hand(episodes, out / "frames", progress) as episodes:
            dataset = stages.prepare(episodes, recipe) if episodes.cameras else dataset
            if teacher is not None:
                teach(dataset, teacher, recipe.chunk, out, recipe.seed, progress)
            trained = _train(recipe, dataset, spec, out, progress, request, device)
        forget_answers(out)
        return trained


def _train(
    recipe: ChunkRecipe,
    dataset: Dataset,
    spec: ChunkSpec,
    out: Path,
    progress: Progress,
    request: dict[str, Any],
    device: torch.device,
) -> TrainingResult:
    stage = demonstrated_stage(dataset, recipe, spec)
    last = run(stage, out, lambda done: progress(recipe.kind, done, recipe.steps), device=device)
    manifest = {"env": recipe.env or "", "specact": __version__, "recipe": request, "training": last_lines(out)}
    snapshots = {
        f"{recipe.bundle}-{step}": checkpoint.read(out / f"{stage.name}@{step}.safetensors")[0]
        for step in stage.averages_at
    }
    folders = []
    for name, weights in (snapshots | {recipe.bundle: last}).items():
        stage.module.load_state_dict(weights)
        folders.append(out / "bundles" / name)
        WRITERS[recipe.kind](
            folders[-1],
            manifest={"name": name, **manifest},
            model=stage.module,
            units=units_of(dataset, recipe.kind),
            half=recipe.precision == "float16",
        )
    return TrainingResult(folders, last_lines(out))
