"""uvicorn's two protocols, with a bound on everything that a peer can make them keep, and on how long it may take."""

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

from specact.server.connections import Connection, Connections, remember

_STATE = "specact.websocket"
_LARGEST_HEAD, _MOST_PIPELINED, _MOST_FRAGMENTS, _MOST_AHEAD = 1 << 16, 16, 1024, 1024
_REQUEST_WITHIN_S = 10.0
_MOST_CONTROLS_PER_S = 200
# Messages that wait when no more is read.
_PAUSED_AT = 4
# Read at once: few enough frames that others need not wait; a slice without a whole frame may be followed by a larger.
_FRAMES_AT_ONCE, _SMALLEST_SLICE, _LARGEST_SLICE = 16, 512, 4096


class BoundedHttp(HttpToolsProtocol):
    """Hangs up on heads and trailers without end, on requests piled up before the first is answered, and on slow ones.

    A request has to be whole some seconds after the connection began, or after its own first byte.
    """

    # Bytes since the parser last handed over a part of a body or the end of a message: it holds the rest.
    _held = 0
    _whole, _upgraded = True, False
    _too_late: asyncio.TimerHandle | None = None
    _connection: Connection
    _connections: Connections

    def opened(self, connection: Connection, connections: Connections) -> None:
        """Says which connection it speaks on, before it begins."""
        self._connection, self._connections = connection, connections

    def closed(self) -> None:
        """Gives the connection's place back."""
        self._on_time()
        self._connections.leave(self._connection)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._held += len(data)
        super().data_received(data)
        if self._held > _LARGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        # Only the peer is waited for: for the rest of a request, or the first line of the next.
        if not self._upgraded and not (self._whole and self._answering):
            self._hurry()

    @property
    def _answering(self) -> bool:
        # uvicorn types it as always there; before the first request it is None.
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._whole = False
        remember(self.scope["state"], self._connection)

    def on_headers_complete(self) -> None:
        # Before anybody acts on one of them (RFC 9112, 3.2).
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise ValueError("more than one Host")
        super().on_headers_complete()
        if len(self.pipeline) > _MOST_PIPELINED:
            raise OverflowError("too many requests at once")

    def on_body(self, body: bytes) -> None:
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held, self._whole = 0, True
        self._on_time()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self._on_time()
        super().handle_websocket_upgrade()
        websocket = self.transport.get_protocol()
        if isinstance(websocket, BoundedWebSocket):
            websocket.opened(self._connection, self._connections)

    def _hurry(self) -> None:
        if self._too_late is None and not self.transport.is_closing():
            self._too_late = self.loop.call_later(_REQUEST_WITHIN_S, self._give_up)

    def _give_up(self) -> None:
        self._connections.drop(self._connection, f"no request was whole within {_REQUEST_WITHIN_S:g} s")

    def _on_time(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None


class Requests(Protocol):
    """Who takes the messages of a stream."""

    @property
    def full(self) -> bool:
        """Whether the next has to wait."""
        ...

    def take(self, payload: bytes | None) -> None:
        """A message; None for one of text."""
        ...


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Hangs up on fragments, messages and control frames without end, and reads little at once.

    It never decodes text, owes no pongs to who does not read, and answers an opening request it cannot read.
    """

    _connection: Connection
    _connections: Connections
    _slice = _SMALLEST_SLICE
    # Frames since the loop's last turn; control frames in this second.
    _frames = _controls = _second = 0
    _resumes = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._unread = bytearray()
        # Messages that wait for their turn, None for one of text.
        self._ahead: deque[bytes | None] = deque()
        self._requests: Requests | None = None
        self._greeted = False

    def opened(self, connection: Connection, connections: Connections) -> None:
        """Says which connection it speaks on, once it began."""
        self._connection, self._connections = connection, connections
        # Where the opening was refused already, there is no request.
        if self.handshake_initiated and not self.handshake_complete:
            remember(self.scope["state"], connection)
            self.scope["state"][_STATE] = self

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        self._ahead.clear()
        self._connections.leave(self._connection)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._resumes:
            self._unread += data
            return
        self._frames = 0
        if len(data) <= _SMALLEST_SLICE:
            self._feed(data)
        else:
            self._unread += data
            self._read()

    def _read(self) -> None:
        while self._unread and not self.transport.is_closing():
            if self._frames >= _FRAMES_AT_ONCE:
                # The rest when the others had their turn; nothing more is read until then.
                self.transport.pause_reading()
                self._resumes = True
                self.loop.call_soon(self._resume)
                return
            before, part = self._frames, bytes(self._unread[: self._slice])
            del self._unread[: self._slice]
            self._feed(part)
            self._slice = _SMALLEST_SLICE if self._frames > before else min(2 * self._slice, _LARGEST_SLICE)

    def _feed(self, part: bytes) -> None:
        super().data_received(part)
        if self.conn.handshake_exc is not None and not self.handshake_complete:
            self._refuse_opening()

    def _resume(self) -> None:
        self._resumes, self._frames = False, 0
        self._read()
        if not self._resumes and not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _refuse_opening(self) -> None:
        """Answers an opening request that websockets cannot read; uvicorn says nothing and waits for ever."""
        self.handshake_complete = self.close_sent = True
        answer = b"".join(self.conn.data_to_send())
        self.transport.write(answer or self.conn.reject(400, "Invalid opening request.\n").serialize())
        self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        self._frames += 1
        if len(self.frames) >= _MOST_FRAGMENTS:
            self._hang_up("too many fragments")
        elif not self.close_sent:
            super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        self._frames += 1
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._frames += 1
        # A ping for each message is no flood.
        self._controls = max(0, self._controls - 1)
        super().handle_bytes(event)

    def handle_ping(self) -> None:
        pong = b"".join(self.conn.data_to_send())
        if self._may_control() and self.writable.is_set():
            self.transport.write(pong)

    def handle_pong(self, event: Frame) -> None:
        if self._may_control():
            super().handle_pong(event)

    def _may_control(self) -> bool:
        self._frames += 1
        now = int(time.monotonic())
        self._second, self._controls = now, self._controls + 1 if now == self._second else 1
        if self._controls > _MOST_CONTROLS_PER_S and not self.close_sent:
            self._hang_up("too many pings or pongs")
        return not self.close_sent

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self._resumes or self.read_paused:
            self.transport.pause_reading()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A refusal is an answer; uvicorn would log an error for want of one.
            self.handshake_complete = True

    def send_receive_event_to_app(self) -> None:
        """Keeps a message until its turn; goes on reading while few wait: who asks and waits is never paused."""
        # Text is refused whatever it says, and need not be UTF-8.
        text = self.curr_msg_data_type == "text"
        data = None if text else self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = []
        if self.close_sent:
            return
        if len(self._ahead) >= _MOST_AHEAD:
            self._hang_up("too many messages at once")
            return
        self._ahead.append(data)
        self.hand_over()

    async def serve(self, socket: WebSocket, requests: Requests) -> None:
        """Hands over messages until the robot is gone; before, the application receives the first, the hello.

        Past ASGI, whose queues and tasks would take as long as a request.
        """
        self._requests = requests
        self.hand_over()
        while (await socket.receive())["type"] != "websocket.disconnect":
            pass

    def hand_over(self) -> None:
        """Hands over what waits, as far as it is taken and answers can be written; reads on where little is left."""
        if self._requests is None:
            if self._ahead and not self._greeted:
                self._greeted = True
                hello = self._ahead.popleft()
                event: ASGIReceiveEvent = {"type": "websocket.receive", "text": ""}
                self.queue.put_nowait(event if hello is None else {"type": "websocket.receive", "bytes": hello})
        else:
            while self._ahead and not (self._requests.full or self.close_sent) and self.writable.is_set():
                self._requests.take(self._ahead.popleft())
        if self.read_paused != (len(self._ahead) >= _PAUSED_AT):
            self.read_paused = not self.read_paused
            if self.read_paused:
                self.transport.pause_reading()
            elif not self._resumes:
                self.transport.resume_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.hand_over()

    def write(self, payload: bytes | str) -> None:
        """Sends a message, text as a text frame, if the connection still takes one."""
        if self.conn.state is State.OPEN and not self.transport.is_closing():
            if isinstance(payload, str):
                self.conn.send_text(payload.encode())
            else:
                self.conn.send_binary(payload)
            self.transport.write(b"".join(self.conn.data_to_send()))

    def refuse(self, text: str, code: CloseCode) -> None:
        """Sends a text that says why, and closes; nothing that came since is taken on."""
        if self.conn.state is not State.OPEN or self.transport.is_closing():
            return
        self._ahead.clear()
        self.write(text)
        self.conn.send_close(code)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": ""})
        # As uvicorn does: who does not answer in time is not waited for.
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
        # Its answer is read.
        self.hand_over()

    def _hang_up(self, why: str) -> None:
        self.frames = []
        self.conn.fail(CloseCode.POLICY_VIOLATION, why)
        self.handle_parser_exception()


def websocket_of(scope: Mapping[str, Any]) -> BoundedWebSocket | None:
    """The WebSocket behind an ASGI scope; None without a transport of ours."""
    found: BoundedWebSocket | None = scope.get("state", {}).get(_STATE)
    return found
