"""Predicted success on hardware and at paces that were not run, from two small experiments (TISED, equation 7).

``P(x) = g(A(x), v tau(x))`` with g additive in log odds. The quality ``A(x)`` is measured at every setting x with
little delay, the cost of staleness ``h(v tau)`` at one setting over many delays; together they predict all other cells.
All we know of h is that it is non-decreasing, so it is fitted by isotonic regression, with linear interpolation between
the measured points and constant extrapolation. The fit has no parameters to choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.lab.tised.checks import not_negative
from specact.types import Floats


def staleness(pace: ArrayLike, delay_s: ArrayLike) -> Floats:
    """``v tau``: how far the environment changed during the delay, in the task's unit of change.

    Args:
        pace: v >= 0, rate of change of the environment [unit per s], ``[...]``.
        delay_s: tau >= 0 [s], the stall of equation (6) or the age of the observation, ``[...]``.

    Raises:
        ConfigError: for a negative pace or delay.
    """
    return np.asarray(not_negative("the pace v", pace) * not_negative("the delay tau [s]", delay_s))


def success_rate(quality: ArrayLike, cost: ArrayLike) -> Floats:
    """``P = g(A, v tau) = 1 / (1 + exp(-(A - h(v tau))))``, in [0, 1].

    The paper leaves g open (7, derived). Ours is additive in log odds, so that quality and staleness can be measured
    separately; :func:`prediction_error` measures how well this holds.

    Args:
        quality: A, log odds of success without delay, ``[...]``.
        cost: h(v tau), reduction of the log odds by staleness, 0 without delay, ``[...]``.
    """
    odds = np.subtract(quality, cost)
    # The logistic function as a hyperbolic tangent, which does not overflow.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * odds)))


def log_odds(successes: ArrayLike, trials: ArrayLike) -> Floats:
    """``ln((k + 1/2) / (n - k + 1/2))``: log odds of a rate, finite also for k = 0 and k = n (Haldane, Anscombe).

    k in [0, n], of which a pooled mean need not be whole, and n >= 1, ``[...]``.
    """
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    return np.asarray(np.log((k + 0.5) / (n - k + 0.5)))


def log_odds_variance(successes: ArrayLike, trials: ArrayLike) -> Floats:
    """``1 / (k + 1/2) + 1 / (n - k + 1/2)``: sampling variance of :func:`log_odds` (Gart & Zweifel 1967)."""
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    return np.asarray(1.0 / (k + 0.5) + 1.0 / (n - k + 0.5))


@dataclass(frozen=True)
class DelayResponse:
    """``h``: reduction of the log odds by staleness, at a fixed quality.

    Attributes:
        staleness: measured points, ``[K]``, increasing; the first is taken as free of delay.
        cost: h there, ``[K]``, non-decreasing, from 0.
        variance: sampling variance of the cost, ``[K]``.
    """

    staleness: Floats
    cost: Floats
    variance: Floats

    def __call__(self, staleness: ArrayLike) -> Floats:
        """The cost at any staleness >= 0, ``[...]``; linear interpolation, constant extrapolation."""
        return np.asarray(np.interp(np.asarray(staleness, dtype=np.float64), self.staleness, self.cost))


@dataclass(frozen=True)
class Prediction:
    """Predicted success rates.

    Attributes:
        rate: in [0, 1], ``[...]``.
        error: standard error of the rate, from the finite number of trials, ``[...]``.
        covered: whether the staleness lies within the measured range of the response, bool ``[...]``.
    """

    rate: Floats
    error: Floats
    covered: NDArray[np.bool_]


@dataclass(frozen=True)
class PredictionError:
    """Deviation of predicted rates from observed ones.

    ``sigma^2`` is the sampling variance of predicted minus observed.

    Attributes:
        mean_absolute: mean of ``|predicted - observed|``.
        worst: maximum of ``|predicted - observed|``.
        noise: expected ``mean_absolute`` from sampling alone, if quality and staleness are separable: mean of
            ``sqrt(2 / pi) sigma``.
        chi2: mean of ``(predicted - observed)^2 / sigma^2``: about 1 if they are separable, well above 1 if not.
    """

    mean_absolute: float
    worst: float
    noise: float
    chi2: float


def fit_response(staleness: ArrayLike, successes: ArrayLike, trials: ArrayLike) -> DelayResponse:
    """Fits h to one setting's success over staleness.

    Args:
        staleness: v tau >= 0, ``[K]``, in any order; the smallest is taken as free of delay, repetitions are pooled.
        successes, trials: k and n at each, ``[K]``.

    Raises:
        ConfigError: for fewer than two different values of staleness, or arrays of different shapes.
    """
    s, k, n = (np.asarray(values, dtype=np.float64) for values in (staleness, successes, trials))
    if s.ndim != 1 or not s.shape == k.shape == n.shape or len(np.unique(s)) < 2:
        raise ConfigError(
            f"a delay response needs successes and trials at two or more different values of staleness; got the shapes "
            f"{s.shape}, {k.shape} and {n.shape}, with {len(np.unique(s))} different values"
        )
    points, which = np.unique(s, return_inverse=True)
    hits, tries = (np.bincount(which, weights=values) for values in (k, n))
    # Fitted as rates, because isotonic regression weighted with trials is the maximum-likelihood fit of rates.
    rates = -isotonic(-hits / tries, tries)
    odds, variance = log_odds(rates * tries, tries), log_odds_variance(rates * tries, tries)
    # If trials differ, the continuity correction in the log odds can make them rise slightly.
    cost = np.maximum.accumulate(odds[0] - odds)
    return DelayResponse(points, cost, np.append(0.0, variance[0] + variance[1:]))


def isotonic(values: ArrayLike, weights: ArrayLike) -> Floats:
    """Isotonic regression: the non-decreasing ``[K]`` nearest to ``values`` in weighted least squares.

    Computed by pooling adjacent violators. For proportions weighted with their trials it is also the maximum-likelihood
    fit (Ayer et al. 1955).

    Args:
        values: ``[K]``.
        weights: positive, ``[K]``.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(np.asarray(values, float).tolist(), np.asarray(weights, float).tolist(), strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] >= block[0]:
            mean, mass, length = blocks.pop()
            total = mass + block[1]
            block = ((mean * mass + block[0] * block[1]) / total, total, length + block[2])
        blocks.append(block)
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])


def predict_success(
    successes: ArrayLike, trials: ArrayLike, measured_at: ArrayLike, response: DelayResponse, staleness: ArrayLike
) -> Prediction:
    """``P = g(A, v tau)`` with ``A`` from one measurement per setting; all arguments broadcast to ``[...]``.

    The error neglects the variance of the response at ``measured_at``, which is small if ``measured_at`` is.

    Args:
        successes, trials: k and n of the settings, measured at ``measured_at``.
        measured_at: v tau of that measurement, as small as possible.
        response: h.
        staleness: v tau to predict for.
    """
    cost = response(staleness) - response(measured_at)
    at = np.asarray(staleness, dtype=np.float64)
    variance = log_odds_variance(successes, trials) + np.interp(at, response.staleness, response.variance)
    rate = success_rate(log_odds(successes, trials), cost)
    # By the delta method: dP / d(log odds) = P (1 - P).
    error = rate * (1.0 - rate) * np.sqrt(variance)
    covered = (at >= response.staleness[0]) & (at <= response.staleness[-1])
    return Prediction(rate, error, np.broadcast_to(covered, rate.shape))


def prediction_error(predicted: Prediction, successes: ArrayLike, trials: ArrayLike) -> PredictionError:
    """Compares predicted with observed rates.

    Args:
        predicted: the predictions, ``[...]``.
        successes, trials: k and n observed, ``[...]``.

    Raises:
        ConfigError: without any cell.
    """
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    if not predicted.rate.size:
        raise ConfigError("there is no cell to compare a prediction with; hold out at least one")
    error = np.abs(predicted.rate - k / n)
    variance = predicted.rate * (1.0 - predicted.rate) / n + predicted.error**2
    return PredictionError(
        mean_absolute=float(error.mean()),
        worst=float(error.max()),
        noise=float((np.sqrt(2.0 / np.pi) * np.sqrt(variance)).mean()),
        chi2=float((error**2 / variance).mean()),
    )
