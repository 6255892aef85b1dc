"""The WebSocket stream: one robot's connection, from hello to hang-up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from specact.errors import WireError
from specact.server.access import Access
from specact.server.service import Service, refusal
from specact.server.telemetry import Robot
from specact.wire import msgpack
from specact.wire.protocol import ErrorCode

_HELLO_WITHIN_S, _MOST_UNDER_WAY = 5.0, 32


async def serve_stream(socket: WebSocket, service: Service, access: Access) -> None:
    """Lets a robot in, agrees on what is spoken, and answers its requests as they come, each on its own."""
    if not access.allows(socket.headers):
        error = refusal(WireError(ErrorCode.UNAUTHORIZED, "show the server's token as a bearer token"))
        await socket.send_denial_response(JSONResponse(error, 401))
        return
    if len(service.telemetry.robots) >= service.settings.max_robots or service.draining:
        error = refusal(WireError(ErrorCode.OVERLOADED, "the server takes no more robots"))
        await socket.send_denial_response(JSONResponse(error, 503))
        return
    await socket.accept()
    try:
        key = await _welcome(socket, service)
        if key is not None:
            try:
                await _answer_all(socket, service, service.telemetry.robots[key])
            finally:
                service.telemetry.disconnected(key)
    except (WebSocketDisconnect, TimeoutError, RuntimeError):
        # Gone, silent, or closed while a reply was on its way: there is nobody to tell.
        return


async def _welcome(socket: WebSocket, service: Service) -> int | None:
    """The key of the robot that was let in, or None if it does not fit."""
    frame = await asyncio.wait_for(socket.receive(), _HELLO_WITHIN_S)
    try:
        name, welcome = service.hello(_decode(frame))
    except WireError as error:
        await socket.send_bytes(msgpack.encode(refusal(error)))
        await socket.close(1008)
        return None
    await socket.send_bytes(msgpack.encode(welcome))
    return service.telemetry.connected(name)


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
