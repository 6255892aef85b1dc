"""What the server tells of itself: counters and histograms for Prometheus, and the live numbers of the status page."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Total

from specact.wire.messages import REPORTED, ServerTimes

_WINDOW_S, _KEPT = 10.0, 4096
_BUCKETS_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_STAGES = ("queue", "target", "total")


class Pace:
    """How often something happened in the last ten seconds, whatever the rate."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque(maxlen=int(_WINDOW_S))

    def tick(self, now: float) -> None:
        """Counts one."""
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append([int(now), 0])
        self._seconds[-1][1] += 1

    def rate_hz(self, now: float, since: float) -> float:
        """Per second; over the time since ``since`` where that is shorter."""
        # The second that has just begun would make it flicker, so the last whole ones count.
        counts = [count for second, count in self._seconds if int(now) - _WINDOW_S < second < int(now)]
        return sum(counts) / min(_WINDOW_S - 1.0, max(1.0, int(now) - since))


@dataclass
class Robot:
    """One connection, as the status page shows it.

    Attributes:
        name: what the device called itself.
        since: when it connected, in seconds of the monotonic clock.
        requests, errors: answered with a result, and otherwise.
        report: the device's own counters, see :data:`~specact.wire.messages.REPORTED`.
        recent: (when, total_ms) of the last answers.
        pace: how often it was answered.
    """

    name: str
    since: float
    requests: int = 0
    errors: int = 0
    report: Mapping[str, int] = field(default_factory=dict)
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))
    pace: Pace = field(default_factory=lambda: Pace())


class Telemetry:
    """Counts what happens; used on the event loop only.

    Args:
        bundle: name of the bundle that is served.
    """

    def __init__(self, bundle: str) -> None:
        self.bundle, self.started = bundle, time.monotonic()
        self._pace = Pace()
        self._status: tuple[float, dict[str, Any]] = (-1.0, {})
        self.robots: dict[int, Robot] = {}
        self._stages: deque[tuple[float, float, float, float, int]] = deque(maxlen=_KEPT)
        self._outcomes: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._requests = Total(
            "specact_requests", "Requests by kind and outcome.", ["kind", "outcome"], registry=self._registry
        )
        self._times = {
            stage: Histogram(
                f"specact_{stage}_milliseconds", f"Time of the stage: {stage}.", buckets=_BUCKETS_MS,
                registry=self._registry,
            )
            for stage in _STAGES
        }  # fmt: skip
        self._batch = Histogram(
            "specact_batch_size", "Requests per inference.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=self._registry
        )
        self._connected = Gauge("specact_robots", "Connected robots.", registry=self._registry)
        self._waiting = Gauge("specact_queue", "Requests that wait for the target.", registry=self._registry)

    def connected(self, name: str) -> int:
        """Notes a connection and returns the key for it."""
        key = max(self.robots, default=0) + 1
        self.robots[key] = Robot(name, time.monotonic())
        return key

    def disconnected(self, key: int) -> None:
        """Forgets a connection."""
        self.robots.pop(key, None)

    def answered(self, kind: str, times: ServerTimes, robot: Robot | None) -> None:
        """Notes a result."""
        now = time.monotonic()
        self._outcomes["ok"] += 1
        self._requests.labels(kind, "ok").inc()
        for stage, value in zip(_STAGES, (times.queue_ms, times.target_ms, times.total_ms), strict=True):
            self._times[stage].observe(value)
        self._batch.observe(times.batch)
        self._stages.append((now, times.queue_ms, times.target_ms, times.total_ms, times.batch))
        self._pace.tick(now)
        if robot is not None:
            robot.requests += 1
            robot.pace.tick(now)
            robot.recent.append((now, times.total_ms))

    def refused(self, kind: str, code: str, robot: Robot | None) -> None:
        """Notes an error reply."""
        self._outcomes[code] += 1
        self._requests.labels(kind, code).inc()
        if robot is not None:
            robot.errors += 1

    def prometheus(self, queued: int) -> bytes:
        """Everything in Prometheus' text format."""
        self._connected.set(len(self.robots))
        self._waiting.set(queued)
        return generate_latest(self._registry)

    def status(self, queued: int, ready: bool) -> dict[str, Any]:
        """The live numbers, over the last 10 seconds where they are rates or times; computed twice a second at most."""
        now = time.monotonic()
        if now - self._status[0] > 0.5:
            self._status = now, self._live(now)
        return self._status[1] | {"queued": queued, "ready": ready}

    def _live(self, now: float) -> dict[str, Any]:
        recent = [entry for entry in self._stages if now - entry[0] <= _WINDOW_S]
        columns = [[entry[i] for entry in recent] for i in (1, 2, 3)]
        return {
            "bundle": self.bundle,
            "uptime_s": now - self.started,
            "rate_hz": self._pace.rate_hz(now, self.started),
            "batch": sum(entry[4] for entry in recent) / len(recent) if recent else None,
            "outcomes": dict(self._outcomes),
            "stages_ms": {stage: _quantiles(column) for stage, column in zip(_STAGES, columns, strict=True)},
            "robots": [{"id": key, **_robot(robot, now)} for key, robot in self.robots.items()],
        }


def _robot(robot: Robot, now: float) -> dict[str, Any]:
    times = [total for when, total in robot.recent if now - when <= _WINDOW_S]
    report = {name: robot.report.get(name, 0) for name in REPORTED}
    return {
        "name": robot.name,
        "connected_s": now - robot.since,
        "requests": robot.requests,
        "errors": robot.errors,
        "rate_hz": robot.pace.rate_hz(now, robot.since),
        "transmission_rate": report["transmitted"] / report["steps"] if report["steps"] else None,
        "acceptance": report["accepted"] / report["verified"] if report["verified"] else None,
        "missed": report["missed"],
        "total_ms": _quantiles(times),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    # Sorting a short list takes a tenth of the time that NumPy's quantiles do; a server can have hundreds of robots.
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{share}": ordered[min(len(ordered) - 1, share * len(ordered) // 100)] for share in (50, 95, 99)}
