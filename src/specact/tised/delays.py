"""A latency as a delay in simulation steps: rounded to whole steps, or split into steps and a fraction."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.tised.checks import not_negative, positive
from specact.types import Floats


def nearest_delay(latency_s: ArrayLike, period_s: ArrayLike) -> NDArray[np.int64]:
    """``d = floor(latency / period + 1/2)``: the delay in whole steps, rounded to nearest, halves upwards.

    TISED's Kinetix experiments round latencies to delays like this (given). A latency below half a step becomes 0, and
    two latencies that round to the same step become equal; :func:`split_delay` preserves the difference.

    Args:
        latency_s: latency [s], >= 0, ``[...]``.
        period_s: duration of a step [s], > 0, ``[...]``.

    Returns:
        int64 ``[...]``.

    Raises:
        ConfigError: for values outside their ranges.
    """
    return np.asarray(np.floor(_in_steps(latency_s, period_s) + 0.5), dtype=np.int64)


def split_delay(latency_s: ArrayLike, period_s: ArrayLike) -> tuple[NDArray[np.int64], Floats]:
    """The delay in whole steps, and the fraction of the next step after which the action takes effect.

    Args:
        latency_s: latency [s], >= 0, ``[...]``.
        period_s: duration of a step [s], > 0, ``[...]``.

    Returns:
        ``d``, int64 ``[...]``, and ``f`` in [0, 1), float64 ``[...]``, with ``latency = (d + f) period``.

    Raises:
        ConfigError: for values outside their ranges.
    """
    steps = _in_steps(latency_s, period_s)
    whole = np.floor(steps)
    return np.asarray(whole, dtype=np.int64), np.asarray(steps - whole)


def _in_steps(latency_s: ArrayLike, period_s: ArrayLike) -> Floats:
    return not_negative("the latency [s]", latency_s) / positive("the duration of a step [s]", period_s)
