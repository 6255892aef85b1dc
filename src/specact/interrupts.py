"""Termination signals as an exception that is raised once, and never while a robot is being stopped."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

# Ctrl-C, a supervisor's request, a closed terminal or ssh connection, and Ctrl-\.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(KeyboardInterrupt):
    """A termination signal, by its number."""

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
    Outside the main thread, where no signal handler runs, it does nothing. While ``held`` nothing is raised; set it by
    plain assignment, which no signal handler can interrupt. If it ``suspends``, Ctrl-Z only sets ``suspended``, and
    :meth:`suspend` suspends the process. The first signal since it was entered is ``received``.
    """

    def __init__(self, *, suspends: bool = False) -> None:
        self.held = self.suspended = False
        self.received: int | None = None
        self._numbers = (*ENDING, signal.SIGTSTP) if suspends else ENDING
        self._before: dict[int, Any] = {}
        self._thrown: BaseException | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in self._numbers}
            self._before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
            for number in self._before:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self.held = True
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def raise_received(self) -> None:
        """Raises for a signal that was received while held."""
        if self.received is not None:
            raise Interrupted(self.received)

    def throw(self, error: BaseException) -> None:
        """Raises an error in the main thread, from another one, unless held."""
        self._thrown = error
        number = next(iter(self._before), None)
        if number is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def suspend(self) -> None:
        """Suspends the process until it is continued."""
        os.kill(os.getpid(), signal.SIGSTOP)
        self.suspended = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._thrown is not None:
            thrown, self._thrown = self._thrown, None
            if not self.held:
                raise thrown
        elif number == signal.SIGTSTP:
            self.suspended = True
        elif self.received is None:
            self.received = number
            if not self.held:
                raise Interrupted(number)
