"""The moving world: a task's simulation advances during inference and transmission."""

from __future__ import annotations

from math import floor
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, unknown_name
from specact.lab.envs.task import Idle, Task
from specact.lab.envs.ticking import Seen, as_ticking


class MovingWorld:
    """A task's environment whose time does not wait for the policy.

    World time is continuous; physics is simulated in ticks. A tick runs as soon as world time passes its middle, under
    the current command. A delay is thus rounded to the nearest tick without bias, and as the remainder is kept, many
    short delays add up correctly. Where an environment can be stopped only between control periods, the tick is a whole
    period, which is the rounding of delays in "The Speedup Paradox" (arXiv 2606.28529).

    Success, failure and time limit are checked every control period of the world since the reset. An episode ends at
    its success, even if the plain environment would continue for a better score.

    Args:
        task: the task.
        idle: the robot's behaviour without an action. ``hold`` commands the task's holding action once; ``last`` keeps
            the last command (an environment of whole periods repeats the action); ``neutral`` commands zeros once, the
            middle of every action's range.
        pace: the world's own rate of change, >= 0, see :class:`~specact.lab.envs.task.Task`.
        render_mode: of the environment.

    Attributes:
        static: whether the world stands still while the robot waits: at pace 0, with an idle mode of
            :attr:`Task.still <specact.lab.envs.task.Task.still>`.
        period_s, limit_s: control period and time limit of an episode [s].
        now: world time since the reset [s]. It stops at the control period that ends the episode.
        done: whether the episode is over; True before the first :meth:`reset`.
        success, score: of the episode so far, see :class:`~specact.lab.envs.task.Task`.

    Raises:
        ConfigError: for an unknown idle mode or one that the task does not define, or a pace where nothing can move.
    """

    def __init__(self, task: Task, *, idle: Idle = "hold", pace: float = 0.0, render_mode: str | None = None) -> None:
        if idle not in get_args(Idle):
            raise unknown_name("way to idle", idle, get_args(Idle))
        if idle == "hold" and task.hold is None:
            raise ConfigError(
                f"task {task.name!r} does not define how its robot holds still; choose idle 'last' or 'neutral'"
            )
        if pace and task.pace is None:
            raise ConfigError(f"nothing in task {task.name!r} moves by itself, so its pace must be 0, got {pace}")
        self.task, self.pace, self.idle = task, pace, idle
        self.static = not pace and idle in task.still
        paced = {} if task.pace is None else {"pace": pace}
        self.env = task.make(render_mode=render_mode, **paced)
        self._ticking = as_ticking(self.env, task.rate_hz)
        self.period_s, self.limit_s = 1.0 / task.rate_hz, task.max_steps / task.rate_hz
        self.now, self.done, self.success, self.score = 0.0, True, False, 0.0

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

    def close(self) -> None:
        """Closes the environment."""
        self._ticking.close()

    def _command(self, action: NDArray[np.float32] | None) -> None:
        if action is not None:
            self._ticking.command(action)
            self._last = action
        elif self._acting and (idle_command := self._idle_command()) is not None:
            self._ticking.command(idle_command)
        self._acting = action is not None

    def _idle_command(self) -> NDArray[np.float32] | None:
        """The command when idling begins, or None to keep the last one."""
        if self.idle == "neutral":
            return np.zeros_like(self._last)
        return self.task.hold(self._last) if self.idle == "hold" and self.task.hold is not None else None

    def _settle(self) -> None:
        _, terminated, truncated, info = self._ticking.settle()
        periods = self._ticks // self._ticking.ticks
        self._update(info)
        self.done = self.success or terminated or truncated or periods >= self.task.max_steps
        if self.done:
            self.now = periods * self.period_s

    def _update(self, info: dict[str, Any]) -> None:
        self.success, self.score = bool(info["success"]), float(info["score"])
        if self.task.effector is not None:
            self._positions.append(self.task.effector(self.env))
