"""What is on the way in one direction of a relayed connection."""

from __future__ import annotations

import threading
from collections import deque


class Pipe:
    """A first-in, first-out queue of chunks between two threads, bounded by bytes, that can be closed from a third.

    Args:
        limit_bytes: how much may lie in it; a chunk enters as long as there is less.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._size, self._closed = limit_bytes, 0, False
        self._chunks: deque[tuple[bytes | None, float]] = deque()
        self._changed = threading.Condition()

    def put(self, chunk: bytes | None, due: float) -> bool:
        """Appends a chunk and when it is due, waiting for room; False if the pipe was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._size < self._limit)
            self._chunks.append((chunk, due))
            self._size += len(chunk or b"")
            self._changed.notify_all()
            return not self._closed

    def get(self) -> tuple[bytes | None, float] | None:
        """The oldest chunk and when it is due, waiting for one; None as soon as the pipe is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._chunks)
            if self._closed:
                return None
            chunk, due = self._chunks.popleft()
            self._size -= len(chunk or b"")
            self._changed.notify_all()
            return chunk, due

    def close(self) -> None:
        """Lets nobody wait any more; what was inside is lost."""
        with self._changed:
            self._closed = True
            self._chunks.clear()
            self._changed.notify_all()
