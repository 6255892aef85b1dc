"""Candidates for the next tokens as a tree (trie): continuations share common prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specact.families.tokens.network import Mask, Tokens

Indices = NDArray[np.int64]


class Tree:
    """Candidates that one pass of the target verifies.

    Args:
        tokens: of the N nodes, 0 to 255, ``[N]``.
        parents: index of each node's parent, which must come before it; -1 for children of the decoded prefix, ``[N]``.

    Attributes:
        tokens, parents: as given.

    Raises:
        ValueError: for a parent that does not come before its child, or arrays that do not fit together.
    """

    def __init__(self, tokens: Tokens, parents: Indices) -> None:
        if tokens.shape != parents.shape or not ((parents >= -1) & (parents < np.arange(len(parents)))).all():
            raise ValueError(f"the parents of {len(tokens)} nodes must come before them, got {parents.tolist()}")
        self.tokens, self.parents = tokens, parents

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def among(self) -> Mask:
        """Attention mask ``[N, N]``: whether the node of a column is that of the row, or an ancestor."""
        among = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                among[node] |= among[parent]
        return among

    @cached_property
    def depths(self) -> Indices:
        """Number of ancestors of each node, ``[N]``."""
        depths: Indices = self.among.sum(axis=1) - 1
        return depths

    @cached_property
    def paths(self) -> Sequence[Indices]:
        """The nodes from the root to each leaf."""
        leaf = np.ones(len(self) + 1, np.bool_)
        leaf[self.parents] = False  # -1 is the additional last one
        return [np.flatnonzero(among) for among in self.among[leaf[:-1]]]


EMPTY = Tree(np.zeros(0, np.int64), np.zeros(0, np.int64))


def tree_of(sequences: Iterable[Sequence[int]]) -> Tree:
    """The tree of these continuations."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        parent = -1
        for token in sequence:
            at = parent, int(token)
            if at not in known:
                known[at] = len(tokens)
                tokens.append(at[1])
                parents.append(parent)
            parent = known[at]
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int64)) if tokens else EMPTY


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
