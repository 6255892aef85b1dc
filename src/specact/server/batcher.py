"""Micro-batching: when the target becomes free it takes the queued requests, except expired and cancelled ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specact.errors import WireError
from specact.rng import StepAddress
from specact.server.settings import Limits
from specact.server.turns import FairQueue, Lane, queue_full
from specact.wire.arrays import Arrays, Layout
from specact.wire.exchange import Exchange, Request
from specact.wire.messages import ErrorCode

_log = logging.getLogger("specact.server")
_WARM_UP_RUNS = 20
# How long a stop waits for the target, which may never return.
_STOP_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """The target's result for a request: bytes of the reply's arrays, durations, and requests in that inference."""

    arrays: bytearray
    queued_s: float
    target_s: float
    batch: int


@dataclass(slots=True, eq=False)
class Job:
    """A queued request; ``finish`` is called with the outcome on the event loop, unless it is no longer wanted."""

    kind: str
    request: Request
    deadline_ms: float
    arrived: float
    finish: Callable[[Result | WireError], None]
    wanted: bool = True

    def alive(self, now: float) -> bool:
        """Whether it is neither expired nor cancelled."""
        return self.wanted and now - self.arrived <= self.deadline_ms / 1e3


Outcomes = list[tuple[Job, Result | WireError]]


class Batcher:
    """Micro-batching without waiting: a batch holds the requests that arrived during the last one, robots in turn.

    Args:
        exchange: of the target.
        limits: of the queue and of batches.
    """

    def __init__(self, exchange: Exchange[Any], limits: Limits) -> None:
        self._exchange, self._limits = exchange, limits
        self._queue = FairQueue[Job](limits.max_queue, limits.max_under_way)
        # Queued or being computed, and wanted.
        self._jobs = set[Job]()
        self._changed = threading.Condition()
        self._inline = self._scheduled = self._warm = self._closing = self.ready = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="specact target", daemon=True)

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

    def submit(self, lane: Lane[Job], job: Job) -> None:
        """Queues a validated request; call it on the server's event loop.

        Its outcome is a result, or ``overloaded`` if it was displaced by a robot with fewer queued requests,
        ``expired`` if the deadline passed first, ``internal`` if the target failed.

        Raises:
            WireError: ``overloaded`` if the queue or the robot's lane is full, ``shutting_down`` if it is closed.
        """
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
            outcomes: Outcomes = [(displaced, queue_full(self._limits.max_queue))]
            self._loop.call_soon(self._finish, outcomes)

    def cancel(self, job: Job) -> None:
        """Cancels a request that nobody waits for any more; call it on the event loop."""
        job.wanted = False
        self._jobs.discard(job)

    def abandon(self) -> int:
        """Answers every request in flight with ``shutting_down``, on the event loop; returns their number."""
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
        self._finish(self._outcomes(*self._batch()))
        if self._queue and not self._closing and not self._scheduled:
            self._schedule()

    def _run(self) -> None:
        while batch := self._take():
            outcomes = self._outcomes(*batch)
            # The loop is closed if the target took longer than a stop waits.
            with contextlib.suppress(RuntimeError):
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._finish, outcomes)

    def _batch(self) -> tuple[list[Job], list[Job]]:
        """The next batch, and expired or cancelled jobs."""
        now = time.monotonic()
        return self._queue.take(self._limits.max_batch, lambda job: job.alive(now))

    def _take(self) -> tuple[list[Job], list[Job]] | None:
        """See :meth:`_batch`; waits for it, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._limits.max_wait_ms:
                full = self._limits.max_batch
                self._changed.wait_for(
                    lambda: self._closing or len(self._queue) >= full, self._limits.max_wait_ms / 1e3
                )
            return self._batch() if self._queue else None

    def _outcomes(self, jobs: list[Job], late: list[Job]) -> Outcomes:
        """The outcomes of a batch, whose requests of one kind are one inference."""
        outcomes: Outcomes = [(job, WireError(ErrorCode.EXPIRED, "the deadline passed in the queue")) for job in late]
        by_kind: dict[str, list[Job]] = {}
        for job in jobs:
            by_kind.setdefault(job.kind, []).append(job)
        for kind, group in by_kind.items():
            outcomes += zip(group, self._answer(kind, group, time.monotonic()), strict=True)
        return outcomes

    def _answer(self, kind: str, jobs: Sequence[Job], started: float) -> list[Result | WireError]:
        try:
            answers = self._exchange.answer(kind, [job.request for job in jobs])
            layout = self._exchange.contract.kinds[kind].reply
            packed = [answer if isinstance(answer, WireError) else _packed(layout, answer) for answer in answers]
            if len(packed) != len(jobs):
                raise ValueError(f"{len(jobs)} requests have {len(packed)} answers")
        # Process boundary: a target's exception must not end the server or be disclosed to clients.
        except (Exception, SystemExit):  # noqa: BLE001
            _log.exception("the target failed")
            return [WireError(ErrorCode.INTERNAL, "the target failed; see the server's log") for _ in jobs]
        spent = time.monotonic() - started
        return [
            arrays if isinstance(arrays, WireError) else Result(arrays, started - job.arrived, spent, len(jobs))
            for job, arrays in zip(jobs, packed, strict=True)
        ]

    def _finish(self, outcomes: Outcomes) -> None:
        for job, outcome in outcomes:
            self._jobs.discard(job)
            if job.wanted:
                job.finish(outcome)


def _packed(layout: Layout, arrays: Arrays) -> bytearray | WireError:
    # Extreme observations can overflow; only that request of the batch fails.
    payload = layout.pack(arrays)
    try:
        layout.check(payload)
    except WireError as error:
        return WireError(error.code, f"the target has no usable answer to this observation: {error}")
    return payload
