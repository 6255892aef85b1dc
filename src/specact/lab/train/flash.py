"""Training of FLASH's block for a flow policy: it learns the target's noiseless chunks on demonstrations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn

from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest
from specact.errors import ConfigError
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.sources import kind_of_source
from specact.lab.data.episodes import Episodes
from specact.lab.train.attention import attend, by_head, perceptron
from specact.lab.train.export import BundleFolder, Graph, export_checked, parameters_of, round_to_half
from specact.lab.train.fit import FromDemonstrations
from specact.lab.train.flash_check import fit_check, measure_check
from specact.lab.train.loop import Draw, Metrics, Progress, Stage, adamw_stage, device_of, seed_weights
from specact.lab.train.recipe import FlashRecipe, Recipe, chunk_recipe_of, plain
from specact.lab.train.teacher import check_teacher, labelled, windows_at
from specact.lab.train.windows import Windows
from specact.load import load_policy
from specact.observation import ObservationSpec
from specact.rng import Role, stream
from specact.systems.flash import FLASH_PARTS, Block, FlashSettings, MadeFor, flow_of

# Windows that are validated on, and that the check is measured on.
_VALIDATED = 512
# Of the paper's weights: the longest prefix, its decay, and what comes after it.
_PREFIX, _DECAY, _REST = 16, 0.9, 0.1


class DraftBlock(nn.Module):
    """One transformer block: learned queries attend to an encoder's tokens and to each other, and become a chunk.

    Args:
        width: W, of the tokens.
        chunk: H and A.
        heads, dropout: of the block.
    """

    def __init__(self, width: int, chunk: tuple[int, int], heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(chunk[0], width) * 0.02)
        self.norm_tokens, self.norm_queries = nn.LayerNorm(width), nn.LayerNorm(width)
        self.keys_values, self.qkv = nn.Linear(width, 2 * width), nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp, self.mlp = nn.LayerNorm(width), perceptron(width, 4 * width, width)
        self.norm, self.write = nn.LayerNorm(width), nn.Linear(width, chunk[1])
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Chunks ``[B, H, A]`` in the flow's units, of tokens ``[B, N, W]``."""
        # One for each window without counting them, so that the exported graph computes no sizes.
        x = self.queries + 0.0 * tokens[:, :1, :1]
        queries, keys, values = by_head(self.qkv(self.norm_queries(x)), 3, self.heads)
        seen_keys, seen_values = by_head(self.keys_values(self.norm_tokens(tokens)), 2, self.heads)
        keys, values = torch.cat([seen_keys, keys], -2), torch.cat([seen_values, values], -2)
        x = x + self.dropout(self.project(attend(queries, keys, values)))
        x = x + self.dropout(self.mlp(self.norm_mlp(x)))
        chunks: Tensor = self.write(self.norm(x))
        return chunks


class FlashTraining(FromDemonstrations):
    """The block of a recipe.

    The manifest's ``check`` says what the check tells of this target at each noise level, see
    :meth:`CheckMeasured.describe <specact.lab.train.flash_check.CheckMeasured.describe>`.

    Args:
        recipe: what to train.
        data: folder the data paths of the target's recipe are relative to.

    Raises:
        ConfigError: if the recipe does not fit its target.
    """

    def __init__(self, recipe: FlashRecipe, data: Path) -> None:
        self.recipe, self.target = recipe, load_policy(recipe.target)
        self.flow = flow_of(self.target)
        super().__init__(_demonstrations(recipe, self.flow), data)
        spec = self.flow.spec
        if recipe.execute > spec.chunk or any(dimension >= spec.actions for dimension in recipe.grippers):
            raise ConfigError(
                f"execute and grippers must fit chunks of {spec.chunk} x {spec.actions}, got "
                f"{recipe.execute} and {list(recipe.grippers)}"
            )
        self.tokens: tuple[int, ...] = self.flow.networks.tokens([spec.observation.zeros()]).shape[1:]
        if self.tokens[-1] % recipe.heads:
            raise ConfigError(f"heads must divide {self.tokens[-1]}, the width of {recipe.target}, got {recipe.heads}")
        self.request = plain(recipe) | {"taught_by": self.target.fingerprint}

    def reads(self, episodes: Episodes) -> tuple[Iterable[ObservationSpec], Iterable[str]]:
        spec = self.flow.spec
        assert episodes.rate_hz is not None, "the recipe or its task says it"
        check_teacher(self.target, spec.chunk, episodes.action.shape[1], episodes.rate_hz, episodes)
        return [spec.observation], []

    @contextmanager
    def prepared(self, progress: Progress) -> Iterator[None]:
        flow = self.flow
        noiseless = FlowPolicy(flow.networks, flow.units, flow.spec, steps=flow.steps, spread=0.0)
        teacher = replace(self.target, policy=noiseless)
        with (
            super().prepared(progress),
            labelled(self.dataset, teacher, flow.spec.chunk, self.out, self.recipe.seed, progress),
        ):
            yield

    def plan(self) -> list[dict[str, int]]:
        return [{"block": self.recipe.steps}]

    def stage(self, name: str) -> Stage:
        recipe, flow, steps = self.recipe, self.flow, self.flow.spec.chunk
        seed_weights(recipe.seed)
        model, held_out = self._block(), self._held_out()

        def batch(windows: Windows, rows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
            tokens = flow.networks.tokens(windows_at(windows, flow.spec.observation, rows))
            # Of every window there is one answer, at its newest step.
            answers = self.dataset.centre + self.dataset.scale * windows.chunks[rows]
            labels = flow.units.to_flow(answers.numpy())
            return torch.from_numpy(tokens).to(device), torch.from_numpy(labels).to(device)

        def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
            rng, train = stream(recipe.seed, Role.DATA, step=step), self.dataset.train
            tokens, labels = batch(train, rng.integers(len(train), size=recipe.batch), device_of(model))
            error = nn.functional.smooth_l1_loss(model(tokens), labels, reduction="none").mean(-1)
            prefixes = rng.integers(1, 1 + min(_PREFIX, steps), size=recipe.batch)
            weights = prefix_weights(prefixes, steps).to(error.device)
            return (weights * error).sum() / weights.sum(), {"huber": error.detach().mean()}

        def validate(module: nn.Module) -> Metrics:
            tokens, labels = batch(self.dataset.held_out, held_out, device_of(model))
            missing = (model(tokens) - labels).detach()
            huber = nn.functional.smooth_l1_loss(missing, torch.zeros_like(missing))
            return {"rms": float(missing.square().mean().sqrt()), "huber": float(huber)}

        return adamw_stage(name, model, recipe, update, validate, seed=recipe.seed)

    def export(self, progress: Progress) -> list[Path]:
        recipe, flow, model = self.recipe, self.flow, self._block()
        model.load_state_dict(self.weights("block"))
        model.eval().requires_grad_(False)
        half, folder = recipe.precision == "float16", BundleFolder(self.out / "bundles" / recipe.bundle, FLASH_PARTS)
        if half:
            round_to_half(model)

        def example(batch: int) -> dict[str, Tensor]:
            return {"tokens": torch.randn(batch, *self.tokens, generator=torch.Generator().manual_seed(batch))}

        parity = export_checked(Graph(model, example, ["chunks"]), folder.files["block"], half=half)
        settings = FlashSettings(recipe.execute, recipe.grippers, recipe.period)
        windows = windows_at(self.dataset.held_out, flow.spec.observation, self._held_out())
        block = Block(folder.files["block"], (flow.spec.chunk, flow.spec.actions))
        measured = measure_check(
            flow, block, settings, windows, recipe.seed, lambda done: progress("check", done, len(windows))
        )
        level, within = fit_check(measured)
        low, high = (end[: flow.spec.actions].tolist() for end in (flow.units.low, flow.units.high))
        manifest = {
            "kind": "flash", **self.manifest(recipe.bundle, self.target.env),
            "target": {"spec": flow.spec.describe(), "low": low, "high": high},
            "parity": {"block": parity}, "parameters": {"block": parameters_of(model)}, "check": measured.describe(),
        }  # fmt: skip
        folder.finish(manifest, MadeFor(self.target.fingerprint, replace(settings, levels=(level,), within=within)))
        return [folder.path]

    def _block(self) -> DraftBlock:
        shape = (self.flow.spec.chunk, self.flow.spec.actions)
        return DraftBlock(self.tokens[-1], shape, self.recipe.heads, self.recipe.dropout)

    def _held_out(self) -> np.ndarray:
        """Held-out steps that are validated on."""
        rng = stream(self.recipe.seed, Role.DATA, episode=Draw.WINDOWS)
        return np.sort(rng.permutation(len(self.dataset.held_out))[:_VALIDATED])


def _demonstrations(recipe: FlashRecipe, flow: FlowPolicy) -> Recipe:
    """Which demonstrations are read, and how they are split: nothing is fitted to what a target learned."""
    if kind_of_source(recipe.target) == "folder":
        return chunk_recipe_of(read_manifest(find_bundle(recipe.target)).recipe, recipe.target)
    of = Recipe(
        rate_hz=flow.spec.rate_hz, observations=recipe.observations, data=recipe.data, chunk=flow.spec.chunk,
        seed=recipe.seed,
    )  # fmt: skip
    return of if recipe.held_out is None else structs.replace(of, held_out=recipe.held_out)


def prefix_weights(prefixes: np.ndarray, steps: int) -> Tensor:
    """``.9^h`` within each of B prefixes and .1 after it, ``[B, H]``."""
    step = np.arange(steps)
    weights = np.where(step < prefixes[:, None], _DECAY**step, _REST)
    return torch.from_numpy(weights.astype(np.float32))
