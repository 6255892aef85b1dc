"""Holding a budget online: a transmission rate, a mean latency or a share of a link, whatever drifts.

A calibrated threshold fits the scores it was calibrated on. Here the threshold is the quantile of the last scores
instead, and an integral of what was spent beyond the budget says which quantile: the error integration of conformal
PID control (Angelopoulos, Candes and Tibshirani 2023, arXiv 2307.16895), around a quantile as adaptive
conformal inference steers it (Gibbs and Candes 2021, arXiv 2106.00170). We steer in shares of the last scores and not
in units of the score: readings differ by orders of magnitude, have heavy tails, and some are often exactly 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.gates.gate import Gate
from specact.types import Proposal, StepRecord

_FORCED = ("first", "max_skips")


class Budget(Protocol):
    """What may be spent per inference, in the mean.

    Attributes:
        rate: the transmission rate that spends just that, as far as is known, in [0, 1].
    """

    @property
    def rate(self) -> float: ...

    def overspent(self, record: StepRecord) -> float:
        """What this inference spent beyond the budget, in transmissions; negative where it saved."""
        ...


class RateBudget:
    """A wanted transmission rate.

    Args:
        rate: share of inferences that are transmitted, in [0, 1], forced ones and audits included; it may be changed
            at any time.

    Raises:
        ConfigError: for a rate outside its range.
    """

    def __init__(self, rate: float) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"a transmission rate must lie in [0, 1], got {rate}")
        self.rate = rate

    def overspent(self, record: StepRecord) -> float:
        """See :class:`Budget`."""
        return record.decision.transmit - self.rate


class LinkBudget:
    """A robot's share of a link; requests that left ahead in vain count too, those that could not leave do not.

    Args:
        bytes_per_s: what this robot may use, both ways together [B/s].
        request_bytes: of a request and its reply [B].
        inferences_hz: inferences per second [1/s].

    Raises:
        ConfigError: for a value that is not positive.
    """

    def __init__(self, bytes_per_s: float, request_bytes: float, inferences_hz: float) -> None:
        if not min(bytes_per_s, request_bytes, inferences_hz) > 0.0:
            raise ConfigError(
                "a link's share, the bytes of a request and the inferences per second must be positive, got "
                f"{bytes_per_s} B/s, {request_bytes} B and {inferences_hz} per second"
            )
        self.rate = min(1.0, bytes_per_s / (request_bytes * inferences_hz))

    def overspent(self, record: StepRecord) -> float:
        """See :class:`Budget`."""
        return ((record.decision.transmit and not record.unsent) or record.sent_ahead) - self.rate


class LatencyBudget:
    """A wanted mean time of an inference.

    What a skipped and what a transmitted inference take is averaged over the last ones of each; the rate follows.

    Args:
        seconds: the mean wanted [s].
        memory: inferences of each kind that an average looks back on.

    Raises:
        ConfigError: if either is not positive.
    """

    def __init__(self, seconds: float, memory: int = 50) -> None:
        if not 0.0 < seconds < math.inf or memory < 1:
            raise ConfigError(f"a latency budget and its memory must be positive, got {seconds} s and {memory}")
        self.seconds, self.memory = seconds, memory
        # Means and counts of skipped and of transmitted inferences.
        self._took, self._count = [0.0, 0.0], [0, 0]

    @property
    def rate(self) -> float:
        """See :class:`Budget`; 1/2 until both kinds of inference were seen."""
        if 0 in self._count:
            return 0.5
        return min(1.0, max(0.0, (self.seconds - self._took[0]) / self._price))

    @property
    def _price(self) -> float:
        """What a transmission adds [s]; never less than a microsecond, on links as fast as the draft."""
        return max(1e-6, self._took[1] - self._took[0])

    def overspent(self, record: StepRecord) -> float:
        """See :class:`Budget`."""
        kind, took = int(record.decision.transmit), record.times.total
        self._count[kind] += 1
        self._took[kind] += (took - self._took[kind]) / min(self._count[kind], self.memory)
        return 0.0 if 0 in self._count else (took - self.seconds) / self._price


class Controller(Gate):
    """Another gate's score, and a threshold that holds a budget; it needs no calibration.

    With ``e_t`` what inference t spent beyond the budget, the share of the last scores that the threshold lets
    through next is ``rate - (e_1 + ... + e_t) / horizon``; where that is 0 or less everything is skipped, where it is
    1 or more everything transmitted. Hence, for a fixed :class:`RateBudget` and any numbers for scores, drifting or
    adversarial, the rate over T inferences since the start differs from the wanted one by at most
    ``(horizon + 1) / T``, as long as what is transmitted by force and for audits fits into the budget. Debt and
    savings beyond the horizon are forgotten; they only arise where it does not fit, or where single inferences took
    extremely long. A latency is held in the same way, its debt counted in what a transmission adds at the time.

    An episode's end is forgotten by the inner gate alone: scores and debt are those of the robot's whole life.

    Args:
        inner: gives the score and the limits on skipping; its threshold is not used.
        budget: what is held.
        window: scores that the quantile is taken from. Shorter follows drift faster, longer is steadier.
        horizon: transmissions of debt that change the share by 1. Shorter holds the budget more closely, longer
            disturbs the gate's choice less.

    Raises:
        ConfigError: if window or horizon is below 1.
    """

    def __init__(self, inner: Gate, budget: Budget, *, window: int = 200, horizon: float = 100.0) -> None:
        super().__init__(
            -math.inf, max_skips=inner.max_skips, force_first=inner.force_first, audit_rate=inner.audit_rate
        )
        if window < 1 or not horizon >= 1.0:
            raise ConfigError(f"window and horizon must be at least 1, got {window} and {horizon}")
        self.window, self.horizon = window, horizon
        self._inner, self._budget, self._debt = inner, budget, 0.0
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    @property
    def rate(self) -> float:
        """The transmission rate that the budget asks for now, in [0, 1]."""
        return self._budget.rate

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        """The inner gate's."""
        return self._inner.score(proposal, rng)

    def reset(self) -> None:
        super().reset()
        self._inner.reset()

    def update(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        self._inner.update(drafted, executed)

    def learn(self, record: StepRecord) -> None:
        self._inner.learn(record)
        decision = record.decision
        # The score of a forced step did not decide, and that of an episode's first one means nothing.
        if decision.reason not in _FORCED and not math.isnan(decision.score):
            self._remember(decision.score)
        limit = self.horizon + 1.0
        self._debt = min(limit, max(-limit, self._debt + self._budget.overspent(record)))
        share = self._budget.rate - self._debt / self.horizon
        self.threshold, self.tie_probability = _threshold(self._ordered, share)

    def settings(self) -> dict[str, Any]:
        """Of the inner gate, with what is held."""
        held = {"type": type(self._budget).__name__, "rate": self.rate, "window": self.window, "horizon": self.horizon}
        return self._inner.settings() | {"audit_rate": self.audit_rate, "held": held}

    def _remember(self, score: float) -> None:
        if len(self._recent) == self.window:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(score)
        insort(self._ordered, score)


def _threshold(ordered: list[float], share: float) -> tuple[float, float]:
    """Threshold and tie probability that let a share of these scores through.

    At the ends the threshold is infinite: a score beyond all that were seen must not get around a spent budget.
    """
    if share <= 0.0:
        return math.inf, 0.0
    if share >= 1.0 or not ordered:
        return -math.inf, 1.0
    wanted = share * len(ordered)
    threshold = ordered[min(int(len(ordered) - wanted), len(ordered) - 1)]
    above = len(ordered) - bisect_right(ordered, threshold)
    equal = len(ordered) - above - bisect_left(ordered, threshold)
    return threshold, min(1.0, max(0.0, (wanted - above) / equal))
