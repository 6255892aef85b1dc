"""Training of FLASH's block for a flow policy, and of its check.

The block learns the target's noiseless chunks on demonstrations. A check whose deviation does not grow with the draft's
true error accepts anything. So the deviation is measured at every noise level for chunks whose error is known: the
target's own samples, the block's drafts, and the target's chunks for other windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor, nn

from specact.errors import ConfigError
from specact.families.chunks.flow import Array, FlowPolicy
from specact.families.chunks.sources import kind_of_source
from specact.lab.rollout.statistics import roc_auc
from specact.lab.train.attention import Layer, by_head
from specact.lab.train.dataset import Windows
from specact.lab.train.export import BundleFolder, Graph, Input, deployed
from specact.lab.train.fit import FromDemonstrations, recipe_of
from specact.lab.train.loop import Draw, Losses, Metrics, Progress, Stage, device_of, seed_weights
from specact.lab.train.recipe import FlashRecipe, Recipe, plain
from specact.load import load_policy
from specact.observation import Window
from specact.rng import Role, stream
from specact.systems.flash import Block, FlashSettings, deviations, implied, noised
from specact.systems.flow import FLASH_PARTS, MadeFor, flow_of

# Windows that are validated on, and that the check is measured on.
_VALIDATED = 512
# Of the paper's weights: the longest prefix, its decay, and what comes after it.
_PREFIX, _DECAY, _REST = 16, 0.9, 0.1
# Shares of noise that are looked at; the first two are the paper's.
LEVELS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
# What is checked of every window.
KINDS = ("own", "block", "wrong")
# Of the target's own samples so many are to pass a fitted check.
_PASS = 0.9


class DraftBlock(nn.Module):
    """One transformer block: learned queries attend to an encoder's tokens and to each other, and become a chunk.

    The ``width`` is that of the tokens, and ``chunk`` is H and A.
    """

    def __init__(self, width: int, chunk: tuple[int, int], heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(chunk[0], width) * 0.02)
        self.norm_tokens, self.keys_values = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.layer = Layer(width, heads, dropout)
        self.norm, self.write = nn.LayerNorm(width), nn.Linear(width, chunk[1])

    def forward(self, tokens: Tensor) -> Tensor:
        """Chunks ``[B, H, A]`` in the flow's units, of tokens ``[B, N, W]``."""
        # One for each window without counting them, so that the exported graph computes no sizes.
        x = self.queries + 0.0 * tokens[:, :1, :1]
        seen = by_head(self.keys_values(self.norm_tokens(tokens)), 2, self.heads)
        x, _ = self.layer(x, None, torch.stack(seen, 1))
        chunks: Tensor = self.write(self.norm(x))
        return chunks


class FlashTraining(FromDemonstrations):
    """The block of a recipe, which must fit its target.

    The manifest's ``check`` says what the check tells of this target at each noise level, see
    :meth:`CheckMeasured.describe`.
    """

    def __init__(self, recipe: FlashRecipe, data: Path) -> None:
        self.recipe, self.target = recipe, load_policy(recipe.target)
        self.flow = flow = flow_of(self.target)
        noiseless = FlowPolicy(flow.networks, flow.units, flow.spec, steps=flow.steps, spread=0.0)
        teacher = replace(self.target, policy=noiseless)
        super().__init__(_demonstrations(recipe, flow), data, recipe.seed, teacher=teacher)
        spec = flow.spec
        if recipe.execute > spec.chunk or any(dimension >= spec.actions for dimension in recipe.grippers):
            raise ConfigError(
                f"execute and grippers must fit chunks of {spec.chunk} x {spec.actions}, got "
                f"{recipe.execute} and {list(recipe.grippers)}"
            )
        self.tokens: tuple[int, ...] = flow.networks.tokens([spec.observation.zeros()]).shape[1:]
        if self.tokens[-1] % recipe.heads:
            raise ConfigError(f"heads must divide {self.tokens[-1]}, the width of {recipe.target}, got {recipe.heads}")
        self.request = plain(recipe) | {"taught_by": self.target.fingerprint}

    def plan(self) -> list[dict[str, int]]:
        return [{"block": self.recipe.steps}]

    def stage(self, name: str) -> Stage:
        recipe, flow, steps = self.recipe, self.flow, self.flow.spec.chunk
        seed_weights(recipe.seed)
        model, held_out = self._block(), self._held_out()

        def batch(windows: Windows, rows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
            tokens = flow.networks.tokens(windows.seen_at(flow.spec.observation, rows))
            # Of every window there is one answer, at its newest step.
            answers = self.dataset.centre + self.dataset.scale * windows.chunks[rows]
            labels = flow.units.to_flow(answers.numpy())
            return torch.from_numpy(tokens).to(device), torch.from_numpy(labels).to(device)

        def update(step: int) -> Losses:
            rng, train = stream(recipe.seed, Role.DATA, step=step), self.dataset.train
            tokens, labels = batch(train, rng.integers(len(train), size=recipe.batch), device_of(model))
            error = nn.functional.smooth_l1_loss(model(tokens), labels, reduction="none").mean(-1)
            prefixes = rng.integers(1, 1 + min(_PREFIX, steps), size=recipe.batch)
            weights = prefix_weights(prefixes, steps).to(error.device)
            return (weights * error).sum() / weights.sum(), {"huber": error.mean()}

        def validate(module: nn.Module) -> Metrics:
            tokens, labels = batch(self.dataset.held_out, held_out, device_of(model))
            missing = model(tokens) - labels
            huber = nn.functional.smooth_l1_loss(missing, torch.zeros_like(missing))
            return {"rms": missing.square().mean().sqrt(), "huber": huber}

        return Stage(name, model, recipe, update, validate, recipe.seed)

    def export(self, progress: Progress) -> list[Path]:
        recipe, flow, model = self.recipe, self.flow, self._block()
        model.load_state_dict(self.weights("block"))
        folder = BundleFolder(self.out / "bundles" / recipe.bundle, FLASH_PARTS)
        inputs = {"tokens": Input(("batch", *self.tokens))}
        folder.export("block", Graph(deployed(model), inputs, ["chunks"]))
        settings = FlashSettings(recipe.execute, recipe.grippers, recipe.period)
        windows = self.dataset.held_out.seen_at(flow.spec.observation, self._held_out())
        block = Block(folder.files["block"], (flow.spec.chunk, flow.spec.actions))
        measured = measure_check(
            flow, block, settings, windows, recipe.seed, lambda done: progress("check", done, len(windows))
        )
        level, within = fit_check(measured)
        low, high = (end[: flow.spec.actions].tolist() for end in (flow.units.low, flow.units.high))
        manifest = {
            "kind": "flash", **self.manifest(recipe.bundle, self.target.env),
            "target": {"spec": flow.spec.describe(), "low": low, "high": high}, "check": measured.describe(),
        }  # fmt: skip
        fitted = replace(settings, levels=(level,), within=within)
        return [folder.finish(manifest, MadeFor(self.target.fingerprint, fitted))]

    def _block(self) -> DraftBlock:
        shape = (self.flow.spec.chunk, self.flow.spec.actions)
        return DraftBlock(self.tokens[-1], shape, self.recipe.heads, self.recipe.dropout)

    def _held_out(self) -> np.ndarray:
        """Held-out steps that are validated on."""
        rng = stream(self.recipe.seed, Role.DATA, episode=Draw.WINDOWS)
        return np.sort(rng.permutation(len(self.dataset.held_out))[:_VALIDATED])


def _demonstrations(recipe: FlashRecipe, flow: FlowPolicy) -> Recipe:
    """The demonstrations that the target was trained on, with its split: the check is fitted to the held-out ones."""
    if kind_of_source(recipe.target) == "folder":
        return recipe_of(recipe.target, recipe.env)
    base = Recipe(
        rate_hz=flow.spec.rate_hz, observations=recipe.observations, data=recipe.data, chunk=flow.spec.chunk,
        seed=recipe.seed,
    )  # fmt: skip
    return base if recipe.held_out is None else structs.replace(base, held_out=recipe.held_out)


def prefix_weights(prefixes: np.ndarray, steps: int) -> Tensor:
    """``.9^h`` within each of B prefixes and .1 after it, ``[B, H]``."""
    step = np.arange(steps)
    weights = np.where(step < prefixes[:, None], _DECAY**step, _REST)
    return torch.from_numpy(weights.astype(np.float32))


# --- the check ---


@dataclass(frozen=True)
class CheckMeasured:
    """Deviations and true errors, in the flow's units: root mean square over dimensions, mean over executed actions.

    ``deviation [N, kind, level]``, see :data:`KINDS` and :data:`LEVELS`, and its maximum ``most`` over a chunk's
    executed actions, which decides whether all of it is accepted; ``error [N, kind]`` is the distance to the target's
    noiseless chunk.
    """

    deviation: NDArray[np.float64]
    error: NDArray[np.float64]
    most: NDArray[np.float64]

    def describe(self) -> dict[str, Any]:
        """Statistics by noise level: slope and correlation of deviation and error, and the shares accepted within .15.

        ``auroc``: how well the deviation tells the target's own samples from its chunks for another window.
        """
        rows = {}
        error = self.error.reshape(-1)
        for number, level in enumerate(LEVELS):
            deviation = self.deviation[..., number].reshape(-1)
            rows[f"{level:g}"] = {
                "slope": float(deviation @ error / (error @ error)),
                "correlation": float(np.corrcoef(deviation, error)[0, 1]),
                "auroc": _told_apart(self.most, number),
                **{
                    f"accepted_{kind}": float((self.most[:, place, number] <= 0.15).mean())
                    for place, kind in enumerate(KINDS)
                },
                **{kind: float(self.deviation[:, place, number].mean()) for place, kind in enumerate(KINDS)},
            }
        errors = {kind: float(self.error[:, place].mean()) for place, kind in enumerate(KINDS)}
        return {"windows": len(self.error), "error": errors, "levels": rows}


def measure_check(
    policy: FlowPolicy, block: Block, settings: FlashSettings, windows: Sequence[Window], seed: int,
    progress: Callable[[int], None],
) -> CheckMeasured:  # fmt: skip
    """Checks chunks of known error, see the module; what is executed of them counts.

    At least two windows, held out of the training of policy and block; the seed is that of the noise.
    """
    networks: Any = policy.networks
    calm = FlowPolicy(networks, policy.units, policy.spec, steps=policy.steps, spread=0.0)
    rngs = [stream(seed, Role.DATA, episode=Draw.NOISE, step=number) for number in range(len(windows))]
    kept: list[tuple[Array, Array, Array]] = []
    for window, rng in zip(windows, rngs, strict=True):
        tokens = networks.tokens([window])
        cache = networks.cache([window], tokens)
        truth = policy.denoised(calm.noise(rng)[None], cache, policy.steps)[0]
        sample = policy.denoised(policy.noise(rng)[None], cache, policy.steps)[0]
        kept.append((truth, sample, policy.padded(block.chunks(tokens)[0])))
        progress(len(kept) // 2)
    rows = []
    # The chunk of the window that is half of all away is for another scene.
    turned = np.roll(np.arange(len(windows)), len(windows) // 2)
    levels = np.array(LEVELS, np.float32)
    for number, window in enumerate(windows):
        cache, noise = networks.cache([window]), policy.noise(rngs[number])
        truth, sample, drafted = kept[number]
        candidates = [sample, drafted, kept[int(turned[number])][0]]
        mixed = [noised(chunk, noise, levels) for chunk in candidates]
        times = np.tile(np.float32(1.0) - levels, len(candidates))
        velocity = networks.velocity(np.concatenate(mixed), times, cache).reshape(len(candidates), *mixed[0].shape)
        # What pads actions is no part of the distance.
        acted, grippers = (slice(settings.execute), slice(policy.spec.actions)), settings.grippers
        distances = np.stack([
            deviations(chunk[acted], implied(x, v, levels)[:, *acted], grippers)
            for chunk, x, v in zip(candidates, mixed, velocity, strict=True)
        ])  # fmt: skip
        error = np.stack([deviations(chunk[acted], truth[None, *acted], grippers)[0] for chunk in candidates])
        rows.append((distances.mean(-1), error.mean(-1), distances.max(-1)))
        progress((len(windows) + number + 1) // 2)
    return CheckMeasured(*(np.stack(column).astype(np.float64) for column in zip(*rows, strict=True)))


def fit_check(measured: CheckMeasured) -> tuple[float, float]:
    """The noise level that best tells the target's own samples from chunks for other windows, and its delta.

    Delta is such that nine of ten of the target's own samples pass whole.
    """
    best = max(range(len(LEVELS)), key=lambda number: _told_apart(measured.most, number))
    return LEVELS[best], float(np.quantile(measured.most[:, 0, best], _PASS))


def _told_apart(most: NDArray[np.float64], number: int) -> float:
    right, wrong = most[:, 0, number], most[:, 2, number]
    labels = np.concatenate([np.zeros(len(right), bool), np.ones(len(wrong), bool)])
    auroc = roc_auc(np.concatenate([right, wrong]), labels)
    assert auroc is not None, "there are both"
    return auroc
