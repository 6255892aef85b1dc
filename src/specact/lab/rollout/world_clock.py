"""The clock of a robot in a moving world."""

from __future__ import annotations

from specact.lab.rollout.history import Senses


class WorldClock:
    """World time as a :class:`~specact.clock.Clock`: whoever sleeps on it keeps the robot waiting.

    Args:
        senses: of the robot.
    """

    def __init__(self, senses: Senses) -> None:
        self._senses = senses

    def now(self) -> float:
        return self._senses.world.now

    def sleep(self, seconds: float) -> None:
        self._senses.wait(seconds)
