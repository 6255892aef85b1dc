"""A fair queue: one lane per robot, served in turn, so that a long lane does not delay the others."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from specact.errors import WireError
from specact.wire.messages import ErrorCode

Item = TypeVar("Item")


class Lane(Generic[Item]):
    """The queued items of one robot, oldest first, and the turn in which it was last served, or created."""

    __slots__ = ("items", "served")

    def __init__(self, served: int) -> None:
        self.items: deque[Item] = deque()
        self.served = served


class FairQueue(Generic[Item]):
    """Takes one item per turn from the least recently served lane. Not thread-safe.

    An idle lane goes before those that are never empty. A new lane counts as served at its creation, so that many
    short-lived lanes cannot starve an old one.

    Args:
        most, most_per_lane: maximum number of items of all lanes, and of one.
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
