"""Micro-batching: when the target becomes free it takes the queued requests, robots in turn."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from specact.errors import WireError
from specact.rng import StepAddress
from specact.server.access import Limits
from specact.wire.exchange import Exchange, Request
from specact.wire.messages import ErrorCode, Reply

Item = TypeVar("Item")
_log = logging.getLogger("specact.server")
# A built-in network with a shorter inference runs on the event loop, because a thread switch would take as long.
_WARM_UP_RUNS, _INLINE_BELOW_S = 20, 1e-3


class Lane(Generic[Item]):
    """The queued items of one robot, oldest first, and the turn in which it was last served, or created."""

    __slots__ = ("items", "served")

    def __init__(self, served: int) -> None:
        self.items: deque[Item] = deque()
        self.served = served


class FairQueue(Generic[Item]):
    """Takes one item per turn from the least recently served lane. Not thread-safe.

    It holds at most ``most`` items of all lanes, and ``most_per_lane`` of one. An idle lane goes before those that are
    never empty. A new lane counts as served at its creation, so that many short-lived lanes cannot starve an old one.
    """

    def __init__(self, most: int, most_per_lane: int) -> None:
        self._max_items, self._max_per_lane = most, most_per_lane
        # Heap of the non-empty lanes: last turn, tie-breaker, lane.
        self._waiting: list[tuple[int, int, Lane[Item]]] = []
        self._size = self._turn = self._pushes = 0

    def __len__(self) -> int:
        return self._size

    def lane(self) -> Lane[Item]:
        """A new lane."""
        return Lane(self._turn)

    def put(self, lane: Lane[Item], item: Item) -> Item | None:
        """Adds an item at the end of its lane; returns the newest item of the longest lane, if that was displaced.

        Raises:
            WireError: ``overloaded`` if the lane is full, or the queue is full and no lane is longer than this one.
        """
        if len(lane.items) >= self._max_per_lane:
            raise overloaded(f"{self._max_per_lane} requests of this robot are already waiting; wait for a reply first")
        displaced = None
        if self._size >= self._max_items:
            longest = max((entry[2] for entry in self._waiting), key=lambda other: len(other.items))
            if len(longest.items) <= len(lane.items) + 1:
                raise queue_full(self._max_items)
            displaced = longest.items.pop()
            self._size -= 1
        lane.items.append(item)
        self._size += 1
        if len(lane.items) == 1:
            self._push(lane)
        return displaced

    def take(self, most: int, alive: Callable[[Item], bool]) -> tuple[list[Item], list[Item]]:
        """The next items, at most ``most`` that are alive, and the dead ones before them, which take no turn."""
        taken, dead = list[Item](), list[Item]()
        while self._waiting and len(taken) < most:
            lane = heapq.heappop(self._waiting)[2]
            while lane.items:
                item = lane.items.popleft()
                if alive(item):
                    taken.append(item)
                    self._turn += 1
                    lane.served = self._turn
                    break
                dead.append(item)
            if lane.items:
                self._push(lane)
        self._size -= len(taken) + len(dead)
        return taken, dead

    def _push(self, lane: Lane[Item]) -> None:
        self._pushes += 1
        heapq.heappush(self._waiting, (lane.served, self._pushes, lane))


def overloaded(why: str) -> WireError:
    """The error for what the server does not take on."""
    return WireError(ErrorCode.OVERLOADED, why)


def queue_full(most: int) -> WireError:
    """The error for a request that is refused or displaced."""
    return overloaded(f"{most} requests are waiting already; ask again later")


@dataclass(slots=True, eq=False)
class Job:
    """A validated request; ``finish`` is called with the outcome on the event loop, unless it is no longer wanted.

    An outcome is an error, or a reply whose ``total_ms`` is not known yet.
    """

    id: int
    kind: str
    request: Request
    deadline_ms: float
    arrived: float
    finish: Callable[[Job, Reply | WireError], None]
    wanted: bool = True


# Those to compute, and those that are expired or cancelled.
Batch = tuple[list[Job], list[Job]]
Outcomes = list[tuple[Job, Reply | WireError]]


class Batcher:
    """Micro-batching without waiting: a batch holds the requests that arrived during the last one, robots in turn.

    Everything but the target, which may have a thread, is on the server's event loop.

    Attributes:
        ready: whether requests are taken.
        queue, jobs: the queued requests, and those that are queued or being computed, without cancelled ones.
    """

    def __init__(self, exchange: Exchange[Any], limits: Limits) -> None:
        self._exchange, self._limits = exchange, limits
        self.queue = FairQueue[Job](limits.max_queue, limits.max_under_way)
        self.jobs = set[Job]()
        self._inline = self._busy = self.ready = False
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def warm_up(self) -> None:
        """Runs a few inferences, so that a target that fails or blocks does so before serving."""
        idle = Request(self._exchange.contract.observation.zeros(), StepAddress(0, 0, 0, 0))
        times = []
        for _ in range(_WARM_UP_RUNS):
            started = time.perf_counter()
            self._exchange.answer("infer", [idle])
            times.append(time.perf_counter() - started)
        # A third-party target keeps its thread: it may block on a file or a lock, which would stall every connection.
        steady = getattr(self._exchange, "steady", False)
        self._inline = steady and sorted(times)[_WARM_UP_RUNS // 2] < _INLINE_BELOW_S

    def start(self) -> None:
        """Starts serving on the running event loop; after :meth:`warm_up`."""
        self._loop, self.ready = asyncio.get_running_loop(), True
        if not self._inline:
            # A target that never returns ends with the process.
            threading.Thread(target=self._run, name="specact target", daemon=True).start()

    def stop(self) -> None:
        """Ends the target's thread, without waiting for it; queued requests are not answered any more."""
        self.ready = False
        self._batches.put(None)

    def submit(self, lane: Lane[Job], job: Job) -> None:
        """Queues a request.

        Its outcome is a result, or ``overloaded`` if it was displaced by a robot with fewer queued requests,
        ``expired`` if the deadline passed first, ``internal`` if the target failed.

        Raises:
            WireError: ``overloaded`` if the queue or the robot's lane is full, ``shutting_down`` if it is closed.
        """
        if not self.ready or self._loop is None:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        displaced = self.queue.put(lane, job)
        self.jobs.add(job)
        if displaced is not None:
            outcomes: Outcomes = [(displaced, queue_full(self._limits.max_queue))]
            self._loop.call_soon(self._finish, outcomes)
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._next)

    def cancel(self, job: Job) -> None:
        """Cancels a request that nobody waits for any more."""
        job.wanted = False
        self.jobs.discard(job)

    def abandon(self) -> int:
        """Answers every request in flight with ``shutting_down``; returns their number."""
        jobs = list(self.jobs)
        for job in jobs:
            self.cancel(job)
            job.finish(job, WireError(ErrorCode.SHUTTING_DOWN, "the server stopped before the target had answered"))
        return len(jobs)

    def _next(self) -> None:
        """Has the next batch computed; on the event loop connections are read before the one after it."""
        now = time.monotonic()
        batch = self.queue.take(
            self._limits.max_batch, lambda job: job.wanted and now - job.arrived <= job.deadline_ms / 1e3
        )
        if self._inline:
            self._computed(self._outcomes(*batch))
        else:
            self._batches.put(batch)

    def _computed(self, outcomes: Outcomes) -> None:
        self._busy = len(self.queue) > 0
        # Before the replies, after which robots send more: then there is room in the queue.
        if self._busy and not self._inline:
            self._next()
        elif self._busy and self._loop is not None:
            self._loop.call_soon(self._next)
        self._finish(outcomes)

    def _run(self) -> None:
        assert self._loop is not None
        while batch := self._batches.get():
            outcomes = self._outcomes(*batch)
            # The loop is closed if the target took longer than a stop waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._computed, outcomes)

    def _finish(self, outcomes: Outcomes) -> None:
        for job, outcome in outcomes:
            self.jobs.discard(job)
            if job.wanted:
                job.finish(job, outcome)

    def _outcomes(self, jobs: list[Job], late: list[Job]) -> Outcomes:
        """The outcomes of a batch, whose requests of one kind are one inference."""
        outcomes: Outcomes = [(job, WireError(ErrorCode.EXPIRED, "the deadline passed in the queue")) for job in late]
        by_kind: dict[str, list[Job]] = {}
        for job in jobs:
            by_kind.setdefault(job.kind, []).append(job)
        for kind, group in by_kind.items():
            outcomes += zip(group, self._answer(kind, group, time.monotonic()), strict=True)
        return outcomes

    def _answer(self, kind: str, jobs: list[Job], started: float) -> list[Reply | WireError]:
        layout = self._exchange.contract.kinds[kind].reply
        try:
            answers = self._exchange.answer(kind, [job.request for job in jobs])
            if len(answers) != len(jobs):
                raise ValueError(f"{len(jobs)} requests have {len(answers)} answers")
            packed = [answer if isinstance(answer, WireError) else layout.pack(answer) for answer in answers]
        # Process boundary: a target's exception must not end the server or be disclosed to clients.
        except (Exception, SystemExit):  # noqa: BLE001
            _log.exception("the target failed")
            return [WireError(ErrorCode.INTERNAL, "the target failed; see the server's log") for _ in jobs]
        spent, results = time.monotonic() - started, list[Reply | WireError]()
        for job, payload in zip(jobs, packed, strict=True):
            try:
                if isinstance(payload, WireError):
                    raise payload
                # Extreme observations can overflow; only that request of the batch fails.
                layout.check(payload)
                queued_ms = 1e3 * max(0.0, started - job.arrived)
                results.append(Reply(job.id, queued_ms, 1e3 * spent, 0.0, len(jobs), payload))
            except WireError as error:
                results.append(WireError(error.code, f"the target cannot answer this request: {error}"))
        return results
