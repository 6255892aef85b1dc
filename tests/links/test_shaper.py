"""Shaping with real sockets. Times are checked from below; from above only so that a test ends."""

import shlex
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.children import wait_for
from tests.example_count import example_count
from tests.links.conftest import echo
from tests.remote.conftest import listening

from specact.errors import ConfigError
from specact.links.link import load_link
from specact.links.model import Link, MahimahiLink, OutageLink, SteadyLink, TraceLink
from specact.links.shaper import Pacer, Shaper, kernel_shaped, netem_options

pytestmark = pytest.mark.usefixtures("nothing_left")
PATIENCE = 20.0  # seconds before a test gives up


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as side:
        side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield side


def receive(side: socket.socket, count: int) -> bytes:
    parts = []
    while count and (part := side.recv(min(count, 65536))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def ask(side: socket.socket, data: bytes = b"ping") -> float:
    """Seconds until an echo is back, unchanged."""
    start = time.monotonic()
    side.sendall(data)
    assert receive(side, len(data)) == data
    return time.monotonic() - start


def resetting(side: socket.socket) -> None:
    """Makes a socket end with a reset when it is closed."""
    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def noting(events: list[Any]) -> Any:
    return lambda *event: events.append(event)


def due(link: Link, *messages: tuple[int, float], up: bool = True, start: float = 100.0) -> list[float]:
    """When messages of so many bytes, sent then, arrive."""
    pacer = Pacer(link, up, start, np.random.default_rng(0))
    return [pacer.due(size, now) for size, now in messages]


def test_what_follows_a_big_message_waits_for_it() -> None:
    link = SteadyLink(10.0, 0.0, 8.0, 80.0)  # 1 MB/s up, 5 ms each way
    arrivals = due(link, (500_000, 100.0), (1000, 100.1), (0, 100.2), (1000, 101.0))
    assert arrivals == pytest.approx([100.505, 100.506, 100.506, 101.006])  # the last one meets an idle link
    assert due(link, (500_000, 100.0), up=False) == pytest.approx([100.055])


def test_jitter_never_reorders_and_never_makes_early() -> None:
    sent = 100.0 + 1e-3 * np.arange(500)
    arrivals = np.array(due(SteadyLink(10.0, 5.0, 1e15, 1e15), *((100, now) for now in sent)))
    assert (np.diff(arrivals) >= 0.0).all() and (arrivals - sent > 2.4999e-3).all()
    assert (np.diff(arrivals) == 0.0).any()  # some would have overtaken


def test_a_link_counts_time_from_its_start_and_shares_out_recorded_deliveries() -> None:
    link = OutageLink(SteadyLink(0.0, 0.0, 1e15, 1e15), ((5.0, 3.0),))
    assert due(link, (1, 104.0), (1, 105.5), (1, 106.0), (1, 109.0)) == pytest.approx([104.0, 108.0, 108.0, 109.0])
    arrivals = due(MahimahiLink(np.array([10]), np.array([10])), *[(1500, 0.0)] * 4, start=0.0)  # a packet every 10 ms
    assert arrivals == pytest.approx([0.01, 0.02, 0.03, 0.04], abs=1e-6)


LOOPBACK = load_link("loopback")
SLOW = SteadyLink(40.0, 0.0, 1e6, 1e6)


@given(sizes=st.lists(st.integers(1, 60_000), min_size=1, max_size=12), seed=st.integers(0, 2**32))
@example_count(10)
def test_bytes_arrive_unchanged_and_in_order_both_ways(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunks = [rng.bytes(size) for size in sizes]
    link = SteadyLink(rtt_ms=1.0, jitter_ms=1.0, up_mbit_s=1000.0, down_mbit_s=500.0)
    with listening(echo) as port, Shaper(link, "127.0.0.1", port, seed=seed) as shaper:
        with connected(shaper.port) as client, ThreadPoolExecutor(1) as beside:
            received = beside.submit(receive, client, 10**9)
            for chunk in chunks:
                client.sendall(chunk)
            client.shutdown(socket.SHUT_WR)
            assert received.result() == b"".join(chunks)
        wait_for(lambda: shaper.up_bytes == shaper.down_bytes == sum(sizes))
    assert shaper.connections == 1


def test_messages_take_at_least_as_long_as_the_model_says(echo_port: int) -> None:
    with Shaper(SLOW, "127.0.0.1", echo_port) as shaper, connected(shaper.port) as client:
        times = [ask(client) for _ in range(6)]
    assert min(times) >= 0.04
    assert len(shaper.lateness) == 12 and (shaper.lateness >= 0.0).all()
    # The check tells a shaper that does nothing: without delay some echo is faster.
    with Shaper(LOOPBACK, "127.0.0.1", echo_port) as shaper, connected(shaper.port) as client:
        assert min(ask(client) for _ in range(50)) < 0.04


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_reset_by_one_side_reaches_the_other(who: str) -> None:
    ends: list[type[BaseException]] = []

    def serve(side: socket.socket) -> None:
        side.sendall(side.recv(4))
        if who == "server":
            resetting(side)
            return
        with pytest.raises(ConnectionResetError):
            side.recv(1)
        ends.append(ConnectionResetError)

    events: list[Any] = []
    with (
        listening(serve) as port,
        Shaper(SLOW, "127.0.0.1", port, on_event=noting(events)) as shaper,
    ):
        with connected(shaper.port) as client:
            ask(client)
            start = time.monotonic()
            if who == "server":
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
            else:
                resetting(client)
        wait_for(lambda: len(events) == 2)
        if who == "client":
            wait_for(lambda: ends)
            assert time.monotonic() - start >= 0.02  # it travels like any message
    assert events == [(0, "opened", 0, 0), (0, "reset", 4, 4)]


def test_a_target_that_is_not_there_is_a_reset_for_the_client() -> None:
    events: list[Any] = []
    # Nobody listens at its port, and nobody else is given it meanwhile.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with Shaper(LOOPBACK, *nobody.getsockname(), on_event=noting(events)) as shaper:
            # The reset may arrive before `connect` has returned.
            with pytest.raises(ConnectionResetError), connected(shaper.port) as client:
                client.recv(1)
            wait_for(lambda: len(events) == 2)
    assert [kind for _, kind, *_ in events] == ["opened", "refused"]


def test_a_receiver_that_does_not_read_holds_the_sender_back() -> None:
    release = threading.Event()
    with (
        listening(lambda side: (release.wait(PATIENCE), None)[1]) as port,
        Shaper(LOOPBACK, "127.0.0.1", port) as shaper,
        connected(shaper.port) as client,
    ):
        # Until nothing moves for a while although 4 MiB are in flight.
        client.settimeout(0.3)
        sent, block, until = 0, bytes(1 << 18), time.monotonic() + PATIENCE
        while sent < 1 << 28:
            try:
                sent += client.send(block)
            except TimeoutError:
                if sent > 4 << 20 or time.monotonic() > until:
                    break
        # The rest is what four kernel buffers of a few MiB take.
        assert 4 << 20 < sent < 1 << 27
        release.set()


def test_it_ends_at_once_whatever_is_on_the_way(echo_port: int) -> None:
    minute = SteadyLink(120_000.0, 0.0, 1e6, 1e6)
    start = time.monotonic()
    with Shaper(minute, "127.0.0.1", echo_port) as shaper, connected(shaper.port) as client:
        client.sendall(bytes(1 << 20))
        wait_for(lambda: shaper.connections == 1)
    assert time.monotonic() - start < PATIENCE


def test_the_same_seed_draws_the_same_delays(echo_port: int) -> None:
    shaky = SteadyLink(20.0, 5.0, 1e6, 1e6)
    shapers = [Shaper(shaky, "127.0.0.1", echo_port, seed=seed) for seed in (1, 1, 2)]
    due = [[shaper.pacer(n, up).due(100, 0.0) for n in range(3) for up in (True, False)] for shaper in shapers]
    assert due[0] == due[1] != due[2]
    assert len(set(due[0])) == 6  # every connection and direction has a stream of its own


# ---- the kernel's network emulator -----------------------------------------------------------------------------------

WIFI = "delay 6.027ms 0.214ms distribution normal rate 55400kbit"
RECORDED, INTERRUPTED = TraceLink(np.array([1.0])), load_link("lan+loss=0.1+outage=5:3")


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("wifi-paper", WIFI, WIFI),
        ("5g", "delay 10.000ms 2.828ms distribution normal rate 50000kbit",
         "delay 10.000ms 2.828ms distribution normal rate 100000kbit"),
        ("wifi-paper+delay=20+rate=2+loss=0.3",
         *["delay 16.027ms 0.214ms distribution normal rate 2000kbit loss random 30%"] * 2),
        ("loopback", *["delay 0.000ms rate 1000000000kbit"] * 2),
    ],
)  # fmt: skip
def test_a_steady_link_in_the_words_of_tc(name: str, up: str, down: str) -> None:
    link = load_link(name)
    assert (netem_options(link, up=True), netem_options(link, up=False)) == (up, down)


@pytest.mark.parametrize("link", [RECORDED, INTERRUPTED])
def test_recordings_and_outages_have_no_such_words(link: Link) -> None:
    assert netem_options(link, up=True) is None
    with pytest.raises(ConfigError, match="recorded"), kernel_shaped("lo", link, up=True):
        pytest.fail("it was shaped")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a ``tc`` was called with that stands in for a kernel with netem, and fails where the file REFUSE exists."""
    tool, log = tmp_path / "tc", tmp_path / "log"
    tool.write_text(
        f'#!/bin/sh\necho "tc $*" >> {shlex.quote(str(log))}\n'
        f"if [ -e {shlex.quote(f'{tmp_path}/REFUSE')} ]; then echo 'Operation not permitted' >&2; exit 2; fi\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return log


def test_the_kernel_shapes_for_a_while_and_then_no_longer(log: Path) -> None:
    add = f"tc qdisc add dev lo root netem {WIFI}"
    with kernel_shaped("lo", load_link("wifi-paper"), up=True) as command:
        assert command == add and log.read_text().splitlines() == [add]
    assert log.read_text().splitlines() == [add, "tc qdisc del dev lo root netem"]


def test_a_kernel_that_refuses_is_named_and_nothing_is_removed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (log.parent / "REFUSE").touch()
    with pytest.raises(ConfigError, match="not permitted"), kernel_shaped("lo", load_link("lan"), up=True):
        pytest.fail("it was not shaped")
    assert len(log.read_text().splitlines()) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="iproute2"), kernel_shaped("lo", load_link("lan"), up=True):
        pytest.fail("it was not shaped")
    with pytest.raises(ConfigError, match="--help"), kernel_shaped("--help", load_link("lan"), up=True):
        pytest.fail("it was shaped")
