"""A queue of many lanes that are served in turn, so that a long lane delays nobody but its owner."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from specact.errors import WireError
from specact.wire.checks import ErrorCode

Item = TypeVar("Item")


class Lane(Generic[Item]):
    """What waits of one robot, oldest first; made by :meth:`FairQueue.lane`.

    Attributes:
        items: what waits.
        served: the number of the turn in which it was served last, or was made.
    """

    __slots__ = ("items", "served")

    def __init__(self, served: int) -> None:
        self.items: deque[Item] = deque()
        self.served = served


class FairQueue(Generic[Item]):
    """Takes one item per turn from the lane that was served longest ago. Not safe for several threads.

    A lane that was idle goes before those that are never empty. A new lane counts as served when it was made, so that
    many short-lived ones cannot keep an old one waiting: only a finite number of items is ever ahead of another.

    Args:
        most: items of all lanes.
        most_per_lane: items of one lane.
    """

    def __init__(self, most: int, most_per_lane: int) -> None:
        self._most, self._most_per_lane = most, most_per_lane
        # Of every lane that is not empty: its last turn, a number that decides between equals, and itself.
        self._waiting: list[tuple[int, int, Lane[Item]]] = []
        self._size = self._turn = self._entries = 0

    def __len__(self) -> int:
        return self._size

    def lane(self) -> Lane[Item]:
        """A new lane."""
        return Lane(self._turn)

    def put(self, lane: Lane[Item], item: Item) -> Item | None:
        """Adds an item at the end of its lane.

        Returns:
            The newest item of the longest lane, where that had to make room.

        Raises:
            WireError: ``overloaded`` if the lane is full, or everything is and no lane is longer than this one.
        """
        if len(lane.items) >= self._most_per_lane:
            raise WireError(
                ErrorCode.OVERLOADED,
                f"{self._most_per_lane} requests of this robot are already waiting; wait for a reply first",
            )
        displaced = None
        if self._size >= self._most:
            longest = max((entry[2] for entry in self._waiting), key=lambda other: len(other.items))
            if len(longest.items) <= len(lane.items) + 1:
                raise queue_full(self._most)
            displaced = longest.items.pop()
            self._size -= 1
        lane.items.append(item)
        self._size += 1
        if len(lane.items) == 1:
            self._wait(lane)
        return displaced

    def take(self, most: int, alive: Callable[[Item], bool]) -> tuple[list[Item], list[Item]]:
        """The next items, ``most`` of those alive, and the others met on the way, which cost no turn."""
        taken: list[Item] = []
        dead: list[Item] = []
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
                self._wait(lane)
        self._size -= len(taken) + len(dead)
        return taken, dead

    def _wait(self, lane: Lane[Item]) -> None:
        self._entries += 1
        heapq.heappush(self._waiting, (lane.served, self._entries, lane))


def queue_full(most: int) -> WireError:
    """What is said to whom there was no room for, or no longer."""
    return WireError(ErrorCode.OVERLOADED, f"{most} requests are waiting already; ask again later")
