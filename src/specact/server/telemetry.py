"""What a server tells: metrics for Prometheus, the numbers of the status page, and the access log."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specact.errors import ConfigError
from specact.wire.messages import Reply

_log = logging.getLogger("specact.server")
# Logged refusals of one code per second; the rest is counted, so that a flood does not fill the disk.
_MAX_REFUSALS_PER_S = 20
# Replies of which the status page shows quantiles, of all robots and of one.
_RECENT, _RECENT_OF_ROBOT = 1000, 100
_STAGES, _BUCKETS_MS = ("queue", "target", "total"), (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# Meaning of each histogram, and upper bounds of its buckets.
_HISTOGRAMS = {f"{stage}_milliseconds": (f"Time of the stage: {stage}.", _BUCKETS_MS) for stage in _STAGES} | {
    "batch_size": ("Requests per inference.", (1, 2, 4, 8, 16, 32, 64))
}


@dataclass(eq=False)
class Robot:
    """One connection on the status page, since then [s]: replies, errors, its own counters, and the last total_ms.

    ``report`` is in the order of :data:`~specact.wire.messages.REPORT_COUNTERS`, or empty.
    """

    name: str
    since: float
    requests: int = 0
    errors: int = 0
    report: Sequence[int] = ()
    total_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_OF_ROBOT))


class Telemetry(Collector):
    """Counts requests, errors and robots of a bundle, and those that wait; used on the event loop only."""

    def __init__(self, bundle: str, waiting: Sized = ()) -> None:
        self._bundle, self._since, self._waiting = bundle, time.monotonic(), waiting
        self.robots: list[Robot] = []
        self._requests = Counter[tuple[str, str]]()  # by kind and outcome
        # The last replies: queue_ms, target_ms, total_ms and batch. The histograms have all but the newest.
        self._replies, self._counted = list[tuple[float, float, float, int]](), 0
        self._counts = [np.zeros(len(bounds) + 1, np.int64) for _, bounds in _HISTOGRAMS.values()]
        self._sums = np.zeros(len(_HISTOGRAMS))

    def connected(self, name: str) -> Robot:
        """Adds a connection, until it is removed from ``robots``."""
        self.robots.append(robot := Robot(name, time.monotonic()))
        return robot

    def record_reply(self, kind: str, reply: Reply, robot: Robot) -> None:
        """Records a reply."""
        self._requests[kind, "ok"] += 1
        self._replies.append((reply.queue_ms, reply.target_ms, reply.total_ms, reply.batch))
        if len(self._replies) >= 4 * _RECENT:
            self._fold()
        robot.requests += 1
        robot.total_ms.append(round(reply.total_ms, 3))

    def record_error(self, kind: str, code: str, robot: Robot | None) -> None:
        """Records an error reply."""
        self._requests[kind, code] += 1
        if robot is not None:
            robot.errors += 1

    def prometheus(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """The current metrics, for Prometheus' registry."""
        requests = CounterMetricFamily("specact_requests", "Requests by kind and outcome.", labels=["kind", "outcome"])
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        self._fold()
        for (name, (meaning, bounds)), counts, total in zip(_HISTOGRAMS.items(), self._counts, self._sums, strict=True):
            names = [*(str(float(bound)) for bound in bounds), "+Inf"]
            buckets = list(zip(names, np.cumsum(counts).tolist(), strict=True))
            yield HistogramMetricFamily(f"specact_{name}", meaning, buckets, float(total))
        yield GaugeMetricFamily("specact_robots", "Connected robots.", len(self.robots))
        yield GaugeMetricFamily("specact_queue", "Requests that wait for the target.", len(self._waiting))

    def _fold(self) -> None:
        """Puts new replies into the histograms: all at once, which takes a tenth of the time of one by one."""
        if new := self._replies[self._counted :]:
            columns = np.array(new).T
            self._sums += columns.sum(1)
            for counts, (_, bounds), values in zip(self._counts, _HISTOGRAMS.values(), columns, strict=True):
                counts += np.bincount(np.searchsorted(bounds, values), minlength=len(counts))
        del self._replies[:-_RECENT]
        self._counted = len(self._replies)

    def status(self, ready: bool) -> bytes:
        """What the status page is drawn from, as JSON: counts since the start, and the last replies."""
        outcomes = Counter[str]()
        for (_, outcome), count in self._requests.items():
            outcomes[outcome] += count
        seen = {"bundle": self._bundle, "now": time.monotonic(), "since": self._since, "ready": ready,
                "queued": len(self._waiting), "outcomes": outcomes, "recent": self._replies[-_RECENT:],
                "robots": self.robots}  # fmt: skip
        # Only the deques of robots are no JSON.
        return msgspec.json.encode(seen, enc_hook=list)


class AccessLog(WatchedFileHandler):
    """Appends events to a file, if any, one line of JSON each; ConfigError if the file cannot be opened.

    It opens another where log rotation has moved the file away.
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
            written = Counter(dict.fromkeys(self._refused, _MAX_REFUSALS_PER_S))
            for other, more in (self._refused - written).items():
                self.write("refused", code=other, more=more)
            self._second, self._refused = second, Counter()
        self._refused[code] += 1
        if self._refused[code] <= _MAX_REFUSALS_PER_S:
            self.write("refused", what=what, code=code, peer=peer, robot=robot, why=why[:200])

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        # A disk that is full costs lines, not robots.
        if not self._full:
            self._full = True
            _log.error("the access log %s lacks lines", self.baseFilename, exc_info=True)
