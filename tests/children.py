"""The processes that tests start: they receive signals, and end with the test run, however it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

_IGNORED = "SPECACT_TESTS_IGNORE"


def receive_signals() -> None:
    """Lets children receive signals that this process ignores, as under ``nohup`` or in the background of a shell.

    Ignored signals are inherited, handlers are not. So this process, and the workers of the same test run, handle them
    by doing nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    numbers = {int(number) for number in os.environ.get(_IGNORED, "").split()}
    numbers |= {n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) if signal.getsignal(n) is signal.SIG_IGN}
    for number in numbers:
        signal.signal(number, lambda *_: None)
    os.environ[_IGNORED] = " ".join(str(int(number)) for number in numbers)


def end_with_this_process() -> None:
    """Starts a watchdog: when this process has ended, even by SIGKILL, it kills all that descends from it.

    Descendants are known by a variable of their environment, and so on Linux only, which shows it in ``/proc``.
    """
    if not Path("/proc/self/environ").exists():
        return
    mark = f"SPECACT_TESTS_{os.getpid()}", uuid4().hex
    # A session of its own: what ends a whole group of processes spares it.
    watchdog = subprocess.Popen(
        [sys.executable, "-IS", __file__, "=".join(mark)], stdin=subprocess.PIPE, start_new_session=True
    )
    os.environ.update([mark])
    # Its standard input stays open as long as this process lives.
    atexit.register(watchdog.communicate)


def wait_for(
    condition: Callable[[], object], what: object = "", meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Waits for what other processes or threads bring about, with patience for a machine that is busy."""
    until = time.monotonic() + 300.0
    while not condition():
        assert time.monotonic() < until, f"it did not happen: {what}"
        meanwhile()
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process has ended; its parent need not have noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def marked(mark: bytes) -> list[int]:
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids


def _watch(mark: bytes) -> None:
    sys.stdin.buffer.read()
    # Again and again, because a process may start another before it is killed.
    while pids := marked(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    _watch(sys.argv[1].encode())
