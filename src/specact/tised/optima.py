"""The best setting of a lever: what a sweet spot is, how to find it by looking everywhere, and by its conditions.

Settings are given in order of strength, the weakest first, so that a tie goes to the one that loses least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from specact.errors import ConfigError
from specact.tised.checks import inference_ratio
from specact.tised.prediction import staleness
from specact.tised.timing import chunk_s, stall_s, task_s
from specact.types import Floats

# Task time is to be least, success to be most.
Best = Literal["least", "most"]

# Share of a value within which two doubles that should be equal may differ.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Optimum:
    """The best setting of a lever.

    Attributes:
        where: the setting: alpha, m, or another lever's strength.
        value: task time [s] or success there.
        interior: whether it is better than both the weakest and the strongest setting, by more than rounding.
        conditions: what the conditions for an interior optimum read. For alpha the slope at alpha = 1 and at the
            strongest lightweighting: a minimum needs the first positive and the second negative (11), a maximum the
            reverse (17). For settings that are counted, the first difference, and the largest (minimum) or smallest
            (maximum) of all: a minimum needs the first negative and the other positive (14), a maximum the reverse
            (20, by analogy). NaN where there is one setting only.
        others: further settings at the bottom of a valley (or on a hill) that are not as good. The conditions promise
            one such place and not the best one, so on a curve with several the best is returned and the rest named.
    """

    where: float
    value: float
    interior: bool
    conditions: tuple[float, float]
    others: tuple[float, ...] = ()


def scan(settings: ArrayLike, values: ArrayLike, best: Best) -> Optimum:
    """The best of all settings, by looking at every one of them.

    Args:
        settings: ``[S]``, the weakest first.
        values: task time (``least``) or success (``most``), ``[S]``.
        best: which way.

    Raises:
        ConfigError: for arrays that do not fit together, or values that are not finite.
    """
    where, found = as_curve(settings, values)
    return pick(where, found, [int(np.argmin(losses(found, best)))], best, ends(np.diff(found), best))


def pick(
    where: Floats, values: Floats, candidates: Sequence[int], best: Best, conditions: tuple[float, float]
) -> Optimum:
    """The best of the candidates, the earliest one on a tie.

    Args:
        where, values: the curve, ``[S]``, its ends among them.
        candidates: places in it, in order.
        best: which way.
        conditions: see :class:`Optimum`.
    """
    loss = losses(values, best)
    end = float(min(loss[0], loss[-1]))
    chosen = min(candidates, key=lambda i: float(loss[i]))
    return Optimum(
        where=float(where[chosen]),
        value=float(values[chosen]),
        interior=bool(end - loss[chosen] > _ROUNDING * abs(end)),
        conditions=conditions,
        others=tuple(float(where[i]) for i in candidates if i != chosen),
    )


def ends(steps: Floats, best: Best) -> tuple[float, float]:
    """What condition (14) or (20) reads for these differences: the first one, and the one that turns back most."""
    if not len(steps):
        return float("nan"), float("nan")
    return float(steps[0]), float(steps.max() if best == "least" else steps.min())


def losses(values: Floats, best: Best) -> Floats:
    """The values with the sign that makes the best one the least."""
    return values if best == "least" else -values


def as_curve(settings: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    """Settings and values as rows of floats, checked.

    Raises:
        ConfigError: for arrays that do not fit together, or values that are not finite.
    """
    where, found = np.asarray(settings, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if where.ndim != 1 or where.shape != found.shape or not len(where):
        raise ConfigError(
            f"a curve needs one value per setting and at least one of them; got the shapes {where.shape} and "
            f"{found.shape}"
        )
    if not np.isfinite(found).all():
        missing = ", ".join(f"{setting:g}" for setting in where[~np.isfinite(found)])
        raise ConfigError(f"a curve's values must be finite; they are not at {missing}. Leave these settings out")
    return where, found


# A function of alpha, for arrays.
Curve = Callable[[Floats], Floats]

# Halvings of one cell of the grid; more would not change a double.
_HALVINGS = 52


def task_time_slope(chunks: Curve, chunks_slope: Curve, inference_s: float, action_s: float, actions: int) -> Curve:
    """``dT/dalpha = N'(alpha) (alpha T_inf + n T_act) + N(alpha) T_inf`` [s] (10, derived).

    Args:
        chunks, chunks_slope: N and its derivative.
        inference_s: T_inf [s].
        action_s: T_act [s].
        actions: n.
    """

    def slope(alpha: Floats) -> Floats:
        each = alpha * inference_s + actions * action_s
        return np.asarray(chunks_slope(alpha) * each + chunks(alpha) * inference_s)

    return slope


def success_slope(
    by_quality: Curve, quality_slope: Curve, by_staleness: Curve, pace: float, inference_s: float
) -> Curve:
    """``dP/dalpha = g_A A'(alpha) + g_s v T_inf`` (16, derived).

    Args:
        by_quality, by_staleness: g_A > 0 and g_s < 0, the derivatives of g along the lever.
        quality_slope: A'.
        pace: v.
        inference_s: T_inf [s].
    """

    def slope(alpha: Floats) -> Floats:
        return np.asarray(by_quality(alpha) * quality_slope(alpha) + by_staleness(alpha) * pace * inference_s)

    return slope


def best_alpha(values: Curve, slope: Curve, strongest: float, best: Best, grid: int = 512) -> Optimum:
    """The best alpha, where the slope changes its sign: of task time (9 to 11), or of success (15 to 17).

    The slope is looked at on a grid from alpha = 1 down to ``strongest``, and every change of sign is bisected. Two
    that lie in one cell of the grid are not seen.

    Args:
        values: task time (``least``) or success (``most``).
        slope: its derivative by alpha, see :func:`task_time_slope` and :func:`success_slope`.
        strongest: the smallest alpha, in (0, 1).
        best: which way.
        grid: points to look at, at least 2.

    Raises:
        ConfigError: for a ``strongest`` outside (0, 1), or values that are not finite.
    """
    if not float(inference_ratio(strongest)) < 1.0:
        raise ConfigError(f"the strongest lightweighting must lie strictly between 0 and 1, got {strongest:g}")
    alphas = np.linspace(1.0, strongest, grid)
    gains = losses(slope(alphas), best) > 0.0  # here a smaller alpha is better still
    before, after = gains[:-1], gains[1:]
    roots = [_bisect(slope, alphas[i], alphas[i + 1], best) for i in np.flatnonzero(before & ~after)]
    where, found = as_curve([1.0, *roots, strongest], values(np.array([1.0, *roots, strongest])))
    candidates = [*([] if gains[0] else [0]), *range(1, len(roots) + 1), *([len(roots) + 1] if gains[-1] else [])]
    first, last = slope(alphas[[0, -1]])
    return pick(where, found, candidates, best, (float(first), float(last)))


def _bisect(slope: Curve, better_below: float, not_below: float, best: Best) -> float:
    """Between two alphas, the larger of which gains by getting smaller and the smaller of which does not."""
    for _ in range(_HALVINGS):
        middle = 0.5 * (better_below + not_below)
        if losses(slope(np.array([middle])), best)[0] > 0.0:
            better_below = middle
        else:
            not_below = middle
    return float(not_below)


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
