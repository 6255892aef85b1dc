"""How many robots a server holds: its service time is fitted, and its own queue run in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from specact.server.queue import Job, Lane, Queue
from specact.wire.messages import Ask

# Intervals vary by this share of the period. The queue starts empty, so the first share of the time is not counted.
_JITTER, _WARM_UP = 0.1, 0.2
SEARCH_REQUESTS = 20_000


@dataclass(frozen=True)
class ServiceTime:
    """An inference of b requests takes ``base_s + per_request_s * b`` seconds, messages and replies included."""

    base_s: float
    per_request_s: float

    @classmethod
    def fit(cls, measured: Mapping[int, Sequence[float]] | Mapping[float, Sequence[float]]) -> ServiceTime:
        """From measured seconds per batch size, which may be a mean: least relative squares of medians, none negative.

        Of a single size nothing is known about batching: then it is all per request.
        """
        rows = np.array([np.array((1.0, size)) / np.median(times) for size, times in measured.items()])
        base, per_request = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
        alone = (rows.sum(0) / (rows**2).sum(0)).tolist()  # the one where the other is 0
        if len(rows) == 1 or base < 0:
            return cls(0.0, alone[1])
        return cls(base, per_request) if per_request >= 0 else cls(alone[0], 0.0)

    def seconds(self, batch: int) -> float:
        """Seconds for a batch of this size."""
        return self.base_s + self.per_request_s * batch

    def most_hz(self, max_batch: int) -> float:
        """Requests per second with every batch full: no server answers more."""
        return max_batch / self.seconds(max_batch) if self.seconds(max_batch) else inf


@dataclass(frozen=True)
class Demand:
    """What a robot needs: requests a second, and the deadline [s] of each."""

    rate_hz: float
    deadline_s: float


def latencies(
    demands: Sequence[Demand], service: ServiceTime, max_batch: int, rng: Generator, requests: int
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Seconds from request to reply, infinite for the expired, and the index of the robot, of about so many requests.

    Robots ask at intervals that vary by up to a tenth, from random phases. When the target is free it takes at most
    ``max_batch`` requests from a :class:`~specact.server.queue.Queue`, as the server does.
    """
    rates, deadlines = np.array([(demand.rate_hz, demand.deadline_s) for demand in demands]).T
    horizon_s = requests / rates.sum()
    counts = np.ceil(horizon_s * rates / (1 - _JITTER)).astype(int)
    robots = np.repeat(np.arange(len(rates)), counts)
    intervals = rng.uniform(1 - _JITTER, 1 + _JITTER, len(robots)) / rates[robots]
    # Sums of the intervals of each robot, from its phase.
    first, ends = np.cumsum(counts) - counts, np.cumsum(intervals)
    arrivals = ends - (ends[first] - intervals[first] * rng.uniform(size=len(rates)))[robots]
    order = np.argsort(arrivals)[: np.count_nonzero(arrivals < horizon_s)]
    arrivals, robots = arrivals[order], robots[order]
    lanes, queue, done = [Lane() for _ in demands], Queue(), dict[Job, float]()
    jobs = [Job(Ask("infer", 0, 0.0, (0, 0, 0, 0), bytearray()), lanes[robot], at, at + demands[robot].deadline_s)
            for at, robot in zip(arrivals.tolist(), robots.tolist(), strict=True)]  # fmt: skip
    # In overload the backlog is as long as the deadline, however slowly it grew.
    now, coming = 0.0 if rates.sum() <= service.most_hz(max_batch) else deadlines.max(), deque(jobs)
    while coming or queue:
        now = now if queue else max(now, coming[0].arrived)
        while coming and coming[0].arrived <= now:
            queue.put(coming.popleft())
        if batch := queue.take(max_batch, now)[0]:
            queue.charge(batch, service.seconds(len(batch)))
            now += service.seconds(len(batch))
            done |= dict.fromkeys(batch, now)
    times = np.array([done.get(job, inf) - job.arrived for job in jobs])
    return times[arrivals >= _WARM_UP * horizon_s], robots[arrivals >= _WARM_UP * horizon_s]


def missed(demands: Sequence[Demand], service: ServiceTime, max_batch: int, rng: Generator, most: int = 2000) -> float:
    """The largest share of missed replies, expired or late, of any robot; robots of one demand count together."""
    # Without a simulation if none can be late: a request waits for the batch under way, and then full ones with what
    # the others ask before and while it waits, which is once each if that takes no longer than a period.
    worst_s = (1 + ceil(2 * len(demands) / max_batch)) * service.seconds(min(len(demands), max_batch))
    if all(worst_s <= min(demand.deadline_s, (1 - _JITTER) / demand.rate_hz) for demand in demands):
        return 0.0
    times, robots = latencies(demands, service, max_batch, rng, most)
    table = np.array([(demand.rate_hz, demand.deadline_s) for demand in demands])
    kind = np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)[robots]
    late = np.bincount(kind, times > table[robots, 1])
    return float((late / np.maximum(np.bincount(kind), 1)).max())


def capacity(demand: Demand, service: ServiceTime, max_batch: int, seed: int, allowed: float = 0.01) -> int:
    """The largest number of such robots, at most 100,000, of which none misses more than ``allowed``; by bisection."""
    few, many = 0, int(min(service.most_hz(max_batch) / demand.rate_hz, 100_000)) + 1
    while many - few > 1:
        between = (few + many) // 2
        # A draw of its own for each number, so that whoever simulates it again sees the same.
        rng = np.random.default_rng(seed)
        holds = missed([demand] * between, service, max_batch, rng, SEARCH_REQUESTS) <= allowed
        few, many = (between, many) if holds else (few, between)
    return few
