"""A server that sends far more frames than a robot has use for: the work of one look is bounded, and it is dropped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from specact import Bundle
from specact.remote import websocket
from specact.remote.client import Client, ClientSettings
from specact.remote.transport import Endpoint, TransportClosedError
from specact.remote.websocket import WebSocketTransport
from specact.wire.handshake import Hello, hello_fields

if TYPE_CHECKING:
    from tests.remote.conftest import Misbehaving, Peer, Robot

WaitFor = Callable[..., float]
Refusal = Callable[[Client], str]

pytestmark = pytest.mark.usefixtures("nothing_left")

FLOODS = {
    "empty pings": b"\x89\x00",
    "empty pongs": b"\x8a\x00",
    "pings with data": b"\x89\x7d" + b"x" * 125,
    "empty messages": b"\x82\x00",
    "messages of one byte": b"\x82\x01\xc1",
}
# Fragments: a first one, and then for ever those that go on with it.
FRAGMENTS = {"empty fragments": (b"\x02\x00", b"\x00\x00"), "fragments of one byte": (b"\x02\x01x", b"\x00\x01x")}
EVERY = {**{name: (frame, frame) for name, frame in FLOODS.items()}, **FRAGMENTS}


def flood(peer: Peer, first: bytes, frame: bytes) -> None:
    """For ever, or until the device has hung up."""
    peer.raw(first)
    while True:
        peer.raw(frame * 4096)


class Counted:
    """Counts the frames that transports take in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames, charge = 0, WebSocketTransport._charge

        def counting(transport: WebSocketTransport, frame: Any) -> None:
            self.frames += 1
            charge(transport, frame)

        monkeypatch.setattr(WebSocketTransport, "_charge", counting)


@pytest.mark.parametrize(("first", "frame"), EVERY.values(), ids=EVERY.keys())
def test_one_look_takes_in_a_bounded_number_of_frames_and_soon_none(
    ball: Bundle, misbehaving: Misbehaving, monkeypatch: pytest.MonkeyPatch, first: bytes, frame: bytes
) -> None:
    counted, looks = Counted(monkeypatch), list[int]()
    with misbehaving() as rogue:
        rogue.greet = lambda peer: flood(peer, first, frame)
        transport = WebSocketTransport(Endpoint("ws", "127.0.0.1", rogue.port), 10.0, 1 << 20)
        try:
            hello = hello_fields(Hello("robot", None, {}))
            transport.send("hello", transport.encode(hello), 5.0)
            until, why = time.monotonic() + 60.0, ""
            while not why and time.monotonic() < until:
                before = counted.frames
                try:
                    transport.receive(0.0)
                except TransportClosedError as error:
                    why = str(error)
                looks.append(counted.frames - before)
            assert "too many frames with too little data" in why or "while sending" in why
        finally:
            transport.close()
    assert max(looks) <= websocket._MAX_FRAMES_PER_READ
    assert counted.frames < 2000


@pytest.mark.parametrize(("first", "frame"), EVERY.values(), ids=EVERY.keys())
def test_a_robot_whose_server_floods_it_drops_the_connection_and_finds_back(
    ball: Bundle, misbehaving: Misbehaving, robot: Callable[..., Robot], monkeypatch: pytest.MonkeyPatch,
    first: bytes, frame: bytes,
) -> None:  # fmt: skip
    counted = Counted(monkeypatch)
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client).play(3)
        before, connections = counted.frames, client.counts["connections"]
        rogue.behave = lambda peer, request: flood(peer, first, frame)
        rover.play(10)
        flooded, connected = counted.frames - before, client.counts["connections"] - connections + 1
        rogue.behave = rogue.honest
        rover.run(lambda: rover.verified < 6)
        rover.check("deadline", "disconnected")
    assert client.counts["connections"] >= 2
    assert flooded < 2000 * connected


def test_many_pings_of_ours_are_no_flood_of_the_servers(
    ball: Bundle, misbehaving: Misbehaving, wait_for: WaitFor
) -> None:
    with misbehaving() as rogue:
        transport = WebSocketTransport(Endpoint("ws", "127.0.0.1", rogue.port), 10.0, 1 << 20)
        try:
            transport.send("hello", transport.encode(hello_fields(Hello("robot", None, {}))), 5.0)
            assert transport.receive(5.0) is not None
            for count in range(1, 400):
                transport.ping()
                wait_for(lambda count=count: len(rogue.peers[0].pings) == count)
                assert transport.receive(0.0) is None
        finally:
            transport.close()


@pytest.mark.parametrize("pieces", [1, 40])
def test_large_replies_are_no_flood(ball: Bundle, misbehaving: Misbehaving, pieces: int) -> None:
    message = np.random.default_rng(0).bytes(100_000)

    def greet(peer: Peer) -> None:
        for _ in range(30):
            peer.say(message, pieces=pieces)

    with misbehaving() as rogue:
        rogue.greet = greet
        transport = WebSocketTransport(Endpoint("ws", "127.0.0.1", rogue.port), 10.0, 1 << 20)
        try:
            transport.send("hello", transport.encode(hello_fields(Hello("robot", None, {}))), 5.0)
            for _ in range(30):
                assert transport.receive(5.0) == message
        finally:
            transport.close()


# ---- what it says ---------------------------------------------------------------------------------------------------

UGLY = "\x1b[2J\x1b]0;owned\x07\r\nno\u202eon " + "x" * 5000
SEEN = "?[2J?]0;owned???no?on xxx"


def test_a_servers_text_is_printable_and_short(ball: Bundle, misbehaving: Misbehaving, refusal: Refusal) -> None:
    def refuse(peer: Peer) -> None:
        peer.say({"v": 2, "type": "error", "id": None, "code": "mismatch", "message": UGLY})

    def goodbye(peer: Peer) -> None:
        reason = b"\x03\xf0" + UGLY.encode()[:100]
        peer.raw(b"\x88" + bytes([len(reason)]) + reason)

    settings = ClientSettings(connect_timeout_s=0.5)
    for greet in (refuse, goodbye):
        with misbehaving() as rogue:
            rogue.greet = greet
            with Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect, settings=settings) as client:
                said = refusal(client)
        assert SEEN in said and said.isprintable() and len(said) < 600


def test_a_servers_names_are_printable_and_short(ball: Bundle, misbehaving: Misbehaving) -> None:
    def greet(peer: Peer) -> None:
        names = {"bundle": UGLY, "target": UGLY, "version": UGLY, "family": UGLY, "spec": {}}
        peer.say({"v": 2, "type": "welcome", "max_message_bytes": 1 << 20} | names)

    with misbehaving() as rogue:
        rogue.greet = greet
        with Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
            welcome = client.connect(10.0)
    for name in (welcome.bundle, welcome.target, welcome.version, welcome.family):
        assert name.startswith(SEEN) and name.isprintable() and len(name) <= 64
