"""The contract of a robot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.contracts.expectations import call, expect
from specact.errors import ContractError, ObservationError
from specact.observation import ObservationHistory
from specact.pair import Pair
from specact.robot.loop import Robot, run_loop
from specact.safety import Fallback, Safety
from specact.types import ActionRange, VirtualClock


def check_robot(robot: Robot, pair: Pair[Any], action: NDArray[np.float32]) -> None:
    """Checks a robot: that its observations fit a pair, that it accepts actions, and that it can be stopped.

    The robot may move: the action is sent three times, and the robot is stopped twice, once after an error.

    Args:
        robot: the robot.
        pair: a loaded bundle that will run on it.
        action: a harmless action, ``[A]``, such as one that keeps the robot where it is.

    Raises:
        ContractError: for the first violation of :class:`~specact.robot.loop.Robot`.
    """
    width = len(pair.units.centre)
    action = np.asarray(action, np.float32)
    expect(
        action.shape == (width,), f"{pair.name} has actions of {width} numbers, but the one to try has {action.shape}"
    )
    for method in ("observe", "act"):
        expect(callable(getattr(robot, method, None)), f"a robot must have a method {method!r}")
    own_stop = getattr(robot, "stop", None)
    expect(own_stop is None or callable(own_stop), "stop must be a method, or absent")
    history = ObservationHistory(pair.observation)
    for _ in range(3):
        seen = call("observe", robot.observe)
        try:
            history.push(seen)
        except ObservationError as error:
            raise ContractError(f"observe must give what {pair.name} needs: {error}") from error
        given = action.copy()
        call("act", robot.act, given)
        expect(np.array_equal(given, action), "act must not change the action that it is given")
    # A control loop must stop the robot when the policy raises.
    clock, fallback = VirtualClock(), Fallback(stop_action=None if callable(own_stop) else tuple(action.tolist()))
    failing = _FailingPolicy(Safety(fallback, ActionRange.unknown(width), clock, math.inf))
    try:
        run_loop(robot, failing, 1.0 / pair.rate_hz, clock, lambda: True, lambda tick: None)  # type: ignore[arg-type]
    except _PolicyError as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        expect(not notes, f"the robot must be able to stop after an error of the policy; {notes}")
    if callable(own_stop):
        call("stop, called again,", own_stop)


class _PolicyError(Exception):
    """Stands for any exception of a policy."""


class _FailingPolicy:
    """The part of :class:`~specact.policy.SpeculativePolicy` that a control loop uses; always raises."""

    record = None

    def __init__(self, safety: Safety) -> None:
        self.safety = safety

    def act(self, observation: Any) -> NDArray[np.float32]:
        raise _PolicyError
