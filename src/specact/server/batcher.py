"""Micro-batching: when the target becomes free it takes the queued requests, except expired and cancelled ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from specact.errors import WireError
from specact.rng import StepAddress
from specact.server.settings import Limits
from specact.server.turns import FairQueue, Lane, queue_full
from specact.wire.exchange import Exchange, Request
from specact.wire.messages import ErrorCode

_log = logging.getLogger("specact.server")
_WARM_UP_RUNS = 20


@dataclass(frozen=True, slots=True)
class Result:
    """The target's result for a request: bytes of the reply's arrays, durations, and requests in that inference."""

    arrays: bytearray
    queued_s: float
    target_s: float
    batch: int


@dataclass(slots=True, eq=False)
class Job:
    """A validated request; ``finish`` is called with the outcome on the event loop, unless it is no longer wanted."""

    id: int
    kind: str
    request: Request
    deadline_ms: float
    arrived: float
    finish: Callable[[Job, Result | WireError], None]
    wanted: bool = True

    def alive(self, now: float) -> bool:
        """Whether it is neither expired nor cancelled."""
        return self.wanted and now - self.arrived <= self.deadline_ms / 1e3


# Those to compute, and those that are expired or cancelled.
Batch = tuple[list[Job], list[Job]]
Outcomes = list[tuple[Job, Result | WireError]]


class Batcher:
    """Micro-batching without waiting: a batch holds the requests that arrived during the last one, robots in turn.

    Everything but the target, which may have a thread, is on the server's event loop.

    Args:
        exchange: of the target.
        limits: of the queue and of batches.

    Attributes:
        ready: whether requests are answered.
    """

    def __init__(self, exchange: Exchange[Any], limits: Limits) -> None:
        self._exchange, self._limits = exchange, limits
        self._queue = FairQueue[Job](limits.max_queue, limits.max_under_way)
        # Queued or being computed, and wanted.
        self._jobs = set[Job]()
        self._inline = self._warm = self._busy = self.ready = False
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def warm_up(self) -> None:
        """Runs a few inferences, so that a target that fails or blocks does so before serving."""
        idle = Request(self._exchange.contract.observation.zeros(), StepAddress(0, 0, 0, 0))
        times = []
        for _ in range(_WARM_UP_RUNS):
            started = time.perf_counter()
            self._exchange.answer("infer", [idle])
            times.append(1e3 * (time.perf_counter() - started))
        # For a target this fast a thread switch takes longer than the inference. A third-party target keeps its thread:
        # it may block on a file or a lock, which would stall every connection.
        steady = getattr(self._exchange, "steady", False) and not self._limits.max_wait_ms
        self._inline, self._warm = steady and sorted(times)[_WARM_UP_RUNS // 2] < self._limits.inline_below_ms, True

    def start(self) -> None:
        """Starts serving on the running event loop; warms the target up if necessary."""
        if not self._warm:
            self.warm_up()
        self._loop, self.ready = asyncio.get_running_loop(), True
        if not self._inline:
            # A target that never returns ends with the process.
            threading.Thread(target=self._run, name="specact target", daemon=True).start()

    def stop(self) -> None:
        """Ends the target's thread, without waiting for it; queued requests are not answered any more."""
        self.ready = False
        self._batches.put(None)

    @property
    def queued(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """Number of requests that are queued or being computed, without cancelled ones."""
        return len(self._jobs)

    def lane(self) -> Lane[Job]:
        """A new queue for the requests of one robot; robots are served in turn."""
        return self._queue.lane()

    def submit(self, lane: Lane[Job], job: Job) -> None:
        """Queues a request.

        Its outcome is a result, or ``overloaded`` if it was displaced by a robot with fewer queued requests,
        ``expired`` if the deadline passed first, ``internal`` if the target failed.

        Raises:
            WireError: ``overloaded`` if the queue or the robot's lane is full, ``shutting_down`` if it is closed.
        """
        if not self.ready or self._loop is None:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        displaced = self._queue.put(lane, job)
        self._jobs.add(job)
        if displaced is not None:
            outcomes: Outcomes = [(displaced, queue_full(self._limits.max_queue))]
            self._loop.call_soon(self._finish, outcomes)
        if not self._busy:
            self._busy = True
            self._loop.call_later(self._limits.max_wait_ms / 1e3, self._next)

    def cancel(self, job: Job) -> None:
        """Cancels a request that nobody waits for any more."""
        job.wanted = False
        self._jobs.discard(job)

    def abandon(self) -> int:
        """Answers every request in flight with ``shutting_down``; returns their number."""
        jobs = list(self._jobs)
        for job in jobs:
            self.cancel(job)
            job.finish(job, WireError(ErrorCode.SHUTTING_DOWN, "the server stopped before the target had answered"))
        return len(jobs)

    def _next(self) -> None:
        """Has the next batch computed; on the event loop connections are read before the one after it."""
        now = time.monotonic()
        batch = self._queue.take(self._limits.max_batch, lambda job: job.alive(now))
        if self._inline:
            self._computed(self._outcomes(*batch))
        else:
            self._batches.put(batch)

    def _computed(self, outcomes: Outcomes) -> None:
        self._busy = self.ready and len(self._queue) > 0
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
            self._jobs.discard(job)
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

    def _answer(self, kind: str, jobs: list[Job], started: float) -> list[Result | WireError]:
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
        spent, results = time.monotonic() - started, list[Result | WireError]()
        for job, payload in zip(jobs, packed, strict=True):
            try:
                if isinstance(payload, WireError):
                    raise payload
                # Extreme observations can overflow; only that request of the batch fails.
                layout.check(payload)
                results.append(Result(payload, started - job.arrived, spent, len(jobs)))
            except WireError as error:
                results.append(WireError(error.code, f"the target cannot answer this request: {error}"))
        return results
