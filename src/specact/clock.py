"""Time as an argument: the machine's, or one that moves only when told."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells the time and can let it pass."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Lets ``seconds`` (>= 0) pass."""
        ...


class RealClock:
    """The machine's monotonic clock, untouched by clock jumps."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """Stands still until told to move: simulated latencies cost nothing and tests never wait."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a sleep must be at least 0 s, got {seconds}")
        self._now += seconds
