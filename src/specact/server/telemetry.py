"""Telemetry of the server: counters and histograms for Prometheus, and the live numbers of the status page."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specact.wire.messages import REPORT_COUNTERS, ServerTimes

_WINDOW_S, _MAX_RECENT = 10.0, 4096
_BUCKETS_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_BUCKETS_BATCH = (1, 2, 4, 8, 16, 32, 64)
_STAGES = ("queue", "target", "total")


class RateCounter:
    """Rate of events over the last ten seconds, in constant memory."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque(maxlen=int(_WINDOW_S))

    def count(self, now: float) -> None:
        """Counts an event."""
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append([int(now), 0])
        self._seconds[-1][1] += 1

    def rate_hz(self, now: float, since: float) -> float:
        """Events per second; over the time since ``since`` if that is shorter."""
        # Complete seconds only: the current one would make the rate fluctuate.
        counts = [count for second, count in self._seconds if int(now) - _WINDOW_S < second < int(now)]
        return sum(counts) / min(_WINDOW_S - 1.0, max(1.0, int(now) - since))


@dataclass
class Robot:
    """One connection on the status page.

    Attributes:
        name: of the device.
        since: when it connected, in seconds of the monotonic clock.
        requests, errors: number of results and of error replies.
        report: the device's own counters, see :data:`~specact.wire.messages.REPORT_COUNTERS`.
        recent: (time, total_ms) of the last replies.
        rate: of its replies.
    """

    name: str
    since: float
    requests: int = 0
    errors: int = 0
    report: Mapping[str, int] = field(default_factory=dict)
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))
    rate: RateCounter = field(default_factory=lambda: RateCounter())


class Histogram:
    """Counts of values per bucket; cheaper than Prometheus' own class, which locks and resolves labels at every value.

    Args:
        bounds: upper bounds of the buckets, inclusive, in order; an unbounded one follows.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def take(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def metric(self, name: str, meaning: str) -> Metric:
        """In Prometheus' form, with cumulative buckets."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return HistogramMetricFamily(name, meaning, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class Telemetry(Collector):
    """Counts requests, errors and connections; used on the event loop only.

    Args:
        bundle: name of the bundle that is served.
    """

    def __init__(self, bundle: str) -> None:
        self.bundle, self.started = bundle, time.monotonic()
        self._rate = RateCounter()
        self._status: tuple[float, dict[str, Any]] = (-1.0, {})
        self.robots: dict[int, Robot] = {}
        self._stages: deque[tuple[float, float, float, float, int]] = deque(maxlen=_MAX_RECENT)
        # Counts by kind and outcome.
        self._requests: Counter[tuple[str, str]] = Counter()
        self._times = {stage: Histogram(_BUCKETS_MS) for stage in _STAGES}
        self._batch = Histogram(_BUCKETS_BATCH)
        self._queued = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def connected(self, name: str) -> int:
        """Records a connection and returns its key."""
        key = max(self.robots, default=0) + 1
        self.robots[key] = Robot(name, time.monotonic())
        return key

    def disconnected(self, key: int) -> None:
        """Removes a connection."""
        self.robots.pop(key, None)

    def record_reply(self, kind: str, times: ServerTimes, robot: Robot | None) -> None:
        """Records a result."""
        now = time.monotonic()
        self._requests[kind, "ok"] += 1
        self._times["queue"].take(times.queue_ms)
        self._times["target"].take(times.target_ms)
        self._times["total"].take(times.total_ms)
        self._batch.take(times.batch)
        self._stages.append((now, times.queue_ms, times.target_ms, times.total_ms, times.batch))
        self._rate.count(now)
        if robot is not None:
            robot.requests += 1
            robot.rate.count(now)
            robot.recent.append((now, times.total_ms))

    def record_error(self, kind: str, code: str, robot: Robot | None) -> None:
        """Records an error reply."""
        self._requests[kind, code] += 1
        if robot is not None:
            robot.errors += 1

    def prometheus(self, queued: int) -> bytes:
        """All metrics in Prometheus' text format."""
        self._queued = queued
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The current metrics, for Prometheus' registry."""
        requests = CounterMetricFamily("specact_requests", "Requests by kind and outcome.", labels=["kind", "outcome"])
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        for stage, times in self._times.items():
            yield times.metric(f"specact_{stage}_milliseconds", f"Time of the stage: {stage}.")
        yield self._batch.metric("specact_batch_size", "Requests per inference.")
        yield GaugeMetricFamily("specact_robots", "Connected robots.", len(self.robots))
        yield GaugeMetricFamily("specact_queue", "Requests that wait for the target.", self._queued)

    def status(self, queued: int, ready: bool) -> dict[str, Any]:
        """The live numbers; rates and times are over the last 10 seconds. Recomputed at most twice a second."""
        now = time.monotonic()
        if now - self._status[0] > 0.5:
            self._status = now, self._live(now)
        return self._status[1] | {"queued": queued, "ready": ready}

    def _live(self, now: float) -> dict[str, Any]:
        recent = [entry for entry in self._stages if now - entry[0] <= _WINDOW_S]
        columns = [[entry[i] for entry in recent] for i in (1, 2, 3)]
        outcomes: Counter[str] = Counter()
        for (_, outcome), count in self._requests.items():
            outcomes[outcome] += count
        return {
            "bundle": self.bundle,
            "uptime_s": now - self.started,
            "rate_hz": self._rate.rate_hz(now, self.started),
            "batch": sum(entry[4] for entry in recent) / len(recent) if recent else None,
            "outcomes": dict(outcomes),
            "stages_ms": {stage: _quantiles(column) for stage, column in zip(_STAGES, columns, strict=True)},
            "robots": [{"id": key, **_robot(robot, now)} for key, robot in self.robots.items()],
        }


def _robot(robot: Robot, now: float) -> dict[str, Any]:
    times = [total for when, total in robot.recent if now - when <= _WINDOW_S]
    report = {name: robot.report.get(name, 0) for name in REPORT_COUNTERS}
    return {
        "name": robot.name,
        "connected_s": now - robot.since,
        "requests": robot.requests,
        "errors": robot.errors,
        "rate_hz": robot.rate.rate_hz(now, robot.since),
        "transmission_rate": report["transmitted"] / report["steps"] if report["steps"] else None,
        "acceptance": report["accepted"] / report["verified"] if report["verified"] else None,
        "missed": report["missed"],
        "total_ms": _quantiles(times),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    # Sorting a short list takes a tenth of the time of NumPy's quantiles; a server can have hundreds of robots.
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{share}": ordered[min(len(ordered) - 1, share * len(ordered) // 100)] for share in (50, 95, 99)}
