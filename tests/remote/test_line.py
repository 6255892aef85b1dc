"""A line's own promises: what it sends and when, what it does with replies, and how it finds back."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from specact import Bundle
from specact.child import Child
from specact.links.link import load_link
from specact.links.shaper import Shaper
from specact.remote.channel import Endpoint
from specact.remote.line import Line, LineSettings
from specact.remote.target import RemoteTarget
from specact.types import Window
from specact.verifiers import Answer
from specact.wire import json
from specact.wire.handshake import Welcome, welcome_fields

if TYPE_CHECKING:
    from tests.remote.conftest import Misbehaving, Peer, Robot

Listening = Callable[[Callable[[socket.socket], None]], AbstractContextManager[int]]
WaitFor = Callable[..., float]

pytestmark = pytest.mark.usefixtures("nothing_left")
PATIENT_MS = 5000.0


def at(port: int, scheme: str = "ws") -> Endpoint:
    return Endpoint(scheme, "127.0.0.1", port)


def window(bundle: Bundle, seed: int = 0) -> Window:
    rng = np.random.default_rng(seed)
    spec = bundle.spec
    return Window(rng.uniform(-1, 1, (spec.window, spec.state)).astype(np.float32), np.zeros(spec.goal, np.float32))


def free_port() -> int:
    with socket.socket() as side:
        side.bind(("127.0.0.1", 0))
        return int(side.getsockname()[1])


# ---- which reply is taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_reply_that_comes_before_it_is_asked_for_is_kept(ball: Bundle, server: Child, scheme: str) -> None:
    # As with a slow draft: the thread that keeps the line looks at it meanwhile, and must not throw the reply away.
    with Line(at(server.port, scheme), ball) as line:
        line.connect(10.0)
        target, seen = RemoteTarget(line, ball.spec, PATIENT_MS), window(ball)
        target.prefetch(seen)
        time.sleep(0.6)
        answer = target.ask(seen)
        assert isinstance(answer, Answer)
        np.testing.assert_array_equal(answer.target.probs, ball.target.infer(seen).probs)
        assert line.counts == {"connections": 1, "sent": 1, "answered": 1}


def test_replies_nobody_asked_for_are_counted_once(ball: Bundle, misbehaving: Misbehaving, wait_for: WaitFor) -> None:
    def thrice(peer: Peer, request: Any) -> None:
        for _ in range(3):
            peer.say(rogue.answer(request))

    with misbehaving() as rogue, Line(at(rogue.port), ball) as line:
        line.connect(10.0)
        target = RemoteTarget(line, ball.spec, PATIENT_MS)
        target.prefetch(window(ball, 1))  # the gate says no
        time.sleep(0.6)
        target.prefetch(window(ball, 2))
        rogue.behave = thrice
        assert isinstance(target.ask(window(ball, 3)), Answer)
        wait_for(lambda: line.counts.total() == 1 + 3 + 1 + 4)
        assert line.counts == {"connections": 1, "sent": 3, "answered": 1, "unwanted": 4}


def test_a_flood_of_replies_costs_no_more_than_a_deadline(
    ball: Bundle, misbehaving: Misbehaving, robot: Callable[..., Robot]
) -> None:
    def flood(peer: Peer, request: Any) -> None:
        foreign = rogue.answer(request) | {"id": 10**9}
        while True:
            peer.say(foreign)

    with misbehaving() as rogue, Line(at(rogue.port), ball) as line:
        line.connect(10.0)
        rover = robot(line).play(3)
        rogue.behave = flood
        rover.play(10)
        rogue.behave = rogue.honest
        rover.run(lambda: rover.verified < 6)
        rover.check("deadline", "disconnected")
    assert line.counts["connections"] >= 2


# ---- HTTP, which has one lane --------------------------------------------------------------------------------------


def test_a_server_that_hangs_over_http_costs_three_deadlines_and_is_hung_up_on(
    ball: Bundle, server: Child, robot: Callable[..., Robot]
) -> None:
    settings = LineSettings(silence_s=1.0)
    with (
        Shaper(load_link("loopback"), "127.0.0.1", server.port) as shaper,
        Line(at(shaper.port, "http"), ball, settings=settings) as line,
    ):
        line.connect(10.0)
        rover = robot(line).play(5)
        shaper.half_open()
        until = time.monotonic() + 3.0
        rover.run(lambda: rover.verified < 10 and time.monotonic() < until)
        rover.check("deadline", "disconnected")
        assert rover.verified >= 10
        assert line.counts["connections"] == 2
        assert rover.waited < 4 * 0.04 + 2 * rover.noise


def test_a_reply_in_drops_over_http_cannot_stretch_the_deadline(
    ball: Bundle, listening: Listening, robot: Callable[..., Robot]
) -> None:
    welcome = json.encode(welcome_fields(Welcome("ball", "0" * 16, "0", 1 << 20)))

    def serve(side: socket.socket) -> None:
        side.recv(65536)
        side.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(welcome) + welcome)
        while side.recv(65536):
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
                side.sendall(bytes([byte]))
                time.sleep(0.02)

    with listening(serve) as port, Line(at(port, "http"), ball) as line:
        line.connect(10.0)
        rover = robot(line).play(6, period_s=0.05)
        rover.check("deadline", "disconnected")
