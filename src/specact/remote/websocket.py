"""A WebSocket channel without a thread of its own: the caller's time is spent on the wire, not on waking others."""

from __future__ import annotations

import socket
import time
from collections import deque

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from specact.errors import RemoteError
from specact.remote.channel import ChannelClosedError, Endpoint, Fields
from specact.wire import msgpack

_PATH = "/v1/stream"
_READ = 1 << 16


class WebSocketChannel:
    """Binary msgpack over one WebSocket; see :class:`~specact.remote.channel.Channel`.

    Args:
        endpoint: where to.
        timeout: for connecting and the opening handshake together [s].
        max_message_bytes: a larger reply closes the channel before it is read.

    Raises:
        RemoteError: if the server cannot be reached in time, or does not let us in.
    """

    pings, busy = True, False

    def __init__(self, endpoint: Endpoint, timeout: float, max_message_bytes: int) -> None:
        until = time.monotonic() + timeout
        self._messages: deque[bytes] = deque()
        self._parts: list[bytes] = []
        self.heard = time.monotonic()
        uri = parse_uri(f"{endpoint}{_PATH}")
        self._protocol = ClientProtocol(uri, max_size=max_message_bytes)
        try:
            self._socket = socket.create_connection((endpoint.host, endpoint.port), timeout)
        except OSError as error:
            raise RemoteError(f"no connection to {endpoint}: {error}") from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.encrypted:
                self._socket = endpoint.context().wrap_socket(self._socket, server_hostname=endpoint.host)
            self._open(endpoint, until)
        except (OSError, ChannelClosedError, InvalidHandshake) as error:
            self.close()
            raise RemoteError(f"{endpoint} does not speak WebSocket with us: {error}") from None
        except RemoteError:
            self.close()
            raise

    def encode(self, fields: Fields) -> bytes:
        return msgpack.encode(fields)

    def decode(self, payload: bytes) -> Fields:
        return msgpack.decode(payload)

    def send(self, kind: str, payload: bytes, timeout: float) -> None:
        if self._protocol.state is not State.OPEN:
            raise ChannelClosedError("the connection is closed")
        self._protocol.send_binary(payload)
        self._flush(timeout)

    def receive(self, timeout: float) -> bytes | None:
        until = time.monotonic() + timeout
        while not self._messages:
            self._read(max(0.0, until - time.monotonic()))
            if not self._messages and time.monotonic() >= until:
                return None
        return self._messages.popleft()

    def ping(self) -> None:
        if self._protocol.state is not State.OPEN:
            raise ChannelClosedError("the connection is closed")
        self._protocol.send_ping(b"")
        self._flush(0.05)

    def close(self) -> None:
        try:
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self._flush(0.05)
        except ChannelClosedError:
            pass
        self._socket.close()

    def _open(self, endpoint: Endpoint, until: float) -> None:
        request = self._protocol.connect()
        if endpoint.token is not None:
            request.headers["Authorization"] = f"Bearer {endpoint.token}"
        self._protocol.send_request(request)
        self._flush(until - time.monotonic())
        while self._protocol.state is State.CONNECTING:
            self._read(max(0.001, until - time.monotonic()))
            error = self._protocol.handshake_exc
            if isinstance(error, InvalidStatus):
                status = error.response.status_code
                why = "the token is wrong or missing" if status in (401, 403) else f"HTTP status {status}"
                raise RemoteError(f"{endpoint} refuses the connection: {why}")
            if error is not None:
                raise error
            if time.monotonic() > until:
                raise RemoteError(f"{endpoint} accepted the connection but did not answer in time")

    def _flush(self, timeout: float) -> None:
        self._socket.settimeout(max(0.001, timeout))
        try:
            for data in self._protocol.data_to_send():
                if data:
                    self._socket.sendall(data)
        # After a timeout an unknown part of the frame has left: the stream cannot be continued.
        except OSError as error:
            self._broken()
            raise ChannelClosedError(f"the connection broke while sending: {error}") from None

    def _read(self, timeout: float) -> None:
        """Takes in what is there, waiting for at most ``timeout`` seconds."""
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(_READ)
        except (TimeoutError, BlockingIOError, InterruptedError):
            return
        except OSError as error:
            # A TLS socket that would block says so in its own way.
            if "did not complete" in str(error):
                return
            self._broken()
            raise ChannelClosedError(f"the connection broke: {error}") from None
        if data:
            self.heard = time.monotonic()
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._take(event)
            elif not isinstance(event, Response):
                raise InvalidMessage("unexpected event")
        self._flush(0.05)
        if self._protocol.state in (State.CLOSING, State.CLOSED) and not self._messages:
            raise ChannelClosedError("the server closed the connection")

    def _take(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.BINARY, Opcode.CONT):
            self._parts.append(bytes(frame.data))
            if frame.fin:
                self._messages.append(b"".join(self._parts))
                self._parts.clear()

    def _broken(self) -> None:
        self._protocol.state = State.CLOSED
        self._socket.close()
