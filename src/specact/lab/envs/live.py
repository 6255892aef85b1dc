"""A simulated robot whose world does not wait: it goes on at its control rate in a process of its own.

In every control period the world takes one action. Where none has come in time the robot holds, as its task says, and
time goes on: an episode lasts as long as a real one would.
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
    """What the world tells after a control period, or at an episode's start.

    Attributes:
        observation: as the environment gives it.
        done, success, score, of_suite: of the episode so far, see :class:`~specact.lab.envs.robot.SimulatedRobot`.
        steps: control periods so far.
        held: how many of them had no action of their own.
        late_s: how much later than due the world was at most [s]: what this machine could not keep up with.
    """

    observation: Any
    done: bool
    success: bool
    score: float
    of_suite: str
    steps: int
    held: int
    late_s: float


class LiveRobot:
    """One environment behind ``observe()`` and ``act()``, which goes on whether or not somebody acts.

    Args:
        env: the environment's name.
        sees: what is looked at: cameras are drawn only then.
        period_s: control period [s]; the task's own if None.

    Attributes:
        task: the environment.
        roll_forward: the task's model of the robot, or None.
        last: what the world told last.

    Raises:
        ConfigError: if the task does not say how its robot holds.
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
        self._pipe, its_end = _SPAWN.Pipe()
        self._given = True
        period_s = 1.0 / self.task.rate_hz if period_s is None else period_s
        # Only plain values go there: a task holds functions.
        self._process = _SPAWN.Process(target=_world, args=(env, sees.describe(), period_s, its_end), daemon=True)
        self._process.start()
        its_end.close()
        self._expect(_STARTS_WITHIN_S)

    def start(self, seed: int) -> None:
        """Begins an episode; its time runs from now on."""
        self._pipe.send(("start", seed))
        while True:
            self.last = self._expect(_STARTS_WITHIN_S)
            if self.last.steps == 0:
                break
        self._given = False

    def observe(self) -> Any:
        """The newest observation; where it was given before, the next one is waited for, while the episode lasts."""
        self._drain()
        while self._given and not self.last.done:
            self.last, self._given = self._expect(_STARTS_WITHIN_S), False
            self._drain()
        self._given = True
        return self.last.observation

    def act(self, action: NDArray[np.float32]) -> None:
        """What the robot does in the next control period, unless another action comes before."""
        self._pipe.send(("act", np.asarray(action, np.float32)))

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        self._drain()
        return self.last.done

    @property
    def told(self) -> dict[str, Any]:
        """How the episode went so far, as plain values."""
        last = self.last
        return {
            "success": last.success, "score": last.score, "task": last.of_suite, "steps": last.steps,
            "held": last.held, "world_late_ms": 1e3 * last.late_s,
        }  # fmt: skip

    def stop(self) -> None:
        """Nothing is left moving: without actions the robot holds."""

    def close(self) -> None:
        """Ends the world."""
        with suppress(OSError):
            self._pipe.send(("end", None))
        self._process.join(_ENDS_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _drain(self) -> None:
        while self._pipe.poll():
            self.last, self._given = self._expect(0.0), False

    def _expect(self, within_s: float) -> Frame:
        try:
            said = self._pipe.recv() if self._pipe.poll(within_s) else None
        except EOFError:
            said = None
        if isinstance(said, SpecactError):
            raise said
        if not isinstance(said, Frame):
            raise SpecactError(f"the world of {self.task.name} does not answer; look above for what its process says")
        return said


def _world(env: str, sees: dict[str, Any], period_s: float, pipe: Connection) -> None:
    """The other process."""
    try:
        robot = SimulatedRobot(load_task(env, read_spec(sees)))
    except SpecactError as error:
        pipe.send(error)
        return
    pipe.send(Frame(None, True, False, 0.0, "", -1, 0, 0.0))
    seed: int | None = None
    # EOFError, BrokenPipeError: whoever looked on is gone.
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            while seed is None:
                what, value = pipe.recv()
                if what == "end":
                    return
                seed = value if what == "start" else None
            seed = _episode(robot, seed, period_s, pipe)
            if seed == _END:
                return


_END = -1


def _episode(robot: SimulatedRobot, seed: int, period_s: float, pipe: Connection) -> int | None:
    """Lets an episode go on to its end, or until the next is asked for; returns that one's seed, or ``_END``."""
    robot.start(seed)
    hold, last = robot.task.hold, np.zeros(robot.env.action_space.shape or (), np.float32)
    assert hold is not None, "looked at before"
    held, late_s, due = 0, 0.0, time.monotonic()

    def tell() -> None:
        pipe.send(
            Frame(
                robot.observe(), robot.done, robot.success, robot.score, robot.of_suite, robot.steps, held, late_s
            )
        )  # fmt: skip

    tell()
    while not robot.done:
        due += period_s
        action: NDArray[np.float32] | None = None
        while True:
            left = due - time.monotonic()
            if not pipe.poll(max(0.0, left)):
                break
            what, value = pipe.recv()
            if what == "end":
                return _END
            if what == "start":
                return int(value)
            action = value
        late_s = max(late_s, time.monotonic() - due)
        if action is None:
            held += 1
        last = hold(last) if action is None else action
        robot.act(last)
        tell()
    return None
