"""Address of a server, and one WebSocket to it, read and written by the thread that waits: no reply changes threads."""

from __future__ import annotations

import re
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from specact.errors import ConfigError, RefusedError, RemoteError, WireError, unknown_name
from specact.wire.exchange import Request
from specact.wire.messages import ErrorCode, Failure, Reply, Welcome, printable

Counts = Mapping[str, int]
PORT = 8600
_HOST = re.compile(r"[0-9A-Za-z_:%-]{1,63}(\.[0-9A-Za-z_:%-]{1,63})*\.?")
# Bytes per read: a hostile peer's thousands of tiny frames in one read cost at most about 40 ms, once.
_READ_BYTES = 1 << 13
# Pings, pongs and empty frames in one read; above this the connection is closed.
_MAX_IDLE_FRAMES = 64
# Timeout for sending control frames; they are small, so a longer delay means a stalled connection.
_CONTROL_TIMEOUT_S = 0.005
# Errors at the handshake that another attempt may not have.
_PASSING = (ErrorCode.SHUTTING_DOWN, ErrorCode.INTERNAL, ErrorCode.EXPIRED)


@dataclass(frozen=True)
class Endpoint:
    """Address of a server (``ws``, or ``wss`` with TLS), and credentials; ConfigError for invalid ones."""

    scheme: str
    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)  # None for the system's certificates

    def __post_init__(self) -> None:
        if self.scheme not in ("ws", "wss"):
            raise unknown_name("scheme of a server's URL", self.scheme, ("ws", "wss"))
        if not _HOST.fullmatch(self.host):
            raise ConfigError(f"{self.host!r} is not the name or address of a host")
        if not 0 < self.port < 65536:
            raise ConfigError(f"a server's port must lie between 1 and 65535, got {self.port}")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise ConfigError("a token must be one line of printable ASCII")

    @classmethod
    def parse(cls, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> Endpoint:
        """From ``ws://host:port`` or ``wss://host:port``; port 8600 if not given. ConfigError for any other URL.

        A server of openpi's protocol has a :class:`~specact.remote.openpi.OpenpiEndpoint` instead.
        """
        try:
            parts = urlsplit(url if "://" in url else f"ws://{url}")
            host, port = parts.hostname, PORT if parts.port is None else parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a server's URL ({error}); write ws://host:port") from None
        if not host or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(f"{url!r} is not a server's URL; write ws://host:port and nothing else")
        return cls(parts.scheme, host, port, token, tls)

    def connect(self, until: float) -> socket.socket:
        """A connected socket, with TLS for ``wss``; raises RemoteError if there is none ``until`` then (monotonic)."""
        try:
            side = socket.create_connection((self.host, self.port), max(0.001, until - time.monotonic()))
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.scheme == "wss":
                side.settimeout(max(0.001, until - time.monotonic()))
                # It closes the socket where that fails.
                side = (self.tls or ssl.create_default_context()).wrap_socket(side, server_hostname=self.host)
            return side
        except OSError as error:
            why = f"{error.strerror or error}; check the address, and that specact serve runs"
            if isinstance(error, ssl.SSLError):
                why = f"{error}; an authority that the system does not trust is named by --ca; without TLS use ws://"
            kind = RefusedError if isinstance(error, ssl.SSLCertVerificationError) else RemoteError
            raise kind(f"no connection to {self}: {why}") from None

    def __str__(self) -> str:
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def tls_context(ca: Path | None) -> ssl.SSLContext | None:
    """A TLS context that trusts this certificate authority (a PEM file) alone; None for the system's default."""
    try:
        return None if ca is None else ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ConfigError(f"cannot use {ca} as the PEM file of an authority: {error.strerror or error}") from None


class StreamClosedError(Exception):
    """The stream is closed; its owner may open another."""


class Stream(ABC):
    """A WebSocket to a server that has greeted, used by one thread at a time. StreamClosedError says that it has ended.

    Nothing blocks for longer than the timeouts given [s]; a message of more than ``max_message_bytes`` closes it. A
    server that cannot be reached in time is a RemoteError, one that refuses this device or is another a RefusedError.
    """

    single: ClassVar[bool]  # whether nothing is sent while a reply is outstanding; then that alone is a sign of life
    scheme: ClassVar[str]  # of the Authorization header
    refusal: ClassVar[str]  # what it means if the first messages fail
    welcome: Welcome  # the server's, or what it said instead
    alive_s: float  # time of the last sign of life (monotonic clock)
    pong: bytes  # payload of the last pong before the message received last

    def __init__(
        self, endpoint: Endpoint, path: str, timeout: float, max_message_bytes: int, hello: bytes = b""
    ) -> None:
        until = time.monotonic() + timeout
        self._messages: deque[tuple[bytearray | str, bytes]] = deque()
        self._parts: list[Any] = []
        self._text, self._last_pong, self._idle_frames = False, b"", 0
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._protocol = ClientProtocol(parse_uri(f"{endpoint}{path}"), max_size=max_message_bytes)
        self._socket, self.alive_s = endpoint.connect(until), time.monotonic()
        hint = "" if endpoint.scheme == "wss" else "; for a server with TLS use wss://"
        what, refused = "does not accept this connection", False
        try:
            self._open(endpoint.token, until)
            what, hint = self.refusal, ""
            # The server may have refused and closed already; then it has said why.
            with suppress(StreamClosedError):
                self.send(hello, until - time.monotonic())
            message = self.receive(max(0.0, until - time.monotonic()))
            if message is None:
                raise StreamClosedError("it sent no first message in time")
            self.welcome = self._read_welcome(message)
        except (StreamClosedError, InvalidHandshake, WireError) as error:
            self.close()
            why, refused = str(error), isinstance(error, WireError) and error.code not in _PASSING
            if isinstance(error, InvalidStatus):
                status = error.response.status_code
                why, refused = f"HTTP status {status}", 400 <= status < 500 and status not in (408, 429)
            raise (RefusedError if refused else RemoteError)(f"{endpoint} {what}: {printable(why)}{hint}") from None

    @abstractmethod
    def _read_welcome(self, message: bytearray | str) -> Welcome:
        """The server's first message; WireError if it refuses this device, or is not the one expected."""

    @abstractmethod
    def ask(self, kind: str, request: Request, number: int, deadline_ms: float, report: Counts, timeout: float) -> None:
        """Sends a request within ``timeout`` seconds."""

    @abstractmethod
    def reply(self, timeout: float) -> Reply | Failure | None:
        """The next reply, or None if none arrives within ``timeout`` seconds; WireError for an unreadable message."""

    def send(self, payload: bytes, timeout: float = _CONTROL_TIMEOUT_S, mark: bytes = b"") -> None:
        """Hands a binary message, if it is not empty, to the operating system within ``timeout`` seconds.

        The mark, of at most 125 bytes, is sent as a ping before it. A message received before its pong was sent before
        the server read this one, so it is no reply to it. Where that fails, an unknown part may have been sent.
        """
        if self._protocol.state is not State.OPEN:
            raise StreamClosedError("the connection is closed")
        if mark:
            self._protocol.send_ping(mark)
        if payload:
            self._protocol.send_binary(payload)
        self._flush(timeout)

    def receive(self, timeout: float) -> bytearray | str | None:
        """The next message, or None if none arrives within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while not self._messages:
            self._read(timeout)
            timeout = until - time.monotonic()
            if timeout <= 0.0 and not self._messages:
                return None
        message, self.pong = self._messages.popleft()
        return message

    def close(self) -> None:
        """Closes it immediately; idempotent."""
        with suppress(StreamClosedError):
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self._flush(_CONTROL_TIMEOUT_S)
        self._socket.close()

    def _open(self, token: str | None, until: float) -> None:
        request = self._protocol.connect()
        if token is not None:
            request.headers["Authorization"] = f"{self.scheme} {token}"
        self._protocol.send_request(request)
        self._flush(until - time.monotonic())
        while self._protocol.state is State.CONNECTING:
            self._read(max(0.001, until - time.monotonic()))
            if self._protocol.handshake_exc is not None:
                raise self._protocol.handshake_exc
            if time.monotonic() > until:
                raise StreamClosedError("it accepted the connection but did not answer in time")

    def _read(self, timeout: float) -> None:
        """Handles what arrives within ``timeout`` seconds, or has arrived already."""
        try:
            self._socket.settimeout(timeout)
            count = self._socket.recv_into(self._buffer)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as error:
            raise self._lost(error) from None
        protocol = self._protocol
        if not self.single:
            self.alive_s = time.monotonic()
        if count:
            protocol.receive_data(self._buffer[:count])  # type: ignore[arg-type]  # it copies any buffer
        else:
            protocol.receive_eof()
        self._idle_frames = 0
        for event in protocol.events_received():
            if isinstance(event, Frame):
                self._take(event)
        self._flush(_CONTROL_TIMEOUT_S)
        if not self._messages and protocol.state in (State.CLOSING, State.CLOSED):
            why = protocol.parser_exc or protocol.close_rcvd or "no close frame"
            raise StreamClosedError(f"the connection ended: {why}")

    def _take(self, frame: Frame) -> None:
        opcode, data = frame.opcode, frame.data
        if not data or opcode in (Opcode.PING, Opcode.PONG):
            self._idle_frames += 1
            if self._idle_frames > _MAX_IDLE_FRAMES:
                self._protocol.fail(CloseCode.POLICY_VIOLATION, "too many frames with too little data in them")
        if opcode is Opcode.PONG:
            self._last_pong = bytes(data)
        if opcode not in (Opcode.BINARY, Opcode.TEXT, Opcode.CONT):
            return
        if opcode is not Opcode.CONT:
            self._text = opcode is Opcode.TEXT
        if data:
            self._parts.append(data)
        if frame.fin:
            message = bytearray().join(self._parts)
            self._parts.clear()
            self._messages.append((message.decode(errors="replace") if self._text else message, self._last_pong))

    def _flush(self, timeout: float) -> None:
        if data := b"".join(self._protocol.data_to_send()):
            try:
                self._socket.settimeout(max(0.001, timeout))
                self._socket.sendall(data)
            except OSError as error:
                raise self._lost(error) from None

    def _lost(self, error: OSError) -> StreamClosedError:
        self._protocol.state = State.CLOSED
        self._socket.close()
        return StreamClosedError(f"the connection was lost: {error}")
