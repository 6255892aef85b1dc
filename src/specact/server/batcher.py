"""Micro-batching: when the target becomes free it takes the queued requests, except expired and cancelled ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specact.errors import WireError
from specact.rng import StepAddress
from specact.server.settings import ServerSettings
from specact.server.turns import FairQueue, Lane, queue_full
from specact.wire.checks import ErrorCode
from specact.wire.dialect import Arrays
from specact.wire.messages import Request, Responder, ServerTimes

_log = logging.getLogger("specact.server")
_WARM_UP_RUNS = 20
# How long a stop waits for the target, which may never return.
_STOP_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """The target's result for a request.

    Attributes:
        arrays: of the reply.
        queued_s, target_s: durations of queueing and of the inference.
        batch: number of requests in that inference.
    """

    arrays: Arrays
    queued_s: float
    target_s: float
    batch: int

    def times(self, arrived: float) -> ServerTimes:
        """Times for a reply that is sent now; ``arrived`` is the job's."""
        total_ms = 1e3 * (time.monotonic() - arrived)
        return ServerTimes(max(0.0, 1e3 * self.queued_s), 1e3 * self.target_s, total_ms, self.batch)


Outcome = Result | WireError


@dataclass(slots=True, eq=False)
class Job:
    """A queued request.

    Attributes:
        request: itself.
        arrived: when its frame arrived [s, monotonic clock].
        finish: called with the outcome, on the event loop.
        wanted: False after cancellation, when the connection has ended.
    """

    request: Request
    arrived: float
    finish: Callable[[Outcome], None]
    wanted: bool = True

    def alive(self, now: float) -> bool:
        """Whether it is neither expired nor cancelled."""
        return self.wanted and now - self.arrived <= self.request.deadline_ms / 1e3


class Batcher:
    """Micro-batching without waiting: a batch holds the requests that arrived during the last one, robots in turn.

    Args:
        responder: the target.
        settings: limits of the queue and of batches.
    """

    def __init__(self, responder: Responder, settings: ServerSettings) -> None:
        self._responder = responder
        self._max_batch, self._max_queue = settings.max_batch, settings.max_queue
        self._max_wait_s, self._inline_below_s = settings.max_wait_ms / 1e3, settings.inline_below_ms / 1e3
        self._queue = FairQueue[Job](settings.max_queue, settings.max_under_way)
        # Queued or being computed, and wanted.
        self._jobs = set[Job]()
        self._changed = threading.Condition()
        self._closing = False
        self._inline = self._scheduled = self._warm = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="specact target", daemon=True)
        self.ready = False

    def warm_up(self) -> None:
        """Runs a few inferences, so that a target that fails or blocks does so before serving."""
        idle = Request("infer", 0, 0.0, self._responder.dialect.observation.zeros(), StepAddress(0, 0, 0, 0))
        times = []
        for _ in range(_WARM_UP_RUNS):
            started = time.perf_counter()
            self._responder.respond([idle])
            times.append(time.perf_counter() - started)
        # For a target this fast a thread switch takes longer than the inference. A third-party target keeps its thread:
        # it may block on a file or a lock, which would stall every connection.
        steady = getattr(self._responder, "steady", False)
        self._inline = steady and not self._max_wait_s and sorted(times)[_WARM_UP_RUNS // 2] < self._inline_below_s
        self._warm = True

    def start(self) -> None:
        """Starts serving; warms the target up if necessary."""
        if not self._warm:
            self.warm_up()
        if not self._inline:
            self._thread.start()
        elif self._queue:
            self._schedule()
        self.ready = True

    def stop(self) -> None:
        """Answers the queued requests and ends the thread, if there is one.

        A target that takes more than a second is not waited for: its thread ends with the process.
        """
        with self._changed:
            self._closing, self.ready = True, False
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        while self._inline and self._queue:
            self._serve()

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

    def submit(self, lane: Lane[Job], request: Request, arrived: float, finish: Callable[[Outcome], None]) -> Job:
        """Queues a request; call it on the server's event loop.

        Args:
            lane: of the robot, from :meth:`lane`.
            request: already validated.
            arrived: when its frame arrived, in seconds of the monotonic clock.
            finish: called later on the event loop with the result or an error: ``overloaded`` if it was displaced by a
                robot with fewer queued requests, ``expired`` if the deadline passed first, ``internal`` if the target
                failed. Not called for a job that is no longer ``wanted``.

        Raises:
            WireError: ``overloaded`` if the queue or the robot's lane is full, ``shutting_down`` if it is closed.
        """
        job = Job(request, arrived, finish)
        with self._changed:
            if self._closing:
                raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
            displaced = self._queue.put(lane, job)
            self._jobs.add(job)
            self._loop = asyncio.get_running_loop()
            if not self._inline:
                self._changed.notify()
            elif not self._scheduled:
                self._schedule()
        if displaced is not None:
            self._loop.call_soon(self._finish, [(displaced, queue_full(self._max_queue))])
        return job

    def cancel(self, job: Job) -> None:
        """Cancels a request that nobody waits for any more; call it on the event loop."""
        job.wanted = False
        self._jobs.discard(job)

    def abandon(self) -> int:
        """Answers every request in flight with ``shutting_down``; call it on the event loop.

        Returns:
            Their number.
        """
        jobs = list(self._jobs)
        for job in jobs:
            self.cancel(job)
            job.finish(WireError(ErrorCode.SHUTTING_DOWN, "the server stopped before the target had answered"))
        return len(jobs)

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Computes one batch on the event loop; connections are read before the next one."""
        self._scheduled = False
        now = time.monotonic()
        self._finish(self._outcomes(*self._queue.take(self._max_batch, lambda job: job.alive(now))))
        if self._queue and not self._closing and not self._scheduled:
            self._schedule()

    def _run(self) -> None:
        while batch := self._take():
            outcomes = self._outcomes(*batch)
            # The loop is closed if the target took longer than a stop waits.
            with contextlib.suppress(RuntimeError):
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._finish, outcomes)

    def _outcomes(self, jobs: list[Job], late: list[Job]) -> list[tuple[Job, Outcome]]:
        outcomes: list[tuple[Job, Outcome]] = [
            (job, WireError(ErrorCode.EXPIRED, "the deadline passed in the queue")) for job in late
        ]
        if jobs:
            outcomes += zip(jobs, self._answer(jobs, time.monotonic()), strict=True)
        return outcomes

    def _take(self) -> tuple[list[Job], list[Job]] | None:
        """The next batch, and expired or cancelled jobs; None at the end."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            if self._max_wait_s > 0.0:
                until = time.monotonic() + self._max_wait_s
                while len(self._queue) < self._max_batch and (left := until - time.monotonic()) > 0.0:
                    if self._closing:
                        break
                    self._changed.wait(left)
            if not self._queue:
                return None
            now = time.monotonic()
            return self._queue.take(self._max_batch, lambda job: job.alive(now))

    def _answer(self, jobs: Sequence[Job], started: float) -> list[Outcome]:
        try:
            found = list(zip(jobs, self._responder.respond([job.request for job in jobs]), strict=True))
        # Process boundary: a target's exception must not end the server or be disclosed to clients.
        except (Exception, SystemExit):  # noqa: BLE001
            _log.exception("the target failed")
            return [WireError(ErrorCode.INTERNAL, "the target failed; see the server's log") for _ in jobs]
        spent = time.monotonic() - started
        return [
            answer if isinstance(answer, WireError) else Result(answer, started - job.arrived, spent, len(jobs))
            for job, answer in found
        ]

    def _finish(self, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        for job, outcome in outcomes:
            self._jobs.discard(job)
            if job.wanted:
                job.finish(outcome)
