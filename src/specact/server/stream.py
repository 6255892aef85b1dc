"""The WebSocket stream: one robot's connection, from hello to hang-up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from specact.errors import WireError
from specact.server.access import Access, unauthorized
from specact.server.http import STATUS
from specact.server.service import Service, refusal
from specact.server.telemetry import Robot
from specact.wire import msgpack
from specact.wire.protocol import ErrorCode

_HELLO_WITHIN_S, _MOST_UNDER_WAY = 5.0, 32


async def serve_stream(socket: WebSocket, service: Service, access: Access) -> None:
    """Lets a robot in, agrees on what is spoken, and answers its requests as they come, each on its own."""
    refused = _no_room(service) if access.allows(socket.headers) else unauthorized()
    if refused is not None:
        service.telemetry.refused("hello", refused.code, None)
        await socket.send_denial_response(JSONResponse(refusal(refused), STATUS[ErrorCode(refused.code)]))
        return
    await socket.accept()
    try:
        agreed = await _agree(socket, service)
        if agreed is None:
            return
        name, welcome = agreed
        key = service.telemetry.connected(name)
        try:
            await socket.send_bytes(msgpack.encode(welcome))
            await _answer_all(socket, service, service.telemetry.robots[key])
        finally:
            service.telemetry.disconnected(key)
    except (WebSocketDisconnect, RuntimeError):
        # Gone, or closed while a reply was on its way: there is nobody to tell.
        return


def _no_room(service: Service) -> WireError | None:
    if service.draining:
        return WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
    if len(service.telemetry.robots) >= service.settings.max_robots:
        return WireError(ErrorCode.OVERLOADED, "the server takes no more robots")
    return None


async def _agree(socket: WebSocket, service: Service) -> tuple[str, dict[str, Any]] | None:
    """The robot's name and its welcome, or None if it does not fit."""
    try:
        name, welcome = service.hello(await _first(socket))
        # Again: others may have come in while this one was silent.
        if (refused := _no_room(service)) is not None:
            raise refused
    except WireError as error:
        service.telemetry.refused("hello", error.code, None)
        await socket.send_bytes(msgpack.encode(refusal(error)))
        await socket.close(1008)
        return None
    return name, welcome


async def _first(socket: WebSocket) -> dict[str, Any]:
    try:
        return _decode(await asyncio.wait_for(socket.receive(), _HELLO_WITHIN_S))
    except TimeoutError:
        raise WireError(ErrorCode.BAD_MESSAGE, f"no hello came within {_HELLO_WITHIN_S:g} s") from None


async def _answer_all(socket: WebSocket, service: Service, robot: Robot) -> None:
    under_way: set[asyncio.Task[None]] = set()
    try:
        while (frame := await socket.receive())["type"] == "websocket.receive":
            arrived = time.monotonic()
            try:
                fields = _decode(frame)
            except WireError as error:
                service.telemetry.refused("other", error.code, robot)
                await socket.send_bytes(msgpack.encode(refusal(error)))
                continue
            if len(under_way) >= _MOST_UNDER_WAY:
                # Reading on only when one is done lets a flood wait in its own socket.
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(_answer(socket, service, robot, fields, arrived))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    finally:
        for task in under_way:
            task.cancel()


async def _answer(socket: WebSocket, service: Service, robot: Robot, fields: dict[str, Any], arrived: float) -> None:
    reply = await service.answer(fields, arrived, robot)
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
