"""A server whose target does not return: it still ends when it is told to, and leaves nobody without an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from specact.wire.handshake import Hello, hello_fields

if TYPE_CHECKING:
    from tests.server.conftest import Fields, Server

# Beside it appears a file once it is stuck.
STUCK = """
import threading
from pathlib import Path
import numpy as np
from specact.families.chunks.adapters import chunk_policy
from specact.observation import Field

@chunk_policy(observation={"state": Field((2,))}, chunk=2, actions=1, rate_hz=10.0)
def stuck(seen):
    if seen["state"].any():
        Path(__file__).with_name("stuck").touch()
        threading.Event().wait()
    return np.zeros((len(seen["state"]), 2, 1))
"""
DRAINING_FOR = (
    "import specact.server.settings as settings; "
    "settings.ServerSettings.__post_init__ = lambda own: object.__setattr__(own, 'drain_s', {}); "
)


@pytest.fixture
def start(command: list[str], environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[[float], Server]]:
    """Starts one that drains for so many seconds."""
    from tests.server.conftest import Server

    (tmp_path / "sticky.py").write_text(STUCK)
    path = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    servers: list[Server] = []

    def make(drain_s: float) -> Server:
        words = [*command[:-1], DRAINING_FOR.format(drain_s) + command[-1]]
        servers.append(
            Server(words, {**environment, "PYTHONPATH": path}, tmp_path / "log", ("--policy", "sticky:stuck"))
        )
        return servers[-1]

    yield make
    for server in servers:
        server.end()


def asked(identity: int, state: Any) -> Fields:
    return {
        "v": 2, "type": "infer", "id": identity, "deadline_ms": 60_000.0, "observation": {"state": state},
        "address": [0, 0, 0, 0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("drain_s", "signals"), [(0.5, 1), (3600.0, 2)], ids=["it drains for so long", "second signal"]
)
def test_sigterm_ends_a_server_whose_target_is_stuck(
    drain_s: float, signals: int, start: Callable[[float], Server], tmp_path: Path
) -> None:
    server = start(drain_s)
    with server.stream(hello_fields(Hello("tester", None, {}))) as robot, ThreadPoolExecutor(1) as pool:
        posted = pool.submit(server.http, "POST", "/v1/infer", asked(1, [[1.0, 1.0]]))
        try:
            server.until((tmp_path / "stuck").exists, "the target is stuck")
            robot.send(asked(2, np.zeros((1, 2), np.float32)))
            server.until(lambda: server.http("GET", "/v1/status").fields["queued"] == 1, "another is queued")
            for _ in range(signals):
                server.terminate()
                if signals > 1:
                    server.until(lambda: server.process.poll() is not None or not healthy(server), "it drains")
            # Neither what is being computed nor what is queued is left without an answer.
            refusal = robot.receive()
            assert (refusal["type"], refusal["id"], refusal["code"]) == ("error", 2, "shutting_down")
            assert robot.closed() == 1012
            answer = posted.result()
            assert (answer.status, answer.fields["id"], answer.fields["code"]) == (503, 1, "shutting_down")
            assert server.wait() == 0
        finally:
            server.end()
    assert server.log.splitlines()[1:] == ["stopped; 2 requests under way were not answered in time"]


def healthy(server: Server) -> bool:
    try:
        return server.http("GET", "/healthz").status == 200
    except OSError:
        return False
