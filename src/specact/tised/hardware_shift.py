"""How slower hardware moves a sweet spot (TISED, equations 21 to 29, derived).

In units of an action ``T / T_act = N(m) (n + max(0, rho - m))``, and hardware is ``rho = T_inf / T_act``. While ``m``
is below rho the branch is unsaturated: overlap still shortens the chunk, and slower hardware tilts the *local* slope
toward less overlap. From rho on it is saturated: only N changes. The kink at ``m = rho`` moves right with rho, so the
*global* optimum may well go the other way; slower does not mean shallower.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.tised.optima import Optimum, fastest_overlap, task_time_steps
from specact.tised.timing import chunk_s
from specact.types import Floats


def is_saturated(rho: ArrayLike, overlap: ArrayLike) -> NDArray[np.bool_]:
    """``m >= rho``: the inference is hidden whole, and more overlap cannot shorten the chunk.

    Args:
        rho: T_inf / T_act >= 0.
        overlap: m >= 0.
    """
    return np.asarray(np.asarray(overlap) >= np.asarray(rho))


def overlap_slope(chunks: ArrayLike, rho: float, actions: int) -> Floats:
    """``dT(m) / T_act``: on the unsaturated branch ``dN(m) (rho + n - m - 1) - N(m)``, on the other ``n dN(m)``.

    Between ``m < rho < m + 1`` the chunk shortens by ``rho - m`` actions. (22 to 24, derived.)

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M, M <= n.
        rho: T_inf / T_act >= 0.
        actions: n.

    Returns:
        ``[M]``.

    Raises:
        ConfigError: for values outside their ranges.
    """
    each = chunk_s(rho, 1.0, actions, overlap=np.arange(np.size(chunks)))
    return np.asarray(sum(task_time_steps(chunks, each)))


def overlap_tilt(chunks: ArrayLike, rho: float) -> Floats:
    """``d/drho`` of :func:`overlap_slope`: ``dN(m)`` where unsaturated, ``-N(m)`` on the way over the kink, 0 beyond.

    The first is positive where overlap costs chunks, and so pulls toward less overlap (24); the second is negative, and
    so pulls the kink, and an optimum that sits on it, toward more.

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M.
        rho: T_inf / T_act >= 0.

    Returns:
        ``[M]``; at a whole rho, where the branches meet, the derivative towards slower hardware.
    """
    n = np.asarray(chunks, dtype=np.float64)
    depths = np.arange(len(n) - 1)
    return np.where(depths + 1 <= rho, np.diff(n), np.where(depths <= rho, -n[:-1], 0.0))


def alpha_tilt(alpha: ArrayLike, chunks: ArrayLike, chunks_slope: ArrayLike) -> Floats:
    """``d/drho (dT/dalpha) / T_act = N(alpha) + alpha N'(alpha)``: static lightweighting (derived from 10).

    Where it is positive, slower hardware moves the sweet spot toward smaller alpha; it is, unless N falls faster than
    ``1 / alpha`` grows.

    Args:
        alpha: in (0, 1].
        chunks, chunks_slope: N and its derivative there.
    """
    return np.asarray(np.asarray(chunks) + np.asarray(alpha) * np.asarray(chunks_slope))


def dynamic_alpha_tilt(by_staleness: ArrayLike, pace: ArrayLike, action_s: ArrayLike) -> Floats:
    """``d/drho (dP/dalpha) = g_s v T_act``, negative: slower hardware moves it toward smaller alpha (29, derived).

    It holds for a fixed g_A and g_s; where success saturates these change too.

    Args:
        by_staleness: g_s < 0.
        pace: v >= 0.
        action_s: T_act > 0 [s].
    """
    return np.asarray(np.asarray(by_staleness) * np.asarray(pace) * np.asarray(action_s))


def fastest_overlaps(chunks: ArrayLike, rhos: Iterable[float], actions: int) -> list[Optimum]:
    """The overlap of least task time on each hardware, in units of an action; N stays as it is.

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M, M <= n.
        rhos: T_inf / T_act of each hardware.
        actions: n.

    Raises:
        ConfigError: for values outside their ranges.
    """
    return [fastest_overlap(chunks, rho, 1.0, actions) for rho in rhos]
