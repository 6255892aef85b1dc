"""One target and one uplink that robots share, in virtual time: first come, or the best scores that fit."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from specact.observation import Window
from specact.pair import Answer, Pending, TargetPolicy
from specact.rng import StepAddress
from specact.server.capacity import ServiceTime
from specact.server.queue import Job, Lane, Queue
from specact.types import Clock, Miss, OffloadTimes
from specact.wire.messages import Ask

_ASK = Ask("infer", 0, 0.0, (0, 0, 0, 0), bytearray())


@dataclass(eq=False, kw_only=True)
class Request(Job):
    """A robot's request: score, time, when the target began with it, and when its reply is there [s], or never."""

    score: float
    at: float
    started: float = math.inf
    replied: float = math.inf


@dataclass
class Server:
    """A target of at most ``most`` requests in a batch behind an uplink; calls have to be in the order of time.

    A request occupies the uplink for ``upload_s``, and a message travels ``way_s`` more. They are queued as by
    ``specact serve``. If it ``grants``, robots first send scores alone, which takes only that; whenever the target will
    be free after a round trip and a batch's uploads, those go up whose score times the share of their time that is left
    is largest, as many as are answered in time.
    """

    service: ServiceTime
    most: int
    upload_s: float
    way_s: float
    grants: bool
    sent: list[Request] = field(default_factory=list)
    _queue: Queue = field(default_factory=Queue)
    _coming: deque[Request] = field(default_factory=deque)
    _offers: list[Request] = field(default_factory=list)
    _free = _uplink = 0.0

    def send(self, lane: Lane, now: float, due: float, score: float) -> Request:
        """A request, or an offer, that a robot sends now and to which it needs the reply when it is due."""
        self.advance(now)
        sent = now if self.grants else max(self._uplink, now) + self.upload_s
        request = Request(_ASK, lane, sent + self.way_s, due, score=score, at=now)
        self.sent.append(request)
        if sent > due:
            request.due = now  # withdrawn at once
        else:
            self._uplink = sent
            self._coming.append(request)
        return request

    def advance(self, now: float) -> None:
        """Everything that began by now."""
        while (self._grant if self.grants else self._serve)(now):
            pass

    def _serve(self, now: float) -> bool:
        """One batch of the queue, if it began by now."""
        first = 0.0 if len(self._queue) else self._coming[0].arrived if self._coming else math.inf
        if (started := max(self._free, first)) > now:
            return False
        while self._coming and self._coming[0].arrived <= started:
            self._queue.put(self._coming.popleft())
        batch, _ = self._queue.take(self.most, started)
        if batch:
            self._queue.charge(batch, self.service.seconds(len(batch)))
            self._run(batch, started)
        return True

    def _grant(self, now: float) -> bool:
        """One round of grants, if it was made by now."""
        ahead, waiting = 2 * self.way_s + self.most * self.upload_s, self._offers or self._coming
        at = max(self._free - ahead, waiting[0].arrived if waiting else math.inf)
        if at > now:
            return False
        while self._coming and self._coming[0].arrived <= at:
            self._offers.append(self._coming.popleft())

        def start(count: int) -> float:
            return max(self._free, at + 2 * self.way_s + count * self.upload_s)

        def fits(batch: list[Request]) -> bool:
            reply = start(len(batch)) + self.service.seconds(len(batch)) + self.way_s
            return all(reply < request.due for request in batch)

        def worth(request: Request) -> float:
            return request.score * (request.due - at) / (request.due - request.at)

        self._offers = [offer for offer in self._offers if fits([offer])]
        granted: list[Request] = []
        for offer in sorted(self._offers, key=worth, reverse=True):
            if len(granted) < self.most and fits([*granted, offer]):
                granted.append(offer)
        if granted:
            self._run(granted, start(len(granted)))
            self._offers = [offer for offer in self._offers if offer not in granted]
        return True

    def _run(self, batch: list[Any], started: float) -> None:
        self._free = started + self.service.seconds(len(batch))
        for request in batch:
            request.started, request.replied = started, self._free + self.way_s


@dataclass
class SharedTarget:
    """A robot's :class:`~specact.pair.Target` at the server: answers that were prepared, when the server has them.

    ``score`` is that of its next request; the last ``request`` is None when the robot is done with it.
    """

    policy: TargetPolicy[Any]
    server: Server
    clock: Clock
    deadline_s: float
    score: float = 0.0
    request: Request | None = None
    lane: Lane = field(default_factory=Lane)

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[Any]]:
        """See :class:`~specact.pair.Target`."""
        answer, now = self.policy.answer(window, address), self.clock.now()
        request = self.request = self.server.send(self.lane, now, now + self.deadline_s, self.score)

        def result() -> Answer[Any] | Miss:
            in_time, times = request.replied <= request.due, OffloadTimes()
            return Answer(answer, times) if in_time else Miss("expired", times)

        return Pending(result, lambda: self.is_over(request))

    def is_over(self, request: Request) -> bool:
        """Whether the reply is there, or it is too late for one."""
        self.server.advance(self.clock.now())
        return min(request.replied, request.due) <= self.clock.now()
