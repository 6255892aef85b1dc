"""uvicorn's two protocols, with a bound on everything that a peer can make them keep."""

from __future__ import annotations

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

_LARGEST_HEAD, _MOST_PIPELINED, _MOST_FRAGMENTS, _MOST_AHEAD = 1 << 16, 16, 1024, 1024


class BoundedHttp(HttpToolsProtocol):
    """Hangs up on heads and trailers without end, and on requests piled up before the first is answered."""

    # Bytes since the parser last handed over a part of a body or the end of a message: it holds the rest.
    _held = 0

    def data_received(self, data: bytes) -> None:
        self._held += len(data)
        super().data_received(data)
        if self._held > _LARGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if len(self.pipeline) > _MOST_PIPELINED:
            raise OverflowError("too many requests at once")

    def on_body(self, body: bytes) -> None:
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held = 0
        super().on_message_complete()


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Hangs up on fragments and messages without end, never decodes text, and owes no pongs to who does not read."""

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MOST_FRAGMENTS:
            self._hang_up("too many fragments")
        elif not self.close_sent:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pong)

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A refusal is an answer; uvicorn would log an error for want of one.
            self.handshake_complete = True

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            # It is refused whatever it says, and need not be UTF-8.
            self.frames = [b""]
        if self.queue.qsize() >= _MOST_AHEAD and not self.close_sent:
            self._hang_up("too many messages at once")
        super().send_receive_event_to_app()

    def _hang_up(self, why: str) -> None:
        self.frames = []
        self.conn.fail(CloseCode.POLICY_VIOLATION, why)
        self.handle_parser_exception()
