"""A WebSocket transport without a background thread, to avoid the latency of thread switches."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from specact.errors import RemoteError, WireError
from specact.remote.transport import Endpoint, Fields, TransportClosedError, receive_some, send_all
from specact.wire import json, msgpack
from specact.wire.checks import printable
from specact.wire.messages import read_error

_PATH = "/v1/stream"
_DATA = (Opcode.BINARY, Opcode.TEXT, Opcode.CONT)
# Timeout for sending control frames; they are small, so a longer delay means a stalled connection.
_CONTROL_TIMEOUT_S = 0.005
# Limit of frames parsed per read.
_MAX_FRAMES_PER_READ = 64
# Token bucket against floods of tiny frames: each frame of the peer costs one credit; 8 bytes of data, a tenth of a
# second or a ping of ours earns one, up to a maximum. Without credit the connection is closed.
_CREDIT_BYTES, _CREDIT_S, _MAX_CREDIT = 8, 0.1, 128


class Message(NamedTuple):
    """A received message.

    Attributes:
        payload: its content.
        text: whether it is a text message.
        last_pong: payload of the last pong before it, see :meth:`WebSocketTransport.send`.
    """

    payload: bytes
    text: bool
    last_pong: bytes


class WebSocketTransport:
    """Binary msgpack over one WebSocket; see :class:`~specact.remote.transport.Transport`.

    Args:
        endpoint: the server.
        timeout: for connecting and the opening handshake together [s].
        max_message_bytes: a larger reply closes the transport before it is read.
        path: of the URL.
        scheme: of the Authorization header.

    Raises:
        RemoteError: if the server cannot be reached in time, or refuses the connection.
    """

    pings, busy = True, False

    def __init__(
        self, endpoint: Endpoint, timeout: float, max_message_bytes: int, path: str = _PATH, scheme: str = "Bearer"
    ) -> None:
        until = time.monotonic() + timeout
        self._messages: deque[Message] = deque()
        self._parts: list[bytes] = []
        # Received bytes to be parsed, and remaining bytes of the current frame.
        self._unparsed, self._frame_rest = bytearray(), 0
        self.last_activity_s = self._credited_s = time.monotonic()
        self._credit = float(_MAX_CREDIT)
        self._text, self._last_pong = False, b""
        self._protocol = ClientProtocol(parse_uri(f"{endpoint}{path}"), max_size=max_message_bytes)
        self._socket = endpoint.connect(until)
        try:
            self._open(endpoint, until, scheme)
        except (TransportClosedError, InvalidHandshake) as error:
            self.close()
            hint = "" if endpoint.encrypted else "; for a server with TLS use wss://"
            why = printable(str(error))
            raise RemoteError(f"{endpoint} does not accept a WebSocket connection: {why}{hint}") from None
        except RemoteError:
            self.close()
            raise

    def encode(self, fields: Fields) -> bytes:
        return msgpack.encode(fields)

    def decode(self, payload: bytes) -> Fields:
        return msgpack.decode(payload)

    def send(self, kind: str, payload: bytes, timeout: float, mark: bytes = b"") -> None:
        """See :class:`~specact.remote.transport.Transport`.

        ``mark``, of at most 125 bytes, is sent as a ping before the message. A message that arrives before its pong was
        sent before the server read this one, so it is no reply to it.
        """
        if self._protocol.state is not State.OPEN:
            raise TransportClosedError("the connection is closed")
        if mark:
            self._protocol.send_ping(mark)
            self._credit += 1.0
        self._protocol.send_binary(payload)
        self._flush(timeout)

    def receive(self, timeout: float) -> bytes | None:
        message = self.next(timeout)
        # Text messages are not part of the protocol.
        return None if message is None else b"" if message.text else message.payload

    def next(self, timeout: float) -> Message | None:
        """As :meth:`receive`, with the message's metadata."""
        until = time.monotonic() + timeout
        while not self._messages:
            self._read(max(0.0, until - time.monotonic()))
            if not self._messages and time.monotonic() >= until:
                return None
        return self._messages.popleft()

    def ping(self) -> None:
        if self._protocol.state is not State.OPEN:
            raise TransportClosedError("the connection is closed")
        self._protocol.send_ping(b"")
        self._credit += 1.0
        self._flush(_CONTROL_TIMEOUT_S)

    def close(self) -> None:
        try:
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self._flush(_CONTROL_TIMEOUT_S)
        except TransportClosedError:
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
            error = self._protocol.handshake_exc
            if isinstance(error, InvalidStatus):
                raise RemoteError(f"{endpoint} refuses the connection: {_refusal(error.response)}")
            if error is not None:
                raise error
            if time.monotonic() > until:
                raise RemoteError(f"{endpoint} accepted the connection but did not answer in time")

    def _flush(self, timeout: float) -> None:
        data = b"".join(self._protocol.data_to_send())
        try:
            if data:
                send_all(self._socket, data, timeout)
        except TransportClosedError:
            self._abort()
            raise

    def _read(self, timeout: float) -> None:
        """Reads a bounded part of the received data, waiting for at most ``timeout`` seconds."""
        if not self._next_size():
            try:
                data = receive_some(self._socket, timeout)
            except TransportClosedError:
                self._abort()
                raise
            if data is None:
                return
            self.last_activity_s = time.monotonic()
            if not data:
                self._protocol.receive_eof()
                self._handle_events()
            self._unparsed += data
        for _ in range(_MAX_FRAMES_PER_READ):
            size = self._next_size()
            if not size:
                break
            data = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            self._frame_rest = max(0, self._frame_rest - size)
            self._protocol.receive_data(data)
            self._handle_events()
        self._flush(_CONTROL_TIMEOUT_S)
        if self._credit < 0.0:
            self._protocol.fail(CloseCode.POLICY_VIOLATION)
            self._flush(_CONTROL_TIMEOUT_S)
            self._abort()
            raise TransportClosedError("the server sends too many frames with too little data in them")
        if self._protocol.state in (State.CLOSING, State.CLOSED) and not self._messages:
            why = self._protocol.parser_exc or self._protocol.close_rcvd or "no close frame"
            raise TransportClosedError(f"the connection ended: {why}")

    def _next_size(self) -> int:
        """Number of bytes to parse next: the received part of one frame, or of a line of the opening handshake."""
        if self._protocol.state is State.CONNECTING:
            return self._unparsed.find(b"\n") + 1 or len(self._unparsed)
        self._frame_rest = self._frame_rest or _frame_size(self._unparsed)
        return min(self._frame_rest, len(self._unparsed))

    def _handle_events(self) -> None:
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._charge(event)
                self._handle_frame(event)
            elif not isinstance(event, Response):
                raise InvalidMessage("unexpected event")

    def _charge(self, frame: Frame) -> None:
        now = time.monotonic()
        earned = len(frame.data) / _CREDIT_BYTES if frame.opcode in _DATA else 0.0
        self._credit = min(_MAX_CREDIT, self._credit + earned + (now - self._credited_s) / _CREDIT_S) - 1.0
        self._credited_s = now

    def _handle_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._last_pong = bytes(frame.data)
        if frame.opcode not in _DATA:
            return
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        if frame.data:
            self._parts.append(bytes(frame.data))
        if frame.fin:
            self._messages.append(Message(b"".join(self._parts), self._text, self._last_pong))
            self._parts.clear()

    def _abort(self) -> None:
        self._protocol.state = State.CLOSED
        self._socket.close()


def _frame_size(data: bytearray) -> int:
    """Size of the frame that starts here, with its header; 0 if the header is incomplete (RFC 6455, 5.2)."""
    if len(data) < 2:
        return 0
    length, head = data[1] & 0x7F, 2
    if length > 125:
        head = 4 if length == 126 else 10
        if len(data) < head:
            return 0
        length = int.from_bytes(data[2:head])
    return head + length


def _refusal(response: Response) -> str:
    """The server's error message, or the HTTP status if it is no specact server."""
    try:
        return printable(read_error(json.decode(bytes(response.body or b""))).message)
    except WireError:
        return f"HTTP status {response.status_code}"
