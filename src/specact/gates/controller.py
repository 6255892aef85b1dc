"""Online control of a budget under drift: a transmission rate, a mean latency or a share of a link.

A calibrated threshold fits the scores it was calibrated on. Here the threshold is a quantile of the last scores, and
the integral of the overspending sets the quantile level: the error integration of conformal PID control (Angelopoulos,
Candes and Tibshirani 2023, arXiv 2307.16895), on a quantile level as in adaptive conformal inference (Gibbs and Candes
2021, arXiv 2106.00170). The controlled variable is the level and not the score: scores differ by orders of magnitude
between gates, have heavy tails, and some are often exactly 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specact.gates.gate import Gate
from specact.records import AtLeastOne, Count, Positive, Share, validated
from specact.types import Proposal, StepRecord


class RateBudget:
    """A transmission rate in [0, 1], forced transmissions and audits included; it may be changed at any time.

    Of a subclass, ``rate`` is an estimate of the transmission rate that uses exactly the budget.
    """

    @validated
    def __init__(self, rate: Share) -> None:
        self.rate = rate

    def overspent(self, record: StepRecord) -> float:
        """This inference's spending beyond the budget, in transmissions; negative if below it."""
        return record.decision.transmit - self.rate


class LinkBudget(RateBudget):
    """A robot's share of a link's bandwidth; requests that were not sent do not count.

    That is ``bytes_per_s``, both ways together [B/s], for requests that with their reply have ``request_bytes`` [B], at
    ``inferences_hz`` inferences per second [1/s].
    """

    @validated
    def __init__(self, bytes_per_s: Positive, request_bytes: Positive, inferences_hz: Positive) -> None:
        super().__init__(min(1.0, bytes_per_s / (request_bytes * inferences_hz)))

    def overspent(self, record: StepRecord) -> float:
        return (record.decision.transmit and not record.unsent) - self.rate


class LatencyBudget(RateBudget):
    """A mean latency of an inference [s].

    The rate follows from moving averages, over ``memory`` inferences each, of the latencies of skipped and of
    transmitted ones; it is 1/2 until both kinds were seen.
    """

    @validated
    def __init__(self, seconds: Positive, memory: Count = 50) -> None:
        super().__init__(0.5)
        self.seconds, self.memory = seconds, memory
        # Mean latencies and counts of skipped and of transmitted inferences.
        self._mean_s, self._count = [0.0, 0.0], [0, 0]

    def overspent(self, record: StepRecord) -> float:
        kind, latency_s = int(record.decision.transmit), record.times.total
        self._count[kind] += 1
        self._mean_s[kind] += (latency_s - self._mean_s[kind]) / min(self._count[kind], self.memory)
        if 0 in self._count:
            return 0.0
        # The latency that a transmission adds.
        added_s = max(1e-6, self._mean_s[1] - self._mean_s[0])
        self.rate = min(1.0, max(0.0, (self.seconds - self._mean_s[0]) / added_s))
        return (latency_s - self.seconds) / added_s


class Controller(Gate):
    """Another gate's score with a threshold that is controlled to hold a budget; it needs no calibration.

    With ``e_t`` the overspending of inference t, the next threshold transmits the share
    ``rate - (e_1 + ... + e_t) / horizon`` of the last ``window`` scores, clipped to [0, 1]. Hence, for a fixed
    :class:`RateBudget` and any sequence of scores, drifting or adversarial, the rate over T inferences differs from the
    requested one by at most ``(horizon + 1) / T``, as long as forced transmissions and audits fit into the budget; the
    integral is clipped at the horizon. A latency is held likewise, in units of what a transmission adds at the time.
    A shorter window follows drift faster, a shorter horizon holds the budget more closely; a longer one disturbs the
    inner gate's choice less. An episode's end resets the inner gate alone; scores and integral persist.
    """

    @validated
    def __init__(self, inner: Gate, budget: RateBudget, *, window: Count = 200, horizon: AtLeastOne = 100.0) -> None:
        super().__init__(
            -math.inf, max_skips=inner.max_skips, force_first=inner.force_first, audit_rate=inner.audit_rate
        )
        self.window, self.horizon = window, horizon
        self._inner, self._budget, self._debt = inner, budget, 0.0
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return self._inner.score(proposal, rng)

    def reset(self) -> None:
        super().reset()
        self._inner.reset()

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        self._inner.on_action(drafted, executed)

    def on_verified(self, record: StepRecord) -> None:
        self._inner.on_verified(record)

    def on_inference(self, record: StepRecord) -> None:
        self._inner.on_inference(record)
        decision = record.decision
        # The score of a forced step had no effect, and that of an episode's first step is undefined.
        if decision.reason not in ("first", "max_skips") and not math.isnan(decision.score):
            if len(self._recent) == self.window:
                del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
            self._recent.append(decision.score)
            insort(self._sorted, decision.score)
        limit = self.horizon + 1.0
        self._debt = min(limit, max(-limit, self._debt + self._budget.overspent(record)))
        share = self._budget.rate - self._debt / self.horizon
        # At 0 and 1 the threshold is infinite, so that a new extreme score cannot exceed a spent budget.
        if share <= 0.0:
            self.threshold, self.tie_probability = math.inf, 0.0
        elif share >= 1.0 or not self._sorted:
            self.threshold, self.tie_probability = -math.inf, 1.0
        else:
            self.threshold, self.tie_probability = threshold_of(self._sorted, share)


def threshold_of(ordered: Sequence[float], share: float) -> tuple[float, float]:
    """Threshold and tie probability that transmit a share, in [0, 1], of some scores in ascending order."""
    wanted = share * len(ordered)
    threshold = ordered[min(int(len(ordered) - wanted), len(ordered) - 1)]
    above = len(ordered) - bisect_right(ordered, threshold)
    equal = len(ordered) - above - bisect_left(ordered, threshold)
    return threshold, min(1.0, max(0.0, (wanted - above) / equal))
