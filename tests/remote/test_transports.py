"""The two transports by themselves: frames and bodies in pieces, closing, TLS, tokens, and reasons for failing."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from websockets.frames import Frame, Opcode

from specact import Bundle
from specact.errors import ConfigError, RemoteError
from specact.lab.processes import ServerProcess, serving
from specact.observation import Window
from specact.remote.client import Client, ClientSettings
from specact.remote.http import HttpTransport
from specact.remote.target import RemoteTarget
from specact.remote.transport import PORT, Endpoint, TransportClosedError
from specact.remote.websocket import WebSocketTransport
from specact.rng import StepAddress
from specact.verification import Answer
from specact.wire import json

if TYPE_CHECKING:
    from tests.remote.conftest import Misbehaving, Peer, Rogue

Listening = Callable[[Callable[[socket.socket], None]], AbstractContextManager[int]]
WaitFor = Callable[..., float]
Refusal = Callable[[Client], str]

pytestmark = pytest.mark.usefixtures("nothing_left")
LIMIT = 100_000
PATIENCE = 10.0


def at(port: int, scheme: str = "ws", **options: Any) -> Endpoint:
    return Endpoint(scheme, "127.0.0.1", port, **options)


class Talk:
    """A WebSocket transport to a rogue, and the rogue's end of it."""

    def __init__(self, rogue: Rogue, **options: Any) -> None:
        self.transport = WebSocketTransport(at(rogue.port, **options), PATIENCE, LIMIT)
        self.transport.send("hello", self.transport.encode({}), 1.0)
        assert self.transport.receive(PATIENCE)
        self.peer: Peer = rogue.peers[-1]

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *error: object) -> None:
        self.transport.close()
        self.transport.close()

    def receive(self) -> bytes | None:
        return self.transport.receive(PATIENCE)


# ---- WebSocket ------------------------------------------------------------------------------------------------------


def test_messages_come_whole_however_they_were_cut(misbehaving: Misbehaving) -> None:
    with misbehaving() as rogue, Talk(rogue) as talk:
        rng = np.random.default_rng(0)
        for pieces in (1, 2, 7, 500):
            sent = rng.bytes(5000)
            talk.peer.say(sent, pieces)
            assert talk.receive() == sent
        # Cut by the network, anywhere: in the middle of heads, and several in one.
        frames = [Frame(Opcode.BINARY, rng.bytes(size)) for size in (0, 1, 125, 126, 70_000)]
        stream = b"".join(frame.serialize(mask=False) for frame in frames)
        for start in range(0, len(stream), 997):
            talk.peer.raw(stream[start : start + 997])
        assert [talk.receive() for _ in frames] == [bytes(frame.data) for frame in frames]
        assert talk.transport.receive(0.0) is None


def test_pings_are_answered_even_between_the_pieces_of_a_message(misbehaving: Misbehaving, wait_for: WaitFor) -> None:
    with misbehaving() as rogue, Talk(rogue) as talk:
        peer = talk.peer
        peer.raw(Frame(Opcode.BINARY, b"one ", fin=False).serialize(mask=False))
        peer.raw(Frame(Opcode.PING, b"there?").serialize(mask=False))
        peer.raw(Frame(Opcode.CONT, b"", fin=False).serialize(mask=False))
        peer.raw(Frame(Opcode.CONT, b"two").serialize(mask=False))
        assert talk.receive() == b"one two"
        wait_for(lambda: peer.pongs == [b"there?"])
        # A pong is a sign of life, but no message.
        before = talk.transport.last_activity_s
        talk.transport.ping()
        until = time.monotonic() + PATIENCE
        while talk.transport.last_activity_s <= before and time.monotonic() < until:
            assert talk.transport.receive(0.2) is None
        assert talk.transport.last_activity_s > before


def test_text_is_no_message_and_spoils_none(misbehaving: Misbehaving) -> None:
    with misbehaving() as rogue, Talk(rogue) as talk:
        talk.peer.say("text")
        talk.peer.say("text in pieces", pieces=3)
        talk.peer.say(b"bytes", pieces=2)
        assert [talk.receive() for _ in range(3)] == [b"", b"", b"bytes"]


def test_empty_pieces_are_no_part_of_a_message(misbehaving: Misbehaving) -> None:
    with misbehaving() as rogue, Talk(rogue) as talk:
        talk.peer.raw(Frame(Opcode.BINARY, b"", fin=False).serialize(mask=False))
        talk.peer.raw(Frame(Opcode.CONT, b"", fin=False).serialize(mask=False) * 100)
        talk.peer.raw(Frame(Opcode.CONT, b"end").serialize(mask=False))
        assert talk.receive() == b"end"


def test_looking_takes_no_time(misbehaving: Misbehaving) -> None:
    with misbehaving() as rogue, Talk(rogue) as talk:
        start = time.monotonic()
        for _ in range(100):
            assert talk.transport.receive(0.0) is None
        assert time.monotonic() - start < PATIENCE  # waiting for 0.1 s at each would reach it
        start = time.monotonic()
        assert talk.transport.receive(0.2) is None
        assert 0.2 <= time.monotonic() - start < PATIENCE


def test_what_was_said_before_the_end_is_heard_and_then_why_it_ended(misbehaving: Misbehaving) -> None:
    with misbehaving() as rogue, Talk(rogue) as talk:
        last = Frame(Opcode.BINARY, b"last words").serialize(mask=False)
        talk.peer.raw(last + b"\x88\x06\x03\xf4over")  # 1012, service restart
        assert talk.receive() == b"last words"
        with pytest.raises(TransportClosedError, match=r"1012 .*over"):
            talk.receive()
        with pytest.raises(TransportClosedError, match="closed"):
            talk.transport.send("infer", b"", 1.0)
        with pytest.raises(TransportClosedError, match="closed"):
            talk.transport.ping()


def resetting(peer: Peer) -> None:
    peer.reset()


def test_an_end_without_a_word_is_an_end(misbehaving: Misbehaving) -> None:
    with misbehaving() as rogue:
        with Talk(rogue) as talk:
            talk.peer.side.shutdown(socket.SHUT_WR)
            with pytest.raises(TransportClosedError, match="ended"):
                talk.receive()
        rogue.greet = resetting
        transport = WebSocketTransport(at(rogue.port), PATIENCE, LIMIT)
        transport.send("hello", transport.encode({}), 1.0)
        with pytest.raises(TransportClosedError, match=r"lost: .*reset"):
            transport.receive(PATIENCE)
        transport.close()


@pytest.mark.parametrize("pieces", [1, 40])
def test_a_message_that_is_too_large_is_refused_before_it_is_there(misbehaving: Misbehaving, pieces: int) -> None:
    with misbehaving() as rogue, Talk(rogue) as talk:
        talk.peer.say(bytes(LIMIT), pieces)
        assert talk.receive() == bytes(LIMIT)
        # The head of a frame of an exabyte, and of one that is one byte too long with those before it.
        talk.peer.raw(b"\x82\x7f\x10" + bytes(7) if pieces == 1 else b"")
        if pieces > 1:
            talk.peer.raw(Frame(Opcode.BINARY, bytes(LIMIT), fin=False).serialize(mask=False) + b"\x80\x01")
        with pytest.raises(TransportClosedError, match=r"exceeds|too big"):
            talk.receive()


def test_a_server_that_does_not_read_cannot_hold_up_the_sender(misbehaving: Misbehaving) -> None:
    with misbehaving() as rogue, Talk(rogue) as talk:
        rogue.reads_requests = False
        start = time.monotonic()
        with pytest.raises(TransportClosedError, match="while sending: timed out"):
            talk.transport.send("infer", bytes(64 << 20), 0.01)
        assert time.monotonic() - start < PATIENCE


def test_the_token_goes_into_the_head_and_nowhere_else(misbehaving: Misbehaving) -> None:
    token = "correct horse battery staple"
    with misbehaving() as rogue:
        with Talk(rogue, token=token) as talk:
            assert talk.peer.headers["Authorization"] == f"Bearer {token}"
            assert talk.peer.path == "/v1/stream"
            assert talk.peer.headers["Host"] == f"127.0.0.1:{rogue.port}"
            assert "Sec-WebSocket-Extensions" not in talk.peer.headers
        with Talk(rogue) as talk:
            assert "Authorization" not in talk.peer.headers
    assert token not in repr(at(1, token=token)) and token not in str(at(1, token=token))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno", "HTTP status 401"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "HTTP status 403"),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "HTTP status 503"),
        (
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 72\r\n\r\n"
            b'{"v":2,"type":"error","id":null,"code":"overloaded","message":"no room"}',
            "refuses the connection: no room",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "HTTP status 200"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", "does not accept"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not accept a WebSocket connection"),
        (b"\0" * 20_000, "does not accept a WebSocket connection"),
        (b"", "does not accept a WebSocket connection"),
    ],
)
def test_a_server_that_does_not_let_us_in_says_why(listening: Listening, answer: bytes, why: str) -> None:
    def serve(side: socket.socket) -> None:
        side.recv(65536)
        side.sendall(answer)

    with listening(serve) as port, pytest.raises(RemoteError, match=rf"ws://127.0.0.1:{port} .*{why}"):
        WebSocketTransport(at(port), PATIENCE, LIMIT)


@pytest.mark.parametrize("kind", [WebSocketTransport, HttpTransport])
def test_where_nobody_listens_there_is_no_connection(kind: Any) -> None:
    with socket.socket() as side:
        side.bind(("127.0.0.1", 0))
        port = side.getsockname()[1]  # kept meanwhile, so that nobody else is given it and listens
        with pytest.raises(RemoteError, match=f"no connection to ws://127.0.0.1:{port}: .*refused"):
            kind(at(port), PATIENCE, LIMIT)
    with pytest.raises(RemoteError, match=r"no connection to ws://nowhere\.invalid:80"):
        kind(Endpoint("ws", "nowhere.invalid", 80), PATIENCE, LIMIT)


def test_a_handshake_in_drops_ends_in_time(listening: Listening) -> None:
    def drip(side: socket.socket) -> None:
        for byte in b"HTTP/1.1 101 Switching Protocols\r\n" + b"X: y\r\n" * 1000:
            side.sendall(bytes([byte]))
            time.sleep(0.02)

    with listening(drip) as port:
        start = time.monotonic()
        with pytest.raises(RemoteError, match="did not answer in time"):
            WebSocketTransport(at(port), 0.3, LIMIT)
        assert 0.3 <= time.monotonic() - start < PATIENCE


# ---- HTTP -----------------------------------------------------------------------------------------------------------


class Script:
    """An HTTP server that answers one request after the other with these byte strings, and then hangs up or waits."""

    def __init__(self, *answers: bytes, hangs_up: bool = False, pause_s: float = 0.0) -> None:
        self.answers, self.hangs_up, self.pause_s = answers, hangs_up, pause_s
        self.heard: list[bytes] = []

    def __call__(self, side: socket.socket) -> None:
        for answer in self.answers:
            self.heard.append(side.recv(65536))
            for start in range(0, len(answer), 997):
                side.sendall(answer[start : start + 997])
                time.sleep(self.pause_s)
        if not self.hangs_up:
            side.recv(65536)


def body(fields: dict[str, Any], head: bytes = b"") -> bytes:
    payload = json.encode(fields)
    return b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n" % (head, len(payload)) + payload


@pytest.fixture
def http(listening: Listening) -> Iterator[Callable[[Script], HttpTransport]]:
    transports, servers = list[HttpTransport](), list[Any]()

    def make(script: Script) -> HttpTransport:
        servers.append(listening(script))
        port = servers[-1].__enter__()
        transports.append(HttpTransport(at(port, "http", token="sesame open now!"), PATIENCE, LIMIT))
        return transports[-1]

    yield make
    for transport in transports:
        transport.close()
        transport.close()
    for server in servers:
        server.__exit__(None, None, None)


def ask(transport: HttpTransport, kind: str = "infer") -> bytes | None:
    transport.send(kind, b'{"a":1}', 1.0)
    return transport.receive(PATIENCE)


def test_requests_and_replies_share_a_connection(http: Callable[[Script], HttpTransport]) -> None:
    script = Script(
        body({"a": 1}), body({"b": "x" * 9000}, b"Server: me\r\n"), b"HTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n"
    )
    transport = http(script)
    assert transport.receive(0.0) is None and transport.receive(5.0) is None  # at once: nothing was asked
    assert ask(transport, "hello") == b'{"a":1}'
    assert transport.decode(ask(transport) or b"") == {"b": "x" * 9000}
    assert ask(transport, "verify") == b""
    for heard, path in zip(script.heard, (b"hello", b"infer", b"verify"), strict=True):
        head, payload = heard.split(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/%s HTTP/1.1\r\n" % path) and payload == b'{"a":1}'
        assert b"Content-Length: 7" in head and b"Authorization: Bearer sesame open now!" in head
        assert b"Host: 127.0.0.1:" in head and b"Content-Type: application/json" in head


def test_a_reply_in_pieces_is_waited_for_no_longer_than_allowed(http: Callable[[Script], HttpTransport]) -> None:
    transport = http(Script(body({"a": "x" * 20_000}), pause_s=0.05))
    transport.send("infer", b"{}", 1.0)
    start = time.monotonic()
    assert transport.receive(0.1) is None and transport.busy
    assert 0.1 <= time.monotonic() - start < PATIENCE
    with pytest.raises(TransportClosedError, match="previous reply is still outstanding"):
        transport.send("infer", b"{}", 1.0)
    # What has come is not lost.
    assert len(transport.receive(PATIENCE) or b"") > 20_000 and not transport.busy


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "the server closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "with a Content-Length"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "with a Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "with a Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "with a Content-Length"),
        (b"HTTP/1.1 200 OK\r\nX-Content-Length: 2\r\n\r\nhi", "with a Content-Length"),
        (b"HTTP/2 200\r\nContent-Length: 2\r\n\r\nhi", "is not HTTP/1.1"),
        (b"\0" * 20_000, "header of the reply is larger"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100001\r\n\r\n", "larger than any valid one"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n", "with a Content-Length"),
        (body({}) + body({}), "more data than the reply's length"),
    ],
)
def test_a_reply_that_is_none_ends_it(http: Callable[[Script], HttpTransport], answer: bytes, why: str) -> None:
    transport = http(Script(answer, hangs_up=True))
    transport.send("infer", b"{}", 1.0)
    with pytest.raises(TransportClosedError, match=why):
        transport.receive(PATIENCE)


def answered(transport: HttpTransport) -> HttpTransport:
    assert transport.receive(PATIENCE) == b'{"a":1}'
    return transport


def look_on(transport: HttpTransport) -> None:
    """Looks until something comes of it; nothing was asked, so nothing should."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert transport.receive(0.0) is None


def test_what_a_server_says_unasked_is_no_reply_to_the_next_request(listening: Listening) -> None:
    def chatter(side: socket.socket) -> None:
        side.recv(65536)
        side.sendall(body({"a": 1}))
        time.sleep(0.1)
        side.sendall(body({"a": 2}))
        side.recv(65536)

    with listening(chatter) as port:
        transport = HttpTransport(at(port, "http"), PATIENCE, LIMIT)
        transport.send("infer", b"{}", 1.0)
        # Had it come at once, it would have been found with the first.
        with pytest.raises(TransportClosedError, match=r"data without a request|more data than the reply's length"):
            look_on(answered(transport))
        transport.close()


def test_a_server_that_hangs_up_on_an_idle_connection_is_noticed(http: Callable[[Script], HttpTransport]) -> None:
    transport = http(Script(hangs_up=True))
    with pytest.raises(TransportClosedError, match="closed the connection"):
        look_on(transport)


# ---- URLs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said", "host", "port"),
    [
        ("robot.local", "ws://robot.local:8600", "robot.local", PORT),
        ("localhost:9000", "ws://localhost:9000", "localhost", 9000),
        ("WSS://Server.example/", "wss://server.example:8600", "server.example", PORT),
        ("http://10.0.0.1:80", "http://10.0.0.1:80", "10.0.0.1", 80),
        ("https://host.:1", "https://host.:1", "host.", 1),
        ("ws://[::1]:8600", "ws://[::1]:8600", "::1", 8600),
    ],
)
def test_a_url_names_scheme_host_and_port(url: str, said: str, host: str, port: int) -> None:
    endpoint = Endpoint.parse(url)
    assert (str(endpoint), endpoint.host, endpoint.port) == (said, host, port)
    assert endpoint.encrypted == said.startswith(("wss", "https"))
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("htp://host", "did you mean 'http'"),
        ("wws://host", "did you mean 'ws"),
        ("ws://", "write ws://host:port"),
        ("ws://:8600", "write ws://host:port"),
        ("", "write ws://host:port"),
        ("ws://host:http", "write ws://host:port"),
        ("ws://host:99999", "write ws://host:port"),
        ("ws://host:0", "between 1 and 65535"),
        ("ws://host/v1/stream", "nothing else"),
        ("ws://host?token=x", "nothing else"),
        ("ws://host#x", "nothing else"),
        ("ws://me:secret@host", "nothing else"),
        ("ws://a b", "not the name or address"),
        ("ws://a..b", "not the name or address"),
        (f"ws://{'a' * 64}", "not the name or address"),
        ("ws://[::1", "write ws://host:port"),
        ("ws://münchen", "not the name or address"),
    ],
)
def test_a_url_that_is_none_is_refused_with_a_hint(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Endpoint.parse(url)


@pytest.mark.parametrize("token", ["", "two\r\nlines", "ünicode", "nul\0"])
def test_a_token_that_would_break_a_head_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        Endpoint.parse("ws://host", token)


def test_ipv6_addresses_work(ball: Bundle) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving("ball", "--host", "::1") as server:
        for scheme in ("ws", "http"):
            with Client(Endpoint.parse(f"{scheme}://[::1]:{server.port}"), ball.codec.dialect) as client:
                assert client.connect(10.0).bundle == "ball"


# ---- TLS and tokens, with a real server -----------------------------------------------------------------------------

TOKEN = "a token of more than 16 characters"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody but itself has signed, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=specact test",
         "-addext", "subjectAltName=IP:127.0.0.1", "-out", made[0], "-keyout", made[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def guarded(certificate: tuple[Path, Path]) -> Iterator[ServerProcess]:
    options = ("--certificate", str(certificate[0]), "--key", str(certificate[1]))
    with serving("ball", *options, environment={"SPECACT_TOKEN": TOKEN}) as process:
        yield process


def tls_context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


@pytest.mark.parametrize("scheme", ["wss", "https"])
def test_over_tls_with_a_token(
    ball: Bundle, guarded: ServerProcess, certificate: tuple[Path, Path], scheme: str
) -> None:
    endpoint = at(guarded.port, scheme, token=TOKEN, tls=tls_context(certificate))
    with Client(endpoint, ball.codec.dialect, settings=ClientSettings(silence_s=1.5)) as client:
        client.connect(10.0)
        target = RemoteTarget(client, ball.codec, 5000.0)
        rng = np.random.default_rng(0)
        for step in range(50):
            seen = Window({"state": rng.uniform(-1, 1, (1, 8)).astype(np.float32), "goal": np.zeros(2, np.float32)})
            answer = target.submit(seen, StepAddress(0, 0, 0, step)).result()
            assert isinstance(answer, Answer)
            np.testing.assert_array_equal(answer.value.probs, ball.target.infer(seen).probs)
        time.sleep(1.7)  # pings alone
        assert isinstance(target.submit(seen, StepAddress(0, 0, 0, 50)).result(), Answer)
        assert client.counts == {"connections": 1, "sent": 51, "answered": 51}


@pytest.mark.parametrize("scheme", ["wss", "https"])
def test_a_certificate_that_is_not_trusted_is_a_reason(
    ball: Bundle, guarded: ServerProcess, refusal: Refusal, scheme: str
) -> None:
    with Client(at(guarded.port, scheme, token=TOKEN), ball.codec.dialect) as client:
        # OpenSSL before 3.0 writes it without the hyphen.
        assert re.search("certificate verify failed: self.signed", refusal(client))


def test_a_certificate_of_another_host_is_a_reason(guarded: ServerProcess, certificate: tuple[Path, Path]) -> None:
    endpoint = Endpoint("wss", "localhost", guarded.port, TOKEN, tls_context(certificate))
    with pytest.raises(RemoteError, match=r"mismatch|not valid for"):
        WebSocketTransport(endpoint, PATIENCE, LIMIT)


def test_speaking_plainly_to_a_server_with_tls_or_the_other_way_round_is_no_use(
    ball: Bundle, guarded: ServerProcess, server: ServerProcess, refusal: Refusal
) -> None:
    for port, scheme in ((guarded.port, "ws"), (guarded.port, "http"), (server.port, "wss"), (server.port, "https")):
        with Client(at(port, scheme, token=TOKEN), ball.codec.dialect) as client:
            said = refusal(client)
            assert f"{scheme}://127.0.0.1:{port}" in said
            if port == server.port:
                assert f"without TLS use {scheme[:-1]}://" in said
            elif scheme == "ws":
                assert "ended: no close frame; for a server with TLS use wss://" in said


@pytest.mark.parametrize("scheme", ["wss", "https"])
@pytest.mark.parametrize("token", [None, "a token of more than 16 characterz"])
def test_the_wrong_token_is_a_reason(
    ball: Bundle,
    guarded: ServerProcess,
    certificate: tuple[Path, Path],
    refusal: Refusal,
    scheme: str,
    token: str | None,
) -> None:
    endpoint = at(guarded.port, scheme, token=token, tls=tls_context(certificate))
    with Client(endpoint, ball.codec.dialect) as client:
        assert "the token is wrong or missing: SPECACT_TOKEN or --token-file" in refusal(client)


@pytest.mark.parametrize("kind", [WebSocketTransport, HttpTransport])
def test_a_peer_that_never_finishes_the_tls_handshake_is_left_in_time(listening: Listening, kind: Any) -> None:
    def hang(side: socket.socket) -> None:
        while side.recv(65536):
            pass

    with listening(hang) as port:
        start = time.monotonic()
        with pytest.raises(RemoteError, match="timed out"):
            kind(at(port, "wss"), 0.3, LIMIT)
        assert 0.3 <= time.monotonic() - start < PATIENCE
