"""What a robot in a moving world sees, the time it spends acting or waiting, and its clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specact.execution.history import SampledHistory
from specact.lab.envs.moving import MovingWorld
from specact.observation import ObservationSpec, Window


class ObservationSampler:
    """Samples the observations of a world once per control period of the robot, and advances its time.

    Control periods of the robot are its actions, and while it waits every ``period_s`` from when it began to. See
    :class:`~specact.execution.history.SampledHistory` for what a window holds.

    Args:
        world: where it is; at the start of an episode.
        spec: what is looked at.

    Attributes:
        world: as given.
        waited_s: how long the robot has been without an action [s].
    """

    def __init__(self, world: MovingWorld, spec: ObservationSpec) -> None:
        self.world, self._length = world, spec.history
        self._history = SampledHistory(spec, world.period_s, world.task.roll_forward)
        self._sampled_s = -1.0
        self.waited_s = 0.0

    def window(self, ahead: NDArray[np.float32] | None = None) -> Window:
        """The window that ends now.

        Args:
            ahead: actions still to run, ``[r, A]``; the robot is then shown as it will be after them, by the task's
                ``roll_forward``, see :class:`~specact.execution.history.SampledHistory`.

        Raises:
            ObservationError: if the policy cannot use what the world shows.
        """
        self._sample()
        return self._history.window(ahead)

    def play(self, action: NDArray[np.float32]) -> None:
        """One control period under an action ``[A]``."""
        self._sample_for_later()
        self.world.advance(self.world.period_s, action)
        self._history.play(action)

    def wait(self, seconds: float) -> None:
        """Time goes by without an action; less of it where the episode ends."""
        before = self.world.now
        while seconds > 0.0 and not self.world.done:
            self._sample_for_later()
            passing = min(self.world.period_s, seconds)
            self.world.advance(passing, None)
            seconds -= passing
        self.waited_s += self.world.now - before

    def _sample_for_later(self) -> None:
        if self._length > 1:
            self._sample()

    def _sample(self) -> None:
        """Keeps what can be seen now, once per moment."""
        if self._sampled_s != self.world.now:
            self._sampled_s = self.world.now
            self._history.sample(self.world.now, self.world.observe())


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
