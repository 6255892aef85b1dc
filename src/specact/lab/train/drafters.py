"""Training of a token policy's drafters on its own rollouts: head, bigrams, memory, and the settings of papers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save
from torch import Tensor, nn

from specact.errors import ConfigError
from specact.families.tokens.policy import BINS, TokenBundle, load_tokens
from specact.files import write_whole
from specact.lab.envs import env_of
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.token_rollouts import SHARD, RolloutRequest, TokenRollouts, read_rollouts, record_rollouts
from specact.lab.train.drafter_head import DrafterHead, Weights, chain_metrics, head_loss, output_layer
from specact.lab.train.drafter_settings import fit_settings, memory_of, scale_of
from specact.lab.train.export import BundleFolder, Graph, export_checked, parameters_of, round_to_half
from specact.lab.train.fit import Training
from specact.lab.train.loop import Metrics, Progress, Stage, adamw_stage, autocast, device_of, seed_weights
from specact.lab.train.recipe import DrafterRecipe, plain
from specact.rng import Role, stream
from specact.systems.specvla import TokenHead
from specact.systems.tokens import DRAFTER_PARTS, BigramTable, DraftedFor, DrafterSettings

# Maximum number of inferences for validation.
_VALIDATED = 2048


class DrafterTraining(Training):
    """The drafters of a recipe; rollouts are stored in the run's folder.

    Args:
        recipe: what to train.
        jobs: processes of the rollouts.

    Raises:
        ConfigError: if the recipe does not fit its target.
    """

    def __init__(self, recipe: DrafterRecipe, jobs: int = 1) -> None:
        self.recipe, self._jobs, self.target = recipe, jobs, load_tokens(recipe.target)
        target, actions = self.target, self.target.spec.actions
        if not all(0 <= dimension < actions for dimension in recipe.strict):
            raise ConfigError(f"strict names dimensions 0 to {actions - 1} of {target.name}, got {list(recipe.strict)}")
        if target.networks.width % recipe.heads:
            raise ConfigError(
                f"heads must divide {target.networks.width}, the width of {target.name}, got {recipe.heads}"
            )
        if target.networks.length < 2:
            raise ConfigError(f"{target.name} writes chunks of a single token, of which nothing can be drafted")
        self.request = plain(recipe) | {"taught_by": target.fingerprint}

    @contextmanager
    def prepared(self, progress: Progress) -> Iterator[None]:
        recipe, target = self.recipe, self.target
        # By path, so that other processes read the same bundle.
        rollouts = RolloutRequest(str(target.path), env_of(target, recipe.env), recipe.seed, self.out / "rollouts")
        files = recipe.episodes // SHARD
        with Pool(self._jobs) as pool:
            record_rollouts(rollouts, files, pool.each, partial(progress, "rollouts"))
        first_held_out = files - max(1, round(recipe.held_out * files))
        self.train, self.held_out = (
            read_rollouts([rollouts.file(number) for number in part])
            for part in (range(first_held_out), range(first_held_out, files))
        )
        # Before the training, so that errors are raised early.
        settings = fit_settings(
            self.train, self.held_out, target.spec.actions, strict=recipe.strict, groups=recipe.groups,
            path=recipe.path, window=recipe.window,
        )  # fmt: skip
        settings.check(target.spec)
        self.settings = replace(settings, top=recipe.top, depth=recipe.tree, nodes=recipe.nodes, graph=recipe.graph)
        yield

    def plan(self) -> list[dict[str, int]]:
        return [{"head": self.recipe.steps}]

    def stage(self, name: str) -> Stage:
        recipe, train, held_out, actions = self.recipe, self.train, self.held_out, self.target.spec.actions
        seed_weights(recipe.seed)
        model, weights = self._head(), Weights(recipe.feature_weight, recipe.token_weight)

        def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
            rows = stream(recipe.seed, Role.DATA, step=step).integers(len(train), size=recipe.batch)
            device = device_of(model)
            tokens, features = _tensors(train, rows, device)
            with autocast(self.target.networks.width, recipe.bfloat16, device):
                return head_loss(model, tokens, features, weights, recipe.ahead, recipe.feature_noise)

        def validate(module: nn.Module) -> Metrics:
            tokens, features = _tensors(held_out, slice(_VALIDATED), device_of(model))
            _, parts = head_loss(model, tokens, features, weights, recipe.ahead, 0.0)
            chains = chain_metrics(model, tokens, features, recipe.ahead, recipe.strict, actions)
            return {key: float(value) for key, value in parts.items()} | chains

        return adamw_stage(name, model, recipe, update, validate, seed=recipe.seed)

    def export(self, progress: Progress) -> list[Path]:
        head = self._head()
        head.load_state_dict(self.weights("head"))
        manifest = self.manifest(self.recipe.bundle, env_of(self.target, self.recipe.env))
        path = self.out / "bundles" / self.recipe.bundle
        write_drafters(path, manifest, self.recipe, self.settings, self.target, head, self.train, self.held_out)
        return [path]

    def _head(self) -> DrafterHead:
        target, recipe = self.target, self.recipe
        embedding = torch.from_numpy(load_file(target.files["embedding"])["embedding"])
        write = output_layer(target.files["decoder"])
        return DrafterHead(embedding, write, target.networks.length, recipe.heads, recipe.dropout)


def _tensors(rollouts: TokenRollouts, rows: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, features = (torch.from_numpy(column[rows]).to(device) for column in (rollouts.tokens, rollouts.features))
    return tokens.long(), features.float()


def bigram_of(tokens: np.ndarray, most: int) -> BigramTable:
    """How often a token follows another, in chunks ``[N, T]``; the most frequent ``most``, see :class:`BigramTable`.

    The place's own frequencies count as one more observation: they are what is known after a token that never came.
    """
    places, found = tokens.shape[1] - 1, tokens.astype(np.int64)
    counts = np.zeros((places, BINS, BINS))
    np.add.at(counts, (np.arange(places), found[:, :-1], found[:, 1:]), 1.0)
    counts += counts.sum(1, keepdims=True) / len(tokens)
    with np.errstate(divide="ignore"):
        log_probs = np.log(counts / counts.sum(-1, keepdims=True))
    best = np.argsort(-log_probs, axis=-1, kind="stable")[..., :most]
    kept = np.maximum(np.take_along_axis(log_probs, best, -1), np.finfo(np.float16).min)
    return BigramTable(best.astype(np.uint8), kept.astype(np.float16))


def write_drafters(
    path: Path,
    manifest: dict[str, Any],
    recipe: DrafterRecipe,
    settings: DrafterSettings,
    target: TokenBundle,
    head: DrafterHead,
    train: TokenRollouts,
    held_out: TokenRollouts,
) -> None:
    """Writes a bundle of drafters; the scale of a threshold in the settings is set here, because it needs the head.

    With the recipe's precision ``float16`` the head's weights are rounded in place.

    Raises:
        BundleError: if the exported head's outputs differ from the trained one's.
    """
    head.eval().requires_grad_(False)
    half, folder = recipe.precision == "float16", BundleFolder(path, DRAFTER_PARTS)
    if half:
        round_to_half(head)
    parity = export_head(head, folder.files["head"], half)
    write_whole(folder.files["bigram"], save(vars(bigram_of(train.tokens, recipe.bigrams))))
    memory_of(train).save(folder.files["memory"])
    length, width = target.networks.length, target.networks.width
    settings = replace(settings, scale=scale_of(held_out, TokenHead(folder.files["head"], length, width)))
    sizes = {"head": parameters_of(head)}
    folder.finish(
        {"kind": "drafters", **manifest, "parity": {"head": parity}, "parameters": sizes},
        DraftedFor(target.fingerprint, length, width, settings),
    )


def export_head(head: DrafterHead, file: Path, half: bool) -> float:
    """Exports the head, see :func:`~specact.lab.train.export.export_checked`."""
    new, seen = {1: "tokens"}, {1: "tokens", 2: "cached"}
    free = {
        "tokens": new, "features": new, "places": new, "seen": seen, "among": {1: "tokens", 2: "tokens"},
        "cache": {3: "cached"},
    }  # fmt: skip
    graph = Graph(head, partial(example_inputs, head), ["logits", "predicted", "entries"], free=free)
    return export_checked(graph, file, half=half)


def example_inputs(head: DrafterHead, batch: int) -> dict[str, Tensor]:
    """Inputs of a head: random tokens after random cache entries, one of each hidden from another token."""
    generator, news, cached = torch.Generator().manual_seed(batch), 2 * batch + 1, batch + 2  # all sizes differ
    width, heads = head.embedding.embedding_dim, head.layer.heads
    among, seen = torch.ones(batch, news, news).tril().bool(), torch.ones(batch, news, cached).bool()
    among[:, -1, 0] = seen[:, -1, 0] = False
    return {
        "tokens": torch.randint(BINS, (batch, news), generator=generator),
        "features": torch.randn(batch, news, width, generator=generator),
        "places": torch.arange(news).clamp(max=head.length - 1).expand(batch, -1),
        "seen": seen,
        "among": among,
        "cache": torch.randn(batch, 2, heads, cached, width // heads, generator=generator),
    }
