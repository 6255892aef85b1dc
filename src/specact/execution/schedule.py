"""Schedule of actions and inferences, shared by robots and simulators."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from specact.execution.strategy import Execution
from specact.families.chunks.policy import Chunk, Inpainting

NOW_S = 1e-9  # times closer than this are equal; rounding errors of summed control periods are smaller
_LATENCY_WINDOW = 10  # real-time chunking assumes the longest of so many latencies, as in its paper


@dataclass(frozen=True, slots=True)
class Played:
    """One action to execute now.

    Attributes:
        action: ``[A]``, in the policy's units.
        seen_s: timestamp of its chunk's observation [s].
        first: whether it is the first played action of its chunk.
    """

    action: NDArray[np.float32]
    seen_s: float
    first: bool


class Schedule:
    """Plays chunks of actions according to an :class:`~specact.execution.strategy.Execution`; time is an argument.

    At every control step, in this order: :meth:`arrive` if an inference has ended, :meth:`advance`, :meth:`ask` if
    :attr:`wants` is True, :meth:`arrive` and :meth:`advance` if that inference took no time, :meth:`play`.

    Args:
        execution: how chunks are played.
        period_s: control period [s].
        shape: of a chunk, ``(H, A)``.
    """

    def __init__(self, execution: Execution, period_s: float, shape: tuple[int, int]) -> None:
        self._execution, self._period_s, self._shape = execution, period_s, shape
        self._latencies: deque[float] = deque(maxlen=_LATENCY_WINDOW)
        self.reset()

    def reset(self) -> None:
        """Starts an episode; measured latencies persist."""
        # The current chunk, the index of its next action, and the end of those to play.
        self._chunk: Chunk = np.zeros((0, self._shape[1]), np.float32)
        self._next = self._end = 0
        # When its observation was made and its execution started, with which action, and whether one was played.
        self._seen_s, self._started_s, self._first, self._any_played = 0.0, 0.0, 0, True
        # The time of the current inference's observation, and the chunk that has arrived, with that of its own.
        self._requested_s: float | None = None
        self._arrived: tuple[Chunk, float] | None = None

    @property
    def left(self) -> int:
        """Remaining actions of the current chunk."""
        return max(self._end - self._next, 0)

    @property
    def wants(self) -> bool:
        """Whether the next inference should start now."""
        return self._requested_s is None and self._arrived is None and self.left <= self._execution.overlap

    @property
    def ahead(self) -> Chunk | None:
        """The remaining actions ``[r, A]`` that the observation is rolled forward through; None for other kinds."""
        return self._chunk[self._next : self._end] if self._execution.kind == "roll_forward" else None

    @property
    def inpainting(self) -> Inpainting | None:
        """Inpainting from the current chunk, or None; the assumed delay is the longest of the last latencies."""
        rest = self._chunk[self._next :]
        if self._execution.kind != "inpainting" or not len(rest):
            return None
        delay = ceil(max(self._latencies) / self._period_s - NOW_S)
        return inpainting_of(rest, min(delay, self.left), self._shape[0])

    def ask(self, now: float) -> None:
        """Records the start of an inference on an observation made now [s]."""
        self._requested_s = now

    def miss(self) -> None:
        """Records that the current inference failed."""
        self._requested_s = None

    def arrive(self, chunk: Chunk, took_s: float) -> None:
        """Records the result of the current inference, ``[H, A]``, and its latency [s]."""
        assert self._requested_s is not None, "ask comes before arrive"
        self._latencies.append(took_s)
        self._arrived, self._requested_s = (chunk, self._requested_s), None

    def advance(self, now: float) -> bool:
        """Skips actions whose time has passed, and switches to the chunk that has arrived when it is due.

        Returns:
            Whether that one arrived too late for any of its actions.
        """
        by_time = self._execution.by_time
        if by_time and self.left:
            # Control steps may have been skipped.
            self._next = max(self._next, self._first + round((now - self._started_s) / self._period_s))
        if self._arrived is None or (self.left and not by_time):
            return False
        (self._chunk, self._seen_s), self._arrived = self._arrived, None
        past = round((now - self._seen_s) / self._period_s) if by_time else 0
        self._next, self._end, self._any_played = past, self._execution.execute, False
        self._started_s, self._first = now, past
        return not self.left

    def drop_older(self, seen_s: float) -> bool:
        """Drops chunks whose observation was made before a time [s].

        Returns:
            Whether one of them had just arrived, and no action of it was played.
        """
        unplayed = self._arrived is not None and self._arrived[1] < seen_s
        if unplayed:
            self._arrived = None
        if self._seen_s < seen_s:
            self._next = self._end = len(self._chunk)
        return unplayed

    def play(self) -> Played | None:
        """The action to execute now, or None where there is none."""
        if not self.left:
            return None
        played = Played(self._chunk[self._next], self._seen_s, not self._any_played)
        self._any_played = True
        self._next += 1
        return played


def soft_mask(certain: int, foreseen: int, chunk: int) -> NDArray[np.float32]:
    """Weights ``[H]`` of the old chunk's actions in real-time chunking (arXiv 2506.07339, equation 5).

    ``w_i = 1`` for ``i < d``; ``w_i = c_i (e^{c_i} - 1) / (e - 1)`` with ``c_i = (R - i) / (R - d + 1)`` for
    ``d <= i < R``; 0 from there on.

    Args:
        certain: d, the delay: actions that will be executed before the new chunk arrives, 0 to R.
        foreseen: R, remaining actions of the old chunk, 0 to H.
        chunk: H.
    """
    row = np.arange(chunk)
    near = np.clip((foreseen - row) / (foreseen - certain + 1), 0.0, 1.0)
    fading = near * np.expm1(near) / np.expm1(1.0)
    return np.where(row < certain, 1.0, fading).astype(np.float32)


def inpainting_of(rest: NDArray[np.float32], certain: int, chunk: int) -> Inpainting:
    """The remaining actions of the old chunk as a constraint on the new chunk's first actions.

    Args:
        rest: all remaining actions of the old chunk, also those that would not be executed, ``[R, A]``.
        certain: number of them that will be executed before the new chunk arrives, 0 to R.
        chunk: H, at least R.
    """
    actions = np.zeros((chunk, rest.shape[1]), np.float32)
    actions[: len(rest)] = rest
    return Inpainting(actions, soft_mask(certain, len(rest), chunk))
