"""The messages of one robot's WebSocket, over specact's transport or over plain ASGI, as within Ray Serve."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.frames import CloseCode

from specact.server.transport import Requests, websocket_of

# Unsent replies above which no more of a robot's messages are handled.
_MAX_UNSENT = 16


class Messages(Protocol):
    """A WebSocket after its opening handshake."""

    def write(self, payload: bytes | str) -> None:
        """Sends a message, text as a text frame; does nothing if the connection is closing."""
        ...

    def refuse(self, text: str, code: CloseCode) -> None:
        """Sends the reason as text and closes; pending messages are dropped."""
        ...

    def deliver(self) -> None:
        """Delivers pending messages as far as there is capacity."""
        ...

    async def serve(self, socket: WebSocket, requests: Requests) -> None:
        """Delivers messages until the robot disconnects."""
        ...


def messages_of(socket: WebSocket, limit: int) -> Messages:
    """Messages of a WebSocket; ``limit`` is the maximum size [bytes]."""
    return websocket_of(socket.scope) or AsgiMessages(limit)


class AsgiMessages:
    """A WebSocket over any ASGI server, whose own buffers this class cannot limit.

    Args:
        limit: maximum size of a message [bytes].
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._unsent = asyncio.Queue[dict[str, Any]]()
        self._can_take = asyncio.Event()
        self._closing = False

    def write(self, payload: bytes | str) -> None:
        if not self._closing:
            kind = "text" if isinstance(payload, str) else "bytes"
            self._unsent.put_nowait({"type": "websocket.send", kind: payload})

    def refuse(self, text: str, code: CloseCode) -> None:
        self.write(text)
        self._close(code)

    def deliver(self) -> None:
        self._can_take.set()

    async def serve(self, socket: WebSocket, requests: Requests) -> None:
        sending = asyncio.get_running_loop().create_task(self._send(socket))
        try:
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                payload = message.get("bytes")
                if payload is not None and len(payload) > self._limit:
                    self._close(CloseCode.MESSAGE_TOO_BIG)
                while not self._closing and (requests.full or self._unsent.qsize() >= _MAX_UNSENT):
                    self._can_take.clear()
                    await self._can_take.wait()
                if not self._closing:
                    requests.take(payload)
        finally:
            sending.cancel()

    def _close(self, code: CloseCode) -> None:
        if not self._closing:
            self._unsent.put_nowait({"type": "websocket.close", "code": int(code)})
        self._closing = True
        self._can_take.set()

    async def _send(self, socket: WebSocket) -> None:
        try:
            while True:
                await socket.send(await self._unsent.get())
                self._can_take.set()
        except (WebSocketDisconnect, RuntimeError):
            # Disconnected or closed: receiving ends as well.
            return
