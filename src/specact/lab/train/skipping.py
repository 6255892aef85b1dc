"""Fits the bounds of HeiSD's verify-skip, under which a retrieved chunk is executed unverified, to held-out episodes.

HeiSD (Zheng et al. 2026, arXiv 2603.17573) searches the least similarity at which neighbouring steps are still alike,
and the distance up to which that holds; its Algorithm 1 is inconsistent as printed. Here a skip is safe where the
target would have accepted the retrieved chunk, and the bounds maximise the skips while enough of them are safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.rollout.statistics import wilson
from specact.systems.heisd import Index, SkipRule, unit

Floats = NDArray[np.float64]
# Quantiles of the similarity that are tried as bounds.
_CUTS = np.linspace(0.0, 1.0, 201)


def agreement(
    index: Index,
    features: NDArray[np.floating],
    tokens: NDArray[np.int64],
    agrees: Callable[[NDArray[np.int64]], bool],
) -> NDArray[np.bool_]:
    """Whether the nearest chunk would have been accepted, for n steps of episodes that are not in the index.

    Args:
        index: for retrieval.
        features: of every step, ``[n, F]``.
        tokens: the target's at each step, ``[n, T]``.
        agrees: the acceptance rule, of the bias ``[T]`` of a retrieved chunk in bins.
    """
    retrieved = [index.nearest(feature).tokens[0] for feature in features]
    return np.array([agrees(found - right) for found, right in zip(retrieved, tokens, strict=True)], np.bool_)


def fit_skip(
    features: Sequence[NDArray[np.floating]], safe: Sequence[NDArray[np.bool_]], longest: int, share: float = 0.95
) -> SkipRule:
    """The rule that skips the most pairs of steps while enough of them are safe.

    A pair is a verified step t and a step t + k of the same episode, a candidate to skip; it is safe if step t + k is.
    For every distance d up to the longest, the least similarity (of 201 quantiles) is chosen above which Wilson's lower
    bound of the share of safe pairs with ``k <= d`` is high enough; of these bounds, those that skip the most pairs. If
    none are safe enough, the rule never skips.

    Args:
        features: of every step of an episode, ``[n, F]``, for each held-out episode.
        safe: whether the retrieved chunk would have been accepted, ``[n]``; see :func:`agreement`.
        longest: the largest k, at least 1.
        share: required safe share of the skipped pairs, in (0, 1).

    Raises:
        DataError: if no episode has two steps.
    """
    similarities, distances, right = _pairs(features, safe, longest)
    best, skipped = SkipRule(), 0
    for distance in range(1, longest + 1):
        near = distances <= distance
        for similarity in np.unique(np.quantile(similarities[near], _CUTS, method="lower")).tolist():
            chosen = right[near & (similarities >= similarity)]
            # Wilson's lower bound is below the share, so the share is tested first.
            if chosen.mean() >= share and wilson(int(chosen.sum()), len(chosen)).low >= share:
                if len(chosen) > skipped:
                    best, skipped = SkipRule(similarity, distance), len(chosen)
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
