"""The success of a dynamic task: rising in the quality of actions, falling in staleness (TISED, equation 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specact.tised.checks import not_negative
from specact.types import Floats


def staleness(pace: ArrayLike, delay_s: ArrayLike) -> Floats:
    """``v tau``: how far the world moved while nobody looked, in the task's unit of change.

    Args:
        pace: v >= 0, rate of change of the environment [unit per s].
        delay_s: tau >= 0 [s]: the stall of equation (6), or the observation's age where the two differ.

    Raises:
        ConfigError: for a negative pace or delay.
    """
    return np.asarray(not_negative("the pace v", pace) * not_negative("the delay tau [s]", delay_s))


def success_rate(quality: ArrayLike, cost: ArrayLike) -> Floats:
    """``P = g(A, v tau) = 1 / (1 + exp(-(A - h(v tau))))``, in (0, 1).

    The paper leaves g open (7, derived). This one is additive in log odds, so that quality and staleness can be
    measured apart; :mod:`specact.tised.prediction` measures how wrong that is.

    Args:
        quality: A, log odds of success without delay, ``[...]``.
        cost: h(v tau), log odds that staleness takes away, 0 without delay.
    """
    odds = np.subtract(quality, cost)
    # Half a hyperbolic tangent is the same function, and does not overflow.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * odds)))


def log_odds(successes: ArrayLike, trials: ArrayLike) -> Floats:
    """``ln((k + 1/2) / (n - k + 1/2))``: log odds of a rate, finite for 0 and n of n too (Haldane, Anscombe).

    Args:
        successes: k in 0..n, ``[...]``; need not be whole where it is a pooled mean.
        trials: n >= 1.
    """
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    return np.asarray(np.log((k + 0.5) / (n - k + 0.5)))


def log_odds_variance(successes: ArrayLike, trials: ArrayLike) -> Floats:
    """``1 / (k + 1/2) + 1 / (n - k + 1/2)``: variance of :func:`log_odds` from counting (Gart & Zweifel 1967).

    Args:
        successes, trials: as for :func:`log_odds`.
    """
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    return np.asarray(1.0 / (k + 0.5) + 1.0 / (n - k + 0.5))
