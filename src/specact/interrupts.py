"""Termination signals as an exception that is raised once, and never while a robot is being stopped."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# Ctrl-C, a supervisor's request, and a closed terminal or ssh connection.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A termination signal.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_status(self) -> int:
        """The shell's convention: 128 plus the signal's number."""
        return 128 + self.number


class Interrupts:
    """Raises :class:`Interrupted` in the main thread at the first of :data:`ENDING`; later ones are ignored.

    Use it as a context manager; contexts may be nested. A signal that is ignored, as under ``nohup``, stays ignored.
    Outside the main thread, where no signal handler runs, it does nothing.

    Attributes:
        held: while True nothing is raised; set it by plain assignment, which no signal handler can interrupt.
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
        """Raises for a signal that was received while held."""
        if self.received is not None:
            raise Interrupted(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        if first:
            self.received = number
        if first and not self.held:
            raise Interrupted(number)
