"""The learned drafter of Spec-VLA (arXiv 2507.22424): one decoder layer on the target's features and its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specact.errors import BundleError
from specact.families.codes.network import open_session
from specact.families.tokens.bins import BINS
from specact.families.tokens.drafters import Decided
from specact.families.tokens.network import Array, Mask, Reading, Tokens, causal
from specact.families.tokens.tree import Tree
from specact.types import Floats


class TokenHead:
    """A head on ONNX Runtime that predicts the next tokens from tokens and features.

    ``f'_i = layer(W [e_i; f_i])``, with the target's embedding e of token i and the feature f that it was predicted
    from; ``f'_i`` estimates the target's feature for the next token, and the target's output layer converts it to
    logits.

    Args:
        path: the ``.onnx`` file.
        length: T, tokens of a chunk.
        width: W, of the target's features.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Attributes:
        length, width: as given.

    Raises:
        BundleError: if the file is no ONNX model, or has other inputs or outputs.
        ConfigError: if this installation of ONNX Runtime has no such provider.
    """

    def __init__(
        self, path: Path, length: int, width: int, *, provider: str = "CPUExecutionProvider", threads: int = 1
    ) -> None:
        self.length, self.width = length, width
        self._session = open_session(path, provider, threads)
        found = {entry.name: entry.shape[1:] for entry in self._session.get_inputs()}
        given = [entry.shape[2:] for entry in self._session.get_outputs()[:2]]
        cache = found.get("cache", [])
        if (
            set(found) != {"tokens", "features", "places", "seen", "among", "cache"}
            or found["features"][1:] != [width]
            or given != [[BINS], [width]]
            or len(cache) != 4
            or cache[0] != 2
            or cache[1] * cache[3] != width
        ):
            raise BundleError(
                f"{path} takes {found} and gives {given}, which is no drafting head for features of {width} numbers; "
                "train it again with specact train"
            )
        self._heads: int = cache[1]

    def empty_cache(self, batch: int) -> Array:
        """A cache of B windows without entries, ``[B, 2, heads, 0, W / heads]``."""
        return np.zeros((batch, 2, self._heads, 0, self.width // self._heads), np.float32)

    def read(self, tokens: Tokens, features: Array, places: Tokens, seen: Mask, among: Mask, cache: Array) -> Reading:
        """Reads N tokens of each of B windows.

        Args:
            tokens: 0 to 255, ``[B, N]``.
            features: from which they were predicted: the target's or, for drafted tokens, the head's, ``[B, N, W]``.
            places, among: see :meth:`TokenNetworks.read <specact.families.tokens.network.TokenNetworks.read>`.
            seen: attention mask of the cache, row attends to column, ``[B, N, S]``.
            cache: entries of S tokens read before, ``[B, 2, heads, S, W / heads]``.

        Returns:
            Logits and predicted feature of the next token of each, and the cache entries of these tokens, ``[B, 2,
            heads, N, W / heads]``.
        """
        given = {
            "tokens": tokens, "features": features, "places": places, "seen": seen, "among": among, "cache": cache,
        }  # fmt: skip
        return Reading(*self._session.run(None, given))


class HeadDrafter:
    """Grows the dynamic tree of EAGLE-2 (Li et al. 2024) from the head's most likely paths.

    At every level the ``top`` most likely nodes are expanded by their ``top`` most likely children. The ``nodes`` most
    likely nodes are kept; a child is at most as likely as its parent, so that the parent is kept too.

    Args:
        head: see :class:`TokenHead`.
        top: beam width, and children of each expanded node; 1 drafts the greedy chain.
        depth: maximum number of levels, limited by the chunk's end.
        nodes: maximum size of the tree.
    """

    def __init__(self, head: TokenHead, top: int = 8, depth: int = 4, nodes: int = 50) -> None:
        self._head, self._top, self._depth, self._nodes = head, top, depth, nodes

    def grow(self, decided: Decided) -> Tree:
        """The tree after the decoded tokens; likelihoods are cumulative from there."""
        count = len(decided.tokens)
        # Of the next pass: the decoded tokens first, then the nodes to expand, which attend to their ancestors.
        tokens, features, places = decided.tokens, decided.features, np.arange(count)
        seen, among, cache = np.zeros((count, 0), np.bool_), causal(1, count)[0], self._head.empty_cache(1)
        # Of the rows to expand: their indices, nodes, and log-likelihoods.
        rows, follow, likely = np.array([count - 1]), np.array([-1]), np.zeros(1)
        made: list[tuple[Tokens, Tokens, Floats]] = []
        total = 0
        for place in range(count, count + min(self._depth, decided.max_depth)):
            found = self._head.read(tokens[None], features[None], places[None], seen[None], among[None], cache)
            scores = _log_softmax(found.logits[0, rows].astype(np.float64))
            best = np.argsort(-scores, axis=-1, kind="stable")[:, : self._top]
            parents = np.repeat(np.arange(len(rows)), best.shape[1])
            children, likely = best.ravel(), likely[parents] + np.take_along_axis(scores, best, -1).ravel()
            made.append((children, follow[parents], likely))
            chosen = np.argsort(-likely, kind="stable")[: self._top]
            before, total = total, total + len(children)
            if (
                total >= self._nodes
                and likely[chosen[0]] <= np.partition(_likelihoods(made), -self._nodes)[-self._nodes]
            ):
                break  # descendants are at most as likely, so that none would be kept
            above = rows[parents[chosen]]
            tokens, features = children[chosen], found.features[0, above]
            places = np.full(len(chosen), place)
            seen, among = np.concatenate([seen, among], axis=-1)[above], np.eye(len(chosen), dtype=np.bool_)
            cache = np.concatenate([cache, found.entries], axis=-2)
            rows, follow, likely = np.arange(len(chosen)), before + chosen, likely[chosen]
        if not made:
            return Tree(np.empty(0, np.int64), np.empty(0, np.int64))
        nodes, parents, scores = (np.concatenate(column) for column in zip(*made, strict=True))
        return _most_likely(nodes, parents, scores, self._nodes)


def _most_likely(tokens: Tokens, parents: Tokens, likely: Floats, nodes: int) -> Tree:
    """The most likely nodes, in their order; ties keep the first, so that no child is kept without its parent."""
    kept = np.sort(np.argsort(-likely, kind="stable")[:nodes])
    renamed = np.full(len(tokens) + 1, -1)
    renamed[kept] = np.arange(len(kept))
    return Tree(tokens[kept], renamed[parents[kept]])


def _likelihoods(levels: list[tuple[Tokens, Tokens, Floats]]) -> Floats:
    return np.concatenate([likely for _, _, likely in levels])


def _log_softmax(logits: Floats) -> Floats:
    """Log-softmax that never exceeds 0, not even by rounding."""
    shifted = logits - logits.max(-1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found
