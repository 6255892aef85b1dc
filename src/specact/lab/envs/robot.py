"""A simulated robot for a control loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.lab.envs.task import Task
from specact.lab.envs.ticking import as_ticking
from specact.observation import ObservationHistory


class SimulatedRobot:
    """An environment with ``observe()`` and ``act()``; the world advances one step per action.

    Cameras are rendered by ``observe()`` where the environment allows it, see
    :class:`~specact.lab.envs.ticking.Ticking`.

    Args:
        task: the environment.
        render_mode: of the environment.

    Attributes:
        task, env: as given, and the environment.
        steps: actions of the episode so far.
        done: whether the episode is over; True before the first :meth:`start`.
        success, score: of the episode so far.
        roll_forward: the task's model of the robot, or None.
    """

    def __init__(self, task: Task, render_mode: str | None = None) -> None:
        self.task, self.env = task, task.make(render_mode=render_mode)
        self._ticking = as_ticking(self.env, task.rate_hz)
        self._observation: Any = None
        self.roll_forward = task.roll_forward
        self._info: dict[str, Any] = {"success": False, "score": 0.0}
        self.steps, self.done = 0, True

    def start(self, seed: int) -> None:
        """Begins an episode."""
        self._observation, self._info = self._ticking.reset(seed=seed)
        self.steps, self.done = 0, False

    @property
    def success(self) -> bool:
        """Whether the episode has succeeded so far; so is :attr:`score`."""
        return bool(self._info["success"])

    @property
    def score(self) -> float:
        return float(self._info["score"])

    @property
    def of_suite(self) -> str:
        """The episode's task in a suite; else empty."""
        return str(self._info.get("task", ""))

    @property
    def outcome(self) -> dict[str, Any]:
        """The episode's result so far, as plain values."""
        return {"success": self.success, "score": self.score}

    def observe(self) -> Any:
        """The current observation; None before the first :meth:`start`."""
        if self._observation is None and self.steps:
            self._observation = self._ticking.look()
        return self._observation

    def act(self, action: NDArray[np.float32]) -> None:
        """Executes an action ``[A]`` for one control period."""
        self._ticking.command(action)
        self._ticking.run(self._ticking.ticks)
        _, terminated, truncated, self._info = self._ticking.settle()
        self._observation = None
        self.steps += 1
        self.done = terminated or truncated or self.steps >= self.task.max_steps

    def stop(self) -> None:
        """Does nothing: the world stands still between two actions."""

    def close(self) -> None:
        self.env.close()


def play(robot: SimulatedRobot, history: ObservationHistory, chunk: NDArray[np.float32]) -> None:
    """Executes actions ``[n, A]`` in order, to the end of the chunk or of the episode.

    Args:
        robot: during an episode.
        history: holds the observation before the chunk; the ones between its actions are pushed where they matter.
        chunk: in the environment's units.
    """
    for number, action in enumerate(chunk):
        if number and history.length > 1:
            history.push(robot.observe())
        robot.act(action)
        if robot.done:
            return
