"""What a server says of itself: it reaches no terminal as it is, and no device does whatever it asks for."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.remote.conftest import Fields, Peer
from tests.remote.test_openpi import foreign
from websockets.frames import Frame, Opcode

import specact
from specact.errors import BundleError, RemoteError
from specact.observation import Field, ObservationSpec
from specact.wire import openpi
from specact.wire.checks import ErrorCode
from specact.wire.handshake import Welcome, welcome_fields
from specact.wire.messages import ErrorReply, reply_fields

pytestmark = pytest.mark.usefixtures("nothing_left")
Listening = Callable[[Callable[[socket.socket], None]], AbstractContextManager[int]]
# Clears a terminal and colours what follows.
ESCAPE, SHOWN = "\x1b[2J\x1b[31mgo", "?[2J?[31mgo"
REFUSAL = reply_fields(ErrorReply(None, ErrorCode.MISMATCH, ESCAPE))
VECTOR = ObservationSpec({"state": Field((8,))})


def chunk_spec(
    observation: ObservationSpec = VECTOR, chunk: int = 4, actions: int = 2, rate_hz: float = 50.0
) -> Fields:
    return {"observation": observation.describe(), "chunk": chunk, "actions": actions, "rate_hz": rate_hz}


def welcome(spec: Fields) -> Fields:
    return welcome_fields(Welcome("theirs", "0" * 16, "1", 100_000, "chunks", spec))


def over_http(status: str, reply: Fields) -> Callable[[socket.socket], None]:
    """Answers every request with this, a WebSocket's opening request as well."""
    body = json.dumps(reply).encode()

    def serve(side: socket.socket) -> None:
        while side.recv(65536):
            side.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body))

    return serve


def over_websocket(say: Callable[[Peer], None]) -> Callable[[socket.socket], None]:
    """Answers every message in this way."""

    def serve(side: socket.socket) -> None:
        peer = Peer(side)
        for _ in peer.messages():
            say(peer)

    return serve


def odd_upgrade(side: socket.socket) -> None:
    side.recv(65536)
    # A terminal takes 0x9b for an escape sequence's beginning.
    side.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: \x9b2Jgo\r\n\r\n")
    side.recv(65536)


ODD: dict[str, tuple[str, Callable[[socket.socket], None], type[Exception], str]] = {
    "the hello is refused over HTTP": ("http", over_http("409 Conflict", REFUSAL), RemoteError, SHOWN),
    "the opening is refused": ("ws", over_http("401 Unauthorized", REFUSAL), RemoteError, SHOWN),
    "the opening is invalid": ("ws", odd_upgrade, RemoteError, "?2Jgo"),
    "the hello is refused": ("ws", over_websocket(lambda peer: peer.say(REFUSAL)), RemoteError, SHOWN),
    "a reason for closing": (
        "ws",
        over_websocket(lambda peer: peer.raw(Frame(Opcode.CLOSE, b"\x03\xf0" + ESCAPE.encode()).serialize(mask=False))),
        RemoteError,
        SHOWN,
    ),
    "a name in the spec": ("http", over_http("200 OK", welcome(chunk_spec() | {ESCAPE: 1})), BundleError, SHOWN),
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "serve", "error", "shown"), ODD.values(), ids=ODD.keys())
def test_a_server_s_text_is_made_printable(
    scheme: str, serve: Callable[[socket.socket], None], error: type[Exception], shown: str, listening: Listening
) -> None:
    with listening(serve) as port, pytest.raises(error) as raised:
        specact.connect(f"{scheme}://127.0.0.1:{port}", timeout=20.0)
    assert str(raised.value).isprintable() and shown in str(raised.value)


def test_the_text_of_a_server_of_openpi_s_protocol_is_made_printable() -> None:
    with foreign() as (there, port):
        there.metadata = ESCAPE
        with pytest.raises(RemoteError) as raised:
            specact.connect(f"openpi:ws://127.0.0.1:{port}", timeout=20.0)
    assert str(raised.value).isprintable() and SHOWN in str(raised.value)


# Each of these would be a valid spec of a policy on this device.
GREEDY: dict[str, tuple[Fields, str]] = {
    "history": (
        chunk_spec(ObservationSpec({"state": Field((8,), history=1025)})),
        "longest history .* 1 to 1024 .*, got 1025;",
    ),
    # More than an int64 holds, and a multiple of 2^64.
    "observation": (
        chunk_spec(ObservationSpec({"state": Field((1 << 20,) * 3, history=1024)})),
        r"bytes of .*, got \d{22,};",
    ),
    "beside a history": (
        chunk_spec(ObservationSpec({"state": Field((2,), history=1024), "image": Field((400, 400, 3), "uint8", 0)})),
        "bytes of observations and actions .*, got 491528224;",
    ),
    "chunk": (chunk_spec(chunk=1 << 20, actions=1 << 20), "bytes of .*, got 4398046511136;"),
    "slow": (chunk_spec(rate_hz=0.001), "control rate .*, got 0.001;"),
    "fast": (chunk_spec(rate_hz=1e6), "control rate .*, got 1000000.0;"),
}


@pytest.mark.parametrize(("spec", "why"), GREEDY.values(), ids=GREEDY.keys())
def test_a_server_s_spec_that_asks_for_too_much_is_refused(spec: Fields, why: str, listening: Listening) -> None:
    with listening(over_http("200 OK", welcome(spec))) as port, pytest.raises(BundleError, match=why):
        specact.connect(f"http://127.0.0.1:{port}", timeout=20.0)
    said: dict[str, Any] = {
        "action_horizon": spec["chunk"], "action_dim": spec["actions"], "rate_hz": spec["rate_hz"],
        "observation": spec["observation"]["fields"], "instruction": False,
    }  # fmt: skip
    with foreign() as (there, port):
        there.metadata = openpi.encode(said)
        with pytest.raises(BundleError, match=why):
            specact.connect(f"openpi:ws://127.0.0.1:{port}", timeout=20.0)


def test_a_server_s_spec_within_the_limits_is_accepted(listening: Listening) -> None:
    # 256 MiB, with a chunk of 4 KiB.
    large = ObservationSpec({"state": Field((65535,), history=1024)})
    for spec in (
        chunk_spec(large, chunk=512, actions=2) | {"rate_hz": 1000},
        chunk_spec(rate_hz=0.1),
    ):
        with (
            listening(over_http("200 OK", welcome(spec))) as port,
            specact.connect(f"http://127.0.0.1:{port}", timeout=20.0) as policy,
        ):
            assert policy.spec.describe() == spec
