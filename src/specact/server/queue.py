"""Whose request is next: each robot has a lane, and lanes are charged the time that their requests take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from specact.errors import WireError
from specact.wire.messages import Ask, Reply

Outcome = Reply | WireError
# How far a lane may be ahead of the others, since requests come in bursts: so many of the shortest recent requests.
_AHEAD, _RECENT = 2.0, 16
# Of two requests with longer deadlines than this [s] the older one goes first.
_LONGEST_S = 1.0


@dataclass(slots=True, eq=False)
class Lane:
    """The queued requests of one robot, oldest first, and the target's time that it has had, at least its share [s].

    ``urgency`` is the deadline of the oldest, or what counts as one if it is long after that became the oldest [s]:
    what waits behind others of its robot is not urgent for it.
    """

    spent: float = 0.0
    jobs: deque[Job] = field(default_factory=deque)
    urgency: float = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """A request that is queued or being computed; ``arrived`` and ``due`` are times of one clock [s].

    ``finish`` is told the outcome, on the event loop; ``total_ms`` of a reply is not known then.
    """

    ask: Ask
    lane: Lane
    arrived: float
    due: float
    finish: Callable[[Job, Outcome], None] = lambda job, outcome: None
    wanted: bool = True


class Queue:
    """Whose request is next. Every lane is charged the time that its requests took.

    Of the lanes that are not ahead of the one that has had least, the one with the earliest deadline goes first. An
    idle lane saves nothing up: it comes back at its share, the virtual time of WF2Q+ (Bennett and Zhang, 1997). So a
    robot with a short deadline need not wait for others, and one that asks for more than its share waits, however many
    requests or however long ones it sends, if there are more lanes than a batch holds. Not thread-safe.
    """

    def __init__(self) -> None:
        # In a dictionary, which keeps the order.
        self._waiting: dict[Lane, None] = {}
        # The time that each lane has had which always had a request waiting [s], and the lanes that share it.
        self._share, self._lanes = 0.0, 1
        # Where a lane is ahead, and the times of recent requests [s].
        self._ahead, self._recent = 0.0, deque[float](maxlen=_RECENT)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, job: Job) -> None:
        """Adds a request at the end of its lane."""
        lane = job.lane
        if not lane.jobs:
            self._waiting[lane] = None
            lane.spent = max(lane.spent, min(self._share, self._ahead))
            lane.urgency = min(job.due, job.arrived + _LONGEST_S)
        lane.jobs.append(job)
        self._size += 1

    def take(self, most: int, now: float) -> tuple[list[Job], list[Job]]:
        """The next requests, at most ``most`` and one of each lane, and those before them that were due earlier."""
        taken, late, lanes = list[Job](), list[Job](), list(self._waiting)
        if lanes:
            least = min([lane.spent for lane in lanes])
            self._share, self._lanes = max(self._share, least), len(lanes)
            self._ahead = least + _AHEAD * min(self._recent, default=0.0)
        if len(lanes) > most:
            # The second sort keeps the order of the first.
            lanes.sort(key=attrgetter("urgency"))
            lanes.sort(key=lambda lane: lane.spent > self._ahead)
            del lanes[most:]
        for lane in lanes:
            while lane.jobs:
                job = lane.jobs.popleft()
                if job.due >= now and job.wanted:
                    taken.append(job)
                    break
                late.append(job)
            if lane.jobs:
                lane.urgency = min(lane.jobs[0].due, now + _LONGEST_S)
            else:
                del self._waiting[lane]
        self._size -= len(taken) + len(late)
        return taken, late

    def charge(self, jobs: Sequence[Job], seconds: float) -> None:
        """Charges the lanes of a batch for its time, in equal parts."""
        part = seconds / len(jobs)
        for job in jobs:
            job.lane.spent += part
        self._recent.append(part)
        self._share += seconds / self._lanes
