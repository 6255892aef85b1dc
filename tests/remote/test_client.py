"""Whatever a server sends, a step has its own answer in time or a miss with the right cause."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.children import wait_for
from tests.remote.conftest import (
    PATIENT_MS,
    QUICK,
    Behave,
    Peer,
    Robot,
    Rogue,
    at,
    failing,
    frame,
    honest,
    listening,
    refusal,
    silent,
    zeros,
)

from specact import Pair
from specact.errors import ConfigError
from specact.remote import Client, ClientSettings, Endpoint, RemoteTarget, remote_verifier
from specact.safety import Fallback
from specact.types import Miss
from specact.wire.messages import Ask, ErrorCode, Failure, encode

pytestmark = pytest.mark.usefixtures("nothing_left")


def damaged(name: str, value: float) -> Behave:
    """An answer with this value in the first place of an array."""

    def behave(rogue: Rogue, peer: Peer, ask: Ask) -> None:
        reply = rogue.answer(ask)
        rogue.contract.kinds[ask.kind].reply.unpack(reply.arrays)[name].flat[0] = value
        peer.say(reply)

    return behave


def cut(rogue: Rogue, peer: Peer, ask: Ask) -> None:
    peer.say(rogue.answer(ask, arrays=rogue.answer(ask).arrays[:-4]))


def of_another_kind(rogue: Rogue, peer: Peer, ask: Ask) -> None:
    layout = rogue.contract.kinds["verify" if ask.kind == "infer" else "infer"].reply
    peer.say(rogue.answer(ask, arrays=layout.pack(layout.example())))


INVALID: dict[str, tuple[str, Behave]] = {
    "NaN": ("device", damaged("probs", np.nan)),
    "infinite": ("device", damaged("offsets", -np.inf)),
    "no distribution": ("device", damaged("probs", 0.999)),
    "below zero": ("device", damaged("probs", -0.01)),
    "fewer bytes": ("device", cut),
    "another kind": ("device", of_another_kind),
    "codes out of range": ("server", damaged("codes", 16)),
    "a rejection above one": ("server", damaged("rejection", 1.5)),
    "a chunk that is NaN": ("server", damaged("chunk", np.nan)),
    "a chunk beyond reason": ("server", damaged("chunk", 3e38)),
    "a distribution": ("server", of_another_kind),
    **{f"error {code}": ("device", failing(code)) for code in ErrorCode},
}
CAUSES = {"error overloaded": "overloaded", "error expired": "expired"}


@pytest.mark.parametrize("case", INVALID)
def test_what_is_no_valid_answer_is_a_miss_by_its_cause(case: str, ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    (sampling, behave), (server, port) = INVALID[case], rogue
    cause = CAUSES.get(case, "refused" if case.startswith("error") else "invalid")
    with Client(at(port), ball.exchange.contract) as client:
        client.connect(10.0)
        robot = Robot(ball, client, sampling=sampling).play(3)
        server.behave = behave
        robot.play(4)
        server.behave = honest
        robot.play(3).check(cause)
        assert robot.causes == {cause: 4} and client.counts["connections"] == 1


# ---- an answer, but not this step's ---------------------------------------------------------------------------------


def preceded_by(*messages: Any) -> Behave:
    """The right answer, after others; a function makes one of server and request."""

    def behave(rogue: Rogue, peer: Peer, ask: Ask) -> None:
        for message in messages:
            peer.say(message(rogue, ask) if callable(message) else message)
        peer.say(rogue.answer(ask))

    return behave


def again(rogue: Rogue, ask: Ask) -> Any:
    return rogue.answer(ask)


HARMLESS: dict[str, tuple[Behave, str]] = {
    "three times": (preceded_by(again, again), "unwanted"),
    "after the last one": (preceded_by(lambda rogue, ask: rogue.answer(rogue.asks[-2])), "unwanted"),
    "after a foreign id": (preceded_by(lambda rogue, ask: rogue.answer(ask, id=10**9)), "unwanted"),
    "after an error without an id": (preceded_by(Failure(None, ErrorCode.BAD_MESSAGE, "what?")), "unwanted"),
    "after garbage": (preceded_by(b"\xc1\xff" * 40), "unreadable"),
    "after nothing": (preceded_by(b""), "unreadable"),
    "after text": (preceded_by("how are you?"), "unreadable"),
    "after a nest of lists": (preceded_by(b"\x91" * 5000), "unreadable"),
    "in many pieces": (lambda rogue, peer, ask: peer.say(rogue.answer(ask), pieces=50), "answered"),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_the_answer_is_found_among_others(case: str, ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    (behave, counted), (server, port) = HARMLESS[case], rogue
    with Client(at(port), ball.exchange.contract) as client:
        client.connect(10.0)
        robot = Robot(ball, client).play(2)
        server.behave = behave
        robot.play(8).check()
        wait_for(lambda: client.counts[counted] > 0)
        assert client.counts["connections"] == 1
        assert len({ask.id for ask in server.asks}) == len(server.asks) == 10


def under_another_id(change: Any) -> Behave:
    def behave(rogue: Rogue, peer: Peer, ask: Ask) -> None:
        fields = msgspec.msgpack.decode(encode(rogue.answer(ask)))
        fields[1] = change(ask.id)
        peer.say(msgspec.msgpack.encode(fields))

    return behave


LOST: dict[str, Behave] = {
    "the id of an earlier step": under_another_id(lambda identity: identity - 1),
    "a foreign id": under_another_id(lambda identity: identity + 10**6),
    "an id that is no integer": under_another_id(float),
    "no id": under_another_id(lambda identity: None),
    "text": lambda rogue, peer, ask: peer.say("x" * 100, pieces=3),
    "half of it": lambda rogue, peer, ask: peer.say(encode(rogue.answer(ask))[:-40]),
    "nothing at all": silent,
}


@pytest.mark.parametrize("case", LOST)
def test_what_answers_no_request_is_not_waited_for_beyond_the_deadline(
    case: str, ball: Pair[Any], rogue: tuple[Rogue, int]
) -> None:
    server, port = rogue
    with Client(at(port), ball.exchange.contract) as client:
        client.connect(10.0)
        robot = Robot(ball, client, deadline_ms=40.0).find_back(4)
        before = len(robot.records)
        server.behave = LOST[case]
        robot.play(6)
        server.behave = honest
        robot.find_back(4).check("deadline", "disconnected")
        # Three in a row, and the client waits for a sign of life.
        assert robot.records[before].miss == "deadline" and client.counts["connections"] == 1
        assert len({ask.id for ask in server.asks}) == len(server.asks)


def test_late_answers_are_dropped_by_id_and_counted(ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    server, port = rogue

    def slow(rogue: Rogue, peer: Peer, ask: Ask) -> None:
        time.sleep(0.08)
        peer.say(rogue.answer(ask))

    with Client(at(port), ball.exchange.contract) as client:
        client.connect(10.0)
        robot = Robot(ball, client, deadline_ms=40.0).find_back(4)
        answered, verified = client.counts["answered"], robot.verified
        server.behave = slow
        robot.play(12, 0.02)
        wait_for(lambda: client.counts["late"] >= client.counts["sent"] - client.counts["answered"])
        assert client.counts["answered"] == answered and client.counts["late"] >= 3 and robot.verified == verified
        server.behave = honest
        robot.find_back(4).check("deadline", "disconnected")


# ---- connections that end, and what is sent again -------------------------------------------------------------------


def reset(rogue: Rogue, peer: Peer, ask: Ask) -> None:
    peer.side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.side.close()


ENDINGS: dict[str, Behave] = {
    "reset": reset,
    "an oversized reply": lambda rogue, peer, ask: peer.say(b"\0" * (rogue.contract.max_message_bytes + 1)),
    "an oversized reply in pieces": lambda rogue, peer, ask: peer.say(b"\0" * 200_000, pieces=40),
    "a frame that is none": lambda rogue, peer, ask: peer.raw(b"\x83\x00"),
    "a close frame": lambda rogue, peer, ask: peer.raw(b"\x88\x02\x03\xe9"),
    "HTTP in the middle": lambda rogue, peer, ask: peer.raw(b"HTTP/1.1 502 Bad Gateway\r\n\r\n"),
    "a flood of pings": lambda rogue, peer, ask: peer.raw(b"\x89\x00" * 5000),
    "a flood of empty frames": lambda rogue, peer, ask: peer.raw(b"\x02\x00" + b"\x00\x00" * 5000),
    "a flood of replies": lambda rogue, peer, ask: peer.raw(frame(encode(rogue.answer(ask, id=10**9))) * 1000),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_after_a_lost_connection_nothing_is_sent_again(case: str, ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    server, port = rogue
    with Client(at(port), ball.exchange.contract, settings=QUICK) as client:
        client.connect(10.0)
        robot = Robot(ball, client, deadline_ms=2000.0).play(3)
        server.behave = ENDINGS[case]
        robot.play(4, 0.05)
        server.behave = honest
        robot.find_back(3).check("disconnected", "deadline")
        assert robot.causes["disconnected"] > 0 and client.counts["connections"] > 1
        assert max(Counter(ask.address for ask in server.asks).values()) == 1


def test_too_many_misses_stop_the_robot(ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    server, port = rogue
    still = np.array([0.25, -0.5], np.float32)
    with Client(at(port), ball.exchange.contract) as client:
        client.connect(10.0)
        fallback = Fallback("hold_last", max_consecutive_misses=4, stop_action=tuple(still.tolist()))
        robot = Robot(ball, client, deadline_ms=200.0, fallback=fallback).find_back(2)
        first, sent = len(robot.records), client.counts["sent"]
        server.behave = silent
        robot.play(4)
        for before, action in zip(robot.actions[first - 1 :], robot.actions[first:], strict=False):
            np.testing.assert_array_equal(action, before)
        # Three deadlines, then no sign of life but a pong, which allows one more.
        assert client.counts["sent"] <= sent + 4
        robot.play(2)
        assert robot.policy.safety.stopped
        np.testing.assert_array_equal(robot.actions[-1], still)


# ---- connecting, and staying connected ------------------------------------------------------------------------------


def test_a_reply_that_comes_before_it_is_asked_for_is_kept(ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    with Client(at(rogue[1]), ball.exchange.contract) as client:
        client.connect(10.0)
        pending = client.request("infer", zeros(ball), PATIENT_MS)
        assert pending.sent
        wait_for(pending.done)
        assert not isinstance(pending.result(), Miss)


def test_an_idle_client_asks_for_signs_of_life_once_and_gives_up_without(ball: Pair[Any]) -> None:
    received: list[bytes] = []

    def serve(side: socket.socket) -> None:
        peer = Peer(side)
        for _ in peer.messages():
            peer.say(Rogue(ball).welcome())
            break
        while data := side.recv(65536):
            received.append(data)

    settings = ClientSettings(silence_s=0.6, first_delay_s=5.0)
    with listening(serve) as port, Client(at(port), ball.exchange.contract, settings=settings) as client:
        client.connect(10.0)
        wait_for(lambda: client.problem is not None)
        # One ping, then a close frame.
        assert "nothing received" in str(client.problem) and 1 <= len(received) <= 2


def test_a_server_that_hangs_up_is_tried_again_ever_less_often_and_not_by_all_at_once(ball: Pair[Any]) -> None:
    tried: dict[int, list[float]] = {}

    def hang_up(side: socket.socket) -> None:
        tried.setdefault(side.getsockname()[1], []).append(time.monotonic())

    settings, contract = ClientSettings(first_delay_s=0.02, longest_delay_s=0.32), ball.exchange.contract
    with listening(hang_up) as one, listening(hang_up) as other:
        with Client(at(one), contract, settings=settings), Client(at(other), contract, settings=settings):
            wait_for(lambda: len(tried) == 2 and min(map(len, tried.values())) >= 7)
        pauses = {port: np.diff(moments) for port, moments in tried.items()}
    for waits in pauses.values():
        # Never below the delay, which doubles up to its longest.
        for wait, least in zip(waits, (0.02, 0.04, 0.08, 0.16, 0.32, 0.32), strict=False):
            assert wait >= least - 0.01
    assert not np.allclose(pauses[one][:6], pauses[other][:6], atol=1e-4)


GREETINGS: dict[str, tuple[Any, str]] = {
    "another family": ({"family": "chunks"}, "chunks"),
    "another spec": ({"spec": {}}, "tokenizer"),
    "other arrays": ({"kinds": {}}, "arrays"),
    "an error": (Failure(None, ErrorCode.UNAUTHORIZED, "the token\x1b[31m is wrong"), "token"),
    "garbage": (b"\xc1", "message"),
    "text": ("hello", "message"),
}


@pytest.mark.parametrize("case", GREETINGS)
def test_a_server_that_is_not_the_one_is_not_asked_and_the_reason_is_printable(
    case: str, ball: Pair[Any], rogue: tuple[Rogue, int]
) -> None:
    (greeting, word), (server, port) = GREETINGS[case], rogue
    server.greet = lambda peer: peer.say(server.welcome(**greeting) if isinstance(greeting, dict) else greeting)
    with Client(at(port), ball.exchange.contract) as client:
        reason = refusal(client)
        assert word in reason and reason.isprintable() and len(reason) < 700
        assert Robot(ball, client).play(2).causes == {"disconnected": 2} and not server.asks


def test_the_names_of_a_server_are_printable_and_short(ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    server, port = rogue
    server.greet = lambda peer: peer.say(server.welcome(bundle="a\x1b[2J" + "b" * 999, version="\n"))
    with Client(at(port), ball.exchange.contract) as client:
        welcome = client.connect(10.0)
        assert welcome.bundle == "a?[2J" + "b" * 59 and welcome.version == "?"


ANSWERS = {
    "nothing": b"", "no HTTP": b"SSH-2.0-OpenSSH\r\n", "a page": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "a refusal": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "an endless head": b"HTTP/1.1 101 x\r\n" + b"a: b\r\n" * 100_000,
    "a wrong key": b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_what_is_no_websocket_is_a_reason(case: str, ball: Pair[Any]) -> None:
    def answer(side: socket.socket) -> None:
        side.recv(65536)
        side.sendall(ANSWERS[case])
        side.recv(65536)

    settings = ClientSettings(connect_timeout_s=0.5)
    with listening(answer) as port, Client(at(port), ball.exchange.contract, settings=settings) as client:
        assert f"127.0.0.1:{port}" in refusal(client)


def test_a_client_can_be_closed_during_a_step_which_is_a_miss(ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    server, port = rogue
    server.behave = silent
    client = Client(at(port), ball.exchange.contract)
    client.connect(10.0)
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(client.request("infer", zeros(ball), 500.0).result()))
    waiting.start()
    client.close()
    client.close()
    waiting.join(60)
    results.append(client.request("infer", zeros(ball), 500.0).result())
    assert [isinstance(result, Miss) for result in results] == [True, True] and not results[1].sent


def test_requests_that_are_never_answered_cost_little_memory(ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    server, port = rogue
    server.behave = silent
    with Client(at(port), ball.exchange.contract) as client:
        client.connect(10.0)
        pending = [client.request("infer", zeros(ball), PATIENT_MS) for _ in range(600)]
        assert client.counts["sent"] == 600 and not any(request.done() for request in pending[-200:])
        # The oldest are given up.
        assert isinstance(pending[0].result(), Miss)


def test_the_token_goes_into_the_head_and_is_not_shown(ball: Pair[Any], rogue: tuple[Rogue, int]) -> None:
    server, port = rogue
    endpoint = Endpoint("ws", "127.0.0.1", port, "open-sesame-0123456789")
    with Client(endpoint, ball.exchange.contract) as client:
        client.connect(10.0)
    assert server.peers[0].headers["Authorization"] == "Bearer open-sesame-0123456789"
    assert "sesame" not in repr(endpoint) + str(endpoint)


URLS = {
    "ws://a:1": ("ws", "a", 1), "wss://a": ("wss", "a", 8600), "a:5": ("ws", "a", 5), "ws://[::1]:7/": ("ws", "::1", 7),
}  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_a_url_names_scheme_host_and_port(url: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.scheme, endpoint.host, endpoint.port) == URLS[url]


@pytest.mark.parametrize(
    "url",
    ["http://a:1", "https://a", "ftp://a", "ws://", "ws://a:b", "ws://a:0", "ws://a:70000", "ws://a/b", "ws://a?x=1",
     "ws://me@a:1", "ws://a b", "ws://" + "a" * 70],
)  # fmt: skip
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint.parse(url)


@pytest.mark.parametrize("token", ["", "a\nb", "\N{LOCK}" * 20])
def test_a_token_that_would_break_a_head_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        Endpoint("ws", "a", 1, token)


def test_settings_that_make_no_sense_are_refused(ball: Pair[Any]) -> None:
    for quality in (0, 96):
        with pytest.raises(ConfigError, match=str(quality)):
            Client(at(1), ball.exchange.contract, jpeg_quality=quality)
    with Client(at(1), ball.exchange.contract) as client:
        for deadline in (0.0, -1.0, 60_001.0, float("nan")):
            with pytest.raises(ConfigError, match="deadline"):
                RemoteTarget(client, ball.exchange, deadline)
        with pytest.raises(ConfigError, match="sampling"):
            remote_verifier(client, ball, 10.0, "moon")  # type: ignore[arg-type]
        assert "127.0.0.1:1" in refusal(client)
