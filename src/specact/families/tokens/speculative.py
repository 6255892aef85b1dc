"""Speculative decoding of action tokens: a tree of candidates, one pass of the target, the longest accepted path.

With the strict rule the tokens are those of greedy decoding, whatever was drafted (Leviathan et al. 2023). With a
relaxed one (Spec-VLA, arXiv 2507.22424) accepted tokens keep the drafted values; with a tail (KERV, arXiv 2603.01581)
everything from the first rejected token on is replaced by the tail, without another pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specact.families.tokens.acceptance import Acceptance
from specact.families.tokens.drafters import Decided, TreeDrafter
from specact.families.tokens.network import Array, Cache, Mask, Reading, TokenNetworks, Tokens
from specact.families.tokens.tree import EMPTY, Indices, Tree
from specact.types import value

# Origin of a token. The numbers are part of the wire format.
TARGET, DRAFT, TAIL = 0, 1, 2


@value
class Decoded:
    """One chunk of T tokens, with statistics of its decoding.

    Attributes:
        tokens: int64 ``[T]``.
        sources: ``TARGET``, ``DRAFT`` or ``TAIL`` of each, uint8 ``[T]``.
        bias: drafted token minus the target's most likely one, given the tokens before it, int64 ``[T]``; 0 for tokens
            that were not drafted.
        accepted: number of drafted tokens accepted in each pass of the target, without the pass over the prefix.
        read: number of tokens processed in each of these passes.
        rejected: position of the first rejected token, or T.
        feature: of the target, from which the chunk's first token was predicted, ``[W]``.
        finite: whether all logits were finite.
    """

    tokens: Tokens
    sources: NDArray[np.uint8]
    bias: NDArray[np.int64]
    accepted: tuple[int, ...]
    read: tuple[int, ...]
    rejected: int
    feature: Array
    finite: bool


class Path(NamedTuple):
    """The accepted path of a tree: its nodes, their biases, and whether a node after them was rejected."""

    nodes: Indices
    bias: NDArray[np.int64]
    rejected: bool


@value
class Speculation:
    """How one window is decoded.

    Attributes:
        drafters: propose candidates after the decoded tokens: in the first pass, in the second, ...; the last one also
            in all further passes.
        rule: for accepting them.
        tail: with KERV's compensation, the T tokens used from the first rejected one on; None continues decoding.
    """

    drafters: Sequence[TreeDrafter]
    rule: Acceptance
    tail: Tokens | None = None


def decode(
    networks: TokenNetworks, cache: Cache, prefix: Reading, speculations: Sequence[Speculation]
) -> list[Decoded]:
    """The chunks of B windows.

    A pass of the target reads the trees of all windows that are not decided yet, padded to the largest. So the other
    windows change the target's outputs for a window in their last bits at most, and nothing else.

    Args:
        networks: of the target.
        cache: of the windows, with their prefixes only; it is used up.
        prefix: the target's outputs for them.
        speculations: one for each window.
    """
    logits, features = prefix.logits[:, -1], prefix.features[:, -1]
    windows = [_Window(one, networks.length, *row) for one, *row in zip(speculations, logits, features, strict=True)]
    going = [window for window in windows if not window.done]
    while going:
        trees = _grow(going)
        found = networks.read(cache, *_decoder_inputs(going, trees))
        wanted: Tokens = np.argmax(found.logits, axis=-1)
        finite = np.logical_and.reduce(np.isfinite(found.logits), axis=-1)
        outputs = zip(wanted, finite, found.features, strict=True)
        kept = [window.read(tree, *row) for window, tree, row in zip(going, trees, outputs, strict=True)]
        entries, left = found.entries, [row for row, window in enumerate(going) if not window.done]
        if 0 < len(left) < len(going):
            cache, entries = cache.select(np.array(left)), entries[left]
        going = [going[row] for row in left]
        if going:
            cache.keep(entries, [kept[row] for row in left])
    return [window.decoded() for window in windows]


class _Window:
    """A window that is being decoded.

    Args:
        speculation: how.
        length: T, tokens of its chunk.
        logits: of the first token, which is not drafted: the pass over the prefix predicts it, ``[256]``.
        feature: of it, ``[W]``.

    Attributes:
        tokens: the first ``count`` are decoded, ``[T]``.
        count: as above.
    """

    def __init__(self, speculation: Speculation, length: int, logits: Array, feature: Array) -> None:
        self._speculation = speculation
        self._sources, self._bias = np.zeros(length, np.uint8), np.zeros(length, np.int64)
        self._features = np.zeros((length, len(feature)), np.float32)
        self._accepted, self._read, self._rejected = list[int](), list[int](), length
        self.tokens, self.count = np.zeros(length, np.int64), 1
        self.tokens[0], self._features[0], self._finite = np.argmax(logits), feature, bool(np.isfinite(logits).all())

    @property
    def done(self) -> bool:
        """Whether all tokens are decoded."""
        return self.count >= len(self.tokens)

    @property
    def drafter(self) -> TreeDrafter:
        """Of the next pass."""
        drafters = self._speculation.drafters
        return drafters[min(len(self._read), len(drafters) - 1)]

    @property
    def decided(self) -> Decided:
        """Its input."""
        return Decided(self.tokens[: self.count], self._features[: self.count], len(self.tokens))

    def read(self, tree: Tree, wanted: Tokens, finite: NDArray[np.bool_], features: Array) -> Indices:
        """Accepts what it can of a tree.

        Args:
            tree: of N nodes.
            wanted, finite, features: of the pass, after the last decoded token and after each of the nodes: the
                target's most likely token, whether all logits are finite, and the feature; ``[1 + N, ...]`` and
                padding.

        Returns:
            Indices of the tokens read that are part of the chunk.
        """
        speculation, count, size = self._speculation, self.count, 1 + len(tree)
        self._finite = self._finite and bool(finite[:size].all())
        path = longest_accepted(tree, wanted[:size], speculation.rule, count)
        kept = np.concatenate([[0], 1 + path.nodes])
        end = count + len(path.nodes)
        drafted = slice(count, end)
        self.tokens[drafted], self._sources[drafted], self._bias[drafted] = tree.tokens[path.nodes], DRAFT, path.bias
        self._accepted.append(len(path.nodes))
        self._read.append(size)
        self.count = end + 1
        if path.rejected:
            self._rejected = min(self._rejected, end)
            if speculation.tail is not None:
                self.tokens[end:], self._sources[end:] = speculation.tail[end:], TAIL
                self.count = len(self.tokens)
                return kept
        self.tokens[end] = wanted[kept[-1]]
        self._features[count : self.count] = features[kept]
        return kept

    def decoded(self) -> Decoded:
        """The result."""
        return Decoded(
            self.tokens, self._sources, self._bias, tuple(self._accepted), tuple(self._read), self._rejected,
            self._features[0], self._finite,
        )  # fmt: skip


def longest_accepted(tree: Tree, wanted: Tokens, rule: Acceptance, start: int) -> Path:
    """The longest accepted path of a tree; the first one of equal length.

    Args:
        tree: of candidates.
        wanted: the target's most likely token after the decoded tokens, and after each of the N nodes, ``[1 + N]``.
        rule: for accepting them.
        start: position of the first candidates.
    """
    best, bias, rejected = np.zeros(0, np.int64), np.zeros(0, np.int64), bool(len(tree))
    # Bias to the target's most likely token at each node, given the path to that node.
    off = tree.tokens - wanted[1 + tree.parents]
    for nodes in tree.paths:
        if len(nodes) <= len(best):
            continue
        count = rule.accepted(off[nodes], start)
        if count > len(best):
            best, bias, rejected = nodes[:count], off[nodes[:count]], count < len(nodes)
    return Path(best, bias, rejected)


def _grow(windows: Sequence[_Window]) -> list[Tree]:
    """The trees of some windows; each drafter grows those of all its windows together."""
    trees = [EMPTY] * len(windows)
    for drafter in dict.fromkeys(window.drafter for window in windows):
        rows = [row for row, window in enumerate(windows) if window.drafter is drafter]
        for row, tree in zip(rows, drafter.grow([windows[row].decided for row in rows]), strict=True):
            trees[row] = tree
    return trees


def _decoder_inputs(windows: Sequence[_Window], trees: Sequence[Tree]) -> tuple[Tokens, Indices, Mask]:
    """Tokens, places and mask of a pass over each window's last decided token, which was not read yet, and its tree.

    The rows of smaller trees end with padding, which attends only to itself.
    """
    batch, size = len(windows), 1 + max(map(len, trees))
    tokens, places = np.zeros((batch, size), np.int64), np.zeros((batch, size), np.int64)
    among = np.tile(np.eye(size, dtype=np.bool_), (batch, 1, 1))
    for row, (window, tree) in enumerate(zip(windows, trees, strict=True)):
        end, last = 1 + len(tree), window.count - 1
        tokens[row, 0], tokens[row, 1:end] = window.tokens[last], tree.tokens
        places[row, 0], places[row, 1:end] = last, last + 1 + tree.depths
        among[row, :end, 0], among[row, 1:end, 1:end] = True, tree.among
    return tokens, places, among
