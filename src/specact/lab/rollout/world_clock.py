"""The clock of a robot in a moving world."""

from __future__ import annotations

from specact.lab.rollout.history import ObservationSampler


class WorldClock:
    """World time as a :class:`~specact.clock.Clock`: whoever sleeps on it keeps the robot waiting.

    Args:
        sampler: of the robot.
    """

    def __init__(self, sampler: ObservationSampler) -> None:
        self._sampler = sampler

    def now(self) -> float:
        return self._sampler.world.now

    def sleep(self, seconds: float) -> None:
        self._sampler.wait(seconds)
