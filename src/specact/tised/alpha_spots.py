"""The best inference-time ratio by the sign of a slope (TISED, equations 9 to 11 and 15 to 17)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specact.errors import ConfigError
from specact.tised.checks import inference_ratio
from specact.tised.sweet_spots import Best, Optimum, as_curve, losses, pick
from specact.types import Floats

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
