"""A task's environment as a control loop meets it: it waits between two actions, or goes on without them."""

from __future__ import annotations

from math import floor
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, unknown_name
from specact.lab.envs.task import Idle, Seen, Task, as_ticking
from specact.observation import ObservationHistory


class _Simulation:
    """An environment and its state; ``success`` and ``score`` are of the episode so far."""

    def __init__(self, task: Task, **options: Any) -> None:
        self.task, self.env = task, task.make(**options)
        self._ticking = as_ticking(self.env, task.rate_hz)
        self._info: dict[str, Any] = {"success": False, "score": 0.0}
        self.done = True

    @property
    def success(self) -> bool:
        """Whether the episode has succeeded so far."""
        return bool(self._info["success"])

    @property
    def score(self) -> float:
        """The best one so far, see :class:`~specact.lab.envs.task.Task`."""
        return float(self._info["score"])

    def close(self) -> None:
        """Closes the environment."""
        self._ticking.close()


class SimulatedRobot(_Simulation):
    """An environment with ``observe()`` and ``act()``; the world advances one step per action.

    Cameras are rendered by ``observe()``, where the environment is a :class:`~specact.lab.envs.task.TickingEnv`.

    Attributes:
        steps: actions of the episode so far.
        done: whether the episode is over; True before the first :meth:`start`.
        roll_forward: the task's model of the robot, or None.
    """

    def __init__(self, task: Task, render_mode: str | None = None) -> None:
        super().__init__(task, render_mode=render_mode)
        self._observation: Any = None
        self.roll_forward, self.steps = task.roll_forward, 0

    def start(self, seed: int) -> None:
        """Begins an episode."""
        self._observation, self._info = self._ticking.reset(seed=seed)
        self.steps, self.done = 0, False

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


class MovingWorld(_Simulation):
    """A task's environment whose time does not wait for the policy; an episode ends at its success.

    World time is continuous; physics is simulated in ticks. A tick runs as soon as world time passes its middle, under
    the current command: a delay is rounded to the nearest tick without bias, and as the remainder is kept, short delays
    add up correctly. Where an environment can be stopped only between control periods, the tick is a whole period, as
    delays are rounded in "The Speedup Paradox" (arXiv 2606.28529). Attributes besides the task's: ``static``, whether
    the world stands still while the robot waits; ``period_s`` and ``limit_s``, control period and time limit [s];
    ``now``, world time since the reset [s], which stops at the control period that ends the episode.
    """

    def __init__(self, task: Task, *, idle: Idle = "hold", pace: float = 0.0, render_mode: str | None = None) -> None:
        """A world before its first reset.

        Args:
            task: the task.
            idle: the robot's behaviour without an action: ``hold`` commands the task's holding action once; ``last``
                keeps the last command; ``neutral`` commands zeros once, the middle of every action's range.
            pace: the world's own rate of change, >= 0.

        Raises:
            ConfigError: for an idle mode that the task does not define, or a pace where nothing can move.
        """
        if idle not in get_args(Idle):
            raise unknown_name("way to idle", idle, get_args(Idle))
        if idle == "hold" and task.hold is None:
            raise ConfigError(
                f"task {task.name!r} does not define how its robot holds still; choose idle 'last' or 'neutral'"
            )
        if pace and task.pace is None:
            raise ConfigError(f"nothing in task {task.name!r} moves by itself, so its pace must be 0, got {pace}")
        super().__init__(task, render_mode=render_mode, **({} if task.pace is None else {"pace": pace}))
        self.pace, self.idle = pace, idle
        self.static = not pace and idle in task.still
        self.period_s, self.limit_s = 1.0 / task.rate_hz, task.max_steps / task.rate_hz
        self.now = 0.0

    def reset(self, seed: int) -> None:
        """Begins an episode. The initial last action is zeros."""
        _, info = self._ticking.reset(seed=seed)
        self._last = np.zeros(self.env.action_space.shape or (), np.float32)
        self._ticking.command(self._last)
        self._acting = False
        self._ticks = 0
        self._positions: list[NDArray[np.float64]] = []
        self._update(info)
        self.now, self.done = 0.0, self.success

    def observe(self) -> Seen:
        """The observation at :attr:`now`."""
        return self._ticking.look()

    def advance(self, seconds: float, action: NDArray[np.float32] | None) -> None:
        """Advances the world, under an action or idle; after the end of the episode it does nothing.

        Args:
            seconds: duration, >= 0.
            action: commanded now, ``[A]``; None for the idle mode, which continues across calls.

        Raises:
            ValueError: for a negative time.
        """
        if seconds < 0:
            raise ValueError(f"the clock can advance only by at least 0 s, got {seconds}")
        if self.done:
            return
        self._command(action)
        self.now += seconds
        due, period = floor(self.now / self._ticking.tick_s + 0.5), self._ticking.ticks
        while self._ticks < due and not self.done:
            ticks = min(due - self._ticks, period - self._ticks % period)
            self._ticking.run(ticks)
            self._ticks += ticks
            if self._ticks % period == 0:
                self._settle()

    def motion(self) -> NDArray[np.float64]:
        """Positions of the end effector at every control period since the reset, ``[T, D]``.

        Raises:
            ConfigError: if the task does not define one.
        """
        if self.task.effector is None:
            raise ConfigError(f"task {self.task.name!r} does not define what its robot moves; set Task.effector")
        return np.array(self._positions)

    def _command(self, action: NDArray[np.float32] | None) -> None:
        if action is not None:
            self._ticking.command(action)
            self._last = action
        elif self._acting and self.idle != "last":
            hold = np.zeros_like if self.idle == "neutral" else self.task.hold
            assert hold is not None, "checked before"
            self._ticking.command(hold(self._last))
        self._acting = action is not None

    def _settle(self) -> None:
        _, terminated, truncated, info = self._ticking.settle()
        periods = self._ticks // self._ticking.ticks
        self._update(info)
        self.done = self.success or terminated or truncated or periods >= self.task.max_steps
        if self.done:
            self.now = periods * self.period_s

    def _update(self, info: dict[str, Any]) -> None:
        self._info = info
        if self.task.effector is not None:
            self._positions.append(self.task.effector(self.env))
