"""Training of a token policy's drafters on its own rollouts: Spec-VLA's head, bigrams, memory, and fitted settings.

HeiSD (Zheng et al. 2026, arXiv 2603.17573) lets its memory draft above a value of F, and executes a retrieved chunk
unverified above the least similarity at which neighbouring steps are still alike, up to the distance to which that
holds; its Algorithm 1 is inconsistent as printed. Here the boundary of F maximises the accepted tokens. A skip is safe
where the target would have accepted the whole retrieved chunk, and its bounds maximise the skips while enough of them
are safe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn

from specact.bundle.manifest import MANIFEST
from specact.errors import ConfigError, DataError
from specact.families.tokens.policy import BINS, causal, load_tokens, to_actions
from specact.families.tokens.speculative import Acceptance, Decided, GroupCandidates, TreeDrafter, relaxed
from specact.lab.envs import env_of
from specact.lab.rollout.distillation import TokenRollouts, read_rollouts, record_rollouts, record_tokens
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.statistics import roc_auc_interval, wilson
from specact.lab.train.attention import HIDDEN, Layer
from specact.lab.train.export import BundleFolder, Graph, Input, below, deployed, mostly, stored_weights
from specact.lab.train.fit import Training
from specact.lab.train.loop import Losses, Metrics, Progress, Stage, autocast, device_of, seed_weights
from specact.lab.train.recipe import DrafterRecipe, plain
from specact.rng import Role, stream
from specact.systems.heisd import HEAD_BINS, NEIGHBOURS, KinematicMetric, Memory, SkipRule, unit
from specact.systems.kerv import Kalman, Motion, typical_change, variability
from specact.systems.specvla import HeadDrafter, TokenHead
from specact.systems.tokens import DRAFTER_PARTS, DraftedFor, DrafterSettings, load_drafters

_VALIDATED = 2048  # maximum number of inferences for validation
_BIGRAMS = 16  # most frequent successors that are stored per token
# HeiSD's tolerance of a group's sum and of each of its tokens, and the middle of KERV's tolerances [bins].
GROUP_TOTAL, GROUP_EACH, MIDDLE = 30, 15, 10
# Maximum consecutive inferences without verification.
LONGEST_SKIP = 8
# Quantiles of the similarity that are tried as bounds.
_CUTS = np.linspace(0.0, 1.0, 201)


class DrafterTraining(Training):
    """The drafters of a recipe, which must fit its target."""

    def __init__(self, recipe: DrafterRecipe, data: Path) -> None:
        recipe.refuse_data(data)
        self.recipe, self.target = recipe, load_tokens(recipe.target)
        target, actions = self.target, self.target.spec.actions
        if not all(0 <= dimension < actions for dimension in recipe.strict):
            raise ConfigError(f"strict names dimensions 0 to {actions - 1} of {target.name}, got {list(recipe.strict)}")
        if target.networks.width % recipe.heads:
            raise ConfigError(
                f"heads must divide {target.networks.width}, the width of {target.name}, got {recipe.heads}"
            )
        if target.networks.length < 2:
            raise ConfigError(f"{target.name} writes chunks of a single token, of which nothing can be drafted")
        self.kept = None if recipe.keeps is None else load_drafters(recipe.keeps, target)
        self.request = plain(recipe) | {"taught_by": target.fingerprint}

    @contextmanager
    def prepared(self, progress: Progress, jobs: int) -> Iterator[None]:
        recipe, target, (train, held_out) = self.recipe, self.target, self.recipe.files
        # By path, so that other processes read the same bundle.
        record = partial(record_tokens, str(target.path), env_of(target.env, recipe.env), recipe.seed)
        numbers = [*(() if self.kept else train), *held_out]
        with Pool(jobs) as pool:
            files = record_rollouts(record, self.out / "rollouts", numbers, pool.each, partial(progress, "rollouts"))
        self.held_out = read_rollouts(files[-len(held_out) :])
        if self.kept is None:
            self.train = read_rollouts(files[: len(train)])
            # Before the training, so that errors are raised early.
            self.settings = fit_settings(recipe, self.train, target.spec.actions)
            self.settings.check(target.spec)
        yield

    def plan(self) -> list[dict[str, int]]:
        return [] if self.kept else [{"head": self.recipe.steps}]

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
            return head_loss(model, tokens, features, recipe, 0.0)[1]

        return Stage(name, model, recipe, update, validate, recipe.seed)

    def export(self, progress: Progress) -> list[Path]:
        recipe, target, kept = self.recipe, self.target, self.kept
        folder = BundleFolder(self.out / "bundles" / recipe.bundle, DRAFTER_PARTS)
        if kept is not None:
            for part, file in kept.files.items():
                folder.take(part, file)
            settings, fitted = fit_memory(kept.settings, self.held_out, kept.memory, kept.by_name["head"])
            values = json.loads((kept.path / MANIFEST).read_text())
            values["training"] = {**values.get("training", {}), **fitted}
            return [folder.finish(values, replace(kept.spec, settings=settings))]
        head, memory = self._head(), memory_of(self.train)
        head.load_state_dict(self.weights("head"))
        folder.export("head", head_graph(deployed(head)))
        folder.arrays("bigram", bigram_of(self.train.tokens))
        folder.arrays(
            "memory", {"features": memory.features.astype(np.float16), "tokens": memory.tokens.astype(np.uint8)}
        )
        length, width = target.networks.length, target.networks.width
        exported = TokenHead(folder.files["head"], length, width)
        settings = replace(self.settings, scale=scale_of(self.held_out, exported))
        drafter = HeadDrafter(exported, settings.top, settings.depth, settings.nodes)
        settings, fitted = fit_memory(settings, self.held_out, memory, drafter)
        manifest = self.manifest(recipe.bundle, env_of(target.env, recipe.env))
        values = {"kind": "drafters", **manifest, "training": manifest["training"] | fitted}
        return [folder.finish(values, DraftedFor(target.fingerprint, length, width, settings))]

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

    Also ``agreement``, the share of the likeliest tokens that are the target's. They are means over the passes of
    :meth:`DrafterHead.unrolled`, of the target's tokens and features with uniform noise of half the width ``noise``.
    """
    ahead, noisy = recipe.ahead, features + noise * (2.0 * torch.rand_like(features) - 1.0)
    with torch.no_grad():
        target_probs = head.write(features[:, 1:]).float().softmax(-1)
    distance, entropy, agreement = features.new_zeros(3)
    for number, predicted in enumerate(head.unrolled(tokens, noisy, ahead)):
        predicted_features, target_features = predicted[:, number:].float(), features[:, 1 + number :]
        distance = distance + nn.functional.smooth_l1_loss(predicted_features, target_features) / ahead
        log_probs = head.write(predicted[:, number:]).float().log_softmax(-1)
        entropy = entropy - (target_probs[:, number:] * log_probs).sum(-1).mean() / ahead
        agreement = agreement + log_probs.argmax(-1).eq(tokens[:, 1 + number :]).float().mean() / ahead
    return distance + entropy, {"feature_l1": distance, "cross_entropy": entropy, "agreement": agreement}


def bigram_of(tokens: np.ndarray, most: int = _BIGRAMS) -> dict[str, np.ndarray]:
    """How often a token follows another, in chunks ``[N, T]``.

    The most frequent ``most`` in descending order: ``tokens`` and their ``log_probs``, ``[T - 1, 256, most]``; entry i
    holds those at position i + 1 given the token at position i.
    The place's own frequencies count as one more observation: they are what is known after a token that never came.
    """
    places, values = tokens.shape[1] - 1, tokens.astype(np.int64)
    counts = np.zeros((places, BINS, BINS))
    np.add.at(counts, (np.arange(places), values[:, :-1], values[:, 1:]), 1.0)
    counts += counts.sum(1, keepdims=True) / len(tokens)
    with np.errstate(divide="ignore"):
        log_probs = np.log(counts / counts.sum(-1, keepdims=True))
    best = np.argsort(-log_probs, axis=-1, kind="stable")[..., :most]
    kept = np.maximum(np.take_along_axis(log_probs, best, -1), np.finfo(np.float16).min)
    return {"tokens": best.astype(np.uint8), "log_probs": kept.astype(np.float16)}


def head_graph(head: DrafterHead) -> Graph:
    """The head as it is exported."""
    width, heads = head.embedding.embedding_dim, head.layer.heads
    inputs = {
        "tokens": Input(("batch", "tokens"), below(BINS)),
        "features": Input(("batch", "tokens", width)),
        "places": Input(("batch", "tokens"), below(head.length)),
        "seen": Input(("batch", "tokens", "cached"), mostly),
        "among": Input(("batch", "tokens", "tokens"), mostly),
        "cache": Input(("batch", 2, heads, "cached", width // heads)),
    }
    return Graph(head, inputs, ["logits", "predicted", "entries"])


# --- settings of KERV and HeiSD, fitted to the target's own rollouts ---


def memory_of(rollouts: TokenRollouts) -> Memory:
    """The retrieval memory: the target's tokens by its encoder's embedding, of successful episodes if there are any."""
    used = rollouts.success if rollouts.success.any() else np.ones(len(rollouts), np.bool_)
    return Memory(unit(rollouts.seen[used].astype(np.float32)), rollouts.tokens[used].astype(np.int64))


def fit_settings(recipe: DrafterRecipe, rollouts: TokenRollouts, actions: int) -> DrafterSettings:
    """Fits filters and ranges to the rollouts of the memory.

    The scale of KERV's tolerance stays 1, and HeiSD never retrieves or skips, because they need a head: see
    :func:`scale_of` and :func:`fit_memory`.

    Raises:
        ConfigError: for values that do not fit the policy, or rollouts that are too short for the window.
    """
    strict, episodes = recipe.strict, _rows(rollouts)
    groups, path = recipe.groups or tuple(range(actions)), recipe.path or tuple(range(rollouts.state.shape[1]))
    executed = [to_actions(rollouts.tokens[rows].astype(np.int64)).reshape(-1, actions) for rows in episodes]
    return DrafterSettings(
        strict, groups, path, scale=1.0, top=recipe.top, depth=recipe.tree, nodes=recipe.nodes,
        filters={motion: Kalman.fit(executed, motion=motion, copied=strict) for motion in get_args(Motion)},
        metric=KinematicMetric.fit([rollouts.state[rows][:, list(path)] for rows in episodes], recipe.window),
        fast=2.0, skip=SkipRule(),  # above every F
    )  # fmt: skip


def fit_memory(
    settings: DrafterSettings, rollouts: TokenRollouts, memory: Memory, head: TreeDrafter
) -> tuple[DrafterSettings, dict[str, Any]]:
    """Settings with HeiSD's boundary and its bounds of verify-skip, fitted to rollouts that are not in the memory.

    And what the boundary rests on, for the manifest: the mean accepted tokens of a chunk with the memory, the head,
    and whichever the boundary chooses, its ``share`` of the memory; and the ``auc`` of F, the probability that it is
    larger where more of the memory's tokens are accepted than where more of the head's are, with its interval.
    """
    length, actions = rollouts.tokens.shape[1], len(settings.groups)
    rule = relaxed(GROUP_EACH, length, actions, settings.strict, settings.groups, GROUP_TOTAL)
    wanted, moving, episodes = rollouts.tokens.astype(np.int64), np.zeros(len(rollouts)), _rows(rollouts)
    for rows in episodes:
        moving[rows] = settings.metric.along(rollouts.state[rows][:, list(settings.path)])
    nearest = [memory.nearest(seen, NEIGHBOURS) for seen in rollouts.seen]
    candidates = [GroupCandidates(chunks, rule.groups, rule.each == 0) for chunks in nearest]
    retrieved = accepted_tokens(rollouts, rule, head, candidates)
    drafted = accepted_tokens(rollouts, relaxed(HEAD_BINS, length, actions, settings.strict), head)
    fast, apart = least_worthwhile(moving, retrieved - drafted), retrieved != drafted
    auc = roc_auc_interval(moving[apart], (retrieved > drafted)[apart], rollouts.episode[apart])
    fitted = {
        "inferences": len(rollouts), "memory": retrieved.mean(), "head": drafted.mean(),
        "chosen": np.where(moving >= fast, retrieved, drafted).mean(), "share": (moving >= fast).mean(),
        **({} if auc is None else {"auc": auc.mean, "auc_low": auc.low, "auc_high": auc.high}),
    }  # fmt: skip
    # Whether the nearest chunk would have been accepted.
    agrees = np.array([rule.accepted(top[0] - right, 0) for top, right in zip(nearest, wanted, strict=True)]) == length
    skip = fit_skip([rollouts.seen[rows] for rows in episodes], [agrees[rows] for rows in episodes], LONGEST_SKIP)
    return replace(settings, fast=fast, skip=skip), {"boundary": {name: float(value) for name, value in fitted.items()}}


def accepted_tokens(
    rollouts: TokenRollouts, rule: Acceptance, head: TreeDrafter, first: Sequence[TreeDrafter] = ()
) -> NDArray[np.int64]:
    """Drafted tokens that are accepted of each whole chunk, ``[N]``: T less the passes of the target's decoder.

    The head drafts, after what drafts ``first`` in each inference if anything does. In every pass the tokens before
    are the target's own, whereas decoding goes on from the accepted ones: an approximation that needs no target.
    """
    tokens, features = rollouts.tokens.astype(np.int64), rollouts.features.astype(np.float32)
    count, length = tokens.shape
    places, accepted, drafters = np.ones(count, np.int64), np.zeros(count, np.int64), first
    while len(rows := np.flatnonzero(places < length)):
        decided = [Decided(tokens[row, : places[row]], features[row, : places[row]], length) for row in rows]
        trees = [drafter.tree(before) for drafter, before in zip(drafters, decided, strict=False)] or head.grow(decided)
        for row, tree in zip(rows.tolist(), trees, strict=True):
            at, wanted = int(places[row]), tokens[row, places[row] :]
            paths = (tree.tokens[path] - wanted[: len(path)] for path in tree.paths)
            most = max((rule.accepted(bias, at) for bias in paths), default=0)
            accepted[row] += most
            places[row] += most + 1
        drafters = ()
    return accepted


def least_worthwhile(scores: NDArray[np.floating], gains: NDArray[np.integer]) -> float:
    """The score threshold that maximises the sum of the gains at and above it.

    Returns:
        One of the scores; above all of them if no threshold has a positive sum.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, sums = scores[order], np.cumsum(gains[order])
    # A threshold can lie only between different scores.
    sums = np.where(np.append(np.diff(ranked) != 0.0, True), sums, -np.inf)
    best = int(np.argmax(sums))
    return float(ranked[best]) if sums[best] > 0 else float(np.nextafter(ranked[0], np.inf))


def scale_of(rollouts: TokenRollouts, head: TokenHead) -> float:
    """K_S of KERV's tolerance for the head's drafts on the target's own prefix; 1 if they never deviate."""
    tokens = rollouts.tokens.astype(np.int64)
    count, length = tokens.shape
    positions = np.broadcast_to(np.arange(length - 1), (count, length - 1))
    features, seen = rollouts.features[:, :-1].astype(np.float32), np.zeros((count, length - 1, 0), np.bool_)
    among, cache = np.ascontiguousarray(causal(count, length - 1)), head.empty_cache(count)
    reading = head.read(tokens[:, :-1], features, positions, seen, among, cache)
    drafted, wanted = reading.logits.argmax(-1), tokens[:, 1:]
    near = np.abs(drafted - wanted) <= MIDDLE
    variabilities = [variability(wanted[row, near[row]], drafted[row, near[row]]) for row in range(count)]
    episodes = [[variabilities[row] for row in rows] for rows in _rows(rollouts)]
    changes = any(np.diff(episode).any() for episode in episodes)
    return typical_change(episodes) if changes else 1.0


def _rows(rollouts: TokenRollouts) -> list[NDArray[np.int64]]:
    """The rows of each episode, ordered by step; episodes in order of their first row."""
    _, first, which = np.unique(rollouts.episode, return_index=True, return_inverse=True)
    return [
        rows[np.argsort(rollouts.step[rows], kind="stable")]
        for rows in (np.flatnonzero(which == number) for number in np.argsort(first))
    ]


def fit_skip(
    features: Sequence[NDArray[np.floating]], safe: Sequence[NDArray[np.bool_]], longest: int, share: float = 0.95
) -> SkipRule:
    """The rule that skips the most pairs of steps, a verified t and a t + k, k <= longest, while enough are safe.

    Of every held-out episode ``features [n, F]`` of its steps and whether they are ``safe [n]``, as then the
    pair is. For every distance d the least similarity (of 201 quantiles) is chosen above which Wilson's
    lower bound of the share of safe pairs with ``k <= d`` is high enough. If none are safe enough, it never skips.

    Raises:
        DataError: if no episode has two steps.
    """
    similarities, distances, right = _pairs(features, safe, longest)
    best, skipped = SkipRule(), 0
    for distance in range(1, longest + 1):
        near = distances <= distance
        for similarity in np.unique(np.quantile(similarities[near], _CUTS, method="lower")).tolist():
            chosen = right[near & (similarities >= similarity)]
            # Wilson's lower bound is below the share, so the share is tested first.
            if chosen.mean() >= share and wilson(int(chosen.sum()), len(chosen)).low >= share:
                if len(chosen) > skipped:
                    best, skipped = SkipRule(similarity, distance), len(chosen)
                break
    return best


def _pairs(
    features: Sequence[NDArray[np.floating]], safe: Sequence[NDArray[np.bool_]], longest: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """Similarity, distance, and whether the later step is safe, of all pairs."""
    pairs = []
    for seen, fine in zip(features, safe, strict=True):
        along = unit(seen).astype(np.float64)
        for distance in range(1, min(longest, len(along) - 1) + 1):
            cosines = (along[distance:] * along[:-distance]).sum(axis=1)
            pairs.append((np.clip(cosines, -1.0, 1.0), np.full(len(cosines), distance), fine[distance:]))
    if not pairs:
        raise DataError("a rule for skipping needs held-out episodes of at least two steps")
    similarities, distances, right = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return similarities, distances, right
