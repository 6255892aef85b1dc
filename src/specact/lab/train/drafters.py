"""Training of a token policy's drafters on its own rollouts: Spec-VLA's head, bigrams, memory, and fitted settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from specact.errors import ConfigError
from specact.families.tokens.policy import BINS, TokenBundle, load_tokens
from specact.lab.envs import env_of
from specact.lab.rollout.distillation import TokenRollouts, read_rollouts, record_rollouts
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.steps import SHARD
from specact.lab.train.attention import HIDDEN, Layer
from specact.lab.train.drafter_settings import fit_settings, memory_of, scale_of
from specact.lab.train.export import BundleFolder, Graph, deployed, stored_weights
from specact.lab.train.fit import Training
from specact.lab.train.loop import Losses, Metrics, Progress, Stage, adamw_stage, autocast, device_of, seed_weights
from specact.lab.train.recipe import DrafterRecipe, plain
from specact.rng import Role, stream
from specact.systems.specvla import TokenHead
from specact.systems.tokens import DRAFTER_PARTS, DraftedFor, DrafterSettings

_VALIDATED = 2048  # maximum number of inferences for validation
_BIGRAMS = 16  # most frequent successors that are stored per token


class DrafterTraining(Training):
    """The drafters of a recipe, which must fit its target; ``jobs`` processes record rollouts in the run's folder."""

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
        with Pool(self._jobs) as pool:
            # By path, so that other processes read the same bundle.
            files = record_rollouts(
                str(target.path), env_of(target, recipe.env), recipe.seed, self.out / "rollouts",
                recipe.episodes // SHARD, pool.each, partial(progress, "rollouts"),
            )  # fmt: skip
        first_held_out = len(files) - max(1, round(recipe.held_out * len(files)))
        self.train, self.held_out = read_rollouts(files[:first_held_out]), read_rollouts(files[first_held_out:])
        # Before the training, so that errors are raised early.
        settings = fit_settings(
            self.train, self.held_out, target.spec.actions, strict=recipe.strict, groups=recipe.groups,
            path=recipe.path, window=recipe.window,
        )  # fmt: skip
        settings.check(target.spec)
        self.settings = replace(settings, top=recipe.top, depth=recipe.tree, nodes=recipe.nodes)
        yield

    def plan(self) -> list[dict[str, int]]:
        return [{"head": self.recipe.steps}]

    def stage(self, name: str) -> Stage:
        recipe, train, held_out = self.recipe, self.train, self.held_out
        seed_weights(recipe.seed)
        model = self._head()

        def update(step: int) -> Losses:
            rows = stream(recipe.seed, Role.DATA, step=step).integers(len(train), size=recipe.batch)
            device = device_of(model)
            tokens, features = _tensors(train, rows, device)
            with autocast(self.target.networks.width, recipe.bfloat16, device):
                return head_loss(model, tokens, features, recipe, recipe.feature_noise)

        def validate(module: nn.Module) -> Metrics:
            tokens, features = _tensors(held_out, slice(_VALIDATED), device_of(model))
            _, parts = head_loss(model, tokens, features, recipe, 0.0)
            return {**parts, **chain_metrics(model, tokens, features, recipe.ahead)}

        return adamw_stage(name, model, recipe, update, validate, seed=recipe.seed)

    def export(self, progress: Progress) -> list[Path]:
        head = self._head()
        head.load_state_dict(self.weights("head"))
        manifest = self.manifest(self.recipe.bundle, env_of(self.target, self.recipe.env))
        path = self.out / "bundles" / self.recipe.bundle
        half = self.recipe.precision == "float16"
        return [write_drafters(path, manifest, self.settings, self.target, head, self.train, self.held_out, half=half)]

    def _head(self) -> DrafterHead:
        target, recipe = self.target, self.recipe
        embedding = torch.from_numpy(load_file(target.files["embedding"])["embedding"])
        write = output_layer(target.files["decoder"])
        return DrafterHead(embedding, write, target.networks.length, recipe.heads, recipe.dropout)


def _tensors(rollouts: TokenRollouts, rows: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, features = (torch.from_numpy(column[rows]).to(device) for column in (rollouts.tokens, rollouts.features))
    return tokens.long(), features.float()


def output_layer(decoder: Path) -> nn.Linear:
    """The output layer of a token policy's decoder, from features to logits; refused if the bundle has no weights."""
    weights = stored_weights(decoder)
    layer = nn.Linear(weights["write.weight"].shape[1], BINS)
    layer.load_state_dict({"weight": weights["write.weight"], "bias": weights["write.bias"]})
    return layer


class DrafterHead(nn.Module):
    """See :class:`~specact.systems.specvla.TokenHead`.

    The ``embedding [256, W]`` of the target's tokens and its output layer ``write`` are frozen; chunks have ``length``
    T tokens.
    """

    def __init__(self, embedding: Tensor, write: nn.Linear, length: int, heads: int, dropout: float) -> None:
        super().__init__()
        width = embedding.shape[1]
        self.length = length
        self.embedding = nn.Embedding.from_pretrained(embedding, freeze=True)
        self.write = write.requires_grad_(False)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.join, self.layer = nn.Linear(2 * width, width), Layer(width, heads, dropout)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, tokens: Tensor, features: Tensor, places: Tensor, seen: Tensor, among: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and features of the next tokens, and cache entries; the outputs of the exported graph."""
        predicted, entries = self.predicted(tokens, features, places, torch.cat([seen, among], -1), cache)
        return self.write(predicted), predicted, entries

    def predicted(
        self, tokens: Tensor, features: Tensor, places: Tensor, visible: Tensor, cache: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Features ``[B, N, W]``, and keys and values; see :class:`~specact.lab.train.attention.Layer`."""
        x = self.join(torch.cat([self.embedding(tokens), features], -1))
        x = x + nn.functional.embedding(places, self.positions)
        x, entries = self.layer(x, (HIDDEN * (~visible).to(x.dtype))[:, None], cache)
        return self.norm(x), torch.stack(entries, 1)

    def unrolled(self, tokens: Tensor, features: Tensor, ahead: int) -> list[Tensor]:
        """Predictions where the last 0, 1, ... ``ahead - 1`` input features are the head's own, each ``[B, T - 1, W]``.

        Entry s, position j is a prediction of ``features[:, j + 1]`` from the target's features up to position
        ``j - s``, and is valid from ``j = s`` on. It takes ``ahead`` passes: a pass attends to the keys and values of
        the previous ones (as in EAGLE-3, Li et al. 2025). Tokens are ``[B, T]``, features ``[B, T, W]``.
        """
        count = self.length - 1
        place = torch.arange(count, device=tokens.device)
        lag = place[:, None] - place[None]
        inputs, cache, predictions = features[:, :-1], None, list[Tensor]()
        for number in range(ahead):
            # The target's features so far, then one own feature of every previous pass, and this token's.
            blocks = [lag >= number] + [lag == number - earlier for earlier in range(1, number + 1)]
            predicted, entries = self.predicted(tokens[:, :-1], inputs, place[None], torch.cat(blocks, -1)[None], cache)
            cache = entries if cache is None else torch.cat([cache, entries], -2)
            predictions.append(predicted)
            inputs = torch.cat([torch.zeros_like(predicted[:, :1]), predicted[:, :-1]], 1)
        return predictions


def head_loss(head: DrafterHead, tokens: Tensor, features: Tensor, recipe: DrafterRecipe, noise: float) -> Losses:
    """The smooth L1 loss of features plus the cross-entropy to the target's distribution, and both.

    They are means over the passes of :meth:`DrafterHead.unrolled`, of the target's tokens and features with uniform
    noise of half the width ``noise``.
    """
    ahead, noisy = recipe.ahead, features + noise * (2.0 * torch.rand_like(features) - 1.0)
    with torch.no_grad():
        target_probs = head.write(features[:, 1:]).float().softmax(-1)
    distance, entropy = features.new_zeros(()), features.new_zeros(())
    for number, predicted in enumerate(head.unrolled(tokens, noisy, ahead)):
        predicted_features, target_features = predicted[:, number:].float(), features[:, 1 + number :]
        distance = distance + nn.functional.smooth_l1_loss(predicted_features, target_features) / ahead
        log_probs = head.write(predicted[:, number:]).float().log_softmax(-1)
        entropy = entropy - (target_probs[:, number:] * log_probs).sum(-1).mean() / ahead
    return distance + entropy, {"feature_l1": distance, "cross_entropy": entropy}


def chain_metrics(head: DrafterHead, tokens: Tensor, features: Tensor, depth: int) -> dict[str, float]:
    """Drafted tokens per round that are the target's, and passes of the target per chunk, with greedy chains.

    A chain has ``depth`` tokens; the target's are ``[B, T]``, with features ``[B, T, W]``.
    """
    drafted = [head.write(predicted).argmax(-1) for predicted in head.unrolled(tokens, features, depth)]
    return played(torch.stack(drafted).eq(tokens[:, 1:]).cpu())


def played(fits: Tensor) -> dict[str, float]:
    """The metrics of rounds in which these drafted tokens are accepted, ``fits [depth, B, T - 1]``.

    Entry s, position j is token j + 1, drafted after s drafted tokens.
    """
    depth, batch, count = fits.shape
    decided = torch.ones(batch, dtype=torch.long)  # the first token is the target's
    accepted, rounds = 0, 0
    while (unfinished := decided <= count).any():
        active = unfinished.clone()
        rounds += int(active.sum())
        for number in range(depth):
            active &= decided <= count
            active &= fits[number, torch.arange(batch), (decided - 1).clamp(max=count - 1)]
            accepted += int(active.sum())
            decided += active.long()
        decided += (unfinished & (decided <= count)).long()  # the target's own token
    return {"accepted": accepted / rounds, "passes": 1.0 + rounds / batch}


def bigram_of(tokens: np.ndarray, most: int = _BIGRAMS) -> dict[str, np.ndarray]:
    """How often a token follows another, in chunks ``[N, T]``.

    The most frequent ``most`` in descending order: ``tokens`` and their ``log_probs``, ``[T - 1, 256, most]``; entry i
    holds those at position i + 1 given the token at position i.
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
    return {"tokens": best.astype(np.uint8), "log_probs": kept.astype(np.float16)}


def write_drafters(
    path: Path, manifest: dict[str, Any], settings: DrafterSettings, target: TokenBundle, head: DrafterHead,
    train: TokenRollouts, held_out: TokenRollouts, *, half: bool,
) -> Path:  # fmt: skip
    """Writes a bundle of drafters; the scale of KERV's tolerance in the settings is set here, as it needs the head.

    With ``half`` the head's weights are rounded in place.

    Raises:
        BundleError: if the exported head's outputs differ from the trained one's.
    """
    folder = BundleFolder(path, DRAFTER_PARTS, half=half)
    folder.export("head", head_graph(deployed(head, half=half)))
    folder.arrays("bigram", bigram_of(train.tokens))
    memory = memory_of(train)
    folder.arrays("memory", {"features": memory.features.astype(np.float16), "tokens": memory.tokens.astype(np.uint8)})
    length, width = target.networks.length, target.networks.width
    settings = replace(settings, scale=scale_of(held_out, TokenHead(folder.files["head"], length, width)))
    return folder.finish(
        {"kind": "drafters", **manifest}, DraftedFor(target.fingerprint, length, width, settings)
    )  # fmt: skip


def head_graph(head: DrafterHead) -> Graph:
    """The head as it is exported."""
    new, both = {1: "tokens"}, {1: "tokens", 2: "cached"}
    free = {
        "tokens": new, "features": new, "places": new, "seen": both, "among": {1: "tokens", 2: "tokens"},
        "cache": {3: "cached"},
    }  # fmt: skip
    return Graph(head, partial(example_inputs, head), ["logits", "predicted", "entries"], free=free)


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
