"""Drafters of a chunk's tokens that need no network: given chunks, combinations of their groups, a bigram table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specact.families.tokens.policy import Tokens
from specact.families.tokens.speculative import EMPTY, Decided, Tree, tree_of


class NoCandidates:
    """Proposes nothing: the target decodes token by token."""

    def grow(self, decided: Sequence[Decided]) -> list[Tree]:
        """See :class:`TreeDrafter`."""
        return [EMPTY] * len(decided)


NO_CANDIDATES = NoCandidates()


class Candidates:
    """Proposes the remainder of given chunks, from the last action, a memory, a head or another policy.

    Args:
        chunks: K of them, ``[K, T]``; more likely ones first. A chunk may end early, with -1 from there on.
    """

    def __init__(self, chunks: Tokens) -> None:
        self._chunks = chunks

    def grow(self, decided: Sequence[Decided]) -> list[Tree]:
        """See :class:`TreeDrafter`."""
        return [self._tree(len(one.tokens), one.max_depth) for one in decided]

    def _tree(self, start: int, depth: int) -> Tree:
        rows = self._chunks[:, start : start + depth].tolist()
        return tree_of(list(itertools.takewhile(_is_token, row)) for row in rows)


def _is_token(token: int) -> bool:
    return token >= 0


class GroupCandidates:
    """Proposes combinations of the groups of given chunks (HeiSD, arXiv 2603.17573).

    A gripper's tokens are not combined separately but stay with the group before them.

    Args:
        chunks: K of them, ``[K, T]``; more likely ones first. A chunk may end early, with -1 from there on; a group
            in which it ends is left out.
        groups: group of each of the T tokens, ``[T]``, see
            :class:`~specact.families.tokens.speculative.Acceptance`.
        strict: whether a token is a gripper's, bool ``[T]``.
        nodes: maximum size of the tree; less likely combinations are left out first.
    """

    def __init__(self, chunks: Tokens, groups: NDArray[np.int64], strict: NDArray[np.bool_], nodes: int = 50) -> None:
        self._chunks, self._nodes = chunks, nodes
        # A gripper's tokens belong to the piece before them.
        starts = np.flatnonzero((np.diff(groups, prepend=-1) != 0) & ~strict)
        self._piece_ends = [*starts[1:].tolist(), len(groups)]

    def grow(self, decided: Sequence[Decided]) -> list[Tree]:
        """See :class:`TreeDrafter`."""
        return [self._tree(len(one.tokens), one.max_depth) for one in decided]

    def _tree(self, at: int, depth: int) -> Tree:
        end = at + depth
        tokens: list[int] = []
        parents: list[int] = []
        leaves = [-1]
        for stop in (min(stop, end) for stop in self._piece_ends):
            if at >= stop:
                continue
            # The likelier piece first, behind every leaf.
            pieces = dict.fromkeys(tuple(row) for row in self._chunks[:, at:stop].tolist() if all(map(_is_token, row)))
            grown: list[int] = []
            for piece, leaf in itertools.product(pieces, leaves):
                if len(tokens) + len(piece) <= self._nodes:
                    chain = [leaf, *range(len(tokens), len(tokens) + len(piece))]
                    tokens += piece
                    parents += chain[:-1]
                    grown.append(chain[-1])
            leaves, at = grown, stop
        return Tree(np.array(tokens, np.int64), np.array(parents, np.int64)) if tokens else EMPTY


class Bigram:
    """Proposes the most frequent next tokens, per position.

    Args:
        followers: the K most frequent next tokens of each token at each position but the last, in descending order,
            ``[T - 1, 256, K]``.
        widths: branching factor at each depth, such as ``(4, 2, 1, 1)``; the last one repeats.
    """

    def __init__(self, followers: Tokens, widths: Sequence[int] = (1,)) -> None:
        self._followers, self._widths = followers, tuple(widths)

    def grow(self, decided: Sequence[Decided]) -> list[Tree]:
        """See :class:`TreeDrafter`."""
        return [self._tree(one) for one in decided]

    def _tree(self, decided: Decided) -> Tree:
        place = len(decided.tokens) - 1
        paths = [[int(decided.tokens[-1])]]
        for depth in range(decided.max_depth):
            width = self._widths[min(depth, len(self._widths) - 1)]
            paths = [[*path, int(t)] for path in paths for t in self._followers[place + depth, path[-1], :width]]
        return tree_of(path[1:] for path in paths)


def rows_of(tree: Tree, first: int, length: int) -> Tokens:
    """The paths of a tree to its leaves as candidates of a request, ``[K, T]``; -1 after the end of a path.

    Where the children of each node are in descending order of likelihood, the first row is the greedy path.

    Args:
        tree: continuations of one token, at most T - 1 deep.
        first: that token.
        length: T, tokens of a chunk.
    """
    paths = sorted(nodes.tolist() for nodes in tree.paths)
    rows = np.full((len(paths), length), -1, np.int64)
    rows[:, 0] = first
    for row, nodes in zip(rows, paths, strict=True):
        row[1 : 1 + len(nodes)] = tree.tokens[nodes]
    return rows
