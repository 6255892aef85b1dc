"""What a robot in a moving world sees, and the time it spends: acting, or waiting."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.lab.envs.moving import MovingWorld
from specact.lab.envs.ticking import Seen
from specact.observation import ObservationHistory, ObservationSpec, Window

NOW_S = 1e-9  # moments closer than this are one: sums of control periods are off by less


@dataclass(frozen=True)
class _Sample:
    at: float
    seen: Seen
    played: int  # actions played before it


class Senses:
    """The robot's end of a world: it samples observations once per control period of the robot, and lets time pass.

    Control periods of the robot are its actions, and while it waits every ``period_s`` from when it began to. A window
    holds the observation of now and, of those before, the ones nearest to a whole number of periods ago: in a robot
    that never waits exactly those, as in training; after a wait at most half a period off.

    Args:
        world: where it is; at the start of an episode.
        spec: what is looked at.

    Attributes:
        world: as given.
        waited_s: how long the robot has been without an action [s].
    """

    def __init__(self, world: MovingWorld, spec: ObservationSpec) -> None:
        self.world, self._length, self._history = world, spec.history, ObservationHistory(spec)
        self._samples: deque[_Sample] = deque()
        self._actions: list[NDArray[np.float32]] = []
        self.waited_s = 0.0

    def window(self, ahead: NDArray[np.float32] | None = None) -> Window:
        """The window that ends now.

        Args:
            ahead: actions still to run, ``[r, A]``; the robot is then shown as it will be after them, by the task's
                ``roll_forward``, in every observation of the window: each is rolled through the r actions that
                followed it, so that the robot does not seem to leap.

        Raises:
            ObservationError: if the policy cannot use what the world shows.
        """
        self._sample()
        self._history.reset()
        for back in reversed(range(self._length)):
            at = self.world.now - back * self.world.period_s
            sample = min(reversed(self._samples), key=lambda sample: abs(sample.at - at))
            window = self._history.push(sample.seen if ahead is None else self._rolled(sample, ahead))
        return window

    def play(self, action: NDArray[np.float32]) -> None:
        """One control period under an action ``[A]``."""
        self._sample_for_later()
        self.world.advance(self.world.period_s, action)
        self._actions.append(action)

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
        """Keeps what can be seen now, once per moment, and forgets what no window will reach back to."""
        now = self.world.now
        if self._samples and self._samples[-1].at == now:
            return
        self._samples.append(_Sample(now, self.world.observe(), len(self._actions)))
        while len(self._samples) > 1 and self._samples[1].at <= now - self._length * self.world.period_s:
            self._samples.popleft()

    def _rolled(self, sample: _Sample, ahead: NDArray[np.float32]) -> Seen:
        assert self.world.task.roll_forward is not None, "Execution.check has seen to it"
        following = [*self._actions[sample.played :], *ahead][: len(ahead)]
        if not following:
            return sample.seen
        return self.world.task.roll_forward(sample.seen, np.stack(following))
