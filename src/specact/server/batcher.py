"""Micro-batching without waiting: when the target becomes free it takes the requests that arrived meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any

from specact.errors import WireError
from specact.rng import StepAddress
from specact.server.queue import Job, Outcome, Queue
from specact.wire.exchange import Exchange, Request
from specact.wire.messages import ErrorCode, Reply, requests_of

_log = logging.getLogger("specact.server")
_INTERNAL = WireError(ErrorCode.INTERNAL, "the target failed; see the server's log")
# A built-in network with a shorter inference runs on the event loop, because a thread switch would take as long.
_INLINE_BELOW_S = 1e-3
# Inferences before serving, of each size of a batch, and the time after which there are no more of them [s].
_WARM_UP_RUNS, _WARM_UP_S = 20, 1.0
# The work of an error, which needs no inference.
_NO_WORK = -1.0


class Batcher:
    """The target's side of a server. Everything but the target, which may have a thread, is on the event loop.

    Attributes:
        ready: whether requests are taken.
        queue: the requests that wait.
        times: of the last batches, by their size: until their replies, from the last batch or the first request [s].
    """

    def __init__(self, exchange: Exchange[Any], max_batch: int) -> None:
        self._exchange, self.max_batch = exchange, max_batch
        # What a request costs relative to others, where the exchange says so.
        self._work: Callable[[str, Request], float] = getattr(exchange, "work", lambda kind, request: 1.0)
        self.queue = Queue()
        self.times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=64))
        self._inline = self._busy = self.ready = False
        # The batch being computed: its size, how many requests have no outcome yet, and when its time began [s].
        self._size, self._left, self._since = 0, 0, 0.0
        self._batches: SimpleQueue[list[Job]] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop

    def warm_up(self) -> None:
        """Runs a few inferences, so that a target that fails or blocks does so before serving."""
        idle, usual = Request(self._exchange.contract.observation.zeros(), StepAddress(0, 0, 0, 0)), 0.0
        for size in (1, self.max_batch):
            times, until = self.times[size], time.monotonic() + _WARM_UP_S
            # A large batch of a slow target would take minutes.
            while len(times) < _WARM_UP_RUNS and time.monotonic() + size * usual < until:
                started = time.monotonic()
                self._exchange.answer("infer", [idle] * size)
                times.append(time.monotonic() - started)
            usual = usual or sorted(times)[len(times) // 2]
        # A third-party target keeps its thread: it may block on a file or a lock, which would stall every connection.
        self._inline = getattr(self._exchange, "steady", False) and usual < _INLINE_BELOW_S

    def start(self) -> None:
        """Starts serving on the running event loop; after :meth:`warm_up`."""
        self._loop, self.ready = asyncio.get_running_loop(), True
        if not self._inline:
            # A target that never returns ends with the process.
            threading.Thread(target=self._run, name="specact target", daemon=True).start()

    def stop(self) -> None:
        """Ends the target's thread, without waiting for it; queued requests are not answered any more."""
        self.ready = False
        self._batches.put([])

    def submit(self, job: Job) -> None:
        """Queues a request.

        Its outcome is a reply, ``bad_message`` where it cannot be answered, ``expired`` if the deadline passed first,
        ``internal`` if the target failed, or ``shutting_down``.
        """
        if not self.ready:
            job.finish(job, WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))
            return
        self.queue.put(job)
        if not self._busy:
            self._busy = True
            # In the next turn of the event loop, when every connection has been read that has a request by now.
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Has the next batch computed."""
        now = time.monotonic()
        self._since = self._since or now
        jobs, late = self.queue.take(self.max_batch, now)
        self._size = self._left = len(jobs)
        _finish(late, [WireError(ErrorCode.EXPIRED, "the deadline passed in the queue")] * len(late))
        if not jobs:
            self._rest()
        elif self._inline:
            for answers in self._answers(jobs):
                self._answered(*answers)
        else:
            self._batches.put(jobs)

    def _run(self) -> None:
        """The target's thread."""
        while jobs := self._batches.get():
            # The loop is closed if the target took longer than a stop waits.
            with contextlib.suppress(RuntimeError):
                for answers in self._answers(jobs):
                    self._loop.call_soon_threadsafe(self._answered, *answers)

    def _answered(self, jobs: Sequence[Job], outcomes: Sequence[Outcome], seconds: float) -> None:
        """Takes the outcomes of a group; after the last one of a batch goes on with the next."""
        self.queue.charge(jobs, seconds)
        self._left -= len(jobs)
        if self._left:
            _finish(jobs, outcomes)
        elif self._inline or len(self.queue) < self.max_batch:
            _finish(jobs, outcomes)
            self._measure()
            self._rest()
        else:
            # A full batch need not wait until the replies are sent, as one does that may still grow.
            self._measure()
            self._next()
            _finish(jobs, outcomes)

    def _measure(self) -> None:
        self.times[self._size].append(time.monotonic() - self._since)
        self._since = 0.0

    def _rest(self) -> None:
        """Goes on if requests wait; but connections are read first, whose robots have their replies by now."""
        self._busy = len(self.queue) > 0
        # The time of a batch that follows without a pause begins here: with reading what it takes.
        self._since = time.monotonic() if self._busy else 0.0
        if self._busy:
            self._loop.call_soon(self._next)

    def _answers(self, jobs: list[Job]) -> Iterator[tuple[Sequence[Job], Sequence[Outcome], float]]:
        """The outcomes of a batch in groups of one inference each, the shortest first, and their times [s]."""
        started, groups = time.monotonic(), defaultdict[tuple[float, str], list[tuple[Job, Any]]](list)
        for kind in {job.ask.kind for job in jobs}:
            members = [job for job in jobs if job.ask.kind == kind]
            for job, request in zip(members, self._requests(members), strict=True):
                work = _NO_WORK if isinstance(request, WireError) else self._work(kind, request)
                groups[work, kind].append((job, request))
        for (work, kind), group in sorted(groups.items(), key=lambda entry: entry[0]):
            members, requests = map(list, zip(*group, strict=True))
            outcomes = requests if work == _NO_WORK else self._answer(kind, members, requests)
            now = time.monotonic()
            yield members, outcomes, now - started
            started = now

    def _requests(self, jobs: list[Job]) -> Sequence[Request | WireError]:
        try:
            return requests_of([job.ask for job in jobs], self._exchange.contract)
        except WireError as error:
            return [error] * len(jobs)
        # Process boundary: any other failure, such as that of a library for images, must not end the server.
        except Exception:  # noqa: BLE001
            _log.exception("requests cannot be read")
            return [_INTERNAL] * len(jobs)

    def _answer(self, kind: str, jobs: list[Job], requests: list[Request]) -> list[Outcome]:
        started, layout = time.monotonic(), self._exchange.contract.kinds[kind].reply
        try:
            answers = self._exchange.answer(kind, requests)
            rows = zip(jobs, answers, strict=True)
            packed = [answer if isinstance(answer, WireError) else layout.pack(answer) for _, answer in rows]
            # Extreme observations can overflow; only that request of the batch fails.
            good = [payload for payload in packed if not isinstance(payload, WireError)]
            faults = layout.faults(good)
        # Process boundary: whatever a target raises must not end the server or be disclosed to clients.
        except BaseException:  # noqa: BLE001
            _log.exception("the target failed")
            return [_INTERNAL] * len(jobs)
        spent_ms, places, outcomes = 1e3 * (time.monotonic() - started), count(), list[Outcome]()
        for job, payload in zip(jobs, packed, strict=True):
            outcome = payload if isinstance(payload, WireError) else faults.get(next(places), payload)
            if isinstance(outcome, WireError):
                outcomes.append(WireError(outcome.code, f"the target cannot answer this request: {outcome}"))
            else:
                queued_ms = 1e3 * max(0.0, started - job.arrived)
                outcomes.append(Reply(job.ask.id, queued_ms, spent_ms, 0.0, len(jobs), outcome))
        return outcomes


def _finish(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job.wanted:
            job.finish(job, outcome)
