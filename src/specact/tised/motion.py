"""Smoothness and length of a motion: jerk (TISED, equation 32) and path length."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specact.errors import ConfigError
from specact.tised.checks import positive
from specact.types import Floats


def jerk(positions: ArrayLike, period_s: float) -> float:
    """``mean_t ||x_{t+3} - 3 x_{t+2} + 3 x_{t+1} - x_t|| / dt^3`` (TISED, equation 32, derived).

    Args:
        positions: ``[T, D]``, one row per period, in the task's unit of length.
        period_s: dt > 0, time between two rows [s].

    Returns:
        The jerk in the unit of length per s^3; NaN for fewer than four rows, which have no third difference.

    Raises:
        ConfigError: for another shape or a period that is not positive and finite.
    """
    rows = _rows(positions)
    positive("the time between two positions [s]", period_s)
    if len(rows) < 4:
        return float("nan")
    return float(np.linalg.norm(np.diff(rows, n=3, axis=0), axis=1).mean() / period_s**3)


def path_length(positions: ArrayLike) -> float:
    """``sum_t ||x_{t+1} - x_t||`` in the unit of the positions; 0 for fewer than two rows.

    Args:
        positions: ``[T, D]``, in the task's unit of length.

    Raises:
        ConfigError: for another shape.
    """
    return float(np.linalg.norm(np.diff(_rows(positions), axis=0), axis=1).sum())


def _rows(positions: ArrayLike) -> Floats:
    rows = np.asarray(positions, dtype=np.float64)
    if rows.ndim != 2:
        raise ConfigError(f"positions must be [T, D], one row per period; got the shape {rows.shape}")
    return rows
