"""The WebSocket stream: one robot's connection, from hello to hang-up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from specact.errors import WireError
from specact.server.access import Caller, unauthorized
from specact.server.connections import connection_of
from specact.server.http import STATUS, caller_of, peer
from specact.server.service import Sender, Service, refusal
from specact.wire import msgpack
from specact.wire.checks import ErrorCode

_HELLO_WITHIN_S, _GOODBYE_WITHIN_S = 5.0, 5.0


async def serve_stream(socket: WebSocket, service: Service) -> None:
    """Lets a robot in, agrees on what is spoken, and answers its requests as they come, each on its own."""
    try:
        caller = caller_of(socket, service)
        _check_room(service)
    except WireError as error:
        service.refuse("hello", error, peer(socket.scope))
        await socket.send_denial_response(JSONResponse(refusal(error), STATUS[ErrorCode(error.code)]))
        return
    await socket.accept()
    try:
        agreed = await _agree(socket, service, caller)
        if agreed is None:
            return
        name, welcome = agreed
        with service.robot(caller, name, peer(socket.scope), lambda: _dismiss(socket)) as sender:
            if (connection := connection_of(socket.scope)) is not None:
                service.connections.prove(connection)
            await socket.send_bytes(msgpack.encode(welcome))
            await _answer_all(socket, service, sender)
    except (WebSocketDisconnect, RuntimeError):
        # Gone, or closed while a reply was on its way: there is nobody to tell.
        return


async def _dismiss(socket: WebSocket) -> None:
    """Closes the stream of a robot whose token is no longer valid, without waiting for the robot."""
    try:
        async with asyncio.timeout(_GOODBYE_WITHIN_S):
            await socket.send_bytes(msgpack.encode(refusal(unauthorized())))
            await socket.close(1008)
    except (WebSocketDisconnect, RuntimeError):
        return
    except TimeoutError:
        if (connection := connection_of(socket.scope)) is not None:
            connection.abort()


def _check_room(service: Service) -> None:
    if service.draining:
        raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
    if len(service.telemetry.robots) >= service.max_robots:
        raise WireError(ErrorCode.OVERLOADED, f"the server accepts at most {service.max_robots} robots")


async def _agree(socket: WebSocket, service: Service, caller: Caller) -> tuple[str, dict[str, Any]] | None:
    """The robot's name and its welcome, or None if it does not fit."""
    try:
        name, welcome = service.hello(await _first(socket))
        # Again: others may have come in, and tokens gone, while this one was silent.
        _check_room(service)
        if not service.access.knows(caller):
            raise unauthorized()
    except WireError as error:
        service.refuse("hello", error, peer(socket.scope))
        await socket.send_bytes(msgpack.encode(refusal(error)))
        await socket.close(1008)
        return None
    return name, welcome


async def _first(socket: WebSocket) -> dict[str, Any]:
    try:
        return _decode(await asyncio.wait_for(socket.receive(), _HELLO_WITHIN_S))
    except TimeoutError:
        raise WireError(ErrorCode.BAD_MESSAGE, f"no hello came within {_HELLO_WITHIN_S:g} s") from None


async def _answer_all(socket: WebSocket, service: Service, sender: Sender) -> None:
    under_way: set[asyncio.Task[None]] = set()
    try:
        while (frame := await socket.receive())["type"] == "websocket.receive":
            arrived = time.monotonic()
            try:
                fields = _decode(frame)
            except WireError as error:
                service.refuse("other", error, sender.peer, sender.robot)
                await socket.send_bytes(msgpack.encode(refusal(error)))
            else:
                task = asyncio.create_task(_answer(socket, service, sender, fields, arrived))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            if len(under_way) >= service.settings.max_under_way:
                # Reading on only when one is done lets a flood wait in its own socket.
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in under_way:
            task.cancel()


async def _answer(socket: WebSocket, service: Service, sender: Sender, fields: dict[str, Any], arrived: float) -> None:
    reply = await service.answer(fields, arrived, sender)
    try:
        await socket.send_bytes(msgpack.encode(reply))
    except (WebSocketDisconnect, RuntimeError):
        return


def _decode(frame: Any) -> dict[str, Any]:
    payload = frame.get("bytes")
    if frame["type"] != "websocket.receive":
        raise WebSocketDisconnect
    if payload is None:
        raise WireError(ErrorCode.BAD_MESSAGE, "messages are binary frames of msgpack, this one is text")
    return msgpack.decode(payload)
