"""Training of chunk policies: by flow matching, by regression, or with autoregressive tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import WEIGHTS, Words
from specact.errors import ConfigError, unknown_name
from specact.families.chunks.flow import FLOW_PARTS, FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import REGRESSION_PARTS, LoadedPolicy
from specact.families.tokens.policy import BINS, TOKEN_PARTS
from specact.lab.data.episodes import Episodes
from specact.lab.train.attention import Statistics, perceptron
from specact.lab.train.dataset import Dataset, Windows, observation_of
from specact.lab.train.export import BundleFolder, deployed, stored_weights, write_weights
from specact.lab.train.fit import FromDemonstrations
from specact.lab.train.flow import Flow, TokenModel, flow_graphs, regression_graphs, token_graphs
from specact.lab.train.loop import Losses, Metrics, Progress, Stage, autocast, device_of, seed_weights
from specact.lab.train.recipe import ChunkRecipe, plain

ChunkModel = Flow | TokenModel
# Files of bundles, by kind.
CHUNK_PARTS = {"flow": FLOW_PARTS, "regression": REGRESSION_PARTS, "tokens": TOKEN_PARTS}
_SMALL = 0.1  # beta of the auxiliary loss, in standard deviations


class ChunkTraining(FromDemonstrations):
    """The chunk policy of a recipe, from demonstrations, or from a teacher's answers to what they observe."""

    def __init__(self, recipe: ChunkRecipe, data: Path, teacher: LoadedPolicy | None = None) -> None:
        super().__init__(recipe, data, recipe.seed, teacher=teacher)
        self.recipe = recipe
        self.request = plain(recipe) | ({} if teacher is None else {"teacher": [teacher.name, teacher.fingerprint]})

    def reads(self, episodes: Episodes) -> set[str]:
        recipe = self.recipe
        observation = observation_of(recipe, recipe, episodes, "the policy")
        numbers = [name for name in episodes.observation if name not in episodes.cameras]
        if recipe.auxiliary and recipe.auxiliary not in numbers:
            raise unknown_name("observation in auxiliary", recipe.auxiliary, numbers)
        assert episodes.rate_hz is not None, "given by the recipe or its task"
        self.spec = ChunkSpec(observation, recipe.chunk, episodes.action.shape[1], episodes.rate_hz)
        return super().reads(episodes) | {*observation.fields, recipe.auxiliary}

    def plan(self) -> list[dict[str, int]]:
        return [{self.recipe.kind: self.recipe.steps}]

    def stage(self, name: str) -> Stage:
        return demonstrated_stage(self.dataset, self.recipe, self.spec)

    def export(self, progress: Progress) -> list[Path]:
        recipe, units, folder = self.recipe, units_of(self.dataset, self.recipe.kind), self.out / "bundles"
        weights = {f"{recipe.bundle}-{step}": f"{recipe.kind}@{step}" for step in snapshots_of(recipe)}
        weights[recipe.bundle] = recipe.kind
        model = chunk_model(self.spec, recipe, self.dataset.statistics, self.dataset.words)
        for name, stage in weights.items():
            trained = self.weights(stage).items()
            model.load_state_dict({key: value for key, value in trained if not key.startswith("readout.")})
            write_chunk_bundle(folder / name, self.manifest(name, recipe.env), recipe, model, units)
        return [folder / name for name in weights]


def chunk_model(spec: ChunkSpec, recipe: ChunkRecipe, statistics: Statistics, words: Words | None) -> ChunkModel:
    """The networks of a policy."""
    return (TokenModel if recipe.kind == "tokens" else Flow)(spec, recipe, statistics, words)


def write_chunk_bundle(
    path: Path, manifest: Mapping[str, Any], recipe: ChunkRecipe, model: ChunkModel, units: FlowUnits
) -> None:
    """Writes a bundle of a trained policy, whose weights are rounded to float16 in place.

    Raises:
        BundleError: if an exported network's outputs differ from the trained one's.
    """
    folder, model = BundleFolder(path, CHUNK_PARTS[recipe.kind]), deployed(model)
    folder.arrays("normalisation", vars(units))
    if isinstance(model, TokenModel):
        folder.arrays("embedding", {"embedding": model.embedding.weight.numpy()})
        # Of its parts only the decoder can be left out.
        graphs, weights = token_graphs(model), write_weights(path / "decoder.safetensors", model.decoder)
    else:
        graphs = flow_graphs(model) if recipe.kind == "flow" else regression_graphs(model, units)
        weights = write_weights(path / WEIGHTS, model)
    for part, graph in graphs.items():
        folder.export(part, graph, None if isinstance(model, TokenModel) and part == "encoder" else weights)
    folder.parameters.pop("guide", None)  # they are the expert's
    vocabulary = {} if model.words is None else {"words": plain(model.words)}
    folder.finish({"kind": recipe.kind, **manifest, **vocabulary}, model.spec)


def units_of(dataset: Dataset, kind: str) -> FlowUnits:
    """The action units of a policy: bins divide the range of the demonstrations; a flow's are standardised."""
    action, centre, scale = dataset.train.episodes.action, dataset.centre.numpy(), dataset.scale.numpy()
    if kind == "tokens":
        return FlowUnits(centre, scale, centre - scale, centre + scale)
    return FlowUnits(action.mean(0), np.maximum(action.std(0), 1e-6), centre - scale, centre + scale)


def snapshots_of(recipe: ChunkRecipe) -> tuple[int, ...]:
    """The steps of a recipe's intermediate bundles."""
    return tuple(recipe.steps * part // (recipe.snapshots + 1) for part in range(1, recipe.snapshots + 1))


class TrainingBatch(NamedTuple):
    """Arrays ``[B, *window_shape]`` by name, labels ``chunk [B, H, A]`` in the policy's units, and which count.

    ``real [B, H]`` is 1 for actions that count in the loss, else 0; ``auxiliary [B, D]`` are the labels of the recipe's
    auxiliary observation, standardised.
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
    labels = {
        id(windows): chunk_labels(windows, dataset, units, skip_disturbed=recipe.skip_disturbed)
        for windows in (dataset.train, dataset.held_out)
    }

    def draw_batch(windows: Windows, step: int, count: int) -> TrainingBatch:
        batch = windows.draw(spec.observation, recipe.seed, step, count)
        chunks, real = labels[id(windows)]
        last = batch.step[:, -1]
        auxiliary = None
        if recipe.auxiliary:
            mean, std = dataset.statistics[recipe.auxiliary]
            numbers = torch.from_numpy(windows.episodes.numbers(recipe.auxiliary)[last.numpy()])
            auxiliary = ((numbers - mean) / std).flatten(1)
        return TrainingBatch(batch.observation, chunks[last], real[last], auxiliary)

    return chunk_stage(
        recipe.kind, recipe, spec, dataset.statistics, dataset.words,
        lambda step: draw_batch(dataset.train, step, recipe.batch),
        lambda: draw_batch(dataset.held_out, 0, min(1024, 4 * len(dataset.held_out))),
        auxiliary=dataset.statistics[recipe.auxiliary][0].numel() if recipe.auxiliary else 0,
    )  # fmt: skip


def chunk_stage(
    name: str, recipe: ChunkRecipe, spec: ChunkSpec, statistics: Statistics, words: Words | None,
    draw: Callable[[int], TrainingBatch], held_out: Callable[[], TrainingBatch], *, auxiliary: int = 0,
) -> Stage:  # fmt: skip
    """The stage that trains all networks of a policy jointly, on the batches that ``draw`` makes for each step.

    ``held_out`` makes one to validate on. ``auxiliary`` labels are predicted by a readout of the prefix.
    """
    seed_weights(recipe.seed)
    model = chunk_model(spec, recipe, statistics, words)
    if recipe.base:
        try:
            model.load_state_dict(stored_weights(find_bundle(recipe.base) / WEIGHTS))
        except RuntimeError as error:
            raise ConfigError(f"{recipe.base} has other networks than this recipe makes: {error}") from None
    if auxiliary:
        model.readout = perceptron(2 * recipe.width, recipe.width, auxiliary)
    measure, error_of = _ERRORS[recipe.kind]

    def losses(batch: TrainingBatch, draws: int) -> Losses:
        batch = batch.to(device_of(model))
        with autocast(recipe.width, recipe.bfloat16, batch.chunk.device):
            error, cache = error_of(model, batch, recipe, draws)
        loss = (batch.real * error.mean(-1)).sum() / batch.real.sum()
        return loss, {} if batch.auxiliary is None else {"auxiliary": _auxiliary_loss(model, cache, batch.auxiliary)}

    def update(step: int) -> Losses:
        loss, parts = losses(draw(step), recipe.draws)
        return loss + sum(parts.values(), loss.new_zeros(())), parts

    def validate(module: nn.Module) -> Metrics:
        torch.manual_seed(recipe.seed)
        loss, parts = losses(held_out(), 4)
        return {measure: loss, **parts}

    return Stage(name, model, recipe, update, validate, recipe.seed, averages_at=snapshots_of(recipe))


def _flow_error(model: Flow, batch: TrainingBatch, recipe: ChunkRecipe, draws: int) -> tuple[Tensor, Tensor]:
    """Flow matching with noise ``x_0``, data ``x_1``, ``x_t = (1 - t) x_0 + t x_1``: squared error to ``x_1 - x_0``.

    With ``delays`` the first d actions of each chunk are data, at t = 1, and only the others count (training-time RTC,
    arXiv 2512.05964); d is uniform from 0 to ``delays``. This and the other errors ``[B, H, A]`` come with the cache of
    the observation's tokens ``[B, L, 2, heads, N, W / heads]``.
    """
    clean = batch.chunk.repeat(draws, 1, 1)
    noise, time = torch.randn_like(clean), torch.rand(len(clean), device=clean.device)
    cache = model.cache(batch.observation)
    if recipe.delays:
        given = torch.randint(recipe.delays + 1, (len(clean), 1), device=clean.device)
        free = torch.arange(clean.shape[1], device=clean.device) >= given
        time = torch.where(free, time[:, None], 1.0)
    at = time[..., None] if recipe.delays else time[:, None, None]
    velocity = model.expert(torch.lerp(noise, clean, at), time, cache, draws)
    error = (velocity.float() - (clean - noise)).square()
    if recipe.delays:
        error = free[..., None] * error / free.float().mean()
    return error.unflatten(0, (draws, -1)).mean(0), cache


def _regression_error(model: Flow, batch: TrainingBatch, recipe: ChunkRecipe, draws: int) -> tuple[Tensor, Tensor]:
    """L1 error of ``x_1`` at ``x_0 = 0`` and ``t = 0``, as in ACT (Zhao et al. 2023)."""
    cache = model.cache(batch.observation)
    return (model.regressed(cache).float() - batch.chunk).abs(), cache


def _token_error(model: TokenModel, batch: TrainingBatch, recipe: ChunkRecipe, draws: int) -> tuple[Tensor, Tensor]:
    """Cross entropy of every token given those before it."""
    tokens = nearest_bins(batch.chunk)
    logits, cache = model.logits(batch.observation, tokens.flatten(1))
    labels = soft_bins(batch.chunk.flatten(1), recipe.smooth) if recipe.smooth else tokens.flatten(1)
    entropy = nn.functional.cross_entropy(logits.float().movedim(-1, 1), labels.movedim(-1, 1), reduction="none")
    return entropy.reshape(tokens.shape), cache


# By kind: the name of the loss on held-out demonstrations, and the errors of which it is the mean.
_ERRORS: dict[str, tuple[str, Callable[..., tuple[Tensor, Tensor]]]] = {
    "flow": ("velocity_mse", _flow_error),
    "regression": ("action_l1", _regression_error),
    "tokens": ("cross_entropy", _token_error),
}


def nearest_bins(chunk: Tensor) -> Tensor:
    """:func:`~specact.families.tokens.policy.to_tokens` for tensors on any device."""
    return ((chunk.clamp(-1.0, 1.0) + 1.0) * ((BINS - 1) / 2)).round().long()


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


def chunk_labels(
    windows: Windows, dataset: Dataset, units: FlowUnits, *, skip_disturbed: bool
) -> tuple[Tensor, Tensor]:
    """Chunks in the policy's units ``[N, H, A]``, and which of their steps count, ``[N, H]``."""
    actions = dataset.centre + dataset.scale * windows.chunks
    episodes = windows.episodes if skip_disturbed else replace(windows.episodes, disturbed=None)
    real = episodes.followed(windows.chunks.shape[1])
    return torch.from_numpy(units.to_flow(actions.numpy())), torch.from_numpy(real.astype(np.float32))
