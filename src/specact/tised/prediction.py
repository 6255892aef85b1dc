"""Success on hardware and at rates that were never run, from two small experiments (TISED, equation 7).

``P(x) = g(A(x), v tau(x))`` with g additive in log odds: quality ``A(x)`` is measured with little delay at every
setting x, and what staleness costs, ``h(v tau)``, at one setting over many delays. Every other cell follows. Of h we
know only that it does not fall, so it is fitted as that and nothing more: isotonic regression, linear between what was
measured. It has no parameter to choose and cannot invent a trend; outside what was measured it stays level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
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


@dataclass(frozen=True)
class DelayResponse:
    """``h``: log odds that staleness takes away, at a fixed quality.

    Attributes:
        staleness: where it was measured, ``[K]``, rising; the first counts as being without delay.
        cost: there, ``[K]``, not falling, from 0.
        variance: of the cost, from counting, ``[K]``.
    """

    staleness: Floats
    cost: Floats
    variance: Floats

    def __call__(self, staleness: ArrayLike) -> Floats:
        """The cost at any staleness >= 0; linear in between, level before the first and beyond the last."""
        return np.asarray(np.interp(np.asarray(staleness, dtype=np.float64), self.staleness, self.cost))


@dataclass(frozen=True)
class Prediction:
    """Rates of success that were not measured.

    Attributes:
        rate: in (0, 1), ``[...]``.
        error: their standard error, from the counts that they rest on, ``[...]``.
        covered: ``[...]``, whether the staleness lies within what the response was measured at.
    """

    rate: Floats
    error: Floats
    covered: NDArray[np.bool_]


@dataclass(frozen=True)
class PredictionError:
    """How far predicted rates are from observed ones.

    Attributes:
        mean_absolute: mean of ``|predicted - observed|``.
        worst: its maximum.
        noise: what ``mean_absolute`` is about where quality and staleness are separable, from counting alone, on both
            sides: mean of ``sqrt(2 / pi) sigma``.
        chi2: mean of ``(predicted - observed)^2 / sigma^2``, about 1 where they are. Well above, they are not.
    """

    mean_absolute: float
    worst: float
    noise: float
    chi2: float


def fit_response(staleness: ArrayLike, successes: ArrayLike, trials: ArrayLike) -> DelayResponse:
    """Fits h to one setting's success over staleness.

    Args:
        staleness: v tau >= 0, ``[K]``, in any order; the least of them is taken as being without delay.
        successes, trials: k and n of each, ``[K]``.

    Raises:
        ConfigError: for fewer than two different stalenesses, or arrays that do not fit together.
    """
    s, k, n = (np.asarray(values, dtype=np.float64) for values in (staleness, successes, trials))
    if s.ndim != 1 or not s.shape == k.shape == n.shape or len(np.unique(s)) < 2:
        raise ConfigError(
            f"a delay response needs successes and trials at two or more different stalenesses; got the shapes "
            f"{s.shape}, {k.shape} and {n.shape}, with {len(np.unique(s))} different ones"
        )
    places, which = np.unique(s, return_inverse=True)
    hits, tries = (np.bincount(which, weights=values) for values in (k, n))
    # Fitted as rates, where the counts are the weights that maximise the likelihood, and turned into log odds then.
    rates = -isotonic(-hits / tries, tries)
    odds, variance = log_odds(rates * tries, tries), log_odds_variance(rates * tries, tries)
    # Where trials differ, the half a success that log odds add can make them rise a little all the same.
    cost = np.maximum.accumulate(odds[0] - odds)
    return DelayResponse(places, cost, np.append(0.0, variance[0] + variance[1:]))


def isotonic(values: ArrayLike, weights: ArrayLike) -> Floats:
    """The row that does not fall and is nearest to ``values`` in weighted least squares (pool adjacent violators).

    For proportions weighted with their trials it is the maximum-likelihood fit too (Ayer et al. 1955).

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
    """``P = g(A, v tau)`` for settings and delays that broadcast, ``[...]``.

    Args:
        successes, trials: k and n of a setting where it was measured.
        measured_at: v tau there, as small as can be had.
        response: h.
        staleness: v tau to predict for.
    """
    cost = response(staleness) - response(measured_at)
    moved = np.asarray(staleness, dtype=np.float64)
    variance = log_odds_variance(successes, trials) + np.interp(moved, response.staleness, response.variance)
    rate = success_rate(log_odds(successes, trials), cost)
    # By the delta method: dP / d(log odds) = P (1 - P).
    error = rate * (1.0 - rate) * np.sqrt(variance)
    covered = (moved >= response.staleness[0]) & (moved <= response.staleness[-1])
    return Prediction(rate, error, np.broadcast_to(covered, rate.shape))


def prediction_error(predicted: Prediction, successes: ArrayLike, trials: ArrayLike) -> PredictionError:
    """Compares predicted rates ``[...]`` with what came out.

    Raises:
        ConfigError: for no cells.
    """
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    if not predicted.rate.size:
        raise ConfigError("there is no cell to compare a prediction with; hold out at least one")
    away = np.abs(predicted.rate - k / n)
    variance = predicted.rate * (1.0 - predicted.rate) / n + predicted.error**2
    return PredictionError(
        mean_absolute=float(away.mean()),
        worst=float(away.max()),
        noise=float((np.sqrt(2.0 / np.pi) * np.sqrt(variance)).mean()),
        chi2=float((away**2 / variance).mean()),
    )
