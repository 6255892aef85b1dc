"""Workers: they end with the process that started them, however it ended, and alone."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
from tests.children import has_ended, wait_for

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
        assert len(workers) == 2 and not any(map(has_ended, workers))
        os.kill(starter.pid, how)
    wait_for(lambda: all(map(has_ended, workers)))


def test_a_pool_of_several_workers_works_inside_its_context_only() -> None:
    with pytest.raises(RuntimeError, match="with Pool"):
        list(Pool(2).each(abs, [-1, -2]))
    assert list(Pool(1).each(abs, [-1, -2])) == [(-1, 1), (-2, 2)]


def test_an_error_ends_the_workers_and_no_other_process() -> None:
    context = get_context("spawn")
    bystander = context.Process(target=time.sleep, args=(60.0,))
    bystander.start()
    try:
        with pytest.raises(ZeroDivisionError), Pool(2) as pool:
            list(pool.each(partial(divmod, 1), [0]))
        wait_for(lambda: context.active_children() == [bystander])
    finally:
        bystander.kill()
        bystander.join()
