"""Spec-VLA (Wang et al. 2025, arXiv 2507.22424): a head drafts a tree of tokens, near ones are accepted.

The head estimates the target's feature for the next token from token i and the feature it was predicted from::

    f'_i = layer(W [e_i; f_i]),        p(. | i) = softmax(out(f'_i))

with the target's embedding e and output layer out. It grows a tree (EAGLE-2, Li et al. 2024): a node's likelihood is
the product along its path, the ``top`` likeliest of a level are expanded, the ``nodes`` likeliest kept. The target
reads the tree in one pass and accepts the longest path whose tokens lie within r bins of its own most likely ones,
``|d_i - t_i| <= r``, with r = 9 (:func:`~specact.families.tokens.speculative.relaxed`).

What we changed: a gripper's tokens are strict, unless a decoding is ``uniform`` as in the paper; and
``specvla_device`` has the head on the robot, on the last verified chunk's first token and feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.bundle.network import CPU, Compute, Network, Shapes
from specact.families.tokens.pair import Decoding, TokenDrafter, TokenParts
from specact.families.tokens.policy import BINS, Reading, causal
from specact.families.tokens.speculative import Array, Decided, Decoded, Mask, Tokens, Tree, TreeDrafter, rows_of
from specact.families.tokens.verify import MAX_CANDIDATES
from specact.observation import Window
from specact.types import Floats

_Scalar = TypeVar("_Scalar", bound=np.generic)


class TokenHead:
    """The head on ONNX Runtime, for chunks of T tokens and a target's features of width W.

    Raises:
        BundleError: if the file is no ONNX model, or has other inputs or outputs.
    """

    def __init__(self, path: Path, length: int, width: int, *, compute: Compute = CPU) -> None:
        rows = ("batch", "tokens")
        inputs: Shapes = {
            "tokens": rows, "features": (*rows, width), "places": rows, "seen": (*rows, "cached"),
            "among": (*rows, "tokens"), "cache": ("batch", 2, "heads", "cached", "each"),
        }  # fmt: skip
        entries = ("batch", 2, "heads", "tokens", "each")
        outputs = {"logits": (*rows, BINS), "predicted": (*rows, width), "entries": entries}
        self._network = Network(path, inputs, outputs, compute, repair="train it again with specact train")
        self._heads, self._head_width = self._network.sizes["heads"], self._network.sizes["each"]

    def empty_cache(self, batch: int) -> Array:
        """A cache of B windows without entries, ``[B, 2, heads, 0, W / heads]``."""
        return np.zeros((batch, 2, self._heads, 0, self._head_width), np.float32)

    def read(self, tokens: Tokens, features: Array, places: Tokens, seen: Mask, among: Mask, cache: Array) -> Reading:
        """Logits and predicted feature of the next token of each of N tokens of B windows, and their cache entries.

        Args:
            tokens, places, among: as of :meth:`TokenNetworks.read <specact.families.tokens.policy.TokenNetworks.read>`.
            features: from which they were predicted: the target's or, for drafted tokens, the head's, ``[B, N, W]``.
            seen: attention mask of the cache, row attends to column, ``[B, N, S]``.
            cache: entries of S tokens read before, ``[B, 2, heads, S, W / heads]``.
        """
        inputs: dict[str, Any] = {
            "tokens": tokens, "features": features, "places": places, "seen": seen, "among": among, "cache": cache,
        }  # fmt: skip
        return Reading(*self._network.run(inputs))


class HeadDrafter(TreeDrafter):
    """Grows the dynamic tree of EAGLE-2 (Li et al. 2024) from the head's most likely paths.

    At every level the ``top`` most likely nodes are expanded by their ``top`` most likely children; 1 drafts the greedy
    chain. The ``nodes`` most likely nodes of at most ``depth`` levels are kept; a child is at most as likely as its
    parent, so that the parent is kept too.
    """

    def __init__(self, head: TokenHead, top: int = 8, depth: int = 4, nodes: int = 50) -> None:
        self._head, self._top, self._depth, self._nodes = head, top, depth, nodes

    def grow(self, decided: Sequence[Decided]) -> list[Tree]:
        """The trees after the decoded tokens of B windows; likelihoods are cumulative from there.

        A level takes one pass of the head for all windows. The decoded tokens are padded to the longest, and nothing
        attends to the padding; a level has as many nodes in each window. Windows whose trees are complete take part in
        the passes until all are.
        """
        counts = np.array([len(state.tokens) for state in decided])
        depths = np.array([min(self._depth, state.max_depth) for state in decided])
        # Of the next pass: the decoded tokens first, then the nodes to expand, which attend to their ancestors.
        tokens, features = _padded([state.tokens for state in decided]), _padded([state.features for state in decided])
        batch, count = tokens.shape
        batch_rows = np.arange(batch)[:, None]
        places, last = np.broadcast_to(np.arange(count), (batch, count)), decided[0].length - 1
        seen, among, cache = np.zeros((batch, count, 0), np.bool_), causal(batch, count), self._head.empty_cache(batch)
        # Of the rows to expand: their indices, nodes, and log-likelihoods.
        rows, follow, likely = counts[:, None] - 1, np.full((batch, 1), -1), np.zeros((batch, 1))
        # All nodes of the levels so far, and how many of them are in the levels of each window's tree.
        nodes, parents, scores = tokens[:, :0], follow[:, :0], likely[:, :0]
        sizes, level = np.zeros(batch, np.int64), 0
        growing = depths > 0
        while growing.any():
            reading = self._head.read(tokens, features, places, seen, among, cache)
            log_probs = _log_softmax(reading.logits[batch_rows, rows].astype(np.float64))
            best = _largest(log_probs, self._top)
            likely = (likely[..., None] + np.take_along_axis(log_probs, best, -1)).reshape(batch, -1)
            children, before = best.reshape(batch, -1), nodes.shape[1]
            nodes, scores = np.concatenate([nodes, children], 1), np.concatenate([scores, likely], 1)
            parents = np.concatenate([parents, follow.repeat(best.shape[-1], 1)], 1)
            level, sizes[growing] = level + 1, nodes.shape[1]
            growing &= level < depths
            chosen = _largest(likely, self._top)
            above, likely = rows[batch_rows, chosen // best.shape[-1]], likely[batch_rows, chosen]
            if nodes.shape[1] >= self._nodes:
                # Descendants are at most as likely, so that none would be kept.
                growing &= ~(likely[:, 0] <= np.partition(scores, -self._nodes)[:, -self._nodes])
            tokens, features = children[batch_rows, chosen], reading.features[batch_rows, above]
            places = np.minimum(np.broadcast_to(counts[:, None] + level - 1, tokens.shape), last)
            seen = np.concatenate([seen, among], -1)[batch_rows, above]
            among = np.broadcast_to(np.eye(tokens.shape[1], dtype=np.bool_), (batch, *[tokens.shape[1]] * 2))
            cache = np.concatenate([cache, reading.entries], -2)
            rows, follow = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), before + chosen
        return [
            _most_likely(nodes[row, :size], parents[row, :size], scores[row, :size], self._nodes)
            for row, size in enumerate(sizes.tolist())
        ]


def _padded(parts: Sequence[NDArray[_Scalar]]) -> NDArray[_Scalar]:
    """Arrays ``[n, ...]`` in one ``[B, N, ...]``, filled with zeros."""
    whole = np.zeros((len(parts), max(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for row, part in zip(whole, parts, strict=True):
        row[: len(part)] = part
    return whole


def _most_likely(tokens: Tokens, parents: Tokens, likely: Floats, nodes: int) -> Tree:
    """The most likely nodes, in their order; ties keep the first, so that no child is kept without its parent."""
    kept = np.sort(np.argsort(-likely, kind="stable")[:nodes])
    renamed = np.full(len(tokens) + 1, -1)
    renamed[kept] = np.arange(len(kept))
    return Tree(tokens[kept], renamed[parents[kept]])


def _largest(values: Floats, count: int) -> Tokens:
    """Indices of the largest values of each row, in descending order, ``[..., K]``; of equal ones the first.

    For a few of them this takes a fraction of the time of a stable sort.
    """
    left, indices = values.reshape(-1, values.shape[-1]).copy(), list[Tokens]()
    rows = np.arange(len(left))
    for _ in range(min(count, values.shape[-1])):
        indices.append(left.argmax(-1))
        left[rows, indices[-1]] = -np.inf
    return np.stack(indices, -1).reshape(*values.shape[:-1], -1)


def _log_softmax(logits: Floats) -> Floats:
    """Log-softmax that never exceeds 0, not even by rounding."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_probs


class DeviceHeadDrafter(TokenDrafter):
    """Reads the last verified chunk's first token and the target's feature from which it was predicted.

    Both are of an earlier observation: a device without the target has no newer ones.
    """

    def __init__(self, parts: TokenParts, decoding: Decoding) -> None:
        super().__init__(parts, decoding)
        # A tree has at most as many paths as nodes, so that each has its row in the request.
        settings = parts.drafters.settings
        nodes = min(settings.nodes, MAX_CANDIDATES)
        self._head = HeadDrafter(parts.drafters.head, settings.top, settings.depth, nodes)
        self._last_verified: Decided | None = None

    def reset(self) -> None:
        super().reset()
        self._last_verified = None

    def verified(self, decoded: Decoded) -> None:
        # Rounded as on the wire, so that the same is drafted with the target here and elsewhere.
        feature = decoded.features[:1].astype(np.float16).astype(np.float32)
        self._last_verified = Decided(decoded.tokens[:1], feature, len(decoded.tokens))

    def candidates(self, window: Window, rng: np.random.Generator) -> Tokens:
        last = self._last_verified
        if last is None:
            return super().candidates(window, rng)
        (tree,) = self._head.grow([last])
        return rows_of(tree, int(last.tokens[0]), last.length)


class DeviceHead(Decoding):
    """Spec-VLA with its head on the device; after its tree the server's own head drafts."""

    drafts = DeviceHeadDrafter


SPECVLA: dict[str, Decoding] = {
    "specvla": Decoding("Spec-VLA: a head drafts a tree, tokens within 9 bins are accepted", then="head", bins=9),
    "specvla_device": DeviceHead(
        "Spec-VLA with its head on the device, on the last verified feature; after its tree the server's own head",
        "head", then="head", bins=9,
    ),
}  # fmt: skip
