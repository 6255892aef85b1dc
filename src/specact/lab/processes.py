"""A server or a link in a process of its own, for measurements and tests: it starts ready and ends with its owner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from specact.errors import RemoteError

_COMMAND = "from specact.cli.main import main; main()"
# What the commands say once they listen.
_ANNOUNCED = re.compile(r"(?:serving \S+ on wss?://|listening on )(\S+):(\d+)(?:;| for)")
_LOOK_EVERY_S = 0.01


class ServerProcess:
    """Runs ``specact serve`` or ``specact proxy``; use it as a context manager.

    Args:
        arguments: the verb and its options.
        environment: variables added to this process's.
        ready_within_s: how long it may take to start.

    Attributes:
        port: where it listens.
        pid: of the process.
        said: what it wrote until it was ready; everything, after it ended.

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
        self.said = ""
        self.port = self.pid = 0

    def __enter__(self) -> ServerProcess:
        # Into a file: a pipe that nobody reads would stop a talkative process when it is full.
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._output, stderr=subprocess.STDOUT
        )
        self.pid = self._process.pid
        try:
            self._await_announcement()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, within_s: float = 15.0) -> int:
        """Asks it to end, kills it if it does not, and returns its exit status; may be called twice."""
        self._process.terminate()
        return self._reap(within_s)

    def kill(self) -> int:
        """Ends it at once, as a crash would."""
        self._process.kill()
        return self._reap(15.0)

    def _reap(self, within_s: float) -> int:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        if not self._output.closed:
            self._listen()
            self._output.close()
        return status

    def _listen(self) -> None:
        # By position, as the process writes on with an offset that it shares with this file.
        written = os.fstat(self._output.fileno()).st_size
        self.said = os.pread(self._output.fileno(), written, 0).decode(errors="replace")

    def _await_announcement(self) -> None:
        until = time.monotonic() + self._ready_within_s
        while time.monotonic() < until:
            ended = self._process.poll() is not None
            self._listen()
            found = _ANNOUNCED.search(self.said)
            if found:
                self.port = int(found[2])
                return
            if ended:
                break
            time.sleep(_LOOK_EVERY_S)
        raise RemoteError(f"the process did not start: {self.said.strip() or 'it printed nothing'}")


def serving(bundle: str | Path, *options: str, environment: dict[str, str] | None = None) -> ServerProcess:
    """``specact serve`` on a free port of loopback, unless the options name one."""
    port = () if "--port" in options else ("--port", "0")
    return ServerProcess(["serve", "--bundle", str(bundle), *port, *options], environment)


def linked(port: int, link: str, seed: int = 0) -> ServerProcess:
    """``specact proxy`` on a free port of loopback, in front of ``port``."""
    target = f"127.0.0.1:{port}"
    return ServerProcess(["proxy", "--target", target, "--listen", "127.0.0.1:0", "--link", link, "--seed", str(seed)])
