"""The cost of skipping in deployment, estimated from audits: skipped steps that are verified at random.

With probability ``audit_rate`` a gate transmits a step that it would skip, independently of the step. For these
*audits* R(z) is known exactly, from both distributions or from a server's verdict, and they are an unbiased sample of
the steps that the gate would skip. An audited step executes its verified action, so the policy's distribution only gets
closer to the target's; audits count toward the transmission rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specact.records import AtLeastOne, BelowOne, InsideUnit, Positive, Share, validated
from specact.types import StepRecord

# Stakes as shares of the maximal one: small stakes detect small changes, large ones detect large changes sooner.
_STAKES = np.array([0.05, 0.1, 0.2, 0.4, 0.7, 0.95])


class DriftAlarm:
    """``raised``, for good, when the mean of values in [0, 1] has left ``[level - tolerance, level + tolerance]``.

    For each stake s and side, ``e_t`` is what a fair game pays for a bet that the mean is beyond that end of the
    interval: ``1 + s (x_t - m) / m`` above, ``1 + s (m - x_t) / (1 - m)`` below, with mean at most 1 while it is not.
    The evidence ``M_t = (M_{t-1} + 1) e_t`` (Shiryaev and Roberts) adds up the bets begun at every time; the alarm is
    raised when its mean over stakes and sides reaches ``run_length``. As long as the conditional means given the past
    lie within the interval, the expected number of values until a false alarm is at least ``run_length``, and its
    probability within n values at most ``n / run_length`` (Shin, Ramdas and Rinaldo 2024, "E-detectors", arXiv
    2203.03532, section 2; Doob's inequality). A confidence interval for a fixed n, tested repeatedly, has neither.
    """

    @validated
    def __init__(self, level: Share, *, tolerance: InsideUnit = 0.05, run_length: AtLeastOne = 20_000.0) -> None:
        self.level, self.tolerance, self.run_length = level, tolerance, run_length
        self.raised = False
        high, low = level + tolerance, level - tolerance
        # e = offset + slope * x; both sides in one array.
        self._slopes = np.concatenate([_STAKES / high, -_STAKES / (1.0 - low)])
        self._offsets = 1.0 - self._slopes * np.repeat([high, low], len(_STAKES))
        self._evidence = np.zeros(2 * len(_STAKES))

    def take(self, value: float) -> bool:
        """Adds a value in [0, 1]; True if this one raises the alarm."""
        if self.raised:
            return False
        self._evidence = (self._evidence + 1.0) * (self._offsets + self._slopes * value)
        self.raised = float(self._evidence.mean()) >= self.run_length
        return self.raised


# Geometric grid, so that one value fits any number of audits up to about a million.
_LAMBDAS = tuple(0.9 / 1.5**k for k in range(12))


@dataclass(frozen=True)
class Estimate:
    """The mean of ``count`` values in [0, 1], None if there are none, and its interval within [0, 1]."""

    mean: float | None
    low: float
    high: float
    count: int


class RunningMean:
    """The mean of values in [0, 1] with an anytime-valid confidence interval (a confidence sequence).

    With probability at least ``1 - error_rate``, for all n at once, the interval contains the mean of the n conditional
    expectations given the past; values need not be independent. It is the empirical Bernstein confidence sequence of
    Howard, Ramdas, McAuliffe and Sekhon (2021, arXiv 1810.08240, theorem 4): for every lambda in (0, 1) and all n

        |sum (x_i - E_i x_i)| < (log(2 / error) - (log(1 - lambda) + lambda) V) / lambda,   V = sum (x_i - guess_i)^2

    where the guess is the mean of the values before. Each of twelve lambdas gets a twelfth of the error.
    """

    @validated
    def __init__(self, error_rate: InsideUnit = 0.05) -> None:
        self._log = math.log(2.0 * len(_LAMBDAS) / error_rate)
        self._count, self._sum, self._variance = 0, 0.0, 0.0

    def take(self, value: float) -> None:
        """Adds a value in [0, 1]."""
        guess = (self._sum + 0.5) / (self._count + 1)
        self._variance += (value - guess) ** 2
        self._count += 1
        self._sum += value

    def estimate(self) -> Estimate:
        """The mean of all values so far."""
        if self._count == 0:
            return Estimate(None, 0.0, 1.0, 0)
        mean = self._sum / self._count
        beyond = min((self._log - (math.log1p(-rate) + rate) * self._variance) / rate for rate in _LAMBDAS)
        half = beyond / self._count
        return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half), self._count)


class AuditEstimator:
    """True skip ratio in deployment, ``mean of 1 - R(z)`` over the steps a gate would skip, estimated from its audits.

    Each such step is audited with the same probability, so the estimate is unbiased as long as that probability is
    constant. Audits that ``missed`` are counted and excluded, which assumes that misses are independent of R(z). With
    action codes an audit gives the probability that all codes are accepted, with less variance than the event itself.
    The guarantee of an ``alarm`` on the values ``1 - R(z)`` needs audits that are far enough apart to be uncorrelated,
    as at small rates; ``experiments/controller`` counts false alarms.
    """

    def __init__(self, alarm: DriftAlarm | None = None) -> None:
        self.alarm, self.missed, self._mean = alarm, 0, RunningMean()

    def take(self, record: StepRecord) -> bool:
        """Adds an inference, which is ignored if it is no audit; True if it raises the alarm."""
        if record.decision.reason != "audit":
            return False
        if record.outcome is None:
            self.missed += 1
            return False
        kept = record.outcome.kept
        self._mean.take(kept)
        return self.alarm is not None and self.alarm.take(kept)

    def estimate(self) -> Estimate:
        """The true skip ratio so far."""
        return self._mean.estimate()


@validated
def expected_true_skip(rejections: Sequence[float], rate: BelowOne, free: Positive = 1.0) -> float:
    """True skip ratio at a transmission rate in [0, 1) according to the calibration: the level of an alarm.

    The mean R(z) is in bins of equal count, lowest scores first: ``rejections`` of a calibration's model, which are of
    the share ``free`` of the steps that the score decided. Only these are skipped.
    """
    skipped = min(1.0, (1.0 - rate) / free) * len(rejections)
    weights = [min(1.0, max(0.0, skipped - index)) for index in range(len(rejections))]
    return sum(weight * (1.0 - r) for weight, r in zip(weights, rejections, strict=True)) / skipped
