"""Signals that end a program, as an exception that comes once and never while a robot is being stopped."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# Ctrl-C, a supervisor's request, and a terminal or ssh connection that is gone.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked this program to end.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_status(self) -> int:
        """As shells have it: 128 and the signal's number."""
        return 128 + self.number


class Interrupts:
    """Raises :class:`Interrupted` in the main thread at the first of :data:`ENDING`; later ones are ignored.

    Use it as a context manager; contexts may be nested. A signal that is ignored, as under ``nohup``, stays ignored. In
    other threads than the main one, where no signal handler runs, it does nothing.

    Attributes:
        held: while True nothing is raised; set it by plain assignment, between which and the code around it Python
            runs no handler.
        received: the first signal since it was entered, or None.
    """

    def __init__(self) -> None:
        self.held = False
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in ENDING}
            self._before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
            for number in self._before:
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held = True
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def raise_received(self) -> None:
        """Raises for a signal that came while held."""
        if self.received is not None:
            raise Interrupted(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        if first:
            self.received = number
        if first and not self.held:
            raise Interrupted(number)
