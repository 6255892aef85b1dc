"""How slower hardware moves a sweet spot (TISED, equations 21 to 29, derived).

In units of an action ``T / T_act = N(m) (n + max(0, rho - m))``, and hardware is ``rho = T_inf / T_act``. The branch
``m < rho`` is unsaturated: more overlap shortens the chunk, and slower hardware tilts the *local* slope toward less
overlap. The branch ``m >= rho`` is saturated: only N changes. The kink at ``m = rho`` moves right with rho, so the
*global* optimum may move the other way; slower hardware does not imply less overlap.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.tised.optima import Optimum, fastest_overlap, task_time_steps
from specact.tised.timing import chunk_s
from specact.types import Floats


def is_saturated(rho: ArrayLike, overlap: ArrayLike) -> NDArray[np.bool_]:
    """``m >= rho``: the inference is hidden completely, and more overlap cannot shorten the chunk; bool ``[...]``.

    Args:
        rho: T_inf / T_act >= 0, ``[...]``.
        overlap: m >= 0, ``[...]``.
    """
    return np.asarray(np.asarray(overlap) >= np.asarray(rho))


def overlap_slope(chunks: ArrayLike, rho: float, actions: int) -> Floats:
    """``dT(m) / T_act``: ``dN(m) (rho + n - m - 1) - N(m)`` where unsaturated, ``n dN(m)`` where saturated.

    On the step across the kink, ``m < rho < m + 1``, the chunk shortens by ``rho - m`` actions. (22 to 24, derived.)

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M, M <= n.
        rho: T_inf / T_act >= 0.
        actions: n.

    Returns:
        float64 ``[M]``, at m = 0..M - 1.

    Raises:
        ConfigError: for values outside their ranges.
    """
    each = chunk_s(rho, 1.0, actions, overlap=np.arange(np.size(chunks)))
    return np.asarray(sum(task_time_steps(chunks, each)))


def overlap_tilt(chunks: ArrayLike, rho: float) -> Floats:
    """``d/drho`` of :func:`overlap_slope`: ``dN(m)`` where unsaturated, ``-N(m)`` across the kink, 0 where saturated.

    ``dN(m)`` is positive where overlap costs chunks and tilts toward less overlap (24). ``-N(m)`` is negative and moves
    the kink, and an optimum at the kink, toward more.

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M.
        rho: T_inf / T_act >= 0.

    Returns:
        float64 ``[M]``; at a whole rho, where the branches meet, the one-sided derivative toward slower hardware.
    """
    n = np.asarray(chunks, dtype=np.float64)
    depths = np.arange(len(n) - 1)
    return np.where(depths + 1 <= rho, np.diff(n), np.where(depths <= rho, -n[:-1], 0.0))


def alpha_tilt(alpha: ArrayLike, chunks: ArrayLike, chunks_slope: ArrayLike) -> Floats:
    """``d/drho (dT/dalpha) / T_act = N(alpha) + alpha N'(alpha)`` for a static task (derived from 10).

    Where it is positive, slower hardware moves the sweet spot toward smaller alpha. It is positive where
    ``alpha N(alpha)`` increases with alpha, that is, unless N grows faster than ``1 / alpha`` as alpha decreases.

    Args:
        alpha: in (0, 1], ``[...]``.
        chunks, chunks_slope: N(alpha) and N'(alpha), ``[...]``.
    """
    return np.asarray(np.asarray(chunks) + np.asarray(alpha) * np.asarray(chunks_slope))


def dynamic_alpha_tilt(by_staleness: ArrayLike, pace: ArrayLike, action_s: ArrayLike) -> Floats:
    """``d/drho (dP/dalpha) = g_s v T_act <= 0``: slower hardware moves the optimum to smaller alpha (29, derived).

    It holds for fixed g_A and g_s; where success saturates these change too.

    Args:
        by_staleness: g_s < 0, ``[...]``.
        pace: v >= 0, ``[...]``.
        action_s: T_act > 0 [s], ``[...]``.
    """
    return np.asarray(np.asarray(by_staleness) * np.asarray(pace) * np.asarray(action_s))


def fastest_overlaps(chunks: ArrayLike, rhos: Iterable[float], actions: int) -> list[Optimum]:
    """The overlap with the shortest task time on each hardware, for the same N; times in units of T_act.

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M, M <= n.
        rhos: T_inf / T_act of each hardware.
        actions: n.

    Raises:
        ConfigError: for values outside their ranges.
    """
    return [fastest_overlap(chunks, rho, 1.0, actions) for rho in rhos]
