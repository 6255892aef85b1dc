"""``specact proxy`` as a process of its own, and what it says."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specact.cli.links import Proxy
from specact.errors import ConfigError


@contextmanager
def running(environment: dict[str, str], target: int, link: str = "lan") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The relay and the port it says it listens on."""
    code = f"from specact.cli.links import Proxy; Proxy('127.0.0.1:{target}', '127.0.0.1:0', {link!r}, 3).run()"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            assert first.startswith("listening on 127.0.0.1:"), first
            yield process, int(first.split()[2].split(":")[1])
        finally:
            process.kill()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_relays_until_it_is_told_to_end(environment: dict[str, str], echo_port: int, end: signal.Signals) -> None:
    with running(environment, echo_port) as (process, port):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(b"ping")
            assert client.recv(4) == b"ping"
        process.send_signal(end)
        assert process.wait(20) == 0
        assert process.stdout is not None and process.stderr is not None
        lines, complaints = process.stdout.read().splitlines(), process.stderr.read()
    assert complaints == ""
    assert "connection 0 opened" in lines
    assert any(line.startswith("connection 0 ") and line.endswith(", 4 bytes up, 4 bytes down") for line in lines)
    assert lines[-1].startswith("1 connections, 4 bytes up, 4 bytes down; of the last 2 messages half left ")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"listen": "0.0.0.0:0"}, "allow-remote"), ({"listen": "[::]:0"}, "allow-remote"),
        ({"listen": "8601"}, "listen"), ({"listen": ":8601"}, "listen"), ({"listen": "127.0.0.1:65536"}, "listen"),
        ({"target": "localhost:http"}, "target"), ({"target": "127.0.0.1:0"}, "target"),
        ({"target": "no-such-host:1"}, "no-such-host"), ({"link": "wifi-papr"}, "wifi-paper"), ({"seed": -1}, "seed"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Proxy(**{"listen": "127.0.0.1:0"} | settings).run()


def test_signals_are_as_before_when_it_cannot_start() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        Proxy(listen=f"127.0.0.1:{taken.getsockname()[1]}").run()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
