"""Address of a server, and one WebSocket to it, read and written by the thread that waits: no reply changes threads."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from specact.errors import ConfigError, RemoteError, WireError, unknown_name
from specact.wire.messages import printable

PORT = 8600
_HOST = re.compile(r"[0-9A-Za-z_.:%-]+")
# Bytes per read: a hostile peer's thousands of tiny frames in one read cost at most about 40 ms, once.
_READ_BYTES = 1 << 13
# Pings, pongs and empty frames of the peer per second without a message; above this the connection is closed.
_MAX_IDLE_FRAMES = 64
# Timeout for sending control frames; they are small, so a longer delay means a stalled connection.
_CONTROL_TIMEOUT_S = 0.005


@dataclass(frozen=True)
class Endpoint:
    """Address of a server (``ws``, or ``wss`` with TLS), and credentials.

    Attributes:
        token: bearer token, or None.
        tls: context for ``wss``; None for the system's certificates.

    Raises:
        ConfigError: for an invalid scheme, host, port or token.
    """

    scheme: str
    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.scheme not in ("ws", "wss"):
            raise unknown_name("scheme of a server's URL", self.scheme, ("ws", "wss"))
        labels = self.host.removesuffix(".").split(".")
        if not _HOST.fullmatch(self.host) or not all(0 < len(label) < 64 for label in labels):
            raise ConfigError(f"{self.host!r} is not the name or address of a host")
        if not 0 < self.port < 65536:
            raise ConfigError(f"a server's port must lie between 1 and 65535, got {self.port}")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise ConfigError("a token must be one line of printable ASCII")

    @classmethod
    def parse(cls, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> Endpoint:
        """From ``ws://host:port`` or ``wss://host:port``; port 8600 if not given.

        A server of openpi's protocol has a :class:`~specact.remote.openpi.OpenpiEndpoint` instead.

        Raises:
            ConfigError: if it is no such URL.
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
        except OSError as error:
            why = f"{error.strerror or error}; check the address, and that specact serve runs"
            raise RemoteError(f"no connection to {self}: {why}") from None
        try:
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.scheme == "wss":
                side.settimeout(max(0.001, until - time.monotonic()))
                side = (self.tls or ssl.create_default_context()).wrap_socket(side, server_hostname=self.host)
            return side
        except OSError as error:
            side.close()
            why = f"{error}; an authority that the system does not trust is named by --ca; without TLS use ws://"
            raise RemoteError(f"no connection to {self}: {why}") from None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def tls_context(ca: Path | None) -> ssl.SSLContext | None:
    """A TLS context that trusts this certificate authority (a PEM file) alone; None for the system's default.

    Raises:
        ConfigError: if the file is missing or invalid.
    """
    try:
        return None if ca is None else ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ConfigError(
            f"cannot use {ca} as the PEM file of a certificate authority: {error.strerror or error}"
        ) from None


class StreamClosedError(Exception):
    """The stream is closed; its owner may open another."""


class Stream:
    """A WebSocket, used by one thread at a time. Nothing blocks for longer than the timeouts given [s].

    ``scheme`` is that of the Authorization header; a message of more than ``max_message_bytes`` closes the stream.

    Attributes:
        last_activity_s, last_pong: when the last byte arrived (monotonic clock), and the payload of the last pong.

    Raises:
        RemoteError: if the server cannot be reached in time, or refuses the connection.
    """

    def __init__(self, endpoint: Endpoint, path: str, scheme: str, timeout: float, max_message_bytes: int) -> None:
        until = time.monotonic() + timeout
        self._messages: deque[tuple[bytes | str, bytes]] = deque()
        self._parts: list[bytes] = []
        self._text, self.last_pong, self._second, self._idle_frames = False, b"", 0, 0
        self._protocol = ClientProtocol(parse_uri(f"{endpoint}{path}"), max_size=max_message_bytes)
        self._endpoint = endpoint
        self._socket = endpoint.connect(until)
        self.last_activity_s = time.monotonic()
        try:
            self._open(until, scheme)
        except (StreamClosedError, InvalidHandshake) as error:
            self.close()
            hint = "" if endpoint.scheme == "wss" else "; for a server with TLS use wss://"
            status = f"HTTP status {error.response.status_code}" if isinstance(error, InvalidStatus) else str(error)
            raise RemoteError(f"{endpoint} does not accept this connection: {printable(status)}{hint}") from None
        except RemoteError:
            self.close()
            raise

    @contextmanager
    def handshake(self, refusal: str) -> Iterator[None]:
        """Closes the stream where its first messages fail, and raises RemoteError with this refusal."""
        try:
            yield
        except (StreamClosedError, WireError) as error:
            self.close()
            raise RemoteError(f"{self._endpoint} {refusal}: {printable(str(error))}") from None

    def send(self, payload: bytes, timeout: float, mark: bytes = b"") -> None:
        """Hands a binary message, if it is not empty, to the operating system within ``timeout`` seconds.

        The mark, of at most 125 bytes, is sent as a ping before it. A message received before its pong was sent before
        the server read this one, so it is no reply to it.

        Raises:
            StreamClosedError: if that fails; an unknown part may have been sent.
        """
        if self._protocol.state is not State.OPEN:
            raise StreamClosedError("the connection is closed")
        if mark:
            self._protocol.send_ping(mark)
        if payload:
            self._protocol.send_binary(payload)
        self._flush(timeout)

    def ping(self) -> None:
        """Sends a ping, see :meth:`send`."""
        self.send(b"", _CONTROL_TIMEOUT_S, b"alive?")

    def receive(self, timeout: float) -> tuple[bytes | str, bytes] | None:
        """The next message, and the last pong before it; None if none arrives within ``timeout`` seconds.

        Raises:
            StreamClosedError: if the stream has ended.
        """
        until = time.monotonic() + timeout
        while not self._messages:
            self._read(max(0.0, until - time.monotonic()))
            if not self._messages and time.monotonic() >= until:
                return None
        return self._messages.popleft()

    def close(self) -> None:
        """Closes it immediately; idempotent."""
        try:
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self._flush(_CONTROL_TIMEOUT_S)
        except StreamClosedError:
            pass
        self._socket.close()

    def _open(self, until: float, scheme: str) -> None:
        request = self._protocol.connect()
        if self._endpoint.token is not None:
            request.headers["Authorization"] = f"{scheme} {self._endpoint.token}"
        self._protocol.send_request(request)
        self._flush(until - time.monotonic())
        while self._protocol.state is State.CONNECTING:
            self._read(max(0.001, until - time.monotonic()))
            if self._protocol.handshake_exc is not None:
                raise self._protocol.handshake_exc
            if time.monotonic() > until:
                raise RemoteError(f"{self._endpoint} accepted the connection but did not answer in time")

    def _read(self, timeout: float) -> None:
        """Handles what arrives within ``timeout`` seconds, or has arrived already."""
        try:
            self._socket.settimeout(timeout)
            data = self._socket.recv(_READ_BYTES)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as error:
            raise self._lost(error) from None
        self.last_activity_s = time.monotonic()
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._take(event)
        self._flush(_CONTROL_TIMEOUT_S)
        if self._protocol.state in (State.CLOSING, State.CLOSED) and not self._messages:
            why = self._protocol.parser_exc or self._protocol.close_rcvd or "no close frame"
            raise StreamClosedError(f"the connection ended: {why}")

    def _take(self, frame: Frame) -> None:
        if not frame.data or frame.opcode in (Opcode.PING, Opcode.PONG):
            now = int(time.monotonic())
            self._second, self._idle_frames = now, 1 + self._idle_frames * (self._second == now)
            if self._idle_frames > _MAX_IDLE_FRAMES:
                self._protocol.fail(CloseCode.POLICY_VIOLATION, "too many frames with too little data in them")
        if frame.opcode is Opcode.PONG:
            self.last_pong = bytes(frame.data)
        if frame.opcode not in (Opcode.BINARY, Opcode.TEXT, Opcode.CONT):
            return
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        if frame.data:
            self._parts.append(bytes(frame.data))
        if frame.fin:
            message, self._idle_frames = b"".join(self._parts), 0
            self._parts.clear()
            self._messages.append((message.decode(errors="replace") if self._text else message, self.last_pong))

    def _flush(self, timeout: float) -> None:
        if not (data := b"".join(self._protocol.data_to_send())):
            return
        try:
            self._socket.settimeout(max(0.001, timeout))
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> StreamClosedError:
        self._protocol.state = State.CLOSED
        self._socket.close()
        return StreamClosedError(f"the connection was lost: {error}")
