"""uvicorn's HTTP and WebSocket protocols, with limits on buffers and timeouts per peer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.websockets import WebSocket
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

from specact.server.connections import Connection, Connections, set_connection

_STATE = "specact.websocket"
_MAX_HEADER_BYTES, _MAX_PIPELINED, _MAX_FRAGMENTS, _MAX_PENDING = 1 << 16, 16, 1024, 1024
_REQUEST_TIMEOUT_S = 10.0
_MAX_CONTROLS_PER_S = 200
# Pending messages at which reading pauses.
_PAUSE_AT_PENDING = 4
# Frames parsed per turn of the event loop; the slice size doubles while a slice completes no frame.
_FRAMES_PER_TURN, _MIN_SLICE_BYTES, _MAX_SLICE_BYTES = 16, 512, 4096


class BoundedHttp(HttpToolsProtocol):
    """Limits the size of headers and trailers, the number of pipelined requests, and the time of a request.

    A request must be complete within a timeout after the connection started, or after its own first byte.
    """

    # Bytes since the parser last emitted a part of a body or the end of a message, which it buffers.
    _unparsed_bytes = 0
    _complete, _upgraded = True, False
    _request_timer: asyncio.TimerHandle | None = None
    _connection: Connection
    _connections: Connections

    def opened(self, connection: Connection, connections: Connections) -> None:
        """Sets its connection, before it starts."""
        self._connection, self._connections = connection, connections

    def closed(self) -> None:
        """Removes its connection."""
        self._cancel_request_timer()
        self._connections.remove(self._connection)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        # The timeout runs only while waiting for the peer: for the rest of a request, or the next one.
        if not self._upgraded and not (self._complete and self._responding):
            self._start_request_timer()

    @property
    def _responding(self) -> bool:
        # uvicorn's annotation omits None, which it is before the first request.
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._complete = False
        set_connection(self.scope["state"], self._connection)

    def on_headers_complete(self) -> None:
        # RFC 9112, 3.2.
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise ValueError("more than one Host")
        super().on_headers_complete()
        if len(self.pipeline) > _MAX_PIPELINED:
            raise OverflowError("too many requests at once")

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes, self._complete = 0, True
        self._cancel_request_timer()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self._cancel_request_timer()
        super().handle_websocket_upgrade()
        websocket = self.transport.get_protocol()
        if isinstance(websocket, BoundedWebSocket):
            websocket.opened(self._connection, self._connections)

    def _start_request_timer(self) -> None:
        if self._request_timer is None and not self.transport.is_closing():
            self._request_timer = self.loop.call_later(_REQUEST_TIMEOUT_S, self._on_request_timeout)

    def _on_request_timeout(self) -> None:
        self._connections.drop(self._connection, f"no request was whole within {_REQUEST_TIMEOUT_S:g} s")

    def _cancel_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None


class Requests(Protocol):
    """Handles the messages of a stream."""

    @property
    def full(self) -> bool:
        """Whether the next message has to wait."""
        ...

    def take(self, payload: bytes | None) -> None:
        """Handles a message; None for a text message."""
        ...


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Limits fragments, pending messages and control frames, and parses few frames per turn of the event loop.

    It never decodes text, sends no pongs to a peer that does not read, and replies to a malformed opening request.
    """

    _connection: Connection
    _connections: Connections
    _slice = _MIN_SLICE_BYTES
    # Frames in this turn of the event loop; control frames in this second.
    _frames = _controls = _second = 0
    _resume_scheduled = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._unparsed = bytearray()
        # Pending messages, None for a text message.
        self._pending: deque[bytes | None] = deque()
        self._requests: Requests | None = None
        self._hello_delivered = False

    def opened(self, connection: Connection, connections: Connections) -> None:
        """Sets its connection, after it has started."""
        self._connection, self._connections = connection, connections
        # If the opening was refused already, there is no request.
        if self.handshake_initiated and not self.handshake_complete:
            set_connection(self.scope["state"], connection)
            self.scope["state"][_STATE] = self

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        self._pending.clear()
        self._connections.remove(self._connection)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._resume_scheduled:
            self._unparsed += data
            return
        self._frames = 0
        if len(data) <= _MIN_SLICE_BYTES:
            self._feed(data)
        else:
            self._unparsed += data
            self._read()

    def _read(self) -> None:
        while self._unparsed and not self.transport.is_closing():
            if self._frames >= _FRAMES_PER_TURN:
                # Yields to other connections; reading is paused until the next turn.
                self.transport.pause_reading()
                self._resume_scheduled = True
                self.loop.call_soon(self._resume)
                return
            before, part = self._frames, bytes(self._unparsed[: self._slice])
            del self._unparsed[: self._slice]
            self._feed(part)
            self._slice = _MIN_SLICE_BYTES if self._frames > before else min(2 * self._slice, _MAX_SLICE_BYTES)

    def _feed(self, part: bytes) -> None:
        super().data_received(part)
        if self.conn.handshake_exc is not None and not self.handshake_complete:
            self._refuse_opening()

    def _resume(self) -> None:
        self._resume_scheduled, self._frames = False, 0
        self._read()
        if not self._resume_scheduled and not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _refuse_opening(self) -> None:
        """Replies to a malformed opening request, for which uvicorn would send nothing and wait forever."""
        self.handshake_complete = self.close_sent = True
        answer = b"".join(self.conn.data_to_send())
        self.transport.write(answer or self.conn.reject(400, "Invalid opening request.\n").serialize())
        self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        self._frames += 1
        if len(self.frames) >= _MAX_FRAGMENTS:
            self._fail("too many fragments")
        elif not self.close_sent:
            super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        self._frames += 1
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._frames += 1
        # One ping per message is allowed.
        self._controls = max(0, self._controls - 1)
        super().handle_bytes(event)

    def handle_ping(self) -> None:
        pong = b"".join(self.conn.data_to_send())
        if self._allow_control() and self.writable.is_set():
            self.transport.write(pong)

    def handle_pong(self, event: Frame) -> None:
        if self._allow_control():
            super().handle_pong(event)

    def _allow_control(self) -> bool:
        self._frames += 1
        now = int(time.monotonic())
        self._second, self._controls = now, self._controls + 1 if now == self._second else 1
        if self._controls > _MAX_CONTROLS_PER_S and not self.close_sent:
            self._fail("too many pings or pongs")
        return not self.close_sent

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self._resume_scheduled or self.read_paused:
            self.transport.pause_reading()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # Otherwise uvicorn logs an error about a missing response.
            self.handshake_complete = True

    def send_receive_event_to_app(self) -> None:
        """Queues a message; reading continues while few are pending."""
        # Text is refused without decoding.
        text = self.curr_msg_data_type == "text"
        data = None if text else self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = []
        if self.close_sent:
            return
        if len(self._pending) >= _MAX_PENDING:
            self._fail("too many messages at once")
            return
        self._pending.append(data)
        self.deliver()

    async def serve(self, socket: WebSocket, requests: Requests) -> None:
        """Delivers messages until the robot disconnects; the first one, the hello, goes to the application.

        Bypasses ASGI, whose queues and tasks would take as long as a request.
        """
        self._requests = requests
        self.deliver()
        while (await socket.receive())["type"] != "websocket.disconnect":
            pass

    def deliver(self) -> None:
        """Delivers pending messages while there is capacity and replies can be written; pauses or resumes reading."""
        if self._requests is None:
            if self._pending and not self._hello_delivered:
                self._hello_delivered = True
                hello = self._pending.popleft()
                event: ASGIReceiveEvent = {"type": "websocket.receive", "text": ""}
                self.queue.put_nowait(event if hello is None else {"type": "websocket.receive", "bytes": hello})
        else:
            while self._pending and not (self._requests.full or self.close_sent) and self.writable.is_set():
                self._requests.take(self._pending.popleft())
        if self.read_paused != (len(self._pending) >= _PAUSE_AT_PENDING):
            self.read_paused = not self.read_paused
            if self.read_paused:
                self.transport.pause_reading()
            elif not self._resume_scheduled:
                self.transport.resume_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.deliver()

    def write(self, payload: bytes | str) -> None:
        """Sends a message, text as a text frame; does nothing if the connection is closing."""
        if self.conn.state is State.OPEN and not self.transport.is_closing():
            if isinstance(payload, str):
                self.conn.send_text(payload.encode())
            else:
                self.conn.send_binary(payload)
            self.transport.write(b"".join(self.conn.data_to_send()))

    def refuse(self, text: str, code: CloseCode) -> None:
        """Sends the reason as text and closes; pending messages are dropped."""
        if self.conn.state is not State.OPEN or self.transport.is_closing():
            return
        self._pending.clear()
        self.write(text)
        self.conn.send_close(code)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": ""})
        # As in uvicorn, the peer's close frame is awaited until a timeout.
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
        # Resumes reading, for the peer's close frame.
        self.deliver()

    def _fail(self, why: str) -> None:
        self.frames = []
        self.conn.fail(CloseCode.POLICY_VIOLATION, why)
        self.handle_parser_exception()


def websocket_of(scope: Mapping[str, Any]) -> BoundedWebSocket | None:
    """The WebSocket of an ASGI scope; None if the server is not specact's own."""
    found: BoundedWebSocket | None = scope.get("state", {}).get(_STATE)
    return found
