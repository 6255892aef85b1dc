"""The messages of one robot's WebSocket, past our own transport or over ASGI alone, as within Ray Serve."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.frames import CloseCode

from specact.server.transport import Requests, websocket_of

# Replies that wait for the robot to read, when no more of its messages are taken on.
_MOST_UNREAD = 16


class Messages(Protocol):
    """A WebSocket after its opening."""

    def write(self, payload: bytes | str) -> None:
        """Sends a message, text as a text frame, if the connection still takes one."""
        ...

    def refuse(self, text: str, code: CloseCode) -> None:
        """Sends a text that says why, and closes; nothing that came since is taken on."""
        ...

    def hand_over(self) -> None:
        """Says that there may be room for another request."""
        ...

    async def serve(self, socket: WebSocket, requests: Requests) -> None:
        """Hands over messages until the robot is gone."""
        ...


def messages_of(socket: WebSocket, limit: int) -> Messages:
    """Those of a WebSocket; ``limit`` is the number of bytes of the largest."""
    return websocket_of(socket.scope) or AsgiMessages(limit)


class AsgiMessages:
    """A WebSocket behind whatever speaks ASGI; what a peer can make that keep is bounded there, or not.

    Args:
        limit: bytes of a message.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._unsent = asyncio.Queue[dict[str, Any]]()
        self._room = asyncio.Event()
        self._closing = False

    def write(self, payload: bytes | str) -> None:
        if not self._closing:
            kind = "text" if isinstance(payload, str) else "bytes"
            self._unsent.put_nowait({"type": "websocket.send", kind: payload})

    def refuse(self, text: str, code: CloseCode) -> None:
        self.write(text)
        self._close(code)

    def hand_over(self) -> None:
        self._room.set()

    async def serve(self, socket: WebSocket, requests: Requests) -> None:
        sending = asyncio.get_running_loop().create_task(self._send(socket))
        try:
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                payload = message.get("bytes")
                if payload is not None and len(payload) > self._limit:
                    self._close(CloseCode.MESSAGE_TOO_BIG)
                while not self._closing and (requests.full or self._unsent.qsize() >= _MOST_UNREAD):
                    self._room.clear()
                    await self._room.wait()
                if not self._closing:
                    requests.take(payload)
        finally:
            sending.cancel()

    def _close(self, code: CloseCode) -> None:
        if not self._closing:
            self._unsent.put_nowait({"type": "websocket.close", "code": int(code)})
        self._closing = True
        self._room.set()

    async def _send(self, socket: WebSocket) -> None:
        try:
            while True:
                await socket.send(await self._unsent.get())
                self._room.set()
        except (WebSocketDisconnect, RuntimeError):
            # Gone, or closed: receiving ends as well.
            return
