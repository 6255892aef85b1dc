"""A real server, and everything that a stranger can send it: typed errors, no traceback, no memory, and it goes on."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.example_count import example_count
from tests.server.requests import as_fields, drafted, infer, seeing

from specact import Bundle
from specact.observation import Window
from specact.wire import json as wire_json
from specact.wire import msgpack
from specact.wire.checks import ErrorCode
from specact.wire.messages import ErrorReply, read_reply
from specact.wire.sizes import max_message_bytes

if TYPE_CHECKING:
    from tests.server.conftest import Fields, Server, Start, Stream

schemathesis = pytest.importorskip("schemathesis")

# Without shrinking: a server that is silent once would be waited for again and again.
PHASES = [Phase.explicit, Phase.generate]
bounded = settings(example_count(60), phases=PHASES, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def frames(ball: Bundle, windows: list[Window]) -> list[bytes]:
    """Valid requests of both kinds."""
    return [msgpack.encode(infer(windows[1])), msgpack.encode(as_fields(drafted(ball, windows[0], 2, {"steps": 1})))]


@pytest.fixture(autouse=True)
def unharmed(server: Server, hello: Fields, frames: list[bytes]) -> Iterator[None]:
    """After each test the server answers a good request, runs on, and has nothing to tell of."""
    yield
    with server.stream(hello) as robot:
        assert [robot.ask(frame)["type"] for frame in frames] == ["distribution", "verdict"]
    assert server.process.poll() is None
    assert "Traceback" not in server.log and "ERROR" not in server.log


# HTTP, from its own description.


@pytest.fixture(scope="module")
def api(server: Server) -> Any:
    # A request whose deadline passed, or that meets a full queue, is rightly answered with 504 or 503, and one that is
    # wrong and large with 413. What JSON Schema calls valid need not be: rows that sum to 1, say, are beyond it.
    checks = {
        "negative_data_rejection": {"expected-statuses": ["4xx", "503", "504"]},
        "not_a_server_error": {"expected-statuses": ["2xx", "4xx", "503", "504"]},
        "positive_data_acceptance": {"enabled": False},
    }
    address = f"http://127.0.0.1:{server.port}/openapi.json"
    return schemathesis.openapi.from_url(address, config=schemathesis.Config.from_dict({"checks": checks}))


def test_the_description_is_valid_and_complete(api: Any, launch: Start) -> None:
    api.validate()
    assert {operation.ok().label for operation in api.get_all_operations()} == {
        "POST /v1/hello", "POST /v1/infer", "POST /v1/verify", "GET /healthz", "GET /metrics", "GET /v1/status",
    }  # fmt: skip
    body = api.raw_schema["paths"]["/v1/infer"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    seen = body["properties"]["observation"]
    assert set(seen["required"]) == {"state", "goal"}
    state = seen["properties"]["state"]
    assert (state["minItems"], state["items"]["minItems"], state["items"]["maxItems"]) == (1, 8, 8)
    assert "securitySchemes" not in api.raw_schema.get("components", {})


def test_a_guarded_server_says_what_it_wants(launch: Start) -> None:
    token = "correct horse battery staple"
    guarded = launch(token=token)
    described = guarded.http("GET", "/openapi.json").fields
    assert described["components"]["securitySchemes"] == {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
    wanted = {path for path, methods in described["paths"].items() for about in methods.values() if "security" in about}
    assert wanted == {"/v1/hello", "/v1/infer", "/v1/verify", "/metrics", "/v1/status"}


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", schemathesis.GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("kind", ["hello", "infer", "verify"])
def test_bodies_by_the_description_and_against_it(kind: str, mode: Any, api: Any) -> None:
    statuses: Counter[int] = Counter()

    @bounded
    @given(case=api[f"/v1/{kind}"]["POST"].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response)
        if response.status_code != 200:
            assert response.json()["type"] == "error"

    check()
    assert 500 not in statuses
    if (kind, mode.value) == ("infer", "positive"):
        # What is valid is understood: it is answered, or its deadline, which may be 0, has passed.
        assert statuses[200] + statuses[504] > 0


@pytest.mark.parametrize("kind", ["hello", "infer", "verify"])
def test_replies_are_as_described(kind: str, api: Any, hello: Fields, frames: list[bytes]) -> None:
    messages = {"hello": hello, **{fields["type"]: fields for fields in map(msgpack.decode, frames)}}
    case = api[f"/v1/{kind}"]["POST"].Case(
        body=json.loads(wire_json.encode(messages[kind])), media_type="application/json"
    )
    response = case.call()
    assert response.status_code == 200
    case.validate_response(response)


@pytest.mark.parametrize("address", ["POST /v1/hello", "POST /v1/infer", "POST /v1/verify", "GET /healthz",
                                     "GET /metrics", "GET /v1/status"])  # fmt: skip
def test_borders_and_methods(address: str, api: Any) -> None:
    method, path = address.split()
    cases = api.iter_coverage_cases(
        api[path][method], generation_modes=list(schemathesis.GenerationMode), generation_config=api.config.generation
    )
    statuses: Counter[int] = Counter()
    for case in cases:
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response)
    assert 500 not in statuses and statuses[405] > 0


# Messages on the stream.


def is_fair(reply: Fields, bundle: Bundle) -> bool:
    """Whether it is an answer that a device could read, and an error only of the sender's making."""
    answers = {exchange.answer: exchange for exchange in bundle.codec.dialect.exchanges.values()}
    read = read_reply(reply, answers.get(reply["type"], answers["distribution"]))
    return not isinstance(read, ErrorReply) or read.code in (
        ErrorCode.BAD_MESSAGE, ErrorCode.UNSUPPORTED_PROTOCOL, ErrorCode.EXPIRED
    )  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, frame: bytes) -> bytes:
    worn = bytearray(frame)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(worn)))
        match draw(st.sampled_from("xxxcpe")):
            case "x":
                worn[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "c":
                del worn[at : at + draw(st.integers(1, 16))]
            case "p":
                worn[at:at] = draw(st.binary(max_size=16))
            case "e":
                del worn[at:]
    return bytes(worn)


@pytest.mark.hypothesis
def test_every_message_has_one_answer_and_it_is_typed(
    server: Server, hello: Fields, ball: Bundle, frames: list[bytes]
) -> None:
    kinds: Counter[str] = Counter()
    with server.stream(hello) as robot:

        @settings(example_count(400), phases=PHASES, suppress_health_check=list(HealthCheck))
        @given(payload=st.sampled_from(frames).flatmap(damaged) | st.binary(max_size=100) | st.text(max_size=20))
        def check(payload: bytes | str) -> None:
            reply = robot.ask(payload)
            kinds[reply["type"]] += 1
            assert is_fair(reply, ball)

        check()
    assert kinds["error"] > 100 and kinds["distribution"] + kinds["verdict"] > 0


def packed(body: bytes) -> bytes:
    """An infer whose observation is this, in msgpack of its own."""
    head = msgpack.encode({"v": 2, "type": "infer", "id": 5, "deadline_ms": 9.0, "address": [0, 0, 0, 0]})
    return b"\x86" + head[1:] + b"\xabobservation" + body


ROW, GOAL = np.zeros((1, 8), np.float32), np.zeros(2, np.float32)


def fields_of(**changed: Any) -> bytes:
    """The observation of a good request, changed."""
    seen = {name: value for name, value in ({"state": ROW, "goal": GOAL} | changed).items() if value is not MISSING}
    return msgpack.encode(seen)


MISSING = object()
STATE = msgpack.encode({"state": ROW})[1:]
# What stands where the observation should, and a word of the answer; the second half of them is right.
OBSERVATIONS: dict[str, tuple[bytes, str]] = {
    "no map": (b"\xc0", "observation must be a map with state, goal"),
    "a list": (b"\x92\x01\x02", "observation must be a map"),
    "an array": (msgpack.encode({"a": ROW})[3:], "observation must be a map"),
    "nothing in it": (b"\x80", "state must be an array of float32 (1, 8), got NoneType"),
    "no goal": (fields_of(goal=MISSING), "goal must be an array of float32 (2,), got NoneType"),
    "float64": (
        fields_of(state=ROW.astype(np.float64)),
        "must be an array of float32 (1, 8), got float64 (1, 8)",
    ),
    "another shape": (fields_of(state=ROW[0]), "state must be an array of float32 (1, 8), got float32 (8,)"),
    "a longer history": (fields_of(state=np.zeros((2, 8), np.float32)), "got float32 (2, 8)"),
    "a history of the goal": (fields_of(goal=GOAL[None]), "goal must be an array of float32 (2,), got float32 (1, 2)"),
    "NaN": (fields_of(state=ROW * np.nan), "state holds NaN or infinite numbers"),
    "infinity": (fields_of(goal=GOAL + np.inf), "goal holds NaN or infinite numbers"),
    "lists for arrays": (fields_of(state=[[0.0] * 8]), "state must be an array of float32 (1, 8), got list"),
    "bytes": (fields_of(state=bytes(32)), "got bytes"),
    "JPEG files for numbers": (fields_of(state=[b"\xff\xd8\xff"]), "got list"),
    "a map in it": (fields_of(state={"state": ROW}), "got dict"),
    "keys that are integers": (b"\x81\x01" + msgpack.encode({"a": ROW})[3:], "not a msgpack message"),
    "keys that are bytes": (b"\x82" + STATE.replace(b"\xa5state", b"\xc4\x05state") + STATE, "goal"),
    "a name of 10000 characters": (b"\x81\xda\x27\x10" + b"x" * 10_000 + b"\x01", "state"),
    "more than 64 names": (fields_of(**{f"more{i}": 0 for i in range(63)}), "not a msgpack message"),
    "maps in maps": (b"\x81\xa5state" * 2_000 + b"\xc0", "not a msgpack message"),
    "64 maps in maps": (b"\x81\xa5state" * 64 + b"\xc0", "got dict"),
    "lists in lists": (b"\x81\xa5state" + b"\x91" * 20_000 + b"\xc0", "not a msgpack message"),
    # An expired request was read.
    "more than is needed": (fields_of(later=np.full(3, np.nan)), "the deadline passed"),
    "62 more names": (fields_of(**{f"more{i}": 0 for i in range(62)}), "the deadline passed"),
    "a name twice": (b"\x83" + msgpack.encode({"goal": GOAL})[1:] + STATE + STATE, "the deadline passed"),
}


@pytest.mark.parametrize(("body", "word"), OBSERVATIONS.values(), ids=OBSERVATIONS.keys())
def test_an_observation_that_is_none_is_refused_by_name(body: bytes, word: str, server: Server, hello: Fields) -> None:
    head = packed(body).replace(msgpack.encode({"a": 9.0})[3:], msgpack.encode({"a": 0.0})[3:])
    with server.stream(hello) as robot:
        reply = robot.ask(head)
    assert reply["type"] == "error" and word in reply["message"], reply
    read = "the deadline passed" in word
    assert reply["code"] == ("expired" if read else "bad_message")
    # Where it could be parsed, the answer carries the request's id.
    assert reply["id"] == (None if "msgpack" in word else 5)


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=8)
    | hnp.arrays(st.sampled_from(list(map(np.dtype, "fdBl?"))), hnp.array_shapes(min_dims=0, max_dims=4, max_side=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)  # fmt: skip


@pytest.mark.hypothesis
def test_whatever_is_observed_has_one_answer_and_it_is_typed(server: Server, hello: Fields, ball: Bundle) -> None:
    good = infer(Window({"state": ROW, "goal": GOAL}))
    names = st.sampled_from(["state", "goal", "image", "later", ""]) | st.text(max_size=5)
    kinds: Counter[str] = Counter()
    with server.stream(hello) as robot:

        @settings(example_count(300), phases=PHASES, suppress_health_check=list(HealthCheck))
        @given(changed=st.dictionaries(names, ANYTHING, min_size=1, max_size=3), whole=st.booleans())
        def check(changed: dict[str, Any], whole: bool) -> None:
            seen = changed if whole else good["observation"] | changed
            reply = robot.ask(good | {"observation": seen})
            kinds[reply["type"]] += 1
            assert is_fair(reply, ball)

        check()
    assert kinds["error"] > 50 and kinds["distribution"] > 10


@pytest.mark.hypothesis
def test_a_hello_can_be_anything(server: Server, hello: Fields) -> None:
    good = msgpack.encode(hello)

    @bounded
    @given(payload=damaged(good) | st.binary(max_size=100) | st.text(max_size=20))
    def check(payload: bytes | str) -> None:
        with server.connect() as robot:
            reply = robot.ask(payload)
            if reply["type"] != "welcome":
                assert reply["code"] in ("bad_message", "mismatch", "unsupported_protocol")
                assert robot.closed() == 1008

    check()


# Frames, below the messages.

PING, CLOSE, TEXT, BINARY, CONTINUED = 0x9, 0x8, 0x1, 0x2, 0x0


def frame(opcode: int, payload: bytes = b"", *, final: bool = True, length: int | None = None, masked: bool = True,
          reserved: int = 0) -> bytes:  # fmt: skip
    """A WebSocket frame, right or wrong; masked with zeros, so that the payload stands in it as it is."""
    size, mask = len(payload) if length is None else length, 0x80 * masked
    head = bytes([0x80 * final | reserved << 4 | opcode])
    if size < 126:
        head += bytes([mask | size])
    elif size < 65536:
        head += bytes([mask | 126]) + struct.pack(">H", size)
    else:
        head += bytes([mask | 127]) + struct.pack(">Q", size)
    return head + bytes(4 * masked) + payload


def upgraded(server: Server, hello: Fields) -> socket.socket:
    """A welcomed robot's connection, in the raw."""
    connection = server.raw()
    connection.sendall(
        b"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert take(connection, lambda received: received.endswith(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    connection.sendall(frame(BINARY, msgpack.encode(hello)))
    assert b"welcome" in take(connection, lambda received: len(received) > 2 and len(received) >= 2 + received[1])
    return connection


def test_a_robot_that_asks_and_hangs_up_at_once_disturbs_nobody(
    server: Server, hello: Fields, frames: list[bytes]
) -> None:
    """Its replies have nowhere to go; those of others in the same batch have."""
    with server.stream(hello) as robot:
        for _ in range(20):
            with upgraded(server, hello) as leaving:
                robot.send(frames[0])
                leaving.sendall(frame(BINARY, frames[0]) * 3 + frame(CLOSE, struct.pack(">H", 1000)))
                assert robot.receive()["type"] == "distribution"
                assert close_code(leaving) == 1000


@pytest.mark.parametrize("path", ["/healthz", "/v1/stream"])
def test_a_request_with_two_hosts_is_refused(server: Server, path: str) -> None:
    """They may name different ones, and somebody in between may have looked at the other."""
    upgrade = (
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    )
    accepted, rest = (b"101", upgrade) if path == "/v1/stream" else (b"200", b"")
    for hosts, status in ((1, accepted), (2, b"400")):
        with server.raw() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\n".encode() + b"Host: 127.0.0.1\r\n" * hosts + rest + b"\r\n")
            assert take(connection, lambda received: b"\r\n" in received).startswith(b"HTTP/1.1 " + status)


def take(connection: socket.socket, enough: Callable[[bytes], bool]) -> bytes:
    """What comes, until it is enough or the server hangs up."""
    received = b""
    try:
        while not enough(received) and (part := connection.recv(65536)):
            received += part
    except ConnectionResetError:
        pass
    return received


def close_code(connection: socket.socket) -> int | None:
    """With which the server closed; None if it only hung up."""
    received = take(connection, lambda received: False)
    at = received.rfind(bytes([0x80 | CLOSE]))
    return int.from_bytes(received[at + 2 : at + 4], "big") if at >= 0 else None


BROKEN = {
    "not masked": (frame(BINARY, b"x", masked=False), 1002),
    "reserved bits": (frame(BINARY, b"x", reserved=4), 1002),
    "reserved opcode": (frame(0x3, b"x"), 1002),
    "reserved control opcode": (frame(0xB), 1002),
    "a ping in fragments": (frame(PING, final=False), 1002),
    "a ping of 126 bytes": (frame(PING, bytes(126)), 1002),
    "a continuation of nothing": (frame(CONTINUED, b"x"), 1002),
    "a message within a message": (frame(BINARY, b"x", final=False) + frame(BINARY, b"x"), 1002),
    "2^63 bytes": (frame(BINARY, length=2**63), 1009),
    "2^40 bytes": (frame(BINARY, length=2**40), 1009),
    "too much in fragments": (frame(BINARY, bytes(40_000), final=False) + frame(CONTINUED, bytes(40_000)), 1009),
    "a close of one byte": (frame(CLOSE, b"x"), 1002),
    "a close with a code that is none": (frame(CLOSE, struct.pack(">H", 1005)), 1002),
    "a close that is no UTF-8": (frame(CLOSE, struct.pack(">H", 1000) + b"\xff"), 1007),
    "an honest close": (frame(CLOSE, struct.pack(">H", 1000)), 1000),
}


@pytest.mark.parametrize(("sent", "code"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_frames_close_the_connection(sent: bytes, code: int, server: Server, hello: Fields) -> None:
    with upgraded(server, hello) as connection:
        connection.sendall(sent)
        assert close_code(connection) == code


def test_random_bytes_instead_of_frames_close_the_connection(server: Server, hello: Fields) -> None:
    rng = random.Random(0)
    for _ in range(100):
        with upgraded(server, hello) as connection:
            connection.sendall(rng.randbytes(300))
            with contextlib.suppress(OSError):  # it may have hung up by now
                connection.shutdown(socket.SHUT_WR)
            take(connection, lambda received: False)


def test_a_message_may_come_in_fragments_with_pings_between(server: Server, hello: Fields, frames: list[bytes]) -> None:
    message = frames[0]
    pieces = [message[at : at + 2] for at in range(0, len(message), 2)]
    with upgraded(server, hello) as connection:
        for number, piece in enumerate(pieces):
            opcode = CONTINUED if number else BINARY
            connection.sendall(frame(opcode, piece, final=number == len(pieces) - 1) + frame(PING, b"still here?"))
        # The answer may leave before the last ping has been read, so wait for both.
        received = take(
            connection,
            lambda received: b"distribution" in received and received.count(b"still here?") >= len(pieces),
        )
    assert b"distribution" in received
    assert received.count(b"still here?") == len(pieces)


def test_text_that_is_no_utf_8_is_answered_like_any_text(server: Server, hello: Fields) -> None:
    with upgraded(server, hello) as connection:
        connection.sendall(frame(TEXT, b"\xff\xfe") + frame(TEXT, b"\xff", final=False) + frame(CONTINUED, b"\xfe"))
        received = take(connection, lambda received: received.count(b"bad_message") == 2)
    assert received.count(b"binary frames") == 2


# Floods.


def flood(connection: socket.socket, blob: bytes) -> None:
    """Sends this again and again, never reading, until it is much or the server takes no more for a while."""
    connection.settimeout(1.0)
    with contextlib.suppress(OSError):
        for _ in range(FLOOD_BYTES // len(blob) + 1):
            connection.sendall(blob)


GOOD = msgpack.encode(
    infer(Window({"state": np.zeros((1, 8), np.float32), "goal": np.zeros(2, np.float32)}), 1, deadline_ms=9.0)
)
HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
FLOODS: dict[str, tuple[bool, bytes, bytes]] = {
    # Whether after the hello, what comes first, what comes without end.
    "pings whose pongs nobody reads": (True, b"", frame(PING, bytes(125)) * 500),
    "empty fragments": (True, frame(BINARY, final=False), frame(CONTINUED, final=False) * 5_000),
    "bad messages whose answers nobody reads": (True, b"", frame(BINARY, b"\xc1" * 600) * 50),
    "bad messages, as small as they can be": (True, b"", frame(BINARY, b"\xc1") * 5_000),
    "good requests whose answers nobody reads": (True, b"", frame(BINARY, GOOD) * 50),
    "headers": (False, HEAD, b"X-Header: " + b"y" * 100 + b"\r\n"),
    "one header": (False, HEAD + b"X: ", b"y" * 60_000),
    "an address": (False, b"GET /", b"y" * 60_000),
    "trailers": (False, b"POST /v1/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"X-Trailer: y\r\n" * 5_000),
    "requests": (False, b"", (HEAD + b"\r\n") * 1_000),
    "a body after its answer": (False, b"POST /v1/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
                                       b"Content-Length: 1000000000000\r\n\r\n", b"y" * 60_000),
}  # fmt: skip
FLOOD_BYTES, GROWTH_KB = 16_000_000, 4_000


def grown(server: Server, hello: Fields, kind: str) -> float:
    """By how much the server's memory grew in a flood [kB]."""
    after_hello, first, endless = FLOODS[kind]
    before = server.memory_kb
    with upgraded(server, hello) if after_hello else server.raw() as connection:
        connection.sendall(first)
        flood(connection, endless)
        # The server may still have some of it to read.
        server.until(lambda: server.http("GET", "/healthz").status == 200, "it answers others")
        return server.memory_kb - before


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_costs_no_memory(kind: str, server: Server, hello: Fields) -> None:
    assert grown(server, hello, kind) < GROWTH_KB


def test_a_peer_that_does_not_read_cannot_keep_the_server_from_ending(launch: Start, hello: Fields) -> None:
    own = launch(before="import specact.server.serve as serve; serve._CLOSE_TIMEOUT_S = 1; ")
    with upgraded(own, hello) as connection:
        # Answers fill every buffer, and then the server waits for it to read them.
        flood(connection, frame(BINARY, b"\xc1" * 600) * 50)
        own.terminate()
        assert own.wait() == 0
    assert "Traceback" not in own.log


def test_without_its_bounds_a_flood_would_cost_memory(launch: Start, hello: Fields) -> None:
    """The wrong variant: uvicorn's protocols as they are."""
    bare = launch(
        before="import specact.server.serve as serve; "
        "serve.partial = lambda *_: 'httptools'; serve.BoundedWebSocket = 'websockets-sansio'; "
    )
    assert grown(bare, hello, "pings whose pongs nobody reads") > GROWTH_KB
    assert grown(bare, hello, "one header") > GROWTH_KB
    with upgraded(bare, hello) as connection:
        connection.sendall(frame(TEXT, b"\xff\xfe"))
        assert close_code(connection) == 1007
    assert "Traceback" in bare.log


def test_thousands_of_bad_messages_cost_no_memory(
    server: Server, hello: Fields, ball: Bundle, frames: list[bytes]
) -> None:
    rng = random.Random(1)
    limit = max_message_bytes(ball.codec.dialect)
    answers: Counter[str] = Counter()

    def worn(message: bytes) -> bytes:
        match rng.randrange(5):
            case 0:
                return rng.randbytes(rng.randrange(400))
            case 1:
                return message[: rng.randrange(len(message))]
            case 2:
                return msgpack.encode(seeing(msgpack.decode(message), state=np.zeros(rng.randrange(1, limit // 10))))
            case 3:
                return b"\x81\xa1a" + bytes([0x91]) * rng.randrange(limit - 10)
            case _:
                copy = bytearray(message)
                for _ in range(rng.randrange(1, 5)):
                    copy[rng.randrange(len(copy))] = rng.randrange(256)
                return bytes(copy)

    def send(robot: Stream, number: int) -> None:
        for _ in range(number // 20):
            for _ in range(20):
                robot.send(worn(rng.choice(frames)))
            for _ in range(20):
                reply = robot.receive()
                assert is_fair(reply, ball)
                answers[str(reply.get("code", reply["type"]))] += 1

    with server.stream(hello) as robot:
        send(robot, 1_000)
        before = server.memory_kb
        send(robot, 5_000)
    assert server.memory_kb - before < GROWTH_KB
    assert sum(answers.values()) == 6_000 and answers["bad_message"] > 4_000


def test_connections_that_come_and_go_cost_no_memory(server: Server, hello: Fields) -> None:
    def visit(times: int) -> None:
        for number in range(times):
            with server.raw() if number % 2 else upgraded(server, hello) as connection:
                connection.sendall(b"\x00garbage\r\n\r\n" if number % 4 == 1 else b"")

    visit(100)
    before = server.memory_kb
    visit(400)
    server.until(lambda: server.counts("specact_robots")[()] == 0, "all are gone")
    assert server.memory_kb - before < GROWTH_KB
