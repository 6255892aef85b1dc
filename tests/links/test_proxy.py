"""``specact proxy`` as a process of its own, and what it says."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from specact.cli import proxy as verb
from specact.cli.proxy import Proxy, mechanism
from specact.errors import ConfigError
from specact.links.link import Link, load_link
from specact.links.netem import Netem
from specact.links.recordings import TraceLink


@contextmanager
def running(environment: dict[str, str], target: int, link: str = "lan") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The relay and the port it says it listens on."""
    code = f"from specact.cli.proxy import Proxy; Proxy('127.0.0.1:{target}', '127.0.0.1:0', {link!r}, 3).run()"
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
    assert lines[0].startswith("shaped by a relay in this process")
    assert lines[1].startswith("kernel netem: ")
    assert "connection 0 opened" in lines
    assert any(line.startswith("connection 0 ") and line.endswith(", 4 bytes up, 4 bytes down") for line in lines)
    assert lines[-1].startswith("1 connections, 4 bytes up, 4 bytes down; of the last 2 messages half left ")


def test_without_netem_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "find_netem", lambda: Netem(False, "the kernel shows none"))
    assert mechanism(load_link("lan"))[1:] == [
        "kernel netem: not available here, the kernel shows none; the relay does not need it"
    ]


def test_with_netem_it_gives_the_equivalent_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "find_netem", lambda: Netem(True, "loaded, in /proc/modules"))
    lines = mechanism(load_link("wifi-paper"))
    command = "tc qdisc add dev DEV root netem delay 6.027ms 0.214ms distribution normal rate 55400kbit"
    assert lines[1] == "kernel netem: available (loaded, in /proc/modules), not used by the relay"
    assert "specact netem DEV" in lines[2]
    assert lines[3:] == [f"  on the robot: {command}", f"  on the server: {command}"]


@pytest.mark.parametrize("link", [TraceLink(np.array([1.0])), load_link("wifi-paper+outage=5:3")])
def test_netem_has_no_form_for_recordings_and_outages(monkeypatch: pytest.MonkeyPatch, link: Link) -> None:
    monkeypatch.setattr(verb, "find_netem", lambda: Netem(True, "built in"))
    assert mechanism(link)[-1] == "  it cannot emulate this link, which is recorded or has outages"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"listen": "0.0.0.0:0"}, "can be reached from other machines.*--allow-remote"),
        ({"listen": "[::]:0"}, "can be reached from other machines"),
        ({"listen": "8601"}, "--listen must be HOST:PORT"),
        ({"listen": ":8601"}, "--listen must be HOST:PORT"),
        ({"listen": "127.0.0.1:65536"}, "--listen must be HOST:PORT with a port from 0 to 65535"),
        ({"target": "localhost:http"}, "--target must be HOST:PORT"),
        ({"target": "127.0.0.1:0"}, "--target needs the server's port"),
        ({"target": "no.such.host.invalid:1"}, "cannot resolve the address no.such.host.invalid:1"),
        ({"link": "wifi-papr"}, "did you mean 'wifi-paper'"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Proxy(**{"listen": "127.0.0.1:0"} | settings).run()  # type: ignore[arg-type]


def test_signals_are_as_before_when_it_cannot_start() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        Proxy(listen=f"127.0.0.1:{taken.getsockname()[1]}").run()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
