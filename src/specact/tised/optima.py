"""The best setting of a lever, its sweet spot: by exhaustive search, and by the conditions of its optimum.

Settings are ordered by strength, the weakest first, so that of equally good settings the weakest is chosen.
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

# Task time is minimised ("least"), success is maximised ("most").
Best = Literal["least", "most"]

# Relative rounding error of values that are equal in exact arithmetic.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Optimum:
    """The best setting of a lever.

    Attributes:
        where: the setting: alpha, m, or another lever's strength.
        value: task time [s] or success there.
        interior: whether it is better than both the weakest and the strongest setting, by more than rounding.
        conditions: two values whose signs are a sufficient condition for an interior local optimum. It is not
            necessary: a curve can dip twice. For alpha, the slope at alpha = 1 and at the strongest lightweighting: a
            first value above 0 and a second below 0 suffice for a minimum (11), the reverse for a maximum (17). For
            discrete settings, the first difference, and the largest (minimum) or smallest (maximum) of all: a first
            value below 0 and a second above 0 suffice for a minimum (14), the reverse for a maximum (20, by analogy).
            NaN for a single setting.
        others: the other local optima; empty from :func:`scan`.
    """

    where: float
    value: float
    interior: bool
    conditions: tuple[float, float]
    others: tuple[float, ...] = ()


def scan(settings: ArrayLike, values: ArrayLike, best: Best) -> Optimum:
    """The best of all settings, by exhaustive search.

    Args:
        settings: ``[S]``, the weakest first.
        values: task time [s] (``least``) or success (``most``), ``[S]``.
        best: whether to minimise or maximise.

    Raises:
        ConfigError: for arrays that do not fit together, or values that are not finite.
    """
    where, found = _as_curve(settings, values)
    conditions = _difference_conditions(np.diff(found), best)
    return _pick(where, found, [int(np.argmin(losses(found, best)))], best, conditions)


def _pick(
    where: Floats, values: Floats, candidates: Sequence[int], best: Best, conditions: tuple[float, float]
) -> Optimum:
    """The best of the candidates, the first one on a tie.

    Args:
        where, values: the curve, ``[S]``, including both ends.
        candidates: ascending indices into it.
        best: whether to minimise or maximise.
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


def _difference_conditions(steps: Floats, best: Best) -> tuple[float, float]:
    """The two differences of condition (14) or (20): the first, and the largest or smallest."""
    if not len(steps):
        return float("nan"), float("nan")
    return float(steps[0]), float(steps.max() if best == "least" else steps.min())


def losses(values: Floats, best: Best) -> Floats:
    """The values, negated for a maximum, so that the best one is the smallest."""
    return values if best == "least" else -values


def _as_curve(settings: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    """Settings and values as checked float64 arrays ``[S]``.

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


# A function of alpha, from ``[S]`` to ``[S]``.
Curve = Callable[[Floats], Floats]

# Bisection steps within a cell of the grid; more would not change a double.
_BISECTIONS = 52


def task_time_slope(chunks: Curve, chunks_slope: Curve, inference_s: float, action_s: float, actions: int) -> Curve:
    """``dT/dalpha = N'(alpha) (alpha T_inf + n T_act) + N(alpha) T_inf`` [s] (10, derived).

    Args:
        chunks, chunks_slope: N(alpha) and its derivative.
        inference_s: T_inf >= 0 [s].
        action_s: T_act > 0 [s].
        actions: n >= 1.
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
        by_quality, by_staleness: g_A > 0 and g_s < 0, the partial derivatives of g at each alpha.
        quality_slope: A'(alpha).
        pace: v >= 0.
        inference_s: T_inf >= 0 [s].
    """

    def slope(alpha: Floats) -> Floats:
        return np.asarray(by_quality(alpha) * quality_slope(alpha) + by_staleness(alpha) * pace * inference_s)

    return slope


def best_alpha(values: Curve, slope: Curve, strongest: float, best: Best, grid: int = 512) -> Optimum:
    """The best alpha, where the slope changes sign: for task time (9 to 11), or for success (15 to 17).

    The slope is evaluated on a grid from alpha = 1 down to ``strongest``, and every change of sign is refined by
    bisection. Two changes of sign within one cell of the grid are missed.

    Args:
        values: task time [s] (``least``) or success (``most``).
        slope: its derivative with respect to alpha, see :func:`task_time_slope` and :func:`success_slope`.
        strongest: the smallest alpha, in (0, 1).
        best: whether to minimise or maximise.
        grid: number of grid points, at least 2.

    Raises:
        ConfigError: for a ``strongest`` outside (0, 1), or values that are not finite.
    """
    if not float(inference_ratio(strongest)) < 1.0:
        raise ConfigError(f"the strongest lightweighting must lie strictly between 0 and 1, got {strongest:g}")
    alphas = np.linspace(1.0, strongest, grid)
    gains = losses(slope(alphas), best) > 0.0  # where a smaller alpha is better
    before, after = gains[:-1], gains[1:]
    roots = [_bisect(slope, alphas[i], alphas[i + 1], best) for i in np.flatnonzero(before & ~after)]
    where, found = _as_curve([1.0, *roots, strongest], values(np.array([1.0, *roots, strongest])))
    candidates = [*([] if gains[0] else [0]), *range(1, len(roots) + 1), *([len(roots) + 1] if gains[-1] else [])]
    first, last = slope(alphas[[0, -1]])
    return _pick(where, found, candidates, best, (float(first), float(last)))


def _bisect(slope: Curve, better_below: float, not_below: float, best: Best) -> float:
    """The alpha of the change of sign between ``better_below``, where a smaller alpha is better, and ``not_below``."""
    for _ in range(_BISECTIONS):
        middle = 0.5 * (better_below + not_below)
        if losses(slope(np.array([middle])), best)[0] > 0.0:
            better_below = middle
        else:
            not_below = middle
    return float(not_below)


# g of equation (7): success ``[S]`` from quality ``[S]`` and staleness ``[S]``.
Response = Callable[[Floats, Floats], Floats]


def task_time_steps(chunks: ArrayLike, each_s: ArrayLike) -> tuple[Floats, Floats]:
    """``dT(m) = dN(m) T_chunk(m+1) + N(m) dT_chunk(m)`` (13, derived): the effect of one more action.

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M.
        each_s: T_chunk, ``[M + 1]`` [s].

    Returns:
        The two terms, ``[M]`` each [s]: the cost of more chunks, and the gain from shorter ones (at most 0). Their sum
        is exactly the change of task time.
    """
    n, each = np.asarray(chunks, dtype=np.float64), np.asarray(each_s, dtype=np.float64)
    return np.asarray(np.diff(n) * each[1:]), np.asarray(n[:-1] * np.diff(each))


def success_steps(quality: ArrayLike, stale: ArrayLike, response: Response) -> tuple[Floats, Floats]:
    """``dP(m) = [g(A', s') - g(A, s')] + [g(A, s') - g(A, s)]``, ``'`` for m + 1 (19, by analogy to 13).

    Args:
        quality: A, ``[M + 1]`` at m = 0..M.
        stale: s = v tau, ``[M + 1]``.
        response: g of equation (7).

    Returns:
        The two terms, ``[M]`` each: the cost of worse actions, and the gain from fresher observations. Their sum is
        exactly the change of success.
    """
    a, s = np.asarray(quality, dtype=np.float64), np.asarray(stale, dtype=np.float64)
    between = response(a[:-1], s[1:])
    return np.asarray(response(a[1:], s[1:]) - between), np.asarray(between - response(a[:-1], s[:-1]))


def fastest_overlap(chunks: ArrayLike, inference_s: float, action_s: float, actions: int) -> Optimum:
    """The overlap with the shortest task time, where (13) changes from negative to >= 0 (12 to 14, derived).

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
    return _best_depth(task_s(chunks, each), sum(task_time_steps(chunks, each)), "least")


def most_successful_overlap(
    quality: ArrayLike, pace: float, inference_s: float, action_s: float, response: Response
) -> Optimum:
    """The overlap with the highest success, where (19) changes from positive to <= 0 (18 to 20, by analogy).

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
    stale = staleness(pace, stall_s(inference_s, action_s, overlap=np.arange(len(a))))
    return _best_depth(response(a, stale), sum(success_steps(a, stale, response)), "most")


def _best_depth(values: Floats, steps: Floats | int, best: Best) -> Optimum:
    """The best of the depths 0..M whose differences ``steps`` ``[M]`` change sign there."""
    where, values = _as_curve(np.arange(len(values)), values)
    differences = np.asarray(steps, dtype=np.float64)
    gains = losses(differences, best) < 0.0
    # A local optimum: the step to it is a gain, the step beyond it is not.
    candidates = np.flatnonzero(np.append(True, gains) & ~np.append(gains, False))
    return _pick(where, values, candidates.tolist(), best, _difference_conditions(differences, best))
