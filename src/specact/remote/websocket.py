"""A WebSocket transport without a thread of its own: the caller's time is spent on the wire, not on waking others."""

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
from specact.wire.messages import read_error

_PATH = "/v1/stream"
_DATA = (Opcode.BINARY, Opcode.TEXT, Opcode.CONT)
# What is no request is small: if it does not leave within this, the network has taken nothing for long.
_AT_ONCE_S = 0.005
# One look at the network takes in at most so many frames.
_MOST_FRAMES = 64
# A frame costs a peer one; 8 bytes of data, a tenth of a second and each ping of ours earn it one, and so many can be
# saved. A peer that has none left sends control frames without data, or messages in tiny pieces, and is dropped.
_EARNING_BYTES, _EARNING_S, _MOST_SAVED = 8, 0.1, 128


class Message(NamedTuple):
    """What arrived.

    Attributes:
        payload: its content.
        text: whether it came in frames of text.
        after: the mark that the last pong before it carried, see :meth:`WebSocketTransport.send`.
    """

    payload: bytes
    text: bool
    after: bytes


class WebSocketTransport:
    """Binary msgpack over one WebSocket; see :class:`~specact.remote.transport.Transport`.

    Args:
        endpoint: where to.
        timeout: for connecting and the opening handshake together [s].
        max_message_bytes: a larger reply closes the transport before it is read.
        path: of the URL.
        scheme: in which the token is shown.

    Raises:
        RemoteError: if the server cannot be reached in time, or does not let us in.
    """

    pings, busy = True, False

    def __init__(
        self, endpoint: Endpoint, timeout: float, max_message_bytes: int, path: str = _PATH, scheme: str = "Bearer"
    ) -> None:
        until = time.monotonic() + timeout
        self._messages: deque[Message] = deque()
        self._parts: list[bytes] = []
        # What has arrived and waits to be parsed, and how much of the frame is missing that is being parsed.
        self._unparsed, self._rest = bytearray(), 0
        self.heard = self._credited = time.monotonic()
        self._credit = float(_MOST_SAVED)
        self._text, self._after = False, b""
        self._protocol = ClientProtocol(parse_uri(f"{endpoint}{path}"), max_size=max_message_bytes)
        self._socket = endpoint.connect(until)
        try:
            self._open(endpoint, until, scheme)
        except (TransportClosedError, InvalidHandshake) as error:
            self.close()
            hint = "" if endpoint.encrypted else "; for a server with TLS use wss://"
            raise RemoteError(f"{endpoint} does not accept a WebSocket connection: {error}{hint}") from None
        except RemoteError:
            self.close()
            raise

    def encode(self, fields: Fields) -> bytes:
        return msgpack.encode(fields)

    def decode(self, payload: bytes) -> Fields:
        return msgpack.decode(payload)

    def send(self, kind: str, payload: bytes, timeout: float, mark: bytes = b"") -> None:
        """See :class:`~specact.remote.transport.Transport`.

        A mark, of at most 125 bytes, goes before the message as a ping. What arrives before its pong left the server
        before the message was read there, so that it answers something else.
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
        # Text is no message of ours, whatever it says.
        return None if message is None else b"" if message.text else message.payload

    def next(self, timeout: float) -> Message | None:
        """As :meth:`receive`, with what else is known of the message."""
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
        self._flush(_AT_ONCE_S)

    def close(self) -> None:
        try:
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self._flush(_AT_ONCE_S)
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
            self._broken()
            raise

    def _read(self, timeout: float) -> None:
        """Reads a bounded part of the received data, waiting for at most ``timeout`` seconds."""
        if not self._next():
            try:
                data = receive_some(self._socket, timeout)
            except TransportClosedError:
                self._broken()
                raise
            if data is None:
                return
            self.heard = time.monotonic()
            if not data:
                self._protocol.receive_eof()
                self._take_events()
            self._unparsed += data
        for _ in range(_MOST_FRAMES):
            size = self._next()
            if not size:
                break
            data = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            self._rest = max(0, self._rest - size)
            self._protocol.receive_data(data)
            self._take_events()
        self._flush(_AT_ONCE_S)
        if self._credit < 0.0:
            self._protocol.fail(CloseCode.POLICY_VIOLATION)
            self._flush(_AT_ONCE_S)
            self._broken()
            raise TransportClosedError("the server sends too many frames with too little data in them")
        if self._protocol.state in (State.CLOSING, State.CLOSED) and not self._messages:
            why = self._protocol.parser_exc or self._protocol.close_rcvd or "no close frame"
            raise TransportClosedError(f"the connection ended: {why}")

    def _next(self) -> int:
        """How many bytes to parse next: what is there of one frame, or of a line of the opening handshake."""
        if self._protocol.state is State.CONNECTING:
            return self._unparsed.find(b"\n") + 1 or len(self._unparsed)
        self._rest = self._rest or _frame_size(self._unparsed)
        return min(self._rest, len(self._unparsed))

    def _take_events(self) -> None:
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._charge(event)
                self._take(event)
            elif not isinstance(event, Response):
                raise InvalidMessage("unexpected event")

    def _charge(self, frame: Frame) -> None:
        now = time.monotonic()
        earned = len(frame.data) / _EARNING_BYTES if frame.opcode in _DATA else 0.0
        self._credit = min(_MOST_SAVED, self._credit + earned + (now - self._credited) / _EARNING_S) - 1.0
        self._credited = now

    def _take(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._after = bytes(frame.data)
        if frame.opcode not in _DATA:
            return
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        if frame.data:
            self._parts.append(bytes(frame.data))
        if frame.fin:
            self._messages.append(Message(b"".join(self._parts), self._text, self._after))
            self._parts.clear()

    def _broken(self) -> None:
        self._protocol.state = State.CLOSED
        self._socket.close()


def _frame_size(data: bytearray) -> int:
    """Of the frame that begins here, its header included; 0 if not enough of that is there to tell (RFC 6455, 5.2)."""
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
    """What the server says of it, if it is one of ours."""
    try:
        return read_error(json.decode(bytes(response.body or b""))).message
    except WireError:
        return f"HTTP status {response.status_code}"
