"""A watchdog for a robot's own code: what hangs in it must not leave the last action in force."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.errors import StallError
from specact.interrupts import Interrupts

T = TypeVar("T")


class Watchdog:
    """Stops a robot whose ``observe`` or ``act`` does not return in time. Use it as a context manager.

    A thread calls the robot's ``stop()``, or sends the stop action if the robot is ``concurrent``, and interrupts the
    main thread with :class:`~specact.errors.StallError`, on which the control loop stops the robot as after any error.
    A call that cannot be interrupted goes on until it returns.

    Args:
        robot: the robot.
        stop_action: ``[A]``, or None.
        interrupts: of the control loop, already entered.
        stall_s: how long a call may take [s].

    Attributes:
        error: of the call that took too long, or None.
    """

    def __init__(
        self, robot: Any, stop_action: NDArray[np.float32] | None, interrupts: Interrupts, stall_s: float
    ) -> None:
        self._robot, self._stop_action, self._interrupts, self._stall_s = robot, stop_action, interrupts, stall_s
        self._call: tuple[str, float] | None = None
        self._closing = threading.Event()
        self.error: StallError | None = None
        self._thread = threading.Thread(target=self._watch, name="specact watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(self._stall_s)

    def call(self, name: str, method: Callable[..., T], *arguments: Any) -> T:
        """Calls a method of the robot.

        Raises:
            StallError: if it took too long.
        """
        self._call = name, time.monotonic()
        try:
            result = method(*arguments)
        finally:
            self._call = None
        self.check()
        return result

    def check(self) -> None:
        """Raises the error of a call that took too long."""
        if self.error is not None:
            raise self.error

    def _watch(self) -> None:
        while not self._closing.wait(self._stall_s / 8):
            call = self._call
            if call is not None and time.monotonic() - call[1] > self._stall_s:
                self.error = StallError(
                    f"the robot's {call[0]}() has not returned within {self._stall_s:g} s, and the robot was stopped; "
                    "see whether its devices answer"
                )
                self._stop_robot(self.error)
                self._interrupts.throw(self.error)
                return

    def _stop_robot(self, error: StallError) -> None:
        try:
            if callable(stop := getattr(self._robot, "stop", None)):
                stop()
            elif getattr(self._robot, "concurrent", False) and self._stop_action is not None:
                self._robot.act(self._stop_action)
        except Exception as second:  # noqa: BLE001 - a robot's own code can raise anything
            error.add_note(f"the robot could not be stopped beside this: {type(second).__name__}: {second}")
