"""Whatever a server sends, in either protocol, a step has its own answer in time or a miss with the right cause."""

from __future__ import annotations

import dataclasses
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.children import wait_for
from tests.remote.conftest import (
    BOTH,
    CONTRACT,
    PAIR,
    PATIENT_MS,
    QUICK,
    Behave,
    FakeServer,
    Peer,
    Question,
    asking,
    at,
    endpoint_of,
    frame,
    honest,
    listening,
    misbehaving,
    refusal,
    silent,
    timeouts,
)

from specact import Pair, connect
from specact.errors import ConfigError, RefusedError
from specact.pair import Pending
from specact.remote import Client, Endpoint, RemoteTarget, RemoteVerifier, remote_verifier
from specact.rng import StepAddress
from specact.types import Miss, OffloadTimes
from specact.wire import openpi
from specact.wire.exchange import Request
from specact.wire.messages import ErrorCode, Failure, encode

pytestmark = pytest.mark.usefixtures("nothing_left")
Message = Callable[[FakeServer, Question], Any]
ZEROS = Request(CONTRACT.observation.zeros(), StepAddress(0, 0, 0, 0))


def replying(*number: float, **fields: Any) -> Message:
    return lambda server, question: server.reply(question, *number, **fields)


def failure(code: ErrorCode) -> Message:
    return lambda server, question: Failure(question.id, code, "no")


def saying(message: Any) -> Message:
    return lambda server, question: message


CAUSES = {ErrorCode.OVERLOADED: "overloaded", ErrorCode.EXPIRED: "expired"}
# What is no valid answer, and the cause of the miss.
INVALID: dict[tuple[str, str], tuple[Message, str]] = {
    **{(protocol, "not a number"): (replying(np.nan), "invalid") for protocol in BOTH},
    **{(protocol, "infinite"): (replying(-np.inf), "invalid") for protocol in BOTH},
    **{("specact", f"error {code}"): (failure(code), CAUSES.get(code, "refused")) for code in ErrorCode},
    ("specact", "fewer bytes"): (replying(arrays=bytearray(20)), "invalid"),
    ("openpi", "text"): (saying("Traceback (most recent call last): \x1b[31m boom"), "refused"),
    ("openpi", "too large"): (replying(actions=np.full((3, 2), 1e300)), "invalid"),
    ("openpi", "too short"): (replying(actions=np.zeros((2, 2))), "invalid"),
    ("openpi", "one more axis"): (replying(actions=np.zeros((1, 3, 2))), "invalid"),
    ("openpi", "no array"): (replying(actions=[[0.0, 1.0]] * 3), "invalid"),
    ("openpi", "flags"): (replying(actions=np.zeros((3, 2), bool)), "invalid"),
    ("openpi", "an object"): (replying(actions={"nd": True, "type": "|O", "data": b"."}), "invalid"),
    ("openpi", "nothing"): (saying(openpi.encode({})), "invalid"),
    ("openpi", "another message"): (saying(b"\xc1"), "invalid"),
}
TIMES: list[Any] = [None, 3, {}, {"infer_ms": "x"}, {"infer_ms": np.nan}, {"infer_ms": -1}, {"infer_ms": [1]}]


@pytest.mark.parametrize("case", INVALID, ids=" ".join)
def test_what_is_no_valid_answer_is_a_miss_by_its_cause_and_the_next_one_is_found(case: tuple[str, str]) -> None:
    (protocol, _), (wrong, cause) = case, INVALID[case]

    def behave(server: FakeServer, peer: Peer, question: Question) -> None:
        number = len(server.questions)
        # Whatever an openpi server says of its time.
        time_of = {} if server.native else {"server_timing": TIMES[number % len(TIMES)]}
        peer.say(wrong(server, question) if number % 2 else server.reply(question, **time_of))

    with misbehaving(protocol) as (server, port), asking(protocol, port) as device:
        server.behave = behave
        assert device.asks(14) == [cause, None] * 7
        assert device.client.counts["connections"] == 1 and device.client.counts["requests"] == 14


def test_an_outcome_beyond_reason_is_a_miss(ball: Pair[Any]) -> None:
    class Huge:
        def request(self, kind: str, request: Request, deadline_ms: float) -> Pending[Any]:
            arrays = ball.exchange.contract.kinds[kind].reply.example()
            arrays["chunk"][:] = 3e38
            return Pending(lambda: (arrays, OffloadTimes()))

    proposal = ball.drafter().propose(ball.observation.zeros(), np.random.default_rng(0))
    exchange: Any = ball.exchange
    outcome = RemoteVerifier(Huge(), exchange, 10.0).submit(proposal, StepAddress(0, 0, 0, 0)).result()  # type: ignore[arg-type]
    assert isinstance(outcome, Miss) and outcome.cause == "invalid"


def preceded_by(*messages: Any) -> Behave:
    """The right answer, after others; a function makes one of server and question."""

    def behave(server: FakeServer, peer: Peer, question: Question) -> None:
        for message in messages:
            peer.say(message(server, question) if callable(message) else message)
        peer.say(server.reply(question))

    return behave


HARMLESS: dict[str, tuple[Behave, str]] = {
    "three times": (preceded_by(replying(), replying()), "unwanted"),
    "after the last one": (preceded_by(lambda server, question: server.reply(server.questions[-2])), "unwanted"),
    "after a foreign id": (preceded_by(replying(id=10**9)), "unwanted"),
    "after an error without an id": (preceded_by(Failure(None, ErrorCode.BAD_MESSAGE, "what?")), "unwanted"),
    "after garbage": (preceded_by(b"\xc1\xff" * 40), "unreadable"),
    "after nothing": (preceded_by(b""), "unreadable"),
    "after text": (preceded_by("how are you?"), "unreadable"),
    "after a nest of lists": (preceded_by(b"\x91" * 5000), "unreadable"),
    "in many pieces": (lambda server, peer, question: peer.say(server.reply(question), pieces=50), "answered"),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_the_answer_is_found_among_others(case: str) -> None:
    behave, counted = HARMLESS[case]
    with misbehaving("specact") as (server, port), asking("specact", port) as device:
        device.asks(2)
        server.behave = behave
        assert device.asks(8) == [None] * 8
        wait_for(lambda: device.client.counts[counted] > 0)
        assert device.client.counts["connections"] == 1
        assert len({question.id for question in server.questions}) == len(server.questions) == 10


def under_another_id(change: Any) -> Behave:
    return lambda server, peer, question: peer.say(server.reply(question, id=change(question.id)))


def pinging(server: FakeServer, peer: Peer, question: Question) -> None:
    while not server.released.is_set():
        peer.raw(b"\x89\x00")
        time.sleep(0.02)


LOST: dict[tuple[str, str], Behave] = {
    ("specact", "the id of an earlier step"): under_another_id(lambda identity: identity - 1),
    ("specact", "a foreign id"): under_another_id(lambda identity: identity + 10**6),
    ("specact", "an id that is no integer"): under_another_id(float),
    ("specact", "no id"): under_another_id(lambda identity: None),
    ("specact", "text"): lambda server, peer, question: peer.say("x" * 100, pieces=3),
    ("specact", "half of it"): lambda server, peer, question: peer.say(encode(server.reply(question))[:-10]),
    ("specact", "nothing at all"): silent,
    ("openpi", "nothing at all"): silent, ("openpi", "no more than pings"): pinging,
}  # fmt: skip


@pytest.mark.parametrize("case", LOST, ids=" ".join)
def test_what_answers_no_request_is_not_waited_for_beyond_the_deadline(case: tuple[str, str]) -> None:
    protocol, silence_s = case[0], 3.0 if case[0] == "specact" else 0.3
    with (
        misbehaving(protocol) as (server, port), asking(protocol, port, 40.0, silence_s=silence_s) as device,
    ):  # fmt: skip
        device.find_back()
        server.behave = LOST[case]
        first = device.asks(6)[0]
        server.behave = honest
        device.find_back()
        assert first == "deadline" and set(device.causes) <= {"deadline", "disconnected", "held_back"}
        # In openpi's protocol, which has no ids, a lost reply costs the connection.
        assert server.native == (device.client.counts["connections"] == 1)
        assert max(Counter(question.number for question in server.questions).values()) == 1, "it was sent again"


@pytest.mark.parametrize("protocol", BOTH)
def test_a_late_answer_is_dropped_and_counted(protocol: str) -> None:
    with misbehaving(protocol) as (server, port), asking(protocol, port, 150.0, silence_s=60.0) as device:

        def behave(server: FakeServer, peer: Peer, question: Question) -> None:
            assert server.released.wait(60)
            peer.say(server.reply(question))

        device.find_back()
        answered, server.behave = device.client.counts["answered"], behave
        assert device.asks(2) == ["deadline"] * 2
        # Without ids nothing more is sent while a reply is outstanding.
        late = device.client.counts["requests"] - answered
        assert late == 2 if server.native else late == 1 + device.client.counts["late"]
        assert device.client.request("infer", ZEROS, 1e-3, wait_if_busy=True).result().cause == "deadline"  # type: ignore[union-attr]
        server.released.set()
        wait_for(lambda: device.client.counts["late"] >= late)
        assert device.client.counts["answered"] == answered
        device.find_back()
        assert device.client.counts["connections"] == 1


def late(server: FakeServer, peer: Peer, question: Question) -> None:
    time.sleep(0.25 + 0.005 * (question.number % 30))
    honest(server, peer, question)


def twice(server: FakeServer, peer: Peer, question: Question) -> None:
    honest(server, peer, question)
    honest(server, peer, question)


def failing(server: FakeServer, peer: Peer, question: Question) -> None:
    peer.say("Traceback")
    peer.raw(b"\x88\x02\x03\xf3")


BEHAVIOURS: list[Behave] = [
    *[honest] * 4, twice, late, failing, silent,
    lambda server, peer, question: peer.say("no"), lambda server, peer, question: peer.raw(b"\x88\x02\x03\xf3"),
    lambda server, peer, question: peer.say(server.reply(question, np.inf)),
    lambda server, peer, question: peer.side.shutdown(socket.SHUT_RDWR),
]  # fmt: skip


@pytest.mark.parametrize("protocol", BOTH)
def test_whatever_it_does_no_step_gets_the_answer_of_another(protocol: str) -> None:
    rng = random.Random(0)
    with misbehaving(protocol) as (server, port), asking(protocol, port, 200.0, silence_s=0.15) as device:
        server.behave = lambda server, peer, question: rng.choice(BEHAVIOURS)(server, peer, question)
        causes = []
        for _ in range(60):
            causes.append(device.ask())
            wait_for(lambda: device.client.problem is None)
        assert None in causes and len(device.causes) > 1
        server.behave = honest
        device.find_back()


def reset(server: FakeServer, peer: Peer, question: Question) -> None:
    peer.side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.side.close()


@pytest.mark.parametrize("protocol", BOTH)
@pytest.mark.parametrize("fault", ["half open", "reset and refused", "black hole", "patient"])
def test_a_link_that_breaks_costs_few_deadlines(fault: str, protocol: str) -> None:
    silence_s = 60.0 if fault == "patient" else 1.0

    def behave(server: FakeServer, peer: Peer, question: Question) -> None:
        if fault == "half open" and peer is server.peers[0]:
            server.released.wait(60)  # the connection looks open
        elif fault == "reset and refused" and not server.open.is_set():
            server.refused = True
            reset(server, peer, question)
        else:
            # Nothing passes, and nothing is lost.
            assert server.open.wait(60)
            honest(server, peer, question)

    with misbehaving(protocol) as (server, port), asking(protocol, port, 200.0, silence_s=silence_s) as device:
        device.find_back()
        before, server.behave = device.causes["deadline"], behave
        if fault != "half open":
            server.open.clear()
        while device.causes.total() < (4 if fault == "half open" else 12):
            device.ask()
        assert set(device.causes) <= {"deadline", "disconnected", "held_back"}
        # Three in a row, and nothing more is sent before a sign of life; without ids no other waits at all.
        assert not server.native or device.causes["deadline"] - before <= 4
        assert not (server.native and fault == "patient") or device.causes["held_back"] >= 8
        server.refused = False
        server.open.set()
        device.find_back()
        assert device.client.counts["connections"] >= (2 if fault in ("half open", "reset and refused") else 1)
        assert len({question.number for question in server.questions}) == len(server.questions)


def flood(server: FakeServer, peer: Peer, question: Question) -> None:
    reply = server.reply(question, id=10**9) if server.native else server.reply(question)
    peer.raw(frame(encode(reply) if server.native else reply) * 1000)


ENDINGS: dict[str, Behave] = {
    "reset": reset,
    "an oversized reply": lambda server, peer, question: peer.say(b"\0" * (1 << 21)),
    "an oversized reply in pieces": lambda server, peer, question: peer.say(b"\0" * (1 << 21), pieces=40),
    "a frame that is none": lambda server, peer, question: peer.raw(b"\x83\x00"),
    "a close frame": lambda server, peer, question: peer.raw(b"\x88\x02\x03\xe9"),
    "HTTP in the middle": lambda server, peer, question: peer.raw(b"HTTP/1.1 502 Bad Gateway\r\n" + b"a: b\r\n" * 20),
    "a flood of pings": lambda server, peer, question: peer.raw(b"\x89\x00" * 5000),
    "a flood of empty frames": lambda server, peer, question: peer.raw(b"\x02\x00" + b"\x00\x00" * 5000),
    "a flood of replies": flood,
}


@pytest.mark.parametrize("protocol", BOTH)
@pytest.mark.parametrize("case", ENDINGS)
def test_after_a_lost_connection_nothing_is_sent_again(case: str, protocol: str) -> None:
    with misbehaving(protocol) as (server, port), asking(protocol, port, 2000.0) as device:
        device.asks(3)
        server.behave = ENDINGS[case]
        for _ in range(4):
            device.ask()
            time.sleep(0.05)
        server.behave = honest
        device.find_back()
        assert device.causes["disconnected"] > 0 and set(device.causes) <= {"disconnected", "deadline"}
        assert device.client.counts["connections"] > 1
        assert max(Counter(question.number for question in server.questions).values()) == 1


def test_an_idle_client_asks_for_signs_of_life_once_and_gives_up_without() -> None:
    received: list[bytes] = []

    def serve(side: socket.socket) -> None:
        peer = Peer(side)
        for _ in peer.messages():
            peer.say(FakeServer("specact").greeting)
            break
        while data := side.recv(65536):
            received.append(data)

    with listening(serve) as port, asking("specact", port, silence_s=0.6, first_delay_s=5.0) as device:
        wait_for(lambda: device.client.problem is not None)
        # One ping, then a close frame.
        assert "nothing received" in str(device.client.problem) and 1 <= len(received) <= 2


def test_a_server_that_hangs_up_is_tried_again_ever_less_often_and_not_by_all_at_once() -> None:
    tried: dict[int, list[float]] = {}

    def hang_up(side: socket.socket) -> None:
        tried.setdefault(side.getsockname()[1], []).append(time.monotonic())

    with timeouts(first_delay_s=0.02, longest_delay_s=0.32), listening(hang_up) as first, listening(hang_up) as second:
        with Client(at(first), CONTRACT), Client(at(second), CONTRACT):
            wait_for(lambda: len(tried) == 2 and min(map(len, tried.values())) >= 7)
        pauses = {port: np.diff(moments) for port, moments in tried.items()}
    for waits in pauses.values():
        # Never below the delay, which doubles up to its longest.
        for wait, least in zip(waits, (0.02, 0.04, 0.08, 0.16, 0.32, 0.32), strict=False):
            assert wait >= least - 0.01
    assert not np.allclose(pauses[first][:6], pauses[second][:6], atol=1e-4)


# First messages that are not accepted, by a word of the reason; and those after which another attempt may succeed.
GREETINGS: dict[tuple[str, str], Any] = {
    ("specact", "chunks"): {"family": "codes"}, ("specact", "action"): {"spec": {}},
    ("specact", "infer"): {"kinds": {}}, ("specact", "fedcba9876543210"): {"target": "fedcba9876543210"},
    ("specact", "token"): Failure(None, ErrorCode.UNAUTHORIZED, "the token\x1b[31m is wrong"),
    ("specact", "64 robots"): Failure(None, ErrorCode.OVERLOADED, "no deadline of 50 ms beside 64 robots"),
    ("specact", "is not a message"): b"\xc1", ("specact", "a message"): "hello",
    ("openpi", "fedcba9876543210"): openpi.encode({"specact": "0", "fingerprint": "fedcba9876543210"}
                                                  | openpi.metadata(CONTRACT) | {"family": CONTRACT.family}),
    ("openpi", "does not speak"): b"\xc1", ("openpi", "one map"): b"\x01",
}  # fmt: skip
PASSING: dict[tuple[str, str], Any] = {
    ("specact", "shutting"): Failure(None, ErrorCode.SHUTTING_DOWN, "the server is shutting down"),
    ("openpi", "the model"): "the model is not loaded\x1b[31m", ("openpi", "message in time"): None,
    ("openpi", "exceeds limit"): b"\x81\xa1a\xc6\x00\x20\x00\x00" + bytes(1 << 21),
}  # fmt: skip


@pytest.mark.parametrize("case", [*GREETINGS, *PASSING], ids=" ".join)
def test_a_server_that_is_not_the_one_is_not_asked_and_the_reason_is_printable(case: tuple[str, str]) -> None:
    (protocol, word), greeting = case, (GREETINGS | PASSING)[case]
    contract = dataclasses.replace(CONTRACT, fingerprint="0123456789abcdef" if word[0] == "f" else "")
    with timeouts(connect_timeout_s=0.5 if greeting is None else 10.0), misbehaving(protocol) as (server, port):
        changed = isinstance(greeting, dict)
        server.greeting = msgspec.structs.replace(server.greeting, **greeting) if changed else greeting
        with Client(endpoint_of(protocol, port), contract) as client:
            if case in GREETINGS:
                # At once: after the timeout the error would be another one.
                with pytest.raises(RefusedError) as caught:
                    client.connect(60.0)
            reason = str(caught.value) if case in GREETINGS else refusal(client)
            assert word in reason and reason.isprintable() and len(reason) < 700
            outcome = client.request("infer", ZEROS, 100.0).result()
            assert isinstance(outcome, Miss) and outcome.cause == "disconnected" and not server.questions


def test_a_server_that_was_full_is_tried_again_and_one_of_the_same_target_is_the_one() -> None:
    contract = dataclasses.replace(CONTRACT, fingerprint="0" * 16)
    with misbehaving("specact") as (server, port), timeouts(**QUICK), Client(at(port), contract) as client:
        client.connect(10.0)
        welcome, server.greeting = server.greeting, Failure(None, ErrorCode.OVERLOADED, "full")
        server.peers[0].side.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: len(server.peers) > 3)
        assert "full" in str(client.problem)
        server.greeting = welcome
        wait_for(lambda: client.problem is None)


def test_a_device_says_how_often_and_by_when_it_will_ask() -> None:
    with misbehaving("specact") as (server, port):
        with Client(at(port), CONTRACT, rate_hz=4.0, deadline_ms=50.0) as client:
            client.connect(10.0)
        connect(f"ws://127.0.0.1:{port}", rate_hz=lambda spec: spec.rate_hz / spec.chunk, deadline_ms=90.0).close()
        said = [(hello.rate_hz, hello.deadline_ms) for hello in server.hellos]
        assert said == [(4.0, 50.0), (None, None), (20.0 / 3.0, 90.0)]


def test_the_names_of_a_server_are_printable_and_short() -> None:
    with misbehaving("specact") as (server, port):
        server.greeting = msgspec.structs.replace(server.greeting, bundle="a\x1b[2J" + "b" * 999, version="\n")
        with asking("specact", port) as device:
            welcome = device.client.connect(10.0)
            assert welcome.bundle == "a?[2J" + "b" * 59 and welcome.version == "?"


ANSWERS = {
    "nothing": b"", "no HTTP": b"SSH-2.0-OpenSSH\r\n", "a page": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "a refusal": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "another path": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "an endless head": b"HTTP/1.1 101 x\r\n" + b"a: b\r\n" * 100_000,
    "a wrong key": b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_what_is_no_websocket_is_a_reason(case: str) -> None:
    def answer(side: socket.socket) -> None:
        side.recv(65536)
        side.sendall(ANSWERS[case])
        side.recv(65536)

    with timeouts(connect_timeout_s=0.5), listening(answer) as port, Client(at(port), CONTRACT) as client:
        assert f"127.0.0.1:{port}" in refusal(client)
        if case == "another path":
            with pytest.raises(RefusedError, match="404"):
                client.connect(60.0)


def test_a_client_can_be_closed_during_a_step_which_is_a_miss() -> None:
    with misbehaving("specact") as (server, port):
        server.behave = silent
        client = Client(at(port), CONTRACT)
        client.connect(10.0)
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(client.request("infer", ZEROS, 500.0).result()))
        waiting.start()
        client.close()
        client.close()
        waiting.join(60)
        results.append(client.request("infer", ZEROS, 500.0).result())
        assert [isinstance(result, Miss) for result in results] == [True, True] and not results[1].sent


def test_requests_that_are_never_answered_cost_little_memory() -> None:
    with misbehaving("specact") as (server, port), asking("specact", port) as device:
        server.behave = silent
        pending = [device.client.request("infer", ZEROS, PATIENT_MS) for _ in range(600)]
        assert device.client.counts["requests"] == 600 and not any(request.done() for request in pending[-200:])
        # The oldest are given up. A reply that comes before it is waited for is kept.
        assert isinstance(pending[0].result(), Miss)
        server.behave = honest
        kept = device.client.request("infer", ZEROS, PATIENT_MS)
        wait_for(kept.done)
        assert kept.sent and not isinstance(kept.result(), Miss)


def test_the_token_goes_into_the_head_and_is_not_shown() -> None:
    with misbehaving("specact") as (server, port):
        endpoint = Endpoint("ws", "127.0.0.1", port, "open-sesame-0123456789")
        with Client(endpoint, CONTRACT) as client:
            client.connect(10.0)
        assert server.peers[0].headers["Authorization"] == "Bearer open-sesame-0123456789"
    assert "sesame" not in repr(endpoint) + str(endpoint)


URLS = {
    "ws://a:1": ("ws", "a", 1), "wss://a": ("wss", "a", 8600), "a:5": ("ws", "a", 5), "ws://[::1]:7/": ("ws", "::1", 7),
}  # fmt: skip
NO_URLS = ("http://a:1", "https://a", "ftp://a", "ws://", "ws://a:b", "ws://a:0", "ws://a:70000", "ws://a/b", "ws://a?x=1",
           "ws://me@a:1", "ws://a b", "ws://" + "a" * 70)  # fmt: skip


def test_a_url_names_scheme_host_and_port_and_nothing_else() -> None:
    for url, wanted in URLS.items():
        endpoint = Endpoint.parse(url)
        assert (endpoint.scheme, endpoint.host, endpoint.port) == wanted
    for url in NO_URLS:
        with pytest.raises(ConfigError):
            Endpoint.parse(url)
    # A token that would break a head.
    for token in ("", "a\nb", "\N{LOCK}" * 20):
        with pytest.raises(ConfigError, match="token"):
            Endpoint("ws", "a", 1, token)


def test_settings_that_make_no_sense_are_refused(ball: Pair[Any]) -> None:
    for protocol, quality in (("specact", 0), ("specact", 96), ("openpi", 90)):
        with pytest.raises(ConfigError, match=str(quality)):
            Client(endpoint_of(protocol, 1), CONTRACT, jpeg_quality=quality)
    with Client(at(1), CONTRACT) as client:
        for deadline in (0.0, -1.0, 60_001.0, float("nan")):
            with pytest.raises(ConfigError, match="deadline"):
                RemoteTarget(client, PAIR.exchange, deadline)
        with pytest.raises(ConfigError, match="sampling"):
            remote_verifier(client, ball, 10.0, "moon")  # type: ignore[arg-type]
        assert "127.0.0.1:1" in refusal(client)
