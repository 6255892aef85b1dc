"""A latency in a world that goes on in steps: rounded to whole steps, or kept whole by event time."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.tised.checks import not_negative, positive
from specact.types import Floats


def nearest_delay(latency_s: ArrayLike, period_s: ArrayLike) -> NDArray[np.int64]:
    """``d = floor(latency / period + 1/2)``: the delay in whole steps, to the nearest, a half upwards.

    This is how TISED's Kinetix experiments turn a latency into a delay (given). Latencies of less than half a step
    vanish, and so does every difference that does not cross a half; :func:`split_delay` keeps both.

    Args:
        latency_s: >= 0 [s].
        period_s: > 0, of one step [s].

    Raises:
        ConfigError: for values outside their ranges.
    """
    return np.asarray(np.floor(_in_steps(latency_s, period_s) + 0.5), dtype=np.int64)


def split_delay(latency_s: ArrayLike, period_s: ArrayLike) -> tuple[NDArray[np.int64], Floats]:
    """The delay in whole steps, and how far into the next one the action takes effect.

    Args:
        latency_s: >= 0 [s].
        period_s: > 0, of one step [s].

    Returns:
        ``d`` and ``f`` in [0, 1) with ``latency = (d + f) period``.

    Raises:
        ConfigError: for values outside their ranges.
    """
    steps = _in_steps(latency_s, period_s)
    whole = np.floor(steps)
    return np.asarray(whole, dtype=np.int64), np.asarray(steps - whole)


def _in_steps(latency_s: ArrayLike, period_s: ArrayLike) -> Floats:
    return not_negative("the latency [s]", latency_s) / positive("the period of a step [s]", period_s)
