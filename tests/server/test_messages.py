"""Streams over ASGI alone, as another server than ours offers them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.websockets import WebSocket
from websockets.frames import CloseCode

from specact.server.messages import _MAX_UNSENT, AsgiMessages

Message = MutableMapping[str, Any]


class Peer:
    """A robot behind ASGI.

    Attributes:
        says: what it sends, then it is silent.
        heard: what it read.
        reads: unset, it reads nothing.
    """

    def __init__(self, *says: Message) -> None:
        self.says, self.heard = deque(says), list[Message]()
        self.reads = asyncio.Event()
        self.reads.set()
        self.socket = WebSocket({"type": "websocket", "headers": []}, self._receive, self._send)

    async def opened(self) -> WebSocket:
        self.says.appendleft({"type": "websocket.connect"})
        await self.socket.accept()
        self.heard.clear()
        return self.socket

    async def _receive(self) -> Message:
        if not self.says:
            await asyncio.Event().wait()
        return self.says.popleft()

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        self.heard.append(message)


class Echo:
    """Takes two requests at a time and answers each when it is told to, or at once."""

    def __init__(self, messages: AsgiMessages, at_once: bool = True) -> None:
        self.messages, self.at_once = messages, at_once
        self.taken, self.under_way = list[bytes | None](), list[bytes | None]()

    @property
    def full(self) -> bool:
        return len(self.under_way) >= 2

    def take(self, payload: bytes | None) -> None:
        self.taken.append(payload)
        self.under_way.append(payload)
        if self.at_once:
            self.answer()

    def answer(self) -> None:
        self.messages.write(self.under_way.pop(0) or "text")
        self.messages.deliver()


def said(*payloads: bytes) -> list[Message]:
    return [{"type": "websocket.receive", "bytes": payload} for payload in payloads]


GONE = {"type": "websocket.disconnect", "code": 1000}


async def settle() -> None:
    """Lets everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_requests_are_answered_in_their_order() -> None:
    async def run() -> None:
        peer, messages = Peer(*said(b"1", b"2", b"3")), AsgiMessages(10)
        peer.says.append({"type": "websocket.receive", "text": "hm"})
        echo = Echo(messages)
        messages.write(b"welcome")
        task = asyncio.create_task(messages.serve(await peer.opened(), echo))
        await settle()
        assert [message.get("bytes", message.get("text")) for message in peer.heard] == [
            b"welcome", b"1", b"2", b"3", "text",
        ]  # fmt: skip
        assert echo.taken == [b"1", b"2", b"3", None]
        task.cancel()

    asyncio.run(run())


def test_no_more_is_taken_than_there_is_room_for() -> None:
    async def run() -> None:
        peer, messages = Peer(*said(b"1", b"2", b"3", b"4"), GONE), AsgiMessages(10)
        echo = Echo(messages, at_once=False)
        task = asyncio.create_task(messages.serve(await peer.opened(), echo))
        await settle()
        assert echo.taken == [b"1", b"2"]
        echo.answer()
        await settle()
        assert echo.taken == [b"1", b"2", b"3"]
        echo.answer()
        await asyncio.wait_for(task, 30.0)
        assert echo.taken == [b"1", b"2", b"3", b"4"]

    asyncio.run(run())


def test_who_does_not_read_is_not_answered_without_end() -> None:
    async def run() -> None:
        peer, messages = Peer(*said(*[b"1"] * 1000)), AsgiMessages(10)
        socket, echo = await peer.opened(), Echo(messages)
        peer.reads.clear()
        task = asyncio.create_task(messages.serve(socket, echo))
        await settle()
        assert len(echo.taken) <= _MAX_UNSENT + 2
        peer.reads.set()
        while len(echo.taken) < 1000:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("why", ["refused", "too large"])
def test_a_stream_that_is_refused_is_told_and_closed_and_takes_nothing_more(why: str) -> None:
    async def run() -> None:
        peer, messages = Peer(*said(b"1"), *said(b"x" * 11) * (why == "too large"), *said(b"2"), GONE), AsgiMessages(10)
        echo = Echo(messages)
        socket = await peer.opened()
        if why == "refused":
            messages.refuse("no", CloseCode.INTERNAL_ERROR)
        await asyncio.wait_for(asyncio.create_task(messages.serve(socket, echo)), 30.0)
        await settle()
        assert echo.taken == ([] if why == "refused" else [b"1"])

    async def told() -> None:
        peer, messages = Peer(*said(b"x" * 11) * (why == "too large")), AsgiMessages(10)
        socket = await peer.opened()
        task = asyncio.create_task(messages.serve(socket, Echo(messages)))
        if why == "refused":
            messages.refuse("no", CloseCode.INTERNAL_ERROR)
        await settle()
        code = 1011 if why == "refused" else 1009
        assert (peer.heard[-1]["type"], peer.heard[-1]["code"]) == ("websocket.close", code)
        assert [message["text"] for message in peer.heard[:-1]] == (["no"] if why == "refused" else [])
        task.cancel()

    asyncio.run(run())
    asyncio.run(told())
