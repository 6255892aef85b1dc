"""From predicted action chunks to one action per control step."""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Chunk = NDArray[np.float32]


class ChunkPlayer:
    """Plays the first ``execute`` actions of each chunk; with ``average``, the mean over overlapping chunks.

    A shorter chunk is played to its end.

    Args:
        execute: actions played before the next chunk is needed.
        overlap: ``drop`` plays the newest chunk alone; ``average`` takes the mean over all chunks that predict the
            current control step (VQ-BeT on PushT).
    """

    def __init__(self, execute: int, overlap: Literal["drop", "average"]) -> None:
        self._execute, self._average = execute, overlap == "average"
        self._chunks: deque[tuple[Chunk, Chunk]] = deque()
        self._played = self._end = execute

    def reset(self) -> None:
        """Drops all chunks."""
        self._chunks.clear()
        self._played = self._end = self._execute

    @property
    def empty(self) -> bool:
        """Whether a new chunk is needed."""
        return self._played >= self._end

    @property
    def played(self) -> int:
        """How many actions of the newest chunk have been played."""
        return self._played

    def put(self, drafted: Chunk, executed: Chunk) -> None:
        """Adds a chunk: the drafted actions and those to execute, both ``[n, A]``."""
        if not self._average:
            self._chunks.clear()
        self._chunks.append((drafted, executed))
        self._played, self._end = 0, min(self._execute, len(executed))

    def replace(self, executed: Chunk) -> int:
        """Replaces the newest chunk's actions ``[n, A]`` from the next action on.

        Returns:
            How many of them remain to be played.
        """
        self._chunks[-1] = (self._chunks[-1][0], executed)
        self._end = min(self._execute, len(executed))
        return max(0, self._end - self._played)

    def next(self) -> tuple[Chunk, Chunk]:
        """The drafted and the executed action of this control step, both ``[A]``."""
        newest = self._chunks[-1]
        drafted = newest[0][self._played]
        if self._average:
            # The chunk ``age`` inferences old predicts this step at its position ``played + age * execute``.
            reach = [(pair[1], self._played + age * self._execute) for age, pair in enumerate(reversed(self._chunks))]
            votes = [chunk[at] for chunk, at in reach if at < len(chunk)]
            # Drops the oldest chunks that have ended; a shorter one may end before a longer one that is older.
            while reach[-1][1] >= len(reach[-1][0]):
                reach.pop()
                self._chunks.popleft()
            executed = np.asarray(np.mean(votes, axis=0, dtype=np.float32))
        else:
            executed = newest[1][self._played]
        self._played += 1
        return drafted, executed
