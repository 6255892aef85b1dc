"""Children of a test run receive signals, and end with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.children import has_ended, wait_for

# Starts a child, in a session of its own, that starts another; both write down which process they are, and sleep.
RUN = """
import subprocess, sys, time
from tests.children import end_with_this_process, receive_signals

receive_signals()
end_with_this_process()
SLEEPS = "import os, time; open(f'{os.getpid()}.pid', 'w'); time.sleep(1e4)"
STARTS = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); {SLEEPS}"
subprocess.Popen([sys.executable, "-c", STARTS], start_new_session=True)
time.sleep(1e4)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="environments of processes are shown on Linux only")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_ends_leaves_no_process_behind_and_what_it_ignores_reaches_its_children(
    tmp_path: Path, number: signal.Signals
) -> None:
    ignored = number in (signal.SIGINT, signal.SIGHUP)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    before = signal.signal(number, signal.SIG_IGN) if ignored else None
    try:
        run = subprocess.Popen([sys.executable, "-c", RUN], cwd=tmp_path, env=environment)
    finally:
        if ignored:
            signal.signal(number, before)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2 or run.poll() is not None)
    children = [int(file.stem) for file in tmp_path.glob("*.pid")]
    run.send_signal(number)
    if ignored:
        os.kill(children[0], number)
        wait_for(lambda: has_ended(children[0]))
        assert run.poll() is None
        run.kill()
    assert run.wait() == (-signal.SIGKILL if ignored else -number)
    wait_for(lambda: all(map(has_ended, children)))
