"""The learned drafter of Spec-VLA (arXiv 2507.22424): one decoder layer on the target's features and its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specact.errors import BundleError
from specact.families.codes.network import open_session
from specact.families.tokens.bins import BINS
from specact.families.tokens.drafters import Decided
from specact.families.tokens.network import Array, Mask, Tokens, causal
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
        found = {entry.name: entry.shape[2:] for entry in self._session.get_inputs()}
        given = [entry.shape[2:] for entry in self._session.get_outputs()]
        taken = {name: len(shape) if name == "among" else shape for name, shape in found.items()}
        if taken != {"tokens": [], "features": [width], "places": [], "among": 1} or given != [[BINS], [width]]:
            raise BundleError(
                f"{path} takes {found} and gives {given}, which is no drafting head for features of {width} numbers; "
                "train it again with specact train"
            )

    def read(self, tokens: Tokens, features: Array, places: Tokens, among: Mask) -> tuple[Array, Array]:
        """Reads N tokens of each of B windows.

        Args:
            tokens: 0 to 255, ``[B, N]``.
            features: from which they were predicted: the target's or, for drafted tokens, the head's, ``[B, N, W]``.
            places, among: see :meth:`TokenNetworks.read <specact.families.tokens.network.TokenNetworks.read>`.

        Returns:
            Logits ``[B, N, 256]`` and predicted feature ``[B, N, W]`` of the next token of each.
        """
        given = {"tokens": tokens, "features": features, "places": places, "among": among}
        logits, predicted = self._session.run(None, given)
        return logits, predicted


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
        # The head's inputs: the decoded tokens, followed by the expanded nodes.
        tokens, features, among = decided.tokens, decided.features, causal(1, count)[0]
        places = np.arange(count)
        # Rows of the inputs to expand next, their nodes, and their log-likelihoods.
        rows, follow, likely = np.array([count - 1]), np.array([-1]), np.zeros(1)
        made: list[tuple[Tokens, Tokens, Floats]] = []
        for place in range(count, count + min(self._depth, decided.max_depth)):
            logits, predicted = self._head.read(tokens[None], features[None], places[None], among[None])
            scores = _log_softmax(logits[0, rows].astype(np.float64))
            best = np.argsort(-scores, axis=-1, kind="stable")[:, : self._top]
            parents = np.repeat(np.arange(len(rows)), best.shape[1])
            children, likely = best.ravel(), likely[parents] + np.take_along_axis(scores, best, -1).ravel()
            before = sum(len(level[0]) for level in made)
            made.append((children, follow[parents], likely))
            chosen = np.argsort(-likely, kind="stable")[: self._top]
            above = rows[parents[chosen]]
            tokens = np.concatenate([tokens, children[chosen]])
            features = np.concatenate([features, predicted[0, above]])
            places = np.concatenate([places, np.full(len(chosen), place)])
            among = _extend_mask(among, above)
            rows, follow, likely = len(among) - len(chosen) + np.arange(len(chosen)), before + chosen, likely[chosen]
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


def _extend_mask(among: Mask, above: Tokens) -> Mask:
    """The mask with a new token for each row of ``above``, which attends to what that row attends to, and itself."""
    count, more = len(among), len(above)
    whole = np.zeros((count + more, count + more), np.bool_)
    whole[:count, :count], whole[count:, :count] = among, among[above]
    whole[count:, count:] = np.eye(more, dtype=np.bool_)
    return whole


def _log_softmax(logits: Floats) -> Floats:
    """Log-softmax that never exceeds 0, not even by rounding."""
    shifted = logits - logits.max(-1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found
