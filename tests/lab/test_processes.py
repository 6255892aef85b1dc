"""A command in a process of its own: it starts ready, says why if it cannot, and ends with its owner."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from tests.children import wait_for

from specact.errors import RemoteError
from specact.lab.rollout.processes import ServerProcess, linked, serving

# What stands in for the command: a process that does what the test wants to see handled.
ANNOUNCE = "print('listening on 127.0.0.1:4711 for ever', flush=True);"


def child(code: str, ready_within_s: float = 60.0) -> ServerProcess:
    """A child that runs this code."""
    made = ServerProcess([], ready_within_s=ready_within_s)
    made._command = [sys.executable, "-c", code]
    return made


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def open_files() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


def test_a_server_and_a_link_start_ready_and_end_in_order() -> None:
    before = open_files()
    with serving("ball") as server, linked(server.port, "lan") as proxy:
        assert 0 < server.port != proxy.port > 0
        for port in (server.port, proxy.port):
            with socket.create_connection(("127.0.0.1", port), timeout=10.0) as side:
                side.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert side.recv(100).startswith(b"HTTP/1.1 200")
        pids = server.pid, proxy.pid
        assert server.stop() == 0
        assert "everything under way was answered" in server.output
        assert server.stop() == 0  # again
    assert all(map(ended, pids)) and open_files() == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["serve", "--bundle", "bal"], "did you mean 'ball'"),
        (["serve", "--bundle", "ball", "--host", "0.0.0.0"], "token is needed"),
        (["proxy", "--target", "127.0.0.1:1", "--link", "wifi-papr"], "did you mean 'wifi-paper'"),
    ],
)
def test_a_command_that_fails_says_why(arguments: list[str], why: str) -> None:
    before = open_files()
    with pytest.raises(RemoteError, match=why), ServerProcess(arguments):
        pass
    assert open_files() == before


def test_a_command_that_ends_without_a_word_is_reported_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RemoteError, match="it printed nothing"), child("pass", ready_within_s=600.0):
        pass
    assert time.monotonic() - start < 300.0


def test_a_command_that_never_gets_ready_is_ended() -> None:
    for patience_s in (1.0, 5.0, 25.0):  # Python itself may take longer to start
        slow = child("import time; print('a moment', flush=True); time.sleep(600)", patience_s)
        with pytest.raises(RemoteError, match="did not start: ") as caught, slow:
            pass
        assert ended(slow.pid)
        if "a moment" in str(caught.value):
            break
    assert "a moment" in str(caught.value)


def test_an_announcement_may_come_in_pieces() -> None:
    code = (
        "import sys, time\n"
        "for part in ('warning: x\\nlistening on 127.0.', '0.1:47', '11 for ', 'ever\\n'):\n"
        "    sys.stdout.write(part); sys.stdout.flush(); time.sleep(0.05)\n"
        "time.sleep(600)"
    )
    with child(code) as slow:
        assert slow.port == 4711


def test_a_talkative_command_is_never_stopped_by_a_full_pipe(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"{ANNOUNCE} print('x' * 10**6, flush=True); open({str(done)!r}, 'w'); import time; time.sleep(600)"
    with child(code) as talkative:
        wait_for(done.exists)
        talkative.kill()
        assert talkative.output.count("x") == 10**6


def test_a_command_that_does_not_want_to_end_is_made_to() -> None:
    code = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {ANNOUNCE} time.sleep(600)"
    with child(code) as stubborn:
        assert stubborn.stop(within_s=0.2) == -signal.SIGKILL
        assert ended(stubborn.pid)


def test_an_error_in_the_block_ends_it_too() -> None:
    with pytest.raises(ZeroDivisionError), child(f"{ANNOUNCE} import time; time.sleep(600)") as left:
        raise ZeroDivisionError
    assert ended(left.pid)
