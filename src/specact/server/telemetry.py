"""What a server tells: metrics for Prometheus, the numbers of the status page, and the access log."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specact.errors import ConfigError
from specact.wire.messages import REPORT_COUNTERS, Reply

_log = logging.getLogger("specact.server")
# Logged refusals of one code per second; the rest is counted, so that a flood does not fill the disk.
_MAX_REFUSALS_PER_S = 20
_WINDOW_S, _MAX_RECENT, _MAX_RECENT_OF_ROBOT = 10.0, 4096, 256
_STAGES, _BUCKETS_MS = ("queue", "target", "total"), (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_BUCKETS = {**{f"{stage}_milliseconds": _BUCKETS_MS for stage in _STAGES}, "batch_size": (1, 2, 4, 8, 16, 32, 64)}
_MEANING = {f"{stage}_milliseconds": f"Time of the stage: {stage}." for stage in _STAGES} | {
    "batch_size": "Requests per inference."
}


@dataclass(eq=False)
class Robot:
    """One connection on the status page: replies, errors, the device's own counters, and (time, total_ms) of replies.

    ``report`` is in the order of :data:`~specact.wire.messages.REPORT_COUNTERS`, or empty.
    """

    name: str
    since: float
    requests: int = 0
    errors: int = 0
    report: Sequence[int] = ()
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_RECENT_OF_ROBOT))


class Telemetry(Collector):
    """Counts requests, errors and connections of the bundle of this name; used on the event loop only."""

    def __init__(self, bundle: str) -> None:
        self.bundle, self.started = bundle, time.monotonic()
        self.robots: list[Robot] = []
        self._requests = Counter[tuple[str, str]]()  # by kind and outcome
        self._status: tuple[float, dict[str, Any]] = (-1.0, {})
        # Replies of late: when, queue_ms, target_ms, total_ms and batch; and those that no histogram has yet.
        self._recent: deque[tuple[float, ...]] = deque(maxlen=_MAX_RECENT)
        self._new: list[tuple[float, ...]] = []
        self._counts = [np.zeros(len(bounds) + 1, np.int64) for bounds in _BUCKETS.values()]
        self._sums, self._queued, self._registry = np.zeros(len(_BUCKETS)), 0, CollectorRegistry()
        self._registry.register(self)

    def connected(self, name: str) -> Robot:
        """Adds a connection, until it is removed from ``robots``."""
        self.robots.append(robot := Robot(name, time.monotonic()))
        return robot

    def record_reply(self, kind: str, reply: Reply, robot: Robot) -> None:
        """Records a reply."""
        now = time.monotonic()
        self._requests[kind, "ok"] += 1
        told = now, reply.queue_ms, reply.target_ms, reply.total_ms, float(reply.batch)
        self._recent.append(told)
        self._new.append(told)
        if len(self._new) >= _MAX_RECENT:
            self._fold()
        robot.requests += 1
        robot.recent.append((now, reply.total_ms))

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
        self._fold()
        for (name, bounds), counts, total in zip(_BUCKETS.items(), self._counts, self._sums, strict=True):
            names = [*(str(float(bound)) for bound in bounds), "+Inf"]
            buckets = list(zip(names, np.cumsum(counts).tolist(), strict=True))
            yield HistogramMetricFamily(f"specact_{name}", _MEANING[name], buckets, float(total))
        yield GaugeMetricFamily("specact_robots", "Connected robots.", len(self.robots))
        yield GaugeMetricFamily("specact_queue", "Requests that wait for the target.", self._queued)

    def _fold(self) -> None:
        """Puts new replies into the histograms: all at once, which takes a tenth of the time of one by one."""
        if self._new:
            columns = np.array(self._new).T[1:]
            self._sums += columns.sum(1)
            for counts, bounds, values in zip(self._counts, _BUCKETS.values(), columns, strict=True):
                counts += np.bincount(np.searchsorted(bounds, values), minlength=len(counts))
            self._new.clear()

    def status(self, queued: int, ready: bool) -> dict[str, Any]:
        """The live numbers; rates and times are over the last 10 seconds. Recomputed at most twice a second."""
        now = time.monotonic()
        if now - self._status[0] > 0.5:
            self._status = now, self._live(now)
        return self._status[1] | {"queued": queued, "ready": ready}

    def _live(self, now: float) -> dict[str, Any]:
        recent, outcomes = [reply[1:] for reply in self._recent if now - reply[0] <= _WINDOW_S], Counter[str]()
        for (_, outcome), count in self._requests.items():
            outcomes[outcome] += count
        return {
            "bundle": self.bundle, "uptime_s": now - self.started,
            "rate_hz": _rate_hz(self._recent, now, self.started, _MAX_RECENT),
            "batch": sum(batch for *_, batch in recent) / len(recent) if recent else None,
            "outcomes": dict(outcomes),
            "stages_ms": {stage: _quantiles([reply[place] for reply in recent]) for place, stage in enumerate(_STAGES)},
            "robots": [_row(robot, now) for robot in self.robots],
        }  # fmt: skip


def _row(robot: Robot, now: float) -> dict[str, Any]:
    report = dict.fromkeys(REPORT_COUNTERS, 0) | dict(zip(REPORT_COUNTERS, robot.report, strict=False))
    return {
        "name": robot.name, "connected_s": now - robot.since, "requests": robot.requests, "errors": robot.errors,
        "rate_hz": _rate_hz(robot.recent, now, robot.since, _MAX_RECENT_OF_ROBOT),
        "sent": report["transmitted"] / report["steps"] if report["steps"] else None,
        "accepted": report["accepted"] / report["verified"] if report["verified"] else None,
        "missed": report["missed"],
        "total_ms": _quantiles([total for when, total in robot.recent if now - when <= _WINDOW_S]),
    }  # fmt: skip


def _rate_hz(recent: Sequence[tuple[float, ...]], now: float, since: float, most: int) -> float:
    """Entries per second since ``since``, of the last ten seconds, or of as long as the entries reach back."""
    first = recent[0][0] if len(recent) == most else since
    begin = max(now - _WINDOW_S, first)
    return sum(reply[0] >= begin for reply in recent) / max(1.0, now - begin)


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    # Sorting a short list takes a tenth of the time of NumPy's quantiles; a server can have hundreds of robots.
    ordered = sorted(values)
    places = {share: min(len(ordered) - 1, share * len(ordered) // 100) for share in (50, 95, 99)}
    return {f"p{share}": ordered[place] for share, place in places.items()} if ordered else None


class AccessLog(WatchedFileHandler):
    """Appends events to a file, if any, one line of JSON each; it opens another where log rotation has moved it away.

    Raises:
        ConfigError: if the file cannot be opened.
    """

    def __init__(self, file: Path | None) -> None:
        try:
            super().__init__(file or os.devnull, encoding="ascii", delay=file is None)
        except OSError as error:
            raise ConfigError(f"cannot write the access log {file}: {error.strerror}") from None
        self._second, self._refused, self._full = 0, Counter[str](), False

    def write(self, event: str, **fields: Any) -> None:
        """Writes an event, in ASCII, so that a peer's name cannot inject lines."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.emit(logging.makeLogRecord({"msg": json.dumps({"time": now, "event": event, **fields})}))

    def write_refusal(self, what: str, code: str, peer: str | None, why: str, robot: str | None = None) -> None:
        """Writes an error reply or a dropped connection, limited per second and code."""
        second = int(time.monotonic())
        if second != self._second:
            for other, count in self._refused.items():
                if count > _MAX_REFUSALS_PER_S:
                    self.write("refused", code=other, more=count - _MAX_REFUSALS_PER_S)
            self._second, self._refused = second, Counter()
        self._refused[code] += 1
        if self._refused[code] <= _MAX_REFUSALS_PER_S:
            self.write("refused", what=what, code=code, peer=peer, robot=robot, why=why[:200])

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        # A disk that is full costs lines, not robots.
        if not self._full:
            self._full = True
            _log.error("the access log %s lacks lines", self.baseFilename, exc_info=True)
