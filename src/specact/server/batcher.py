"""Micro-batching without waiting: when the target becomes free it takes the requests that arrived meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol

from specact.errors import WireError
from specact.rng import StepAddress
from specact.wire.exchange import Exchange, Request
from specact.wire.messages import Ask, ErrorCode, Reply, requests_of

Outcome = Reply | WireError
_log = logging.getLogger("specact.server")
_INTERNAL = WireError(ErrorCode.INTERNAL, "the target failed; see the server's log")
# A built-in network with a shorter inference runs on the event loop, because a thread switch would take as long.
_INLINE_BELOW_S = 1e-3
# Inferences before serving, of each size of a batch, and the time after which there are no more of them [s].
_WARM_UP_RUNS, _WARM_UP_S = 20, 1.0
# How far a lane may be ahead of the others, since requests come in bursts: so many of the shortest recent requests.
_AHEAD, _RECENT = 2.0, 16
# Of two requests with longer deadlines than this [s] the older one goes first.
_LONGEST_S = 1.0


class Asker(Protocol):
    """A connection that sent a request."""

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Takes the outcome, on the event loop; ``total_ms`` of a reply is not known yet."""
        ...


@dataclass(slots=True, eq=False)
class Lane:
    """The queued requests of one robot, oldest first, and the target's time that it has had, at least its share [s].

    ``first_since`` is when the oldest became the first [s]: what waits behind others of its robot is not urgent for it.
    """

    spent: float
    jobs: deque[Job] = field(default_factory=deque)
    first_since: float = 0.0

    @property
    def urgency(self) -> float:
        """The deadline of the first request, or what counts as one where it is far away or there is none."""
        return min(self.jobs[0].due, self.first_since + _LONGEST_S)


@dataclass(slots=True, eq=False)
class Job:
    """A request that is queued or being computed; ``arrived`` and ``due`` are times of the monotonic clock [s]."""

    ask: Ask
    lane: Lane
    asker: Asker
    arrived: float
    due: float
    wanted: bool = True


class Queue:
    """Whose request is next. Every lane is charged the time that its requests took.

    Of the lanes that are not ahead of those that have waited longest, the one with the earliest deadline goes first.
    An idle lane saves nothing up. So a robot with a short deadline need not wait for others, and one that asks for more
    than its share waits, however many requests or however long ones it sends, if there are more lanes than a batch
    holds. Not thread-safe.
    """

    def __init__(self) -> None:
        # In a dictionary, which keeps the order.
        self._waiting: dict[Lane, None] = {}
        # The time that each lane has had which always had a request waiting, and the times of recent requests [s].
        self._share, self._recent = 0.0, deque[float](maxlen=_RECENT)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def lane(self) -> Lane:
        """A new lane."""
        return Lane(self._share)

    def put(self, job: Job) -> None:
        """Adds a request at the end of its lane."""
        lane = job.lane
        if not lane.jobs:
            self._waiting[lane] = None
            lane.spent = max(lane.spent, self._share)
            lane.first_since = job.arrived
        lane.jobs.append(job)
        self._size += 1

    def take(self, most: int, now: float) -> tuple[list[Job], list[Job]]:
        """The next requests, at most ``most`` and one of each lane, and those before them that were due earlier."""
        taken, late, lanes = list[Job](), list[Job](), list(self._waiting)
        if lanes:
            self._share = min(lane.spent for lane in lanes)
        if len(lanes) > most:
            ahead = self._share + _AHEAD * min(self._recent, default=0.0)
            lanes = nsmallest(most, lanes, key=lambda lane: (lane.spent > ahead, lane.urgency))
        for lane in lanes:
            job: Job | None = None
            while lane.jobs and job is None:
                job = lane.jobs.popleft()
                self._size -= 1
                if job.due < now or not job.wanted:
                    late.append(job)
                    job = None
            lane.first_since = now
            if not lane.jobs:
                del self._waiting[lane]
            if job is not None:
                taken.append(job)
        return taken, late

    def charge(self, jobs: Sequence[Job], seconds: float) -> None:
        """Charges the lanes of a batch for its time, in equal parts."""
        part = seconds / len(jobs)
        for job in jobs:
            job.lane.spent += part
        self._recent.append(part)


class Batcher:
    """The target's side of a server. Everything but the target, which may have a thread, is on the event loop.

    Attributes:
        ready: whether requests are taken.
        queue, jobs: the queued requests, and those that are queued or being computed, without cancelled ones.
        times: of the last batches, by their size: until their replies, from the last batch or the first request [s].
    """

    def __init__(self, exchange: Exchange[Any], max_batch: int) -> None:
        self._exchange, self.max_batch = exchange, max_batch
        # What a request costs relative to others, where the exchange says so.
        self._work: Callable[[str, Request], float] = getattr(exchange, "work", lambda kind, request: 1.0)
        self.queue, self.jobs = Queue(), set[Job]()
        self.times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=64))
        self._inline = self._busy = self.ready = False
        self._since = 0.0
        self._batches: SimpleQueue[list[Job]] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

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
        if not self.ready or self._loop is None:
            job.asker.finish(job, WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))
            return
        self.queue.put(job)
        self.jobs.add(job)
        if not self._busy:
            self._busy = True
            # In the next turn of the event loop, when every connection has been read that has a request by now.
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
            job.asker.finish(job, WireError(ErrorCode.SHUTTING_DOWN, "the server stopped before the target answered"))
        return len(jobs)

    def _next(self) -> None:
        """Has the next batch computed."""
        started = time.monotonic()
        jobs, late = self.queue.take(self.max_batch, started)
        self._finish(late, [WireError(ErrorCode.EXPIRED, "the deadline passed in the queue")] * len(late))
        if jobs and not self._inline:
            self._batches.put(jobs)
            return
        for group, outcomes, seconds in self._answers(jobs):
            self.queue.charge(group, seconds)
            self._finish(group, outcomes)
        if jobs:
            self.times[len(jobs)].append(time.monotonic() - (self._since or started))
        self._rest()

    def _rest(self) -> None:
        """Goes on if requests wait; but connections are read first, whose robots have their replies by now."""
        self._busy = len(self.queue) > 0
        # The time of a batch that follows without a pause begins here: with reading what it takes.
        self._since = time.monotonic() if self._busy and self._inline else 0.0
        if self._busy and self._loop is not None:
            self._loop.call_soon(self._next)

    def _run(self) -> None:
        """The target's thread."""
        assert self._loop is not None
        while jobs := self._batches.get():
            started, last = time.monotonic(), (list[Job](), list[Outcome]())
            # The loop is closed if the target took longer than a stop waits.
            with contextlib.suppress(RuntimeError):
                for group, outcomes, seconds in self._answers(jobs):
                    if last[0]:
                        self._loop.call_soon_threadsafe(self._finish, *last)
                    self._loop.call_soon_threadsafe(self.queue.charge, group, seconds)
                    last = group, outcomes
                self._loop.call_soon_threadsafe(self._computed, len(jobs), time.monotonic() - started, last)

    def _computed(self, size: int, seconds: float, last: tuple[list[Job], list[Outcome]]) -> None:
        self.times[size].append(seconds)
        if len(self.queue) >= self.max_batch:
            # A full batch need not wait until the replies are sent, as one does that may still grow.
            self._next()
            self._finish(*last)
        else:
            self._finish(*last)
            self._rest()

    def _finish(self, jobs: list[Job], outcomes: Sequence[Outcome]) -> None:
        for job, outcome in zip(jobs, outcomes, strict=True):
            self.jobs.discard(job)
            if job.wanted:
                job.asker.finish(job, outcome)

    def _answers(self, jobs: list[Job]) -> Iterator[tuple[list[Job], list[Outcome], float]]:
        """The outcomes of a batch in groups of one inference each, the shortest first, and their times [s]."""
        started, groups = time.monotonic(), dict[tuple[float, str], tuple[list[Job], list[Request]]]()
        for kind in {job.ask.kind for job in jobs}:
            members = [job for job in jobs if job.ask.kind == kind]
            for job, request in zip(members, self._requests(members), strict=True):
                if isinstance(request, WireError):
                    now = time.monotonic()
                    yield [job], [request], now - started
                    started = now
                else:
                    group = groups.setdefault((self._work(kind, request), kind), ([], []))
                    group[0].append(job)
                    group[1].append(request)
        for (_, kind), group in sorted(groups.items(), key=lambda entry: entry[0]):
            outcomes = self._answer(kind, *group)
            now = time.monotonic()
            yield group[0], outcomes, now - started
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
            if len(answers) != len(jobs):
                raise ValueError(f"{len(jobs)} requests have {len(answers)} answers")
            packed = [answer if isinstance(answer, WireError) else layout.pack(answer) for answer in answers]
            # Extreme observations can overflow; only that request of the batch fails.
            good = [payload for payload in packed if not isinstance(payload, WireError)]
            faults = layout.faults(good)
        # Process boundary: a target's exception must not end the server or be disclosed to clients.
        except (Exception, SystemExit):  # noqa: BLE001
            _log.exception("the target failed")
            return [_INTERNAL] * len(jobs)
        spent_ms, rows, outcomes = 1e3 * (time.monotonic() - started), count(), list[Outcome]()
        for job, payload in zip(jobs, packed, strict=True):
            outcome = payload if isinstance(payload, WireError) else faults.get(next(rows), payload)
            if isinstance(outcome, WireError):
                outcomes.append(WireError(outcome.code, f"the target cannot answer this request: {outcome}"))
            else:
                queued_ms = 1e3 * max(0.0, started - job.arrived)
                outcomes.append(Reply(job.ask.id, queued_ms, spent_ms, 0.0, len(jobs), outcome))
        return outcomes
