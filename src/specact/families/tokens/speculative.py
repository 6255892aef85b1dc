"""Speculative decoding of action tokens: a tree of candidates, one pass of the target, the longest accepted path.

With the strict rule the tokens are those of greedy decoding, whatever was drafted (Leviathan et al. 2023). Under the
others an accepted token keeps the *drafted* value, which differs from the target's by up to the tolerance; actions lie
in [-1, 1] and a bin is 2/255 wide. With a tail everything from the first rejected token on is replaced by the tail,
without another pass of the target. Systems choose drafters, rule and tail, see :mod:`specact.systems`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.types import value

if TYPE_CHECKING:
    from specact.families.tokens.policy import Cache, Reading, TokenNetworks

Array = NDArray[np.float32]
Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Tree:
    """Candidates that one pass of the target verifies.

    Attributes:
        tokens: of the N nodes, 0 to 255, int64 ``[N]``.
        parents: index of each node's parent, which must come before it; -1 for children of the decoded prefix, ``[N]``.

    Raises:
        ValueError: for a parent that does not come before its child, or arrays that do not fit together.
    """

    def __init__(self, tokens: Sequence[int] | Tokens, parents: Sequence[int] | Tokens) -> None:
        self.tokens, self.parents = np.asarray(tokens, np.int64), np.asarray(parents, np.int64)
        before = (self.parents >= -1) & (self.parents < np.arange(len(self.parents)))
        if self.tokens.shape != self.parents.shape or not before.all():
            raise ValueError(f"the parents of {len(self)} nodes must come before them, got {self.parents.tolist()}")

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
    def depths(self) -> Tokens:
        """Number of ancestors of each node, ``[N]``."""
        depths: Tokens = self.among.sum(axis=1) - 1
        return depths

    @cached_property
    def paths(self) -> Sequence[Tokens]:
        """The nodes from the root to each leaf."""
        leaf = np.ones(len(self) + 1, np.bool_)
        leaf[self.parents] = False  # -1 is the additional last one
        return [np.flatnonzero(among) for among in self.among[leaf[:-1]]]


EMPTY = Tree([], [])


def tree_of(sequences: Iterable[Sequence[int]]) -> Tree:
    """The tree of these continuations."""
    known: dict[tuple[int, int], int] = {}  # nodes by their parents and tokens
    for sequence in sequences:
        parent = -1
        for token in sequence:
            parent = known.setdefault((parent, token), len(known))
    return Tree([token for _, token in known], [parent for parent, _ in known])


@value
class Decided:
    """A drafter's input for one window: the decoded prefix of its chunk.

    Attributes:
        tokens: the n decoded tokens, at least one, int64 ``[n]``.
        features: of the target, from which each of them was predicted, ``[n, W]``.
        length: T, tokens of a whole chunk.
    """

    tokens: Tokens
    features: Array
    length: int

    @property
    def max_depth(self) -> int:
        """Maximum useful depth of a tree; the target itself gives the token after it."""
        return self.length - len(self.tokens) - 1


class TreeDrafter:
    """Proposes continuations of the decoded tokens; as it stands none, so that the target decodes token by token."""

    def grow(self, decided: Sequence[Decided]) -> list[Tree]:
        """A tree of candidates for each of B windows, at most :attr:`Decided.max_depth` deep; it may be empty."""
        return [self.tree(each) for each in decided]

    def tree(self, decided: Decided) -> Tree:
        """The tree of one window."""
        return EMPTY


NOTHING = TreeDrafter()


class Candidates(TreeDrafter):
    """Proposes the remainder of given chunks, from the last action, a memory, a head or another policy.

    Args:
        chunks: K of them, ``[K, T]``; more likely ones first. A chunk may end early, with -1 from there on.
    """

    def __init__(self, chunks: Tokens) -> None:
        self._chunks = chunks

    def tree(self, decided: Decided) -> Tree:
        start = len(decided.tokens)
        rows = self._chunks[:, start : start + decided.max_depth].tolist()
        return tree_of(list(itertools.takewhile(lambda token: token >= 0, row)) for row in rows)


class GroupCandidates(TreeDrafter):
    """Proposes combinations of the groups of given chunks (HeiSD, arXiv 2603.17573).

    A gripper's tokens are not combined separately but stay with the group before them.

    Args:
        chunks: as for :class:`Candidates`; a group in which a chunk ends is left out.
        groups, strict: group of each of the T tokens, see :class:`Acceptance`, and whether it is a gripper's, ``[T]``.
        nodes: maximum size of the tree; less likely combinations are left out first.
    """

    def __init__(self, chunks: Tokens, groups: Tokens, strict: Mask, nodes: int = 50) -> None:
        self._chunks, self._nodes = chunks, nodes
        # A gripper's tokens belong to the piece before them.
        starts = np.flatnonzero((np.diff(groups, prepend=-1) != 0) & ~strict)
        self._piece_ends = [*starts[1:].tolist(), len(groups)]

    def tree(self, decided: Decided) -> Tree:
        at = len(decided.tokens)
        end, leaves = at + decided.max_depth, [-1]
        tokens, parents = list[int](), list[int]()
        for stop in (min(stop, end) for stop in self._piece_ends):
            if at >= stop:
                continue
            # The likelier piece first, behind every leaf.
            pieces = dict.fromkeys(tuple(row) for row in self._chunks[:, at:stop].tolist() if min(row) >= 0)
            grown = list[int]()
            for piece, leaf in itertools.product(pieces, leaves):
                if len(tokens) + len(piece) <= self._nodes:
                    chain = [leaf, *range(len(tokens), len(tokens) + len(piece))]
                    tokens += piece
                    parents += chain[:-1]
                    grown.append(chain[-1])
            leaves, at = grown, stop
        return Tree(tokens, parents)


class Bigram(TreeDrafter):
    """Proposes the most frequent next token of each, per position: of each but the last, ``[T - 1, 256]``."""

    def __init__(self, followers: Tokens) -> None:
        self._followers = followers

    def tree(self, decided: Decided) -> Tree:
        place, chain = len(decided.tokens) - 1, [int(decided.tokens[-1])]
        for depth in range(decided.max_depth):
            chain.append(int(self._followers[place + depth, chain[-1]]))
        return tree_of([chain[1:]])


def rows_of(tree: Tree, first: int, length: int) -> Tokens:
    """The paths of a tree to its leaves, after a first token, as candidates of a request, ``[K, T]``; -1 after the end.

    Where the children of each node are in descending order of likelihood, the first row is the greedy path.
    """
    paths = sorted(nodes.tolist() for nodes in tree.paths)
    rows = np.full((len(paths), length), -1, np.int64)
    rows[:, 0] = first
    for row, nodes in zip(rows, paths, strict=True):
        row[1 : 1 + len(nodes)] = tree.tokens[nodes]
    return rows


# Larger than any sum of biases in a group.
UNLIMITED = 2**15 - 1


@value
class Acceptance:
    """A group of tokens is accepted if each bias is within its tolerance, and their sum within the group's.

    Attributes:
        each: largest absolute bias of each of the chunk's T tokens [bins], 0 to 255, int64 ``[T]``.
        groups: group of each token, ``[T]``: 0, 1, ... without gaps. A group is accepted as a whole.
        total: largest sum of the absolute biases of one group [bins].
    """

    each: Tokens
    groups: Tokens
    total: int = UNLIMITED

    def accepted(self, bias: Tokens, start: int) -> int:
        """Number of accepted tokens of one path that begins at ``start``: whole groups, up to the first rejected one.

        An incomplete last group is judged by the tokens in the path. The bias is the drafted token minus the target's
        most likely one, each given the path before it, ``[n]``.
        """
        size = np.abs(bias)
        near = size <= self.each[start : start + len(bias)]
        groups = self.groups[start : start + len(bias)]
        near &= np.bincount(groups, size)[groups] <= self.total
        refused = np.flatnonzero(~near)
        return int(np.searchsorted(groups, groups[refused[0]])) if refused.size else len(bias)


# Of a request that drafts nothing.
UNTESTED = Acceptance(np.zeros(0, np.int64), np.zeros(0, np.int64))


def relaxed(
    bins: int, length: int, actions: int, strict: Collection[int] = (), groups: Sequence[int] | None = None,
    total: int = UNLIMITED,
) -> Acceptance:  # fmt: skip
    """Each token within ``bins`` bins, 0 is strict (Spec-VLA); each group's sum within ``total`` (HeiSD), if any.

    Args:
        bins: r, 0 to 255.
        length, actions: T, tokens of a chunk; A, dimensions of an action.
        strict: dimensions that must be equal, such as a gripper; the papers have none.
        groups: of each dimension of an action, 0, 1, ..., such as position, rotation, gripper; None for single tokens.

    Raises:
        ConfigError: for a tolerance, a dimension or groups that are none, or mix strict dimensions and others.
    """
    if not 0 <= bins <= 255:
        raise ConfigError(f"a tolerance must lie between 0 and 255 bins, got {bins}")
    if not set(strict) <= set(range(actions)):
        raise ConfigError(f"strict dimensions must lie between 0 and {actions - 1}, got {sorted(strict)}")
    each = np.where(np.isin(np.arange(length) % actions, sorted(strict)), 0, bins)
    if groups is None:
        return Acceptance(each, np.arange(length), total)
    steps = np.diff(groups, prepend=0)
    kinds = [{group for axis, group in enumerate(groups) if (axis in strict) == flag} for flag in (True, False)]
    if len(groups) != actions or groups[0] != 0 or not np.isin(steps, (0, 1)).all() or kinds[0] & kinds[1]:
        raise ConfigError(
            f"groups must number the {actions} dimensions of an action from 0 on without gaps, and those of a gripper "
            f"must be their own; got {list(groups)} with a gripper at {sorted(strict)}"
        )
    whole = (np.arange(length) // actions) * (groups[-1] + 1) + np.resize(groups, length)
    return Acceptance(each, whole, total)


# Origin of a token; the first three numbers are part of the wire format. The device drops those it does not execute.
TARGET, DRAFT, TAIL, DROPPED = 0, 1, 2, 3


@dataclass(slots=True)
class Decoded:
    """One chunk of T tokens, with statistics of its decoding.

    Attributes:
        tokens, sources: ``[T]``; ``TARGET``, ``DRAFT``, ``TAIL`` or ``DROPPED`` of each, uint8 ``[T]``.
        bias: drafted token minus the target's most likely one, given the tokens before it, int64 ``[T]``; else 0.
        accepted, read: number of drafted tokens accepted, and of tokens processed, in each pass after the prefix's.
        rejected: position of the first rejected token, or T.
        features: of the target, from which each token was predicted, ``[T, W]``; the first alone in a server's reply.
        finite: whether all logits were finite.
    """

    tokens: Tokens
    sources: NDArray[np.uint8]
    bias: Tokens
    accepted: list[int]
    read: list[int]
    rejected: int
    features: Array
    finite: bool


class Path(NamedTuple):
    """The accepted path of a tree: its nodes, their biases, and whether a node after them was rejected."""

    nodes: Tokens
    bias: Tokens
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
        cache, prefix: of the windows, with their prefixes only, and the target's outputs for them; it is used up.
        speculations: one for each window.
    """
    logits, features = prefix.logits[:, -1], prefix.features[:, -1]
    windows = [_Window(plan, networks.length, *row) for plan, *row in zip(speculations, logits, features, strict=True)]
    going = [window for window in windows if not window.done]
    while going:
        trees = _grow(going)
        reading = networks.read(cache, *_decoder_inputs(going, trees))
        wanted: Tokens = np.argmax(reading.logits, axis=-1)
        finite = np.logical_and.reduce(np.isfinite(reading.logits), axis=-1)
        outputs = zip(wanted, finite, reading.features, strict=True)
        kept = [window.read(tree, *row) for window, tree, row in zip(going, trees, outputs, strict=True)]
        entries, left = reading.entries, [row for row, window in enumerate(going) if not window.done]
        if 0 < len(left) < len(going):
            cache, entries = cache.select(np.array(left)), entries[left]
        going = [going[row] for row in left]
        if going:
            cache.keep(entries, [kept[row] for row in left])
    return [window.decoded for window in windows]


class _Window:
    """A window that is being decoded; the first ``count`` of its T tokens are.

    The first token is not drafted: the pass over the prefix predicts it, from these logits and this feature.
    """

    def __init__(self, speculation: Speculation, length: int, logits: Array, feature: Array) -> None:
        tokens, features = np.zeros(length, np.int64), np.zeros((length, len(feature)), np.float32)
        tokens[0], features[0], finite = np.argmax(logits), feature, bool(np.isfinite(logits).all())
        sources, bias = np.zeros(length, np.uint8), np.zeros(length, np.int64)
        self.decoded = Decoded(tokens, sources, bias, [], [], length, features, finite)
        self._speculation, self.count = speculation, 1

    @property
    def done(self) -> bool:
        return self.count >= len(self.decoded.tokens)

    @property
    def drafter(self) -> TreeDrafter:
        drafters = self._speculation.drafters
        return drafters[min(len(self.decoded.read), len(drafters) - 1)]

    @property
    def decided(self) -> Decided:
        decoded, count = self.decoded, self.count
        return Decided(decoded.tokens[:count], decoded.features[:count], len(decoded.tokens))

    def read(self, tree: Tree, wanted: Tokens, finite: Mask, features: Array) -> Tokens:
        """Accepts what it can of a tree of N nodes, and gives the indices of the tokens read that are in the chunk.

        Of the pass, after the last decoded token and after each of the nodes: the target's most likely token, whether
        all logits are finite, and the feature; ``[1 + N, ...]`` and padding.
        """
        decoded, count, size, tail = self.decoded, self.count, 1 + len(tree), self._speculation.tail
        path = longest_accepted(tree, wanted[:size], self._speculation.rule, count)
        kept, end = np.zeros(1 + len(path.nodes), np.int64), count + len(path.nodes)
        kept[1:] = 1 + path.nodes
        decoded.finite = decoded.finite and bool(finite[:size].all())
        decoded.tokens[count:end], decoded.bias[count:end] = tree.tokens[path.nodes], path.bias
        decoded.sources[count:end] = DRAFT
        decoded.accepted.append(len(path.nodes))
        decoded.read.append(size)
        self.count = end + 1
        if path.rejected:
            decoded.rejected = min(decoded.rejected, end)
            if tail is not None:
                decoded.tokens[end:], decoded.sources[end:] = tail[end:], TAIL
                self.count = len(decoded.tokens)
                return kept
        decoded.tokens[end] = wanted[kept[-1]]
        decoded.features[count : end + 1] = features[kept]
        return kept


def longest_accepted(tree: Tree, wanted: Tokens, rule: Acceptance, start: int) -> Path:
    """The longest accepted path of a tree whose first candidates are at ``start``; the first one of equal length.

    Args:
        tree, rule: candidates, and how they are accepted.
        wanted: the target's most likely token after the decoded tokens, and after each of the N nodes, ``[1 + N]``.
        start: position of the first candidates in the chunk.
    """
    best, bias, rejected = EMPTY.tokens, EMPTY.tokens, bool(len(tree))
    if not rejected:
        return Path(best, bias, rejected)
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
    trees, rows_of_drafter = [EMPTY] * len(windows), dict[TreeDrafter, list[int]]()
    for row, window in enumerate(windows):
        rows_of_drafter.setdefault(window.drafter, []).append(row)
    for drafter, rows in rows_of_drafter.items():
        for row, tree in zip(rows, drafter.grow([windows[row].decided for row in rows]), strict=True):
            trees[row] = tree
    return trees


def _decoder_inputs(windows: Sequence[_Window], trees: Sequence[Tree]) -> tuple[Tokens, Tokens, Mask]:
    """Tokens, places and mask of a pass over each window's last decided token, which was not read yet, and its tree.

    The rows of smaller trees end with padding, which attends only to itself.
    """
    batch, size = len(windows), 1 + max(map(len, trees))
    tokens, places = np.zeros((batch, size), np.int64), np.zeros((batch, size), np.int64)
    among = np.tile(np.eye(size, dtype=np.bool_), (batch, 1, 1))
    places[:, 0] = [window.count - 1 for window in windows]
    tokens[:, 0] = [window.decoded.tokens[window.count - 1] for window in windows]
    for row, tree in enumerate(trees):
        if len(tree):
            nodes = slice(1, 1 + len(tree))
            tokens[row, nodes], places[row, nodes] = tree.tokens, places[row, 0] + 1 + tree.depths
            among[row, nodes, 0], among[row, nodes, nodes] = True, tree.among
    return tokens, places, among
