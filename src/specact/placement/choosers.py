"""Strategies for the cut of the next inference: static, RoboECC's rule, or the smallest predicted total time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from specact.errors import ConfigError
from specact.placement.bandwidth import Bandwidths, Forecast
from specact.placement.planner import Accounting, StageCosts, adjusted_cut, best_cut, total_s, within

# Minimum number of measurements for RoboECC's thresholds.
_MIN_MEASUREMENTS = 3


class Chooser(Protocol):
    """Chooses where a target is cut, between two inferences."""

    def choose(self, current: int, seen: Bandwidths) -> int:
        """The cut of the next inference, given the current one and the measured bandwidths."""
        ...


class StaticCut:
    """A constant cut: 0 for everything on the device, N for everything on the server.

    Args:
        cut: the cut.
    """

    def __init__(self, cut: int) -> None:
        self.cut = cut

    def choose(self, current: int, seen: Bandwidths) -> int:
        return self.cut


class RoboeccRule:
    """The published adjustment: by the sign of the predicted change of the bandwidth, whatever the total time.

    The thresholds are not published; ours are plus and minus one standard deviation of the changes so far. The first
    cut minimises the printed equation, as published.

    Args:
        costs: of the stages.
        pool: the cuts to choose from; device and server both hold the stages between the smallest and the largest.
        forecast: of the bandwidth.
        budget: maximum load of the server.

    Raises:
        ConfigError: if no cut of the pool is within the budget.
    """

    def __init__(self, costs: StageCosts, pool: Sequence[int], forecast: Forecast, budget: float = math.inf) -> None:
        self._costs, self._forecast = costs, forecast
        self._pool = within(pool, costs.loads, budget)
        self._planned = False

    def choose(self, current: int, seen: Bandwidths) -> int:
        if not len(seen):
            return current if current in self._pool else self._pool[0]
        bytes_s = seen.past[-1]
        if not self._planned:
            self._planned = True
            return best_cut(total_s(self._costs, bytes_s, accounting="printed"), self._costs.loads, self._pool)
        if len(seen) < _MIN_MEASUREMENTS:
            return current
        change, spread = self._forecast.forecast(seen.past) - bytes_s, seen.deviation
        return adjusted_cut(current, change, -spread, spread, self._pool, self._costs.cut_bytes)


class SmallestTotal:
    """The cut with the smallest total time at the predicted bandwidth.

    At cut 0 no request is sent and no bandwidth is measured. So after ``look_every`` inferences at cut 0 the best other
    cut is used once, even if it is slower.

    Args:
        costs: of the stages.
        allowed: the cuts to choose from.
        forecast: of the bandwidth.
        budget: maximum load of the server.
        accounting: see :func:`~specact.placement.planner.total_s`.
        latency_apart: whether latency and bandwidth are separated, see
            :meth:`~specact.placement.bandwidth.Bandwidths.split_latency`; as published they are not.
        look_every: inferences at cut 0 between two measurements, see above; 0 for no measurements.

    Raises:
        ConfigError: if no allowed cut is within the budget, or for a negative ``look_every``.
    """

    def __init__(
        self, costs: StageCosts, allowed: Sequence[int], forecast: Forecast, budget: float = math.inf,
        accounting: Accounting = "faithful", latency_apart: bool = False, look_every: int = 10,
    ) -> None:  # fmt: skip
        if look_every < 0:
            raise ConfigError(f"look_every must be at least 0, got {look_every}")
        self._costs, self._forecast, self._accounting = costs, forecast, accounting
        self._allowed = within(allowed, costs.loads, budget)
        self._latency_apart, self._look_every, self._unmeasured = latency_apart, look_every, 0

    def choose(self, current: int, seen: Bandwidths) -> int:
        remote = [cut for cut in self._allowed if cut]
        if not remote:
            return 0
        if not len(seen):
            return remote[-1]  # a first measurement
        bytes_s, latency_s = self._forecast.forecast(seen.past), 0.0
        if self._latency_apart:
            bytes_s, latency_s = seen.split_latency(bytes_s)
        total = total_s(self._costs, bytes_s, latency_s, self._accounting)
        cut = best_cut(total, self._costs.loads, self._allowed)
        self._unmeasured = 0 if cut else self._unmeasured + 1
        if self._look_every and self._unmeasured > self._look_every:
            self._unmeasured = 0
            return best_cut(total, self._costs.loads, remote)
        return cut
