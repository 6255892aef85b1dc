"""The best overlap depth by finite differences (TISED, equations 12 to 14 and 18 to 20)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from specact.tised.success import staleness
from specact.tised.sweet_spots import Best, Optimum, as_curve, ends, losses, pick
from specact.tised.timing import chunk_s, stall_s, task_s
from specact.types import Floats

# g of equation (7): success [S] for quality [S] and how far the world moved [S].
Response = Callable[[Floats, Floats], Floats]


def task_time_steps(chunks: ArrayLike, each_s: ArrayLike) -> tuple[Floats, Floats]:
    """``dT(m) = dN(m) T_chunk(m+1) + N(m) dT_chunk(m)`` (13, derived): what one more action of overlap does.

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M.
        each_s: T_chunk, ``[M + 1]`` [s].

    Returns:
        What more chunks cost, and what shorter ones save (at most 0), ``[M]`` each [s]. Their sum is the change of task
        time, exactly.
    """
    n, each = np.asarray(chunks, dtype=np.float64), np.asarray(each_s, dtype=np.float64)
    return np.asarray(np.diff(n) * each[1:]), np.asarray(n[:-1] * np.diff(each))


def success_steps(quality: ArrayLike, moved: ArrayLike, response: Response) -> tuple[Floats, Floats]:
    """``dP(m)`` as what worse actions cost and what fresher ones give (19, by analogy to 13).

    Args:
        quality: A, ``[M + 1]`` at m = 0..M.
        moved: v tau, ``[M + 1]``.
        response: g of equation (7).

    Returns:
        The two terms, ``[M]`` each. Their sum is the change of success, exactly.
    """
    a, s = np.asarray(quality, dtype=np.float64), np.asarray(moved, dtype=np.float64)
    between = response(a[:-1], s[1:])
    return np.asarray(response(a[1:], s[1:]) - between), np.asarray(between - response(a[:-1], s[:-1]))


def fastest_overlap(chunks: ArrayLike, inference_s: float, action_s: float, actions: int) -> Optimum:
    """The overlap of least task time, where (13) turns from negative to not negative (12 to 14, derived).

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M, M <= n.
        inference_s: T_inf >= 0 [s].
        action_s: T_act > 0 [s].
        actions: n >= 1.

    Raises:
        ConfigError: for values outside their ranges.
    """
    depths = np.arange(np.size(chunks))
    each = chunk_s(inference_s, action_s, actions, overlap=depths)
    return _at_turn(task_s(chunks, each), sum(task_time_steps(chunks, each)), "least")


def most_successful_overlap(
    quality: ArrayLike, pace: float, inference_s: float, action_s: float, response: Response
) -> Optimum:
    """The overlap of most success, where (19) turns from positive to not positive (18 to 20, by analogy).

    Args:
        quality: A, ``[M + 1]`` at m = 0..M.
        pace: v >= 0.
        inference_s: T_inf >= 0 [s].
        action_s: T_act > 0 [s].
        response: g of equation (7).

    Raises:
        ConfigError: for values outside their ranges.
    """
    a = np.asarray(quality, dtype=np.float64)
    moved = staleness(pace, stall_s(inference_s, action_s, overlap=np.arange(len(a))))
    return _at_turn(response(a, moved), sum(success_steps(a, moved, response)), "most")


def _at_turn(values: Floats, steps: Floats | int, best: Best) -> Optimum:
    where, values = as_curve(np.arange(len(values)), values)
    differences = np.asarray(steps, dtype=np.float64)
    falls = losses(differences, best) < 0.0
    # A depth is a candidate if getting there was a gain and going on is none.
    candidates = np.flatnonzero(np.append(True, falls) & ~np.append(falls, False))
    return pick(where, values, candidates.tolist(), best, ends(differences, best))
