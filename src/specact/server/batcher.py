"""Micro-batching: the target takes what is queued when it becomes free, and computes nothing in vain."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from specact.errors import WireError
from specact.rng import StepAddress
from specact.server.settings import ServerSettings
from specact.server.turns import FairQueue, Lane, queue_full
from specact.wire.checks import ErrorCode
from specact.wire.dialect import Arrays
from specact.wire.messages import Request, Responder

_log = logging.getLogger("specact.server")
_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Result:
    """What the target made of a request.

    Attributes:
        arrays: of the reply.
        queued_s, target_s: how long the request waited, and the inference took.
        batch: requests in that inference.
    """

    arrays: Arrays
    queued_s: float
    target_s: float
    batch: int


@dataclass(slots=True)
class Job:
    """A request, when its frame came in [s, monotonic clock], and who waits for its result."""

    request: Request
    arrived: float
    future: asyncio.Future[Result]

    def alive(self, now: float) -> bool:
        """Whether its time is not up, and somebody waits: nobody does where the connection is gone."""
        return not self.future.cancelled() and now - self.arrived <= self.request.deadline_ms / 1e3


class Batcher:
    """Micro-batching without waiting: the batch is what came in while the last one was computed, robots in turn.

    Args:
        responder: the target.
        settings: how many requests it takes on, and how large batches are.
    """

    def __init__(self, responder: Responder, settings: ServerSettings) -> None:
        self._responder = responder
        self._max_batch, self._max_queue = settings.max_batch, settings.max_queue
        self._max_wait_s, self._inline_below_s = settings.max_wait_ms / 1e3, settings.inline_below_ms / 1e3
        self._queue = FairQueue[Job](settings.max_queue, settings.max_under_way)
        self._changed = threading.Condition()
        self._closing = False
        self._inline = self._scheduled = self._warm = False
        self._thread = threading.Thread(target=self._work, name="specact target", daemon=True)
        self.ready = False

    def warm_up(self) -> None:
        """Lets the target answer a few times; a target that fails or blocks does so here."""
        idle = Request("infer", 0, 0.0, self._responder.dialect.observation.zeros(), StepAddress(0, 0, 0, 0))
        times = []
        for _ in range(_WARM_UP):
            started = time.perf_counter()
            self._responder.respond([idle])
            times.append(time.perf_counter() - started)
        # A target this fast is done before a thread could be told of the request. Somebody else's may wait for a file
        # or a lock the next time, and would hold up every connection.
        steady = getattr(self._responder, "steady", False)
        self._inline = steady and not self._max_wait_s and sorted(times)[_WARM_UP // 2] < self._inline_below_s
        self._warm = True

    def start(self) -> None:
        """Starts taking requests; warms the target up if nobody has."""
        if not self._warm:
            self.warm_up()
        if not self._inline:
            self._thread.start()
        elif self._queue:
            self._schedule(asyncio.get_running_loop())
        self.ready = True

    def stop(self) -> None:
        """Ends the thread, where there is one; what is still queued is answered first."""
        with self._changed:
            self._closing, self.ready = True, False
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        while self._inline and self._queue:
            self._serve()

    @property
    def queued(self) -> int:
        """Requests that wait now."""
        return len(self._queue)

    def lane(self) -> Lane[Job]:
        """Where the requests of one robot wait; robots are served in turn."""
        return self._queue.lane()

    def submit(self, lane: Lane[Job], request: Request, arrived: float) -> asyncio.Future[Result]:
        """Queues a request; call it on the event loop that awaits the result.

        Args:
            lane: of the robot, from :meth:`lane`.
            request: checked already.
            arrived: when its frame came in, in seconds of the monotonic clock.

        Raises:
            WireError: ``overloaded`` if the queue or the robot's lane is full, ``shutting_down`` if it is closed;
                as the future's exception ``overloaded`` if it made room for a robot that has less in the queue,
                ``expired`` if the deadline passed first, ``internal`` if the target failed.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closing:
                raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
            displaced = self._queue.put(lane, Job(request, arrived, future))
            if not self._inline:
                self._changed.notify()
            elif not self._scheduled:
                self._schedule(future.get_loop())
        if displaced is not None:
            _resolve_on_their_loops([(displaced, queue_full(self._max_queue))])
        return future

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = True
        loop.call_soon(self._serve)

    def _serve(self) -> None:
        """On the event loop: a batch of what came in since the last one; connections are read before the next."""
        self._scheduled = False
        now = time.monotonic()
        outcomes = self._outcomes(*self._queue.take(self._max_batch, lambda job: job.alive(now)))
        _resolve(outcomes)
        if self._queue and not self._closing:
            self._schedule(outcomes[0][0].future.get_loop())

    def _work(self) -> None:
        while batch := self._take():
            _resolve_on_their_loops(self._outcomes(*batch))

    def _outcomes(self, jobs: list[Job], late: list[Job]) -> list[tuple[Job, Result | WireError]]:
        outcomes: list[tuple[Job, Result | WireError]] = [
            (job, WireError(ErrorCode.EXPIRED, "the deadline passed in the queue")) for job in late
        ]
        if jobs:
            outcomes += zip(jobs, self._answer(jobs, time.monotonic()), strict=True)
        return outcomes

    def _take(self) -> tuple[list[Job], list[Job]] | None:
        """The next batch, and what needs no answer any more; None when it is time to end."""
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

    def _answer(self, jobs: Sequence[Job], started: float) -> list[Result | WireError]:
        try:
            found = list(zip(jobs, self._responder.respond([job.request for job in jobs]), strict=True))
        # The border of the process: whatever the target raises, the server lives on and says nothing of its inside.
        except (Exception, SystemExit):  # noqa: BLE001
            _log.exception("the target failed")
            return [WireError(ErrorCode.INTERNAL, "the target failed; see the server's log") for _ in jobs]
        spent = time.monotonic() - started
        return [
            answer if isinstance(answer, WireError) else Result(answer, started - job.arrived, spent, len(jobs))
            for job, answer in found
        ]


def _resolve_on_their_loops(outcomes: Sequence[tuple[Job, Result | WireError]]) -> None:
    for loop in {job.future.get_loop() for job, _ in outcomes}:
        own = [(job, outcome) for job, outcome in outcomes if job.future.get_loop() is loop]
        loop.call_soon_threadsafe(_resolve, own)


def _resolve(outcomes: Sequence[tuple[Job, Result | WireError]]) -> None:
    for job, outcome in outcomes:
        # Cancelled where its connection is gone.
        if job.future.done():
            continue
        if isinstance(outcome, WireError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
