"""One WebSocket, read and written by the thread that waits for it, so that no reply changes threads."""

from __future__ import annotations

import ssl
import time
from collections import deque

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from specact.errors import RemoteError
from specact.remote.endpoint import Endpoint
from specact.wire.messages import printable

# Bytes per read: a hostile peer's thousands of tiny frames in one read cost at most about 40 ms, once.
_READ_BYTES = 1 << 13
# Pings, pongs and empty frames of the peer per second without a message; above this the connection is closed.
_MAX_IDLE_FRAMES = 64
# Timeout for sending control frames; they are small, so a longer delay means a stalled connection.
_CONTROL_TIMEOUT_S = 0.005


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
        self._socket = endpoint.connect(until)
        self.last_activity_s = time.monotonic()
        try:
            self._open(endpoint, until, scheme)
        except (StreamClosedError, InvalidHandshake) as error:
            self.close()
            hint = "" if endpoint.encrypted else "; for a server with TLS use wss://"
            status = f"HTTP status {error.response.status_code}" if isinstance(error, InvalidStatus) else str(error)
            raise RemoteError(f"{endpoint} does not accept this connection: {printable(status)}{hint}") from None
        except RemoteError:
            self.close()
            raise

    def send(self, payload: bytes, timeout: float, mark: bytes = b"") -> None:
        """Sends a binary message within ``timeout`` seconds.

        Args:
            payload: its content; empty for the mark alone.
            timeout: for handing all of it to the operating system [s].
            mark: of at most 125 bytes, sent as a ping before it. A message received before its pong was sent before
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

    def _open(self, endpoint: Endpoint, until: float, scheme: str) -> None:
        request = self._protocol.connect()
        if endpoint.token is not None:
            request.headers["Authorization"] = f"{scheme} {endpoint.token}"
        self._protocol.send_request(request)
        self._flush(until - time.monotonic())
        while self._protocol.state is State.CONNECTING:
            self._read(max(0.001, until - time.monotonic()))
            if self._protocol.handshake_exc is not None:
                raise self._protocol.handshake_exc
            if time.monotonic() > until:
                raise RemoteError(f"{endpoint} accepted the connection but did not answer in time")

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
