"""A real server with few descriptors, and peers that hold what they take: nobody is kept out, and it ends in peace."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.server.requests import infer
from websockets.exceptions import WebSocketException

from specact import Bundle
from specact.observation import Window
from specact.wire import msgpack

if TYPE_CHECKING:
    from tests.server.conftest import Fields, Server, Start

UPGRADE = (
    b"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)
HALF = b"GET /healthz HTTP/1.1\r\nHost: 127"
# A tenth of what a server usually has, so that filling it up takes no time.
FEW = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
SOON = "import specact.server.transport as t; t._REQUEST_TIMEOUT_S = 2.0; "


@contextmanager
def held(server: Server, number: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that sent this and then nothing."""
    with ExitStack() as stack:
        connections = []
        for _ in range(number):
            connections.append(stack.enter_context(server.raw()))
            connections[-1].sendall(sent)
        yield connections


def reply(connection: socket.socket) -> bytes:
    """Everything until the server hangs up."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def ask(server: Server, sent: bytes) -> bytes:
    with server.raw() as connection:
        connection.sendall(sent)
        return reply(connection)


@pytest.fixture(scope="module")
def small(launch: Start) -> Server:
    """One that may open 128 files."""
    return launch(before=FEW)


@pytest.mark.parametrize(
    "sent",
    [b"", HALF, UPGRADE, UPGRADE + b"\r\n", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", UPGRADE[:1]],
    ids=["silent", "half a head", "half an upgrade", "no hello", "kept alive", "one byte"],
)
def test_connections_that_prove_nothing_lock_nobody_out(
    sent: bytes, small: Server, hello: Fields, windows: list[Window]
) -> None:
    with small.stream(hello) as robot, held(small, 300, sent):
        # Who was there stays, and others come in.
        assert robot.ask(infer(windows[0]))["type"] == "distribution"
        for _ in range(3):
            assert small.http("GET", "/healthz").status == 200
            with small.stream(hello) as another:
                assert another.ask(infer(windows[1]))["type"] == "distribution"
        assert robot.ask(infer(windows[0]))["type"] == "distribution"
    assert "Traceback" not in small.log
    assert small.log.startswith("this process may open too few files for 1024 robots: it takes 48; ")


def test_without_its_limits_half_sent_heads_would_lock_it(launch: Start) -> None:
    """The wrong variant: every connection is let in, and waited for."""
    bare = launch(
        before=FEW + "import specact.server.connections as c; c.Connections._make_room = lambda *_: True; ",
    )
    with held(bare, 300, HALF), pytest.raises((ConnectionError, TimeoutError)), bare.raw() as connection:  # noqa: PT012
        connection.settimeout(1.0)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        if not connection.recv(100):
            raise ConnectionResetError


def test_one_address_has_so_many_connections(launch: Start, hello: Fields) -> None:
    server = launch("--max-per-address", "4")
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(server.stream(hello))
        # It is told before it asks.
        refused = ask(server, b"")
        assert refused.startswith(b"HTTP/1.1 503 ") and b'"code":"overloaded"' in refused
        # A client that has sent its request by then may see no more of it than the end of the connection, which the
        # library meets in one place with an assertion.
        with pytest.raises((WebSocketException, ConnectionError, AssertionError)):
            stack.enter_context(server.connect())
    server.until(lambda: server.http("GET", "/healthz").status == 200, "there is room again")


@pytest.mark.parametrize("sent", [b"", HALF, b"\r\n", b"POST /v1/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"])
def test_a_request_that_does_not_become_whole_is_not_waited_for(sent: bytes, launch: Start, quick: Server) -> None:
    with quick.raw() as connection:
        connection.sendall(sent)
        assert reply(connection) == b""


@pytest.fixture(scope="module")
def quick(launch: Start) -> Server:
    """One that waits for a request for a moment only."""
    return launch(before=SOON)


def test_bytes_that_drip_after_an_answer_keep_no_connection(quick: Server) -> None:
    """A body that is announced to an address which reads none, and the second half of a second head."""
    head = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    for sent in (head + b"Content-Length: 100\r\n\r\n{", head + b"\r\n" + HALF):
        answer = ask(quick, sent)
        assert answer.count(b"HTTP/1.1 200 OK") == 1
    # Whole requests may follow each other for as long as they like.
    with quick.raw() as connection:
        for _ in range(5):
            connection.sendall(head + b"\r\n")
            received = b""
            while not received.endswith(b"}"):
                part = connection.recv(65536)
                assert part, "it hung up"
                received += part
            assert received.startswith(b"HTTP/1.1 200 OK")


def test_a_stream_is_not_taken_for_a_request_that_takes_long(
    quick: Server, hello: Fields, windows: list[Window]
) -> None:
    with quick.stream(hello) as robot:
        # Longer than a request may take: another one was given up in between.
        assert ask(quick, HALF) == b""
        assert ask(quick, HALF) == b""
        assert robot.ask(infer(windows[0]))["type"] == "distribution"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"X: " + b"y" * 9000, b"431"),
        (b"\r\n".join(b"X-%d: y" % number for number in range(200)), b"431"),
        (b"Content-Length: 5", b"400"),
        (b"Content-Length: " + b"0" * 4400 + b"5", b"400"),
        (b"Transfer-Encoding: chunked", b"400"),
        (b"Sec-WebSocket-Key: short", b"400"),
        (b"Sec-WebSocket-Version: 12", b"400"),
    ],
    ids=["a long header", "many headers", "a body", "a length of many digits", "chunks", "two keys", "two versions"],
)
def test_an_opening_request_that_cannot_be_read_is_answered(
    header: bytes, status: bytes, server: Server, hello: Fields
) -> None:
    answer = ask(server, UPGRADE + header + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status)
    with server.stream(hello):
        assert "Traceback" not in server.log


def test_it_ends_in_peace_whatever_is_half_said(launch: Start, hello: Fields) -> None:
    server = launch()
    with ExitStack() as stack:
        robot = stack.enter_context(server.stream(hello))
        for sent in (b"", HALF, UPGRADE, UPGRADE + b"X: " + b"y" * 9000 + b"\r\n\r\n", UPGRADE + b"\r\n"):
            stack.enter_context(held(server, 1, sent))
        server.terminate()
        assert robot.closed() == 1012
        assert server.wait() == 0
    assert server.log.splitlines()[1:] == ["stopped; everything under way was answered"]


def head(*lines: bytes) -> bytes:
    rest = b"\r\n".join((b"Host: 127.0.0.1", b"Content-Type: application/json", b"Connection: close", *lines))
    return b"POST /v1/infer HTTP/1.1\r\n" + rest + b"\r\n\r\n"


MALFORMED = {
    "a length of 4401 digits": head(b"Content-Length: " + b"0" * 4400 + b"5") + b"[[[[[",
    "a length beyond 64 bits": head(b"Content-Length: 99999999999999999999999"),
    "a length that is none": head(b"Content-Length: 1e3"),
    "a negative length": head(b"Content-Length: -1"),
    "two lengths": head(b"Content-Length: 2", b"Content-Length: 3") + b"{}",
    "length and chunks": head(b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
    "a chunk of no size": head(b"Transfer-Encoding: chunked") + b"x\r\n{}\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": head(b"Transfer-Encoding: chunked") + b"f" * 40 + b"\r\n{}",
    "a chunk of a size with thousands of digits": head(b"Transfer-Encoding: chunked") + b"0" * 5000 + b"2\r\n{}",
    "deep JSON": head(b"Content-Length: 6000") + b"[" * 6000,
    "a number of 5000 digits": head(b"Content-Length: 5006") + b'{"v":' + b"9" * 5000 + b"}",
    "half a surrogate pair": head(b"Content-Length: 29") + b'{"type":"infer\\ud800","v":2}  ',
    "no UTF-8": head(b"Content-Length: 4") + b'{"\xff}',
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no version": b"GET /healthz\r\n\r\n",
    "another version": b"GET /healthz HTTP/9.9\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a proxy's request": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    "a broken escape": b"GET /%zz%ff%00 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    "bytes in the address": b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    "a broken host": b"GET /v1/status HTTP/1.1\r\nHost: [::1\xff\r\nConnection: close\r\n\r\n",
    "a space in a header's name": b"GET /healthz HTTP/1.1\r\nHo st: x\r\nConnection: close\r\n\r\n",
    "a zero byte": b"GET /healthz HTTP/1.1\r\nHost: a\x00b\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
def test_whatever_is_malformed_is_a_client_s_error(sent: bytes, server: Server) -> None:
    answer = ask(server, sent)
    assert answer.startswith(b"HTTP/1.1 4") or b" 200 OK" in answer[:20], answer
    assert "Traceback" not in server.log and server.process.poll() is None


def test_damaged_requests_are_client_errors_or_are_let_in(server: Server, hello: Fields) -> None:
    rng = random.Random(0)
    whole = [
        head(b"Content-Length: 2") + b"{}",
        head(b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        UPGRADE + b"\r\n",
    ]
    for _ in range(300):
        worn = bytearray(rng.choice(whole))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(worn))
            worn[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
        with server.raw() as connection:
            connection.sendall(worn)
            with suppress(OSError):  # it may have hung up by now
                connection.shutdown(socket.SHUT_WR)
            answer = reply(connection)
        assert answer[:10] in (b"", b"HTTP/1.1 1", b"HTTP/1.1 4"), (bytes(worn), answer)
    with server.stream(hello):
        assert "Traceback" not in server.log


def opened(server: Server, hello: Fields) -> socket.socket:
    """A robot's connection after its welcome."""
    connection = server.raw()
    connection.sendall(UPGRADE + b"\r\n")
    for sent, last in ((b"", b"\r\n\r\n"), (frame(0x2, msgpack.encode(hello)), b"welcome")):
        connection.sendall(sent)
        received = b""
        while last not in received:
            part = connection.recv(4096)
            assert part, received
            received += part
    return connection


def frame(opcode: int, payload: bytes = b"") -> bytes:
    """A frame, masked with zeros."""
    size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return bytes([0x80 | opcode]) + size + bytes(4) + payload


@pytest.mark.parametrize("opcode", [0x9, 0xA], ids=["pings", "pongs"])
def test_more_control_frames_than_anybody_needs_end_the_connection(opcode: int, server: Server, hello: Fields) -> None:
    with opened(server, hello) as connection:
        connection.sendall(frame(opcode) * 1000)
        assert b"too many pings or pongs" in reply(connection)


def test_a_flood_in_one_read_is_read_in_turns_and_loses_nothing(
    server: Server, hello: Fields, ball: Bundle, windows: list[Window]
) -> None:
    payloads = [msgpack.encode(infer(windows[0], number)) for number in range(400)]
    with opened(server, hello) as connection:
        connection.sendall(b"".join(frame(0x2, payload) for payload in payloads))
        received = b""
        while received.count(b"distribution") < 400 and (part := connection.recv(1 << 20)):
            received += part
    assert received.count(b"distribution") == 400 and b"error" not in received


def test_a_peer_that_begins_no_handshake_is_not_waited_for(launch: Start, certificate: Path) -> None:
    server = launch(
        "--certificate", str(certificate / "cert.pem"), "--key", str(certificate / "key.pem"),
        before=FEW + "import specact.server.acceptor as a; a._HANDSHAKE_TIMEOUT_S = 3.0; ",
    )  # fmt: skip
    server.tls = ssl.create_default_context(cafile=certificate / "cert.pem")
    with held(server, 300, b"\x16\x03\x01"):
        assert server.http("GET", "/healthz").status == 200
    with held(server, 1, b"") as [silent]:
        assert reply(silent) == b""
    with held(server, 1, b"GET / HTTP/1.1\r\n\r\n") as [plain]:
        assert b"HTTP" not in reply(plain)
    server.terminate()
    assert server.wait() == 0
    assert "Traceback" not in server.log
