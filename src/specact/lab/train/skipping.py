"""When a retrieved chunk may be executed unverified: the bounds of HeiSD's verify-skip, from held-out episodes.

HeiSD (Zheng et al. 2026, arXiv 2603.17573) looks for the least similarity at which neighbouring steps are still alike,
and for the distance up to which that holds; its Algorithm 1 is inconsistent as printed. Here a skip is safe where the
target would have agreed with what is retrieved, and the bounds are those that skip most while enough of them are safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.families.tokens.retrieval import Index, SkipRule, unit
from specact.lab.statistics import Interval, wilson

Floats = NDArray[np.float64]
# Shares of the pairs at which a bound is tried.
_CUTS = np.linspace(0.0, 1.0, 201)


@dataclass(frozen=True)
class SkipFit:
    """A rule, and what it would do in the episodes that it was fitted to.

    Attributes:
        rule: never skips where no bounds are safe enough.
        pairs: how many pairs of steps there were.
        skipped: how many of them the rule skips.
        safe: the share of those that is safe, with Wilson's 95 % interval; None where there are none. The interval
            takes pairs for independent, which steps of one episode are not.
    """

    rule: SkipRule
    pairs: int
    skipped: int
    safe: Interval | None


def agreement(
    index: Index,
    features: NDArray[np.floating],
    tokens: NDArray[np.int64],
    agrees: Callable[[NDArray[np.int64]], bool],
) -> NDArray[np.bool_]:
    """Whether the chunk that is most alike would have been accepted, of n steps of episodes that are not in the index.

    Args:
        index: what is retrieved from.
        features: of every step, ``[n, F]``.
        tokens: what the target chose there, ``[n, T]``.
        agrees: the acceptance rule: from the bias ``[T]`` of a retrieved chunk, in bins, to whether it is accepted.
    """
    retrieved = [index.nearest(feature).tokens[0] for feature in features]
    return np.array([agrees(found - right) for found, right in zip(retrieved, tokens, strict=True)], np.bool_)


def fit_skip(
    features: Sequence[NDArray[np.floating]], safe: Sequence[NDArray[np.bool_]], longest: int, share: float = 0.95
) -> SkipFit:
    """The rule that skips most pairs of steps while enough of them are safe.

    A pair is a step t, verified, and a step t + k of the same episode, which might be skipped; it is safe where the
    step t + k is. For every distance d up to the longest, the least similarity is taken (of 201 quantiles) above which
    Wilson's lower bound of the share of safe pairs with ``k <= d`` is high enough; of these bounds, those that skip
    most pairs.

    Args:
        features: of every step of an episode, ``[n, F]``, for each held-out episode.
        safe: whether what is retrieved there is what the target would have done, ``[n]``; see :func:`agreement`.
        longest: the largest k, at least 1.
        share: of the skipped pairs that is safe, in (0, 1).

    Raises:
        DataError: if no episode has two steps.
    """
    similarities, distances, right = _pairs(features, safe, longest)
    best = SkipFit(SkipRule(), len(right), 0, None)
    for distance in range(1, longest + 1):
        near = distances <= distance
        for similarity in np.unique(np.quantile(similarities[near], _CUTS, method="lower")).tolist():
            chosen = right[near & (similarities >= similarity)]
            # Wilson's lower bound lies below the share itself.
            if chosen.mean() >= share and (found := wilson(int(chosen.sum()), len(chosen))).low >= share:
                if len(chosen) > best.skipped:
                    best = SkipFit(SkipRule(similarity, distance), len(right), len(chosen), found)
                break
    return best


def _pairs(
    features: Sequence[NDArray[np.floating]], safe: Sequence[NDArray[np.bool_]], longest: int
) -> tuple[Floats, NDArray[np.int64], NDArray[np.bool_]]:
    """Similarity, distance, and whether the later step is safe, of all pairs."""
    found = []
    for seen, fine in zip(features, safe, strict=True):
        along = unit(seen).astype(np.float64)
        for distance in range(1, min(longest, len(along) - 1) + 1):
            cosines = (along[distance:] * along[:-distance]).sum(axis=1)
            found.append((np.clip(cosines, -1.0, 1.0), np.full(len(cosines), distance), fine[distance:]))
    if not found:
        raise DataError("a rule for skipping needs held-out episodes of at least two steps")
    similarities, distances, right = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return similarities, distances, right
