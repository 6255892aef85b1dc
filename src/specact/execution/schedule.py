"""Which action of which chunk is played when: the arithmetic that robots and simulators share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from specact.execution.inpainting import inpainting_of
from specact.execution.strategy import Execution
from specact.families.chunks.policy import Chunk, Inpainting

NOW_S = 1e-9  # moments closer than this are one: sums of control periods are off by less
_REMEMBERED = 10  # latencies by whose longest real-time chunking reckons, as in its paper


@dataclass(frozen=True, slots=True)
class Played:
    """One action to execute now.

    Attributes:
        action: ``[A]``, as the policy gave it.
        seen_s: when its chunk's observation was made [s].
        first: whether it is the first action of its chunk that is played.
    """

    action: NDArray[np.float32]
    seen_s: float
    first: bool


@dataclass(frozen=True, slots=True)
class _Arrived:
    chunk: Chunk
    seen_s: float


class Schedule:
    """Plays chunks of actions as an :class:`~specact.execution.strategy.Execution` says; it is told the time.

    At every control step, in this order: :meth:`arrive` where an inference has ended, :meth:`advance`, :meth:`ask`
    where :attr:`wants` says so, :meth:`arrive` and :meth:`advance` where the answer took no time, :meth:`play`.

    Args:
        execution: how chunks are played.
        period_s: control period [s].
        shape: of a chunk, ``(H, A)``.
    """

    def __init__(self, execution: Execution, period_s: float, shape: tuple[int, int]) -> None:
        self._execution, self._period_s, self._shape = execution, period_s, shape
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        self.reset()

    def reset(self) -> None:
        """Forgets the episode, but not how long inferences take."""
        # The chunk in play, the next of its actions and the end of those to play; nothing at first.
        self._chunk: Chunk = np.zeros((0, self._shape[1]), np.float32)
        self._next = self._end = 0
        self._seen_s = 0.0
        self._begun = True
        # Since when it is in play, and with which action it began.
        self._since_s, self._first = 0.0, 0
        self._asked_s: float | None = None
        self._arrived: _Arrived | None = None

    @property
    def left(self) -> int:
        """Actions of the chunk in play that are still to be played."""
        return max(self._end - self._next, 0)

    @property
    def wants(self) -> bool:
        """Whether the next inference is to begin now."""
        return self._asked_s is None and self._arrived is None and self.left <= self._execution.overlap

    @property
    def ahead(self) -> Chunk | None:
        """The actions still to run ``[r, A]`` where the policy is shown the robot as it will be after them, or None."""
        return self._chunk[self._next : self._end] if self._execution.kind == "roll_forward" else None

    @property
    def inpainting(self) -> Inpainting | None:
        """What an inpainting policy is told of the chunk in play; None where there is nothing to tell.

        The delay it reckons with is the longest of the last few.
        """
        rest = self._chunk[self._next :]
        if self._execution.kind != "inpainting" or not len(rest):
            return None
        delay = ceil(max(self._latencies) / self._period_s - NOW_S)
        return inpainting_of(rest, min(delay, self.left), self._shape[0])

    def ask(self, now: float) -> None:
        """An inference begins, on an observation made now [s]."""
        self._asked_s = now

    def miss(self) -> None:
        """The inference under way comes to nothing."""
        self._asked_s = None

    def arrive(self, chunk: Chunk, took_s: float) -> None:
        """The inference under way has ended.

        Args:
            chunk: ``[H, A]``.
            took_s: how long it was under way [s].
        """
        assert self._asked_s is not None, "ask comes before arrive"
        self._latencies.append(took_s)
        self._arrived, self._asked_s = _Arrived(chunk, self._asked_s), None

    def advance(self, now: float) -> None:
        """Skips actions whose time has passed, and puts the chunk that has arrived into play if its time has come."""
        if self._execution.by_time and self.left:
            # Control steps may have been lost.
            self._next = max(self._next, self._first + round((now - self._since_s) / self._period_s))
        new = self._arrived
        if new is None or (self.left and not self._execution.by_time):
            return
        past = round((now - new.seen_s) / self._period_s) if self._execution.by_time else 0
        self._chunk, self._next, self._end = new.chunk, past, self._execution.execute
        self._seen_s, self._begun, self._arrived = new.seen_s, False, None
        self._since_s, self._first = now, past

    def drop_older(self, seen_s: float) -> None:
        """Drops what was inferred from observations made before a time [s]."""
        if self._arrived is not None and self._arrived.seen_s < seen_s:
            self._arrived = None
        if self._seen_s < seen_s:
            self._next = self._end = len(self._chunk)

    def play(self) -> Played | None:
        """The action to execute now, or None where there is none."""
        if not self.left:
            return None
        played = Played(self._chunk[self._next], self._seen_s, not self._begun)
        self._begun = True
        self._next += 1
        return played
