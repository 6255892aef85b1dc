"""What proposes candidates for a chunk's tokens, and the simplest that do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specact.families.tokens.bins import BINS
from specact.families.tokens.network import Array, Tokens
from specact.families.tokens.tree import EMPTY, Tree, tree_of
from specact.types import value


@value
class Decided:
    """What a drafter may look at.

    Attributes:
        tokens: the n tokens of a chunk that are decided, one at least, int64 ``[n]``.
        features: of the target, what each of them was read from, ``[n, W]``.
        length: T, tokens of a whole chunk.
    """

    tokens: Tokens
    features: Array
    length: int

    @property
    def room(self) -> int:
        """How deep a tree is of use: the target's own choice after it is the chunk's last token."""
        return self.length - len(self.tokens) - 1


class TreeDrafter(Protocol):
    """Proposes what may follow the tokens that are decided."""

    def grow(self, decided: Decided) -> Tree:
        """Candidates, :attr:`Decided.room` deep at most; no candidates are a tree, too."""
        ...


class NoCandidates:
    """Proposes nothing: the target decodes token by token."""

    def grow(self, decided: Decided) -> Tree:
        """See :class:`TreeDrafter`."""
        return EMPTY


class Candidates:
    """Proposes the rest of whole chunks that were chosen before: the last action, a memory's, another policy's.

    Args:
        chunks: K of them, ``[K, T]``; more likely ones first.
        then: proposes from the second pass on, where what was chosen before has failed; None proposes the same again.
    """

    def __init__(self, chunks: Tokens, then: TreeDrafter | None = None) -> None:
        self._chunks, self._then, self._fresh = chunks, then, True

    def grow(self, decided: Decided) -> Tree:
        """See :class:`TreeDrafter`."""
        if self._then is not None and not self._fresh:
            return self._then.grow(decided)
        self._fresh = False
        start = len(decided.tokens)
        return tree_of(self._chunks[:, start : start + decided.room].tolist())


class GroupCandidates:
    """Proposes every combination of the groups of whole chunks that were chosen before (HeiSD, arXiv 2603.17573).

    A gripper is never combined: its tokens stay with the group before them.

    Args:
        chunks: K of them, ``[K, T]``; more likely ones first.
        groups: which group each of the T tokens belongs to, ``[T]``, see
            :class:`~specact.families.tokens.acceptance.Acceptance`.
        strict: which of them are a gripper's, bool ``[T]``.
        nodes: the tree has no more; combinations of what is less likely are left out first.
        then: see :class:`Candidates`.
    """

    def __init__(
        self,
        chunks: Tokens,
        groups: NDArray[np.int64],
        strict: NDArray[np.bool_],
        nodes: int = 50,
        then: TreeDrafter | None = None,
    ) -> None:
        self._chunks, self._nodes, self._then, self._fresh = chunks, nodes, then, True
        # A gripper's tokens belong to the piece before them.
        starts = np.flatnonzero((np.diff(groups, prepend=-1) != 0) & ~strict)
        self._ends = [*starts[1:].tolist(), len(groups)]

    def grow(self, decided: Decided) -> Tree:
        """See :class:`TreeDrafter`."""
        if self._then is not None and not self._fresh:
            return self._then.grow(decided)
        self._fresh = False
        at = len(decided.tokens)
        end = at + decided.room
        tokens: list[int] = []
        parents: list[int] = []
        leaves = [-1]
        for stop in (min(stop, end) for stop in self._ends):
            if at >= stop:
                continue
            # The likelier piece first, behind every leaf.
            pieces = dict.fromkeys(map(tuple, self._chunks[:, at:stop].tolist()))
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
    """Proposes the tokens that most often followed, place by place.

    Args:
        followers: of each place but the last and each token there, the K tokens that came next most often, in
            falling order, ``[T - 1, 256, K]``.
        widths: how many of them are followed at each depth, such as ``(4, 2, 1, 1)``; the last number goes on.
    """

    def __init__(self, followers: Tokens, widths: Sequence[int] = (1,)) -> None:
        self._followers, self._widths = followers, tuple(widths)

    def grow(self, decided: Decided) -> Tree:
        """See :class:`TreeDrafter`."""
        place = len(decided.tokens) - 1
        paths = [[int(decided.tokens[-1])]]
        for depth in range(decided.room):
            width = self._widths[min(depth, len(self._widths) - 1)]
            paths = [[*path, int(t)] for path in paths for t in self._followers[place + depth, path[-1], :width]]
        return tree_of(path[1:] for path in paths)


class RandomTokens:
    """Proposes chunks of random tokens: what anything else has to beat.

    Args:
        rng: to draw from.
        chains: how many, each to the end of the chunk.
    """

    def __init__(self, rng: np.random.Generator, chains: int = 1) -> None:
        self._rng, self._chains = rng, chains

    def grow(self, decided: Decided) -> Tree:
        """See :class:`TreeDrafter`."""
        return tree_of(self._rng.integers(BINS, size=(self._chains, decided.room)).tolist())
