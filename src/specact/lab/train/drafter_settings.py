"""The settings of KERV and HeiSD, fitted to the target's own rollouts.

HeiSD (Zheng et al. 2026, arXiv 2603.17573) executes a retrieved chunk unverified above the least similarity at which
neighbouring steps are still alike, up to the distance to which that holds; its Algorithm 1 is inconsistent as printed.
Here a skip is safe where the target would have accepted the retrieved chunk, and the bounds maximise the skips while
enough of them are safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.families.tokens.policy import causal, to_actions
from specact.families.tokens.speculative import relaxed
from specact.lab.rollout.distillation import TokenRollouts
from specact.lab.rollout.statistics import wilson
from specact.systems.heisd import KinematicMetric, Memory, SkipRule, unit
from specact.systems.kerv import Kalman, typical_change, variability
from specact.systems.specvla import TokenHead
from specact.systems.tokens import DrafterSettings

# HeiSD's tolerance of a group's sum and of each of its tokens, and the middle of KERV's tolerances [bins].
GROUP_TOTAL, GROUP_EACH, MIDDLE = 30, 15, 10
# Maximum consecutive inferences without verification.
LONGEST_SKIP = 8
# Quantiles of the similarity that are tried as bounds.
_CUTS = np.linspace(0.0, 1.0, 201)


def memory_of(rollouts: TokenRollouts) -> Memory:
    """The retrieval memory: the target's tokens by its encoder's embedding, of successful episodes if there are any."""
    used = rollouts.success if rollouts.success.any() else np.ones(len(rollouts), np.bool_)
    return Memory(unit(rollouts.seen[used].astype(np.float32)), rollouts.tokens[used].astype(np.int64))


def fit_settings(
    rollouts: TokenRollouts, held_out: TokenRollouts, actions: int, *, strict: Sequence[int], groups: Sequence[int],
    path: Sequence[int], window: int,
) -> DrafterSettings:  # fmt: skip
    """Fits filters and ranges to the rollouts of the memory, and thresholds by agreement on held-out ones.

    See :class:`~specact.lab.train.recipe.DrafterRecipe`. The scale of KERV's tolerance stays 1, because it needs a
    head, see :func:`scale_of`.

    Raises:
        ConfigError: for values that do not fit the policy, or rollouts that are too short for the window.
    """
    length = rollouts.tokens.shape[1]
    groups, path = groups or range(actions), path or range(rollouts.state.shape[1])
    rule = relaxed(GROUP_EACH, length, actions, strict, groups, GROUP_TOTAL)
    executed = [to_actions(tokens.astype(np.int64)).reshape(-1, actions) for tokens in _by_episode(rollouts, "tokens")]
    metric = KinematicMetric.fit([states[:, list(path)] for states in _by_episode(rollouts, "state")], window)
    memory, wanted = memory_of(rollouts), held_out.tokens.astype(np.int64)
    agrees = agreement(memory, held_out.seen, wanted, lambda bias: rule.accepted(bias, 0) == length)
    moving = np.zeros(len(held_out))
    rows_held_out = _rows(held_out)
    for rows in rows_held_out:
        moving[rows] = metric.along(held_out.state[rows][:, list(path)])
    return DrafterSettings(
        strict=tuple(strict),
        groups=tuple(groups),
        path=tuple(path),
        filters={
            "velocity": Kalman.fit(executed, motion="velocity", copied=strict),
            "walk": Kalman.fit(executed, motion="walk", copied=strict),
        },
        scale=1.0,
        metric=metric,
        fast=least_worthwhile(moving, agrees),
        skip=fit_skip(
            [held_out.seen[rows] for rows in rows_held_out], [agrees[rows] for rows in rows_held_out], LONGEST_SKIP
        ),
    )


def least_worthwhile(scores: NDArray[np.floating], agrees: NDArray[np.bool_]) -> float:
    """The score threshold that maximises agreements minus disagreements at and above it.

    Returns:
        One of the scores; above all of them if no threshold has a positive balance.
    """
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    gains = np.cumsum(np.where(agrees[order], 1, -1))
    # A threshold can lie only between different scores.
    gains = np.where(np.append(np.diff(ranked) != 0.0, True), gains, -len(scores))
    best = int(np.argmax(gains))
    return float(ranked[best]) if gains[best] > 0 else float(np.nextafter(ranked[0], np.inf))


def scale_of(rollouts: TokenRollouts, head: TokenHead) -> float:
    """K_S of KERV's tolerance for the head's drafts on the target's own prefix; 1 if they never deviate."""
    tokens = rollouts.tokens.astype(np.int64)
    count, length = tokens.shape
    positions = np.broadcast_to(np.arange(length - 1), (count, length - 1))
    features, seen = rollouts.features[:, :-1].astype(np.float32), np.zeros((count, length - 1, 0), np.bool_)
    among, cache = np.ascontiguousarray(causal(count, length - 1)), head.empty_cache(count)
    found = head.read(tokens[:, :-1], features, positions, seen, among, cache)
    drafted, wanted = found.logits.argmax(-1), tokens[:, 1:]
    near = np.abs(drafted - wanted) <= MIDDLE
    variabilities = [variability(wanted[row, near[row]], drafted[row, near[row]]) for row in range(count)]
    episodes = [[variabilities[row] for row in rows] for rows in _rows(rollouts)]
    changes = any(np.diff(episode).any() for episode in episodes)
    return typical_change(episodes) if changes else 1.0


def _by_episode(rollouts: TokenRollouts, column: str) -> list[NDArray[Any]]:
    return [vars(rollouts)[column][rows] for rows in _rows(rollouts)]


def _rows(rollouts: TokenRollouts) -> list[NDArray[np.int64]]:
    """The rows of each episode, ordered by step; episodes in order of their first row."""
    _, first, which = np.unique(rollouts.episode, return_index=True, return_inverse=True)
    return [
        rows[np.argsort(rollouts.step[rows], kind="stable")]
        for rows in (np.flatnonzero(which == number) for number in np.argsort(first))
    ]


# --- HeiSD's verify-skip ---


def agreement(
    memory: Memory,
    features: NDArray[np.floating],
    tokens: NDArray[np.int64],
    agrees: Callable[[NDArray[np.int64]], bool],
) -> NDArray[np.bool_]:
    """Whether the nearest chunk would have been accepted, for n steps of episodes that are not in the memory.

    Features are ``[n, F]``, the target's tokens ``[n, T]``; ``agrees`` takes the bias ``[T]`` of a retrieved chunk.
    """
    retrieved = [memory.nearest(feature)[0] for feature in features]
    return np.array([agrees(found - right) for found, right in zip(retrieved, tokens, strict=True)], np.bool_)


def fit_skip(
    features: Sequence[NDArray[np.floating]], safe: Sequence[NDArray[np.bool_]], longest: int, share: float = 0.95
) -> SkipRule:
    """The rule that skips the most pairs of steps, a verified t and a t + k, k <= longest, while enough are safe.

    Of every held-out episode ``features [n, F]`` of its steps and whether they are ``safe [n]``, as then the pair is,
    see :func:`agreement`. For every distance d the least similarity (of 201 quantiles) is chosen above which Wilson's
    lower bound of the share of safe pairs with ``k <= d`` is high enough. If none are safe enough, it never skips.

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
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
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
