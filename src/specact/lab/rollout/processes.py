"""A server or a link as a child process that is waited for until it listens; this process on a share of a core."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from specact.errors import ConfigError, RemoteError
from specact.records import PositiveShare, validated

# Output of the commands when they listen.
_LISTENING = re.compile(r"(?:serving \S+ on wss?://|listening on )(\S+):(\d+)(?:;| for)")
_POLL_S = 0.01
# Short, so that a control period of 20 ms spans several: a process is throttled once it has used a period's share.
_PERIOD_US = 5_000
_LEAST_US = 1_000  # the kernel's
_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"))


class ServerProcess:
    """Runs ``specact serve`` or ``specact proxy``, a verb with its options; use it as a context manager.

    It has its ``port`` and ``pid``, and its ``output`` until it listened, all of it after it ended. On entering, if it
    did not start in time, it is a :exc:`RemoteError` with its output.
    """

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str] | None = None, ready_within_s: float = 60.0
    ) -> None:
        self._command = [sys.executable, "-m", "specact", *arguments]
        # One thread per process by default: the measuring process shares the machine.
        self._environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **os.environ, **(environment or {})}
        self._ready_within_s = ready_within_s
        self.output = ""
        self.port = self.pid = 0

    def __enter__(self) -> ServerProcess:
        # A file, because a process blocks on a full pipe.
        self._file = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._file, stderr=subprocess.STDOUT
        )
        self.pid = self._process.pid
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, within_s: float = 15.0) -> int:
        """Terminates it, kills it after a timeout, and returns its exit status; may be called twice."""
        self._process.terminate()
        return self._reap(within_s)

    def kill(self) -> int:
        """Kills it, as a crash would."""
        self._process.kill()
        return self._reap(15.0)

    def _reap(self, within_s: float) -> int:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        if not self._file.closed:
            self._read_output()
            self._file.close()
        return status

    def _read_output(self) -> None:
        # By position, because the process shares this file's offset.
        written = os.fstat(self._file.fileno()).st_size
        self.output = os.pread(self._file.fileno(), written, 0).decode(errors="replace")

    def _await_ready(self) -> None:
        until = time.monotonic() + self._ready_within_s
        while time.monotonic() < until:
            ended = self._process.poll() is not None
            self._read_output()
            match = _LISTENING.search(self.output)
            if match:
                self.port = int(match[2])
                return
            if ended:
                break
            time.sleep(_POLL_S)
        raise RemoteError(f"the process did not start: {self.output.strip() or 'it printed nothing'}")


def serving(bundle: str | Path, *options: str, environment: dict[str, str] | None = None) -> ServerProcess:
    """``specact serve`` on a free port of loopback, unless the options name one."""
    port = () if "--port" in options else ("--port", "0")
    return ServerProcess(["serve", str(bundle), *port, *options], environment)


def linked(port: int, link: str, seed: int = 0) -> ServerProcess:
    """``specact proxy`` on a free port of loopback, in front of ``port``."""
    target = f"127.0.0.1:{port}"
    return ServerProcess(["proxy", "--target", target, "--listen", "127.0.0.1:0", "--link", link, "--seed", str(seed)])


@contextmanager
@validated
def device_share(share: PositiveShare | None) -> Iterator[None]:
    """Emulates a slower device: limits this process and its future children together to a share of one core.

    This slows everything, not only networks: reading observations, messages, Python. Processes that were started
    before, such as a simulated world, are not limited; None is no limit. Another share, or a process that may not
    create control groups (or is not on Linux), is a :exc:`ConfigError`.
    """
    if share is None:
        yield
        return
    group = _group(share)
    try:
        yield
    finally:
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()


def _group(share: float) -> Path:
    """Makes a control group with this share, of version 2 or 1, and enters it."""
    period_us = max(_PERIOD_US, round(_LEAST_US / share))
    quota_us = max(_LEAST_US, round(share * period_us))
    # Maximum weight: other processes must not take from the share.
    limits: tuple[dict[str, object], ...] = (
        {"cpu.max": f"{quota_us} {period_us}", "cpu.weight": 10_000},
        {"cpu.cfs_period_us": period_us, "cpu.cfs_quota_us": quota_us, "cpu.shares": 262_144},
    )
    reasons = []
    for mount, files in zip(_MOUNTS, limits, strict=True):
        group = mount / f"specact-{os.getpid()}"
        try:
            group.mkdir()
            for name, value in {**files, "cgroup.procs": os.getpid()}.items():
                if not (group / name).exists():
                    raise FileNotFoundError(2, f"no {name}")
                (group / name).write_text(str(value))
            return group
        except OSError as error:
            reasons.append(f"{mount}: {error.strerror}")
            with suppress(OSError):
                group.rmdir()
    raise ConfigError(
        "--device-share needs Linux and the right to make control groups for the processor, which this machine does "
        f"not give ({'; '.join(reasons)}); run as root, or leave it out"
    )
