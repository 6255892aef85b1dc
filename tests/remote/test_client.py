"""A client's own promises: what it sends and when, what it does with replies, and how it finds back."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from specact import Bundle
from specact.errors import ConfigError, RemoteError
from specact.lab.processes import ServerProcess, serving
from specact.links.link import load_link
from specact.links.shaper import Shaper
from specact.observation import Window
from specact.remote import client as client_module
from specact.remote.client import Client, ClientSettings
from specact.remote.target import RemoteTarget, remote_verifier
from specact.remote.transport import Endpoint
from specact.remote.websocket import WebSocketTransport
from specact.rng import StepAddress
from specact.types import Miss
from specact.verification import Answer
from specact.wire import json
from specact.wire.handshake import Welcome, welcome_fields

if TYPE_CHECKING:
    from tests.remote.conftest import Misbehaving, Peer, Robot

Listening = Callable[[Callable[[socket.socket], None]], AbstractContextManager[int]]
WaitFor = Callable[..., float]
Refusal = Callable[[Client], str]

pytestmark = pytest.mark.usefixtures("nothing_left")
PATIENT_MS = 5000.0
HURRIED = ClientSettings(connect_timeout_s=0.3, first_delay_s=0.02, longest_delay_s=0.2)


WELCOME = welcome_fields(Welcome("ball", "0" * 16, "0", 1 << 20, "codes", {}))


def say(side: socket.socket, fields: dict[str, Any]) -> None:
    """A reply over HTTP."""
    body = json.encode(fields)
    side.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def at(port: int, scheme: str = "ws") -> Endpoint:
    return Endpoint(scheme, "127.0.0.1", port)


def window(bundle: Bundle, seed: int = 0) -> Window:
    rng = np.random.default_rng(seed)
    state, goal = (bundle.observation[name].window_shape for name in ("state", "goal"))
    return Window({"state": rng.uniform(-1, 1, state).astype(np.float32), "goal": np.zeros(goal, np.float32)})


def at_step(step: int) -> StepAddress:
    return StepAddress(0, 0, 0, step)


@pytest.fixture
def refusing() -> Iterator[int]:
    """A port at which nobody listens, and which nobody else is given meanwhile."""
    with socket.socket() as side:
        side.bind(("127.0.0.1", 0))
        yield int(side.getsockname()[1])


# ---- which reply is taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_reply_that_comes_before_it_is_asked_for_is_kept(ball: Bundle, server: ServerProcess, scheme: str) -> None:
    # As with a slow draft: the thread that keeps the client looks at it meanwhile, and must not throw the reply away.
    with Client(at(server.port, scheme), ball.codec.dialect) as client:
        client.connect(10.0)
        target, seen = RemoteTarget(client, ball.codec, PATIENT_MS), window(ball)
        request = target.submit(seen, at_step(0))
        time.sleep(0.6)
        answer = request.result()
        assert isinstance(answer, Answer)
        np.testing.assert_array_equal(answer.value.probs, ball.target.infer(seen).probs)
        assert client.counts == {"connections": 1, "sent": 1, "answered": 1}


def test_replies_nobody_asked_for_are_counted_once(ball: Bundle, misbehaving: Misbehaving, wait_for: WaitFor) -> None:
    def thrice(peer: Peer, request: Any) -> None:
        for _ in range(3):
            peer.say(rogue.answer(request))

    with misbehaving() as rogue, Client(at(rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        target = RemoteTarget(client, ball.codec, PATIENT_MS)
        target.submit(window(ball, 1), at_step(1))
        time.sleep(0.6)
        target.submit(window(ball, 2), at_step(2))
        rogue.behave = thrice
        assert isinstance(target.submit(window(ball, 3), at_step(3)).result(), Answer)
        wait_for(lambda: client.counts.total() == 1 + 3 + 1 + 4)
        assert client.counts == {"connections": 1, "sent": 3, "answered": 1, "unwanted": 4}


def test_a_flood_of_replies_costs_no_more_than_a_deadline(
    ball: Bundle, misbehaving: Misbehaving, robot: Callable[..., Robot]
) -> None:
    def flood(peer: Peer, request: Any) -> None:
        foreign = rogue.answer(request) | {"id": 10**9}
        while True:
            peer.say(foreign)

    with misbehaving() as rogue, Client(at(rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client).play(3)
        rogue.behave = flood
        rover.play(10)
        rogue.behave = rogue.honest
        rover.run(lambda: rover.verified < 6)
        rover.check("deadline", "disconnected")
    assert client.counts["connections"] >= 2


# ---- signs of life --------------------------------------------------------------------------------------------------


def test_an_idle_client_asks_for_signs_of_life_and_gives_up_without(
    ball: Bundle, misbehaving: Misbehaving, wait_for: WaitFor
) -> None:
    awake = threading.Event()

    def sleep(peer: Peer, request: Any) -> None:
        awake.wait(20.0)

    settings = ClientSettings(silence_s=1.5)
    with misbehaving(sleep) as rogue, Client(at(rogue.port), ball.codec.dialect, settings=settings) as client:
        client.connect(10.0)
        quiet = time.monotonic()
        wait_for(lambda: len(rogue.peers[0].pings) >= 4 and time.monotonic() - quiet > 2 * settings.silence_s)
        # Nobody has said anything but pings and pongs, for longer than a silence may be.
        assert client.counts == {"connections": 1}
        asked = time.monotonic()
        assert isinstance(RemoteTarget(client, ball.codec, 1.0).submit(window(ball), at_step(0)).result(), Miss)
        wait_for(lambda: client.problem is not None and "nothing received from the server" in client.problem)
        assert time.monotonic() - asked > settings.silence_s / 2
        wait_for(lambda: client.problem is None)  # the server's other threads are awake
        awake.set()


def test_a_silent_server_is_asked_once_and_not_again_and_again(
    ball: Bundle, misbehaving: Misbehaving, robot: Callable[..., Robot], wait_for: WaitFor
) -> None:
    awake = threading.Event()

    def sleep(peer: Peer, request: Any) -> None:
        awake.wait(20.0)

    with misbehaving(sleep) as rogue, Client(at(rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client).play(20, period_s=0.03)
        rover.check("deadline", "disconnected")
        assert rover.causes == {"deadline": 3, "disconnected": 17}
        rogue.behave = rogue.honest
        awake.set()
        # What lay there unread: three requests and one question.
        wait_for(lambda: len(rogue.requests) == 3 and len(rogue.peers[0].pings) == 1)
        rover.find_back()
        # Only three more misses would be a reason to ask again.
        assert len(rogue.peers[0].pings) == 1 or rover.causes["deadline"] >= 6


# ---- HTTP, which has one lane --------------------------------------------------------------------------------------


def test_a_server_that_hangs_over_http_costs_three_deadlines_and_is_hung_up_on(
    ball: Bundle, server: ServerProcess, robot: Callable[..., Robot]
) -> None:
    settings = ClientSettings(silence_s=1.0)
    with (
        Shaper(load_link("loopback"), "127.0.0.1", server.port) as shaper,
        Client(at(shaper.port, "http"), ball.codec.dialect, settings=settings) as client,
    ):
        client.connect(10.0)
        rover = robot(client).play(5)
        gone = time.monotonic()
        shaper.half_open()
        until = time.monotonic() + 60.0
        rover.run(lambda: rover.verified < 10 and time.monotonic() < until)
        rover.check("deadline", "disconnected")
        assert rover.verified >= 10
        assert client.counts["connections"] == 2
        assert rover.waited(gone, gone + 1.0) < 4 * 0.04 + 3 * rover.noise


def test_a_reply_in_drops_over_http_cannot_stretch_the_deadline(
    ball: Bundle, listening: Listening, robot: Callable[..., Robot]
) -> None:
    def serve(side: socket.socket) -> None:
        side.recv(65536)
        say(side, WELCOME)
        while side.recv(65536):
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
                side.sendall(bytes([byte]))
                time.sleep(0.02)

    with listening(serve) as port, Client(at(port, "http"), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client).play(6, period_s=0.05)
        rover.check("deadline", "disconnected")


def test_a_reply_over_http_that_cannot_be_read_is_a_miss_at_once(ball: Bundle, listening: Listening) -> None:
    html = b"<html>no</html>"

    def serve(side: socket.socket) -> None:
        side.recv(65536)
        say(side, WELCOME)
        side.recv(65536)
        side.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: %d\r\n\r\n" % len(html) + html)
        side.recv(65536)
        say(side, {"v": 2, "type": "error", "id": None, "code": "overloaded", "message": "no"})
        side.recv(65536)

    with listening(serve) as port, Client(at(port, "http"), ball.codec.dialect) as client:
        client.connect(10.0)
        target, start = RemoteTarget(client, ball.codec, PATIENT_MS), time.monotonic()
        for step in range(2):
            answer = target.submit(window(ball), at_step(step)).result()
            assert isinstance(answer, Miss) and answer.cause == "invalid"
        assert time.monotonic() - start < 1e-3 * PATIENT_MS
        assert client.counts == {"connections": 1, "sent": 2, "unreadable": 2}


def test_an_idle_connection_that_the_server_closes_is_opened_again_before_it_is_needed(
    ball: Bundle, listening: Listening, wait_for: WaitFor
) -> None:
    def serve(side: socket.socket) -> None:
        side.recv(65536)
        say(side, WELCOME)

    with listening(serve) as port, Client(at(port, "http"), ball.codec.dialect, settings=HURRIED) as client:
        client.connect(10.0)
        wait_for(lambda: client.counts["connections"] >= 2)
        assert client.counts["sent"] == 0


# ---- how it connects -------------------------------------------------------------------------------------------------


class Attempts:
    """Counts the connections that a client tries to open, and when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: list[float] = []

        def counting(*arguments: Any) -> Any:
            self.times.append(time.monotonic())
            return WebSocketTransport(*arguments)

        monkeypatch.setattr(client_module, "WebSocketTransport", counting)


def test_a_refused_connection_is_tried_again_ever_less_often(
    ball: Bundle, robot: Callable[..., Robot], refusing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Attempts(monkeypatch)
    with Client(at(refusing), ball.codec.dialect, settings=HURRIED) as client:
        # A robot that acts meanwhile does not shorten the waits, and does not wait itself.
        rover = robot(client).run(lambda: len(attempts.times) < 7, period_s=0.005)
        assert client.problem is not None and "refused" in client.problem
        why = r"^no connection to ws://127.0.0.1:\d+: Connection refused; check .* \(tried for 0 s\)$"
        with pytest.raises(RemoteError, match=why):
            client.connect(0.0)
    waits = np.diff(attempts.times)
    assert (waits >= np.array([0.02, 0.04, 0.08, 0.16, 0.2, 0.2])).all()
    rover.check("disconnected")
    assert rover.waited(0.0, math.inf) < 0.1 + rover.noise and client.counts == {}


class LatestDraw:
    """Instead of a random generator: the end of every interval, which is kept."""

    drawn: ClassVar[list[tuple[float, float]]] = []

    def uniform(self, low: float, high: float) -> float:
        self.drawn.append((low, high))
        return high


def test_robots_do_not_all_come_back_at_once(
    ball: Bundle, refusing: int, monkeypatch: pytest.MonkeyPatch, wait_for: WaitFor
) -> None:
    attempts = Attempts(monkeypatch)
    monkeypatch.setattr("random.Random", LatestDraw)
    with Client(at(refusing), ball.codec.dialect, settings=HURRIED):
        wait_for(lambda: len(attempts.times) >= 5)
    # At first there is no wait to be spread; then up to half of it is added.
    drawn = [high for low, high in LatestDraw.drawn if low == 0.0][:5]
    assert drawn == pytest.approx([0.01, 0.01, 0.02, 0.04, 0.08])
    assert (np.diff(attempts.times)[:4] >= 1.5 * np.array([0.02, 0.04, 0.08, 0.16])).all()


def test_a_server_that_hangs_up_on_everybody_is_not_besieged(
    ball: Bundle, misbehaving: Misbehaving, robot: Callable[..., Robot], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, said = Attempts(monkeypatch), ball.codec.dialect
    with (
        misbehaving(lambda peer, request: peer.reset()) as rogue,
        Client(at(rogue.port), said, settings=HURRIED) as client,
    ):
        client.connect(10.0)
        robot(client).run(lambda: len(attempts.times) < 6, period_s=0.005).check("disconnected", "deadline")
    waits = np.diff(attempts.times)
    assert (waits >= np.array([0.02, 0.04, 0.08, 0.16, 0.2])).all()


@pytest.mark.parametrize("upgrades", [False, True])
def test_a_server_that_accepts_and_says_nothing(
    ball: Bundle, misbehaving: Misbehaving, robot: Callable[..., Robot], refusal: Refusal, upgrades: bool
) -> None:
    with misbehaving() as rogue:
        rogue.greet, rogue.answers_handshakes = (lambda peer: None), upgrades
        with Client(at(rogue.port), ball.codec.dialect, settings=HURRIED) as client:
            assert "did not answer" + (" the hello" if upgrades else " in time") in refusal(client)
            rover = robot(client).play(20, period_s=0.005)
            assert rover.causes == {"disconnected": 20}
            rogue.greet, rogue.answers_handshakes = rogue.welcome, True
            client.connect(10.0)
            rover.find_back()
        rover.check("deadline", "disconnected")


def test_a_server_that_refuses_this_device_and_later_does_not(
    ball: Bundle, misbehaving: Misbehaving, refusal: Refusal, robot: Callable[..., Robot]
) -> None:
    why = "the device has tokenizer 'a', the server 'b'"

    def refuse(peer: Peer) -> None:
        peer.say({"v": 2, "type": "error", "id": None, "code": "mismatch", "message": why})
        peer.raw(b"\x88\x02\x03\xf0")  # 1008, policy violation

    with misbehaving() as rogue:
        rogue.greet = refuse
        with Client(at(rogue.port), ball.codec.dialect, settings=HURRIED) as client:
            assert f"127.0.0.1:{rogue.port} refuses this device: {why}" in refusal(client)
            rover = robot(client).play(5)
            assert rover.causes == {"disconnected": 5}
            rogue.greet = rogue.welcome
            assert client.connect(10.0).bundle == "ball"
            rover.find_back()
            rover.check("deadline", "disconnected")


def test_a_real_server_of_another_bundle_says_what_to_do(ball: Bundle, refusal: Refusal) -> None:
    with serving("swarm") as other, Client(at(other.port), ball.codec.dialect, settings=HURRIED) as client:
        assert re.search("differ in tokenizer .*; deploy the same bundle on both", refusal(client))


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        ({"v": 2, "type": "welcome"}, "welcome needs"),
        ({"v": 1, "type": "welcome", "bundle": "b", "target": "t", "version": "0", "max_message_bytes": 1}, "protocol"),
        (WELCOME | {"v": 3}, "this side uses protocol 2, but the message says 3; install the same version"),
        ({name: value for name, value in WELCOME.items() if name != "family"}, "welcome needs"),
        (WELCOME | {"spec": None}, "welcome needs"),
        ({"v": 2, "type": "error", "id": None, "code": "tired", "message": "no"}, "known codes"),
        (b"\xc1", "not a msgpack message"),
        ("welcome", "not a msgpack message"),
        (b"\0" * 200_000, "too big|exceeds"),
    ],
)
def test_a_greeting_that_is_none_is_a_reason(
    ball: Bundle, misbehaving: Misbehaving, refusal: Refusal, greeting: Any, why: str
) -> None:
    with misbehaving() as rogue:
        rogue.greet = lambda peer: peer.say(greeting)
        with Client(at(rogue.port), ball.codec.dialect, settings=HURRIED) as client:
            assert re.search(why, refusal(client))


def test_a_name_that_no_server_takes_is_refused_with_a_reason(
    ball: Bundle, server: ServerProcess, refusal: Refusal
) -> None:
    with Client(at(server.port), ball.codec.dialect, "r" * 65) as client:
        assert "at most 64 printable" in refusal(client)


# ---- how it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["ws", "wss", "http", "https"])
def test_a_client_can_be_closed_while_the_server_hangs(ball: Bundle, listening: Listening, scheme: str) -> None:
    def hang(side: socket.socket) -> None:
        while side.recv(65536):
            pass

    settings = ClientSettings(connect_timeout_s=0.5)
    with listening(hang) as port:
        client = Client(at(port, scheme), ball.codec.dialect, settings=settings)
        time.sleep(0.1)
        start = time.monotonic()
        client.close()
        client.close()
        assert time.monotonic() - start < settings.connect_timeout_s + 20.0  # it would hang for ever
        assert client.send("infer", lambda identity: {}, 1.0, True) is None
        assert client.wait(1, 1.0) == "disconnected"


def test_a_client_that_is_closed_during_a_step_lets_it_miss(
    ball: Bundle, misbehaving: Misbehaving, wait_for: WaitFor
) -> None:
    with misbehaving(lambda peer, request: None) as rogue, Client(at(rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        target, found = RemoteTarget(client, ball.codec, 300.0), list[Any]()
        asking = threading.Thread(target=lambda: found.append(target.submit(window(ball), at_step(0)).result()))
        asking.start()
        wait_for(lambda: len(rogue.requests) == 1)
        client.close()
        asking.join()
        assert isinstance(found[0], Miss)


def test_a_request_larger_than_the_network_takes_at_once_leaves_within_the_deadline(
    ball: Bundle, misbehaving: Misbehaving
) -> None:
    # As with camera frames on a slow link: it takes longer than an instant, and less than the deadline.
    image, later = np.zeros(16 << 20, np.uint8), threading.Event()

    def sleepy(peer: Peer) -> None:
        peer.side.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # nothing like the message, on any machine
        rogue.welcome(peer)
        later.wait(20.0)

    with misbehaving() as rogue, Client(at(rogue.port), ball.codec.dialect) as client:
        rogue.greet, rogue.reads_requests = sleepy, False
        client.connect(10.0)
        start = time.monotonic()
        threading.Timer(0.15, later.set).start()
        assert client.send("infer", lambda identity: {"id": identity, "image": image}, 20.0, False) == 1
        assert time.monotonic() - start > 0.05
        assert client.problem is None
        # Where even the deadline is too short, the connection is given up: a part of a message cannot be taken back.
        client.send("infer", lambda identity: {"id": identity, "image": image}, 0.001, False)
        assert client.problem is not None and "while sending" in client.problem


@pytest.mark.parametrize("name", ["connect_timeout_s", "first_delay_s", "longest_delay_s", "silence_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_the_patience_of_a_client_is_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        ClientSettings(**{name: value})


@pytest.mark.parametrize("deadline_ms", [0.0, -1.0, math.nan, 60_001.0])
def test_a_deadline_is_positive(ball: Bundle, deadline_ms: float) -> None:
    with Client(at(1), ball.codec.dialect) as client, pytest.raises(ConfigError, match="between 0 and 60000"):
        remote_verifier(client, ball, deadline_ms)


def test_the_place_of_sampling_is_known(ball: Bundle) -> None:
    with Client(at(1), ball.codec.dialect) as client, pytest.raises(ConfigError, match="did you mean 'server'"):
        remote_verifier(client, ball, 50.0, "servr")  # type: ignore[arg-type]
