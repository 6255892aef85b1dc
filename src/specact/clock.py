"""Clocks: the machine's, and a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can sleep."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed time; monotonic."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits for ``seconds`` (>= 0)."""
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """Advances by calls of :meth:`sleep` only, so that simulations and tests do not wait."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a sleep must be at least 0 s, got {seconds}")
        self._now += seconds
