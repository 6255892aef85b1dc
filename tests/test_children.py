"""Children of a test run receive signals, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Starts a child, in a session of its own, that starts another; both write down which process they are, and sleep.
RUN = """
import os, subprocess, sys, time
from pathlib import Path
from tests.children import end_with_this_process, receive_signals

receive_signals()
end_with_this_process()
SLEEPS = "import os, sys, time; open(f'{os.getpid()}.pid', 'w'); time.sleep(1e4)"
STARTS = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); {SLEEPS}"
subprocess.Popen([sys.executable, "-c", STARTS], start_new_session=True)
time.sleep(1e4)
"""


def started(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A test run, and the processes that it started."""
    root = Path(__file__).parents[1]
    run = subprocess.Popen([sys.executable, "-c", RUN], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)})
    until = time.monotonic() + 300.0
    while len(pids := [int(file.stem) for file in tmp_path.glob("*.pid")]) < 2:
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    return run, pids


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + 300.0
    # A process that has ended and that nobody has waited for has no command line.
    while (file := Path(f"/proc/{pid}/cmdline")).exists() and file.read_bytes():
        assert time.monotonic() < until, f"{pid} lives"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="environments of processes are shown on Linux only")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    run, pids = started(tmp_path)
    run.send_signal(number)
    assert run.wait(300.0) == -number
    for pid in pids:
        wait_for_end(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_children_receive_signals_that_the_run_ignores(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        run, pids = started(tmp_path)
    finally:
        signal.signal(number, before)
    run.send_signal(number)
    for pid in pids:
        os.kill(pid, number)
        wait_for_end(pid)
    assert run.poll() is None, "the run itself ignores it"
    run.kill()
    run.wait()
