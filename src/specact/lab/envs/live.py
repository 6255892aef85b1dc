"""A simulated robot in real time: its world advances at the control rate in a child process.

In every control period the world executes one action. Without an action in time the robot holds, as its task defines,
so an episode lasts as long as a real one.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, SpecactError
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.observation import ObservationSpec, read_spec

_SPAWN = get_context("spawn")
_STARTS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 5.0


@dataclass(frozen=True)
class Frame:
    """The message of the world after a control period, or at an episode's start.

    ``outcome`` is of the episode so far, ``steps`` its control periods, ``held`` their number without a new action, and
    ``late_s`` the maximum lateness of one [s], where this machine is too slow.
    """

    observation: Any
    done: bool
    outcome: dict[str, Any]
    steps: int
    held: int
    late_s: float


class LiveRobot:
    """An environment with ``observe()`` and ``act()`` that advances with or without actions.

    ``period_s`` is its control period, the task's own if None; ``sees`` the needed observations: other cameras are not
    rendered. ``last`` is the world's last message, that of a finished episode before the first :meth:`start`.

    Raises:
        ConfigError: if the task does not define how its robot holds.
        SpecactError: if the environment cannot be made.
    """

    def __init__(self, env: str, sees: ObservationSpec, period_s: float | None = None) -> None:
        self.task = load_task(env, sees)
        if self.task.hold is None:
            raise ConfigError(
                f"{env} does not say how its robot holds while there is no action, so its world cannot go on; leave "
                "out --live"
            )
        self.roll_forward = self.task.roll_forward
        self._pipe, child_end = _SPAWN.Pipe()
        self._consumed = True
        period_s = 1.0 / self.task.rate_hz if period_s is None else period_s
        # Only plain values are sent, because a task's functions cannot be pickled.
        self._process = _SPAWN.Process(target=_world, args=(env, sees.describe(), period_s, child_end), daemon=True)
        self._process.start()
        child_end.close()
        self.last = self._expect(_STARTS_WITHIN_S)

    def start(self, seed: int) -> None:
        """Begins an episode; its clock starts now."""
        self._pipe.send(("start", seed))
        self.last = self._expect(_STARTS_WITHIN_S)
        while self.last.steps != 0:  # of before
            self.last = self._expect(_STARTS_WITHIN_S)
        self._consumed = False

    def observe(self) -> Any:
        """The newest observation; waits for the next one if it was returned before and the episode is running."""
        self._drain()
        while self._consumed and not self.last.done:
            self.last, self._consumed = self._expect(_STARTS_WITHIN_S), False
            self._drain()
        self._consumed = True
        return self.last.observation

    def act(self, action: NDArray[np.float32]) -> None:
        """Sets the action of the next control period; a later call in the same period replaces it."""
        self._pipe.send(("act", np.asarray(action, np.float32)))

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        self._drain()
        return self.last.done

    @property
    def outcome(self) -> dict[str, Any]:
        """The episode's result so far, as plain values."""
        last = self.last
        return last.outcome | {"steps": last.steps, "held": last.held, "world_late_ms": 1e3 * last.late_s}

    def stop(self) -> None:
        """Does nothing: without actions the robot holds."""

    def close(self) -> None:
        """Ends the world's process."""
        with suppress(OSError):
            self._pipe.send(("end", None))
        self._process.join(_ENDS_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _drain(self) -> None:
        while self._pipe.poll():
            self.last, self._consumed = self._expect(0.0), False

    def _expect(self, within_s: float) -> Frame:
        try:
            message = self._pipe.recv() if self._pipe.poll(within_s) else None
        except EOFError:
            message = None
        if isinstance(message, SpecactError):
            raise message
        if not isinstance(message, Frame):
            raise SpecactError(f"the process of the world of {self.task.name} does not answer; see its messages above")
        return message


def _world(env: str, sees: dict[str, Any], period_s: float, pipe: Connection) -> None:
    """The world's process."""
    try:
        robot = SimulatedRobot(load_task(env, read_spec(sees)))
    except SpecactError as error:
        pipe.send(error)
        return
    hold, still = robot.task.hold, np.zeros(robot.env.action_space.shape or (), np.float32)
    assert hold is not None, "checked in LiveRobot"
    action: NDArray[np.float32] | None = None
    last, held, late_s, due = still, 0, 0.0, 0.0

    def send(observation: Any, steps: int) -> None:
        pipe.send(Frame(observation, robot.done, robot.outcome | {"task": robot.of_suite}, steps, held, late_s))

    send(None, -1)
    # EOFError, BrokenPipeError: the parent is gone.
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            if pipe.poll(None if robot.done else max(0.0, due - time.monotonic())):
                command, value = pipe.recv()
                if command == "end":
                    return
                if command == "act":
                    action = value
                    continue
                robot.start(value)
                action, last, held, late_s, due = None, still, 0, 0.0, time.monotonic()
            else:
                late_s = max(late_s, time.monotonic() - due)
                held += action is None
                last = hold(last) if action is None else action
                action = None
                robot.act(last)
            due += period_s
            send(robot.observe(), robot.steps)
