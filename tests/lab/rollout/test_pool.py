"""Workers: they end with the process that started them, however it ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specact.lab.rollout.pool import Pool

STARTER = """
import sys, time
from concurrent.futures import wait
from specact.lab.rollout.pool import Pool

if __name__ == "__main__":
    with Pool(2) as pool:
        wait([pool._executor.submit(time.sleep, 0.2) for _ in range(4)])
        print(*pool._executor._processes, flush=True)
        time.sleep(60)
"""


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes from /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_parent_that_was_killed(
    how: signal.Signals, tmp_path: Path, environment: dict[str, str]
) -> None:
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout is not None
        workers = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(_alive, workers))
        os.kill(starter.pid, how)
    until = time.monotonic() + 30.0
    while any(map(_alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_alive, workers))


def test_a_pool_of_several_workers_works_inside_its_context_only() -> None:
    with pytest.raises(RuntimeError, match="with Pool"):
        list(Pool(2).each(abs, [-1, -2]))
    assert list(Pool(1).each(abs, [-1, -2])) == [(-1, 1), (-2, 2)]
