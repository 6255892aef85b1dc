"""The stage that trains a flow policy: conditional flow matching on action chunks (Lipman et al. 2023; pi0, 2024)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from specact.families.chunks.flow_units import FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.lab.train.flow import Flow
from specact.lab.train.flow_recipe import FlowRecipe
from specact.lab.train.loop import Metrics, Stage, cosine
from specact.lab.train.stages import Dataset, decayed_apart
from specact.lab.train.windows import Batch, Windows
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
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
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
        optimizer=torch.optim.AdamW(decayed_apart(model, recipe.weight_decay), betas=(0.9, 0.99)),
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
