"""A server or a link in a process of its own, for measurements and tests: it starts ready and ends with its owner."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from specact.errors import RemoteError

_COMMAND = "from specact.cli.main import main; main()"
# What the commands say once they listen.
_ANNOUNCED = re.compile(r"(?:serving \S+ on wss?://|listening on )(\S+):(\d+)(?:;| for)")


class Child:
    """Runs ``specact serve`` or ``specact proxy``; use it as a context manager.

    Args:
        arguments: the verb and its options.
        environment: variables added to this process's.
        ready_within_s: how long it may take to start.

    Attributes:
        port: where it listens.
        pid: of the process.

    Raises:
        RemoteError: on entering, if it did not get ready; with what it said.
    """

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str] | None = None, ready_within_s: float = 60.0
    ) -> None:
        self._command = [sys.executable, "-c", _COMMAND, *arguments]
        # One thread per process unless asked otherwise: the machine is shared with what measures it.
        self._environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **os.environ, **(environment or {})}
        self._ready_within_s = ready_within_s
        self._said: list[str] = []
        self.port = self.pid = 0

    def __enter__(self) -> Child:
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.pid = self._process.pid
        try:
            self._await_announcement()
        except RemoteError:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def said(self) -> str:
        """Everything it wrote; complete after :meth:`stop`."""
        return "".join(self._said)

    def stop(self, within_s: float = 15.0) -> int:
        """Asks it to end, kills it if it does not, and returns its exit status; may be called twice."""
        self._process.terminate()
        return self._reap(within_s)

    def kill(self) -> int:
        """Ends it at once, as a crash would."""
        self._process.kill()
        return self._reap(15.0)

    def _reap(self, within_s: float) -> int:
        if self._process.stdout is not None and not self._process.stdout.closed:
            try:
                rest = self._process.communicate(timeout=within_s)[0]
            except subprocess.TimeoutExpired:
                self._process.kill()
                rest = self._process.communicate()[0]
            self._said.append(rest.decode(errors="replace"))
        return self._process.wait()

    def _await_announcement(self) -> None:
        pipe, until = self._process.stdout, time.monotonic() + self._ready_within_s
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0.0:
                selector.select(left)
                text = pipe.read()
                if text:
                    self._said.append(text.decode(errors="replace"))
                found = _ANNOUNCED.search(self.said)
                if found:
                    self.port = int(found[2])
                    os.set_blocking(pipe.fileno(), True)
                    return
                if text == b"" or self._process.poll() is not None:
                    break
        raise RemoteError(f"it did not start: {self.said.strip() or 'it said nothing'}")


def serving(bundle: str | Path, *options: str, environment: dict[str, str] | None = None) -> Child:
    """``specact serve`` on a free port of loopback, unless the options name one."""
    port = () if "--port" in options else ("--port", "0")
    return Child(["serve", "--bundle", str(bundle), *port, *options], environment)


def linked(port: int, link: str, seed: int = 0) -> Child:
    """``specact proxy`` on a free port of loopback, in front of ``port``."""
    target = f"127.0.0.1:{port}"
    return Child(["proxy", "--target", target, "--listen", "127.0.0.1:0", "--link", link, "--seed", str(seed)])
