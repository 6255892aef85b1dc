"""Speculative decoding of action tokens: a tree of candidates, one pass of the target, the longest accepted path.

With the strict rule the tokens are those of greedy decoding, whatever was drafted (Leviathan et al. 2023). With a
relaxed one (Spec-VLA, arXiv 2507.22424) accepted tokens keep the drafted values; with a tail (KERV, arXiv 2603.01581)
everything from the first rejected token on is replaced by the tail, without another pass of the target.
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
        cache: of one window, with its prefix only.
        prefix: the target's outputs for it.
        drafter: proposes candidates after the decoded tokens.
        rule: for accepting them.
        tail: with KERV's compensation, the T tokens used from the first rejected one on; None continues decoding.
    """
    length = networks.length
    sources, bias = np.zeros(length, np.uint8), np.zeros(length, np.int64)
    tokens, rejected = np.zeros(length, np.int64), length
    accepted: list[int] = []
    read: list[int] = []
    features = [prefix.features[0, -1]]
    # The first token is not drafted: the pass over the prefix predicts it.
    tokens[0], finite, count = np.argmax(prefix.logits[0, -1]), bool(np.isfinite(prefix.logits[0, -1]).all()), 1
    while count < length:
        tree = drafter.grow(Decided(tokens[:count], np.stack(features), length))
        found = networks.read(cache, *_decoder_inputs(tokens[count - 1], tree, count - 1))
        logits = found.logits[0]
        finite = finite and bool(np.isfinite(logits).all())
        path = longest_accepted(tree, np.argmax(logits, axis=-1), rule, count)
        kept = np.concatenate([[0], 1 + path.nodes])
        end = count + len(path.nodes)
        tokens[count:end], sources[count:end], bias[count:end] = tree.tokens[path.nodes], DRAFT, path.bias
        accepted.append(len(path.nodes))
        read.append(1 + len(tree))
        if path.rejected:
            rejected = min(rejected, end)
            if tail is not None:
                tokens[end:], sources[end:] = tail[end:], TAIL
                break
        tokens[end] = np.argmax(logits[kept[-1]])
        count = end + 1
        if count < length:
            cache.keep(found.entries, [kept])
            features += list(found.features[0, kept])
    return Decoded(tokens, sources, bias, tuple(accepted), tuple(read), rejected, features[0], finite)


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
        count = rule.accepted(off[nodes], start)
        if count > len(best):
            best, bias, rejected = nodes[:count], off[nodes[:count]], count < len(nodes)
    return Path(best, bias, rejected)


def _decoder_inputs(last: np.int64, tree: Tree, place: int) -> tuple[Tokens, Indices, Mask]:
    """Tokens, places and mask of a pass over the last decided token, which was not read yet, and a tree after it."""
    tokens = np.concatenate([[last], tree.tokens])[None]
    places = np.concatenate([[place], place + 1 + tree.depths])[None]
    among = np.zeros((1, len(tree) + 1, len(tree) + 1), np.bool_)
    among[0, :, 0], among[0, 1:, 1:] = True, tree.among
    return tokens, places, among
