"""Speculative decoding of action tokens: a tree of candidates, one pass of the target, the longest accepted path.

With the strict rule the tokens are those of greedy decoding, whatever was drafted (Leviathan et al. 2023). With a
relaxed one (Spec-VLA, arXiv 2507.22424) accepted tokens keep the drafted values; with a tail (KERV, arXiv 2603.01581)
everything from the first rejected token on is taken from elsewhere, and the target is not asked again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specact.families.tokens.acceptance import Acceptance
from specact.families.tokens.drafters import Decided, TreeDrafter
from specact.families.tokens.network import Array, Cache, Mask, Reading, TokenNetworks, Tokens
from specact.families.tokens.tree import Indices, Tree
from specact.types import value

# Where a token comes from. The numbers cross the wire.
TARGET, DRAFT, TAIL = 0, 1, 2


@value
class Decoded:
    """One chunk of T tokens, and how it came about.

    Attributes:
        tokens: int64 ``[T]``.
        sources: ``TARGET``, ``DRAFT`` or ``TAIL`` of each, uint8 ``[T]``.
        bias: drafted token minus the target's most likely one, given what is before it, int64 ``[T]``; 0 where the
            token is not a drafted one.
        accepted: how many drafted tokens each pass of the target accepted; the pass over the prefix is not among them.
        read: how many tokens each of these passes read.
        rejected: place of the first token that was refused, or T.
        feature: of the target, what the chunk's first token was read from, ``[W]``.
        sound: whether all logits were numbers.
    """

    tokens: Tokens
    sources: NDArray[np.uint8]
    bias: NDArray[np.int64]
    accepted: tuple[int, ...]
    read: tuple[int, ...]
    rejected: int
    feature: Array
    sound: bool


class Path(NamedTuple):
    """What was accepted of a tree: its nodes, their biases, and whether a node after them was refused."""

    nodes: Indices
    bias: NDArray[np.int64]
    refused: bool


def decode(
    networks: TokenNetworks,
    cache: Cache,
    prefix: Reading,
    drafter: TreeDrafter,
    rule: Acceptance,
    tail: Tokens | None = None,
) -> Decoded:
    """The chunk of one window.

    Args:
        networks: of the target.
        cache: that holds the window's prefix, and nothing else; of one window.
        prefix: what the target said of it.
        drafter: proposes candidates for what comes after the tokens that are decided.
        rule: which of them are accepted.
        tail: with KERV's compensation, the T tokens that are taken from the first rejected one on; None decodes on.
    """
    length = networks.length
    sources, bias = np.zeros(length, np.uint8), np.zeros(length, np.int64)
    tokens, rejected = np.zeros(length, np.int64), length
    accepted: list[int] = []
    read: list[int] = []
    features = [prefix.features[0, -1]]
    # The first token is never drafted: the pass over the prefix gives it.
    tokens[0], sound, count = np.argmax(prefix.logits[0, -1]), bool(np.isfinite(prefix.logits[0, -1]).all()), 1
    while count < length:
        tree = drafter.grow(Decided(tokens[:count], np.stack(features), length))
        found = networks.read(cache, *_asked(tokens[count - 1], tree, count - 1))
        logits = found.logits[0]
        sound = sound and bool(np.isfinite(logits).all())
        path = longest(tree, np.argmax(logits, axis=-1), rule, count)
        kept = np.concatenate([[0], 1 + path.nodes])
        end = count + len(path.nodes)
        tokens[count:end], sources[count:end], bias[count:end] = tree.tokens[path.nodes], DRAFT, path.bias
        accepted.append(len(path.nodes))
        read.append(1 + len(tree))
        if path.refused:
            rejected = min(rejected, end)
            if tail is not None:
                tokens[end:], sources[end:] = tail[end:], TAIL
                break
        tokens[end] = np.argmax(logits[kept[-1]])
        count = end + 1
        if count < length:
            cache.keep(found.entries, [kept])
            features += list(found.features[0, kept])
    return Decoded(tokens, sources, bias, tuple(accepted), tuple(read), rejected, features[0], sound)


def longest(tree: Tree, wanted: Tokens, rule: Acceptance, start: int) -> Path:
    """The longest accepted path of a tree; of equally long ones the first.

    Args:
        tree: of candidates.
        wanted: the target's most likely token after what was decided, and after each of the N nodes, ``[1 + N]``.
        rule: which are accepted.
        start: place of the first candidates.
    """
    best, bias, refused = np.zeros(0, np.int64), np.zeros(0, np.int64), bool(len(tree))
    # What the target would have written in each node's place, given the path to that node.
    off = tree.tokens - wanted[1 + tree.parents]
    for nodes in tree.paths:
        count = rule.accepted(off[nodes], start)
        if count > len(best):
            best, bias, refused = nodes[:count], off[nodes[:count]], count < len(nodes)
    return Path(best, bias, refused)


def _asked(last: np.int64, tree: Tree, place: int) -> tuple[Tokens, Indices, Mask]:
    """Tokens, places and mask of a pass over the last decided token, which was not read yet, and a tree after it."""
    tokens = np.concatenate([[last], tree.tokens])[None]
    places = np.concatenate([[place], place + 1 + tree.depths])[None]
    among = np.zeros((1, len(tree) + 1, len(tree) + 1), np.bool_)
    among[0, :, 0], among[0, 1:, 1:] = True, tree.among
    return tokens, places, among
