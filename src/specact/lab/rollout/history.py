"""Observations of a robot in a moving world, its waiting time, and its clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specact.execution.history import SampledHistory
from specact.lab.envs.moving import MovingWorld
from specact.observation import ObservationSpec, Window
from specact.types import Clock


class ObservationSampler:
    """Samples the observations of a world once per control period of the robot, and advances its time.

    A control period is an action, or ``period_s`` of waiting. For the content of a window see
    :class:`~specact.execution.history.SampledHistory`.

    Args:
        world: at the start of an episode.
        spec: of the observations.

    Attributes:
        world: as given.
        waited_s: total waiting time [s].
    """

    def __init__(self, world: MovingWorld, spec: ObservationSpec) -> None:
        self.world, self._length = world, spec.history
        self._history = SampledHistory(spec, world.period_s, world.task.roll_forward)
        self._sampled_s = -1.0
        self.waited_s = 0.0

    def window(self, ahead: NDArray[np.float32] | None = None) -> Window:
        """The window that ends now.

        Args:
            ahead: remaining actions, ``[r, A]``; the task's ``roll_forward`` predicts the robot's state after them, see
                :class:`~specact.execution.history.SampledHistory`.

        Raises:
            ObservationError: if the world's observations do not fit the policy.
        """
        self._sample()
        return self._history.window(ahead)

    def play(self, action: NDArray[np.float32]) -> None:
        """Executes an action ``[A]`` for one control period."""
        self._sample_history()
        self.world.advance(self.world.period_s, action)
        self._history.play(action)

    def wait(self, seconds: float) -> None:
        """Waits without an action, at most to the end of the episode."""
        before = self.world.now
        while seconds > 0.0 and not self.world.done:
            self._sample_history()
            step_s = min(self.world.period_s, seconds)
            self.world.advance(step_s, None)
            seconds -= step_s
        self.waited_s += self.world.now - before

    def _sample_history(self) -> None:
        if self._length > 1:
            self._sample()

    def _sample(self) -> None:
        """Samples the observation, once per time."""
        if self._sampled_s != self.world.now:
            self._sampled_s = self.world.now
            self._history.sample(self.world.now, self.world.observe())


class WorldClock(Clock):
    """World time as a :class:`~specact.types.Clock`: sleeping on it makes the robot wait.

    Args:
        sampler: of the robot.
    """

    def __init__(self, sampler: ObservationSampler) -> None:
        self._sampler = sampler

    def now(self) -> float:
        return self._sampler.world.now

    def sleep(self, seconds: float) -> None:
        self._sampler.wait(seconds)
