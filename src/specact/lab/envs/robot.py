"""A simulated robot for a control loop: it has sensors and actuators, and an episode that ends."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.lab.envs.task import Task


class SimulatedRobot:
    """One environment behind ``observe()`` and ``act()``; the world moves one step per action.

    Args:
        task: the environment.

    Attributes:
        task: as given.
        done: whether the episode is over; True before the first :meth:`start`.
        success, score: of the episode so far.
        roll_forward: the task's model of the robot, or None.
    """

    def __init__(self, task: Task) -> None:
        self.task, self._env = task, task.make()
        self._observation: Any = None
        self.roll_forward = task.roll_forward
        self.done, self.success, self.score = True, False, 0.0

    def start(self, seed: int) -> None:
        """Begins an episode."""
        self._observation, info = self._env.reset(seed=seed)
        self._steps, self.done = 0, False
        self._take(info)

    def observe(self) -> Any:
        return self._observation

    def act(self, action: NDArray[np.float32]) -> None:
        self._observation, _, terminated, truncated, info = self._env.step(action)
        self._steps += 1
        self.done = terminated or truncated or self._steps >= self.task.max_steps
        self._take(info)

    def stop(self) -> None:
        """Nothing is left moving: the world stands still between two actions."""

    def close(self) -> None:
        self._env.close()

    def _take(self, info: dict[str, Any]) -> None:
        self.success, self.score = bool(info["success"]), float(info["score"])
