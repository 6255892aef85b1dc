"""The WebSocket stream: one robot's connection, from hello to hang-up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from specact.errors import WireError
from specact.server.access import Caller, unauthorized
from specact.server.batcher import Job
from specact.server.connections import connection_of
from specact.server.http import STATUS, caller_of, peer
from specact.server.messages import messages_of
from specact.server.service import Fields, Sender, Service, refusal
from specact.wire import msgpack
from specact.wire.checks import ErrorCode

_HELLO_WITHIN_S, _GOODBYE_WITHIN_S = 5.0, 5.0


async def serve_stream(socket: WebSocket, service: Service) -> None:
    """Lets a robot in, agrees on what is spoken, and answers its requests as they come, each on its own."""
    try:
        caller = caller_of(socket, service)
        check_room(service)
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
            await _serve_requests(socket, service, sender)
    except (WebSocketDisconnect, RuntimeError):
        # Gone, or closed while a reply was on its way: there is nobody to tell.
        return


async def _serve_requests(socket: WebSocket, service: Service, sender: Sender) -> None:
    """Answers what comes until the robot is gone."""
    messages = messages_of(socket, service.limit)
    requests = Requests(service, sender, messages.write, messages.hand_over)
    try:
        await messages.serve(socket, requests)
    finally:
        requests.end()


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


def check_room(service: Service) -> None:
    """Raises where there is no room for another robot.

    Raises:
        WireError: ``shutting_down`` or ``overloaded``.
    """
    if service.draining:
        raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
    if len(service.telemetry.robots) >= service.max_robots:
        raise WireError(ErrorCode.OVERLOADED, f"the server accepts at most {service.max_robots} robots")


async def _agree(socket: WebSocket, service: Service, caller: Caller) -> tuple[str, Fields] | None:
    """The robot's name and its welcome, or None if it does not fit."""
    try:
        name, welcome = service.hello(await _first(socket))
        # Again: others may have come in, and tokens gone, while this one was silent.
        check_room(service)
        if not service.access.knows(caller):
            raise unauthorized()
    except WireError as error:
        service.refuse("hello", error, peer(socket.scope))
        await socket.send_bytes(msgpack.encode(refusal(error)))
        await socket.close(1008)
        return None
    return name, welcome


async def _first(socket: WebSocket) -> Fields:
    try:
        frame = await asyncio.wait_for(socket.receive(), _HELLO_WITHIN_S)
    except TimeoutError:
        raise WireError(ErrorCode.BAD_MESSAGE, f"no hello came within {_HELLO_WITHIN_S:g} s") from None
    if frame["type"] != "websocket.receive":
        raise WebSocketDisconnect
    return _decode(frame.get("bytes"))


class Requests:
    """The requests of one robot on its stream: each is answered when its result is there.

    Args:
        service: answers them.
        sender: the robot.
        send: takes the bytes of a reply.
        more: called after each reply that came late: there is room for another request.
    """

    def __init__(
        self, service: Service, sender: Sender, send: Callable[[bytes], None], more: Callable[[], None]
    ) -> None:
        self._service, self._sender, self._send, self._more = service, sender, send, more
        self._most = service.settings.max_under_way
        self._under_way: dict[int, Job] = {}
        self._taken = 0

    @property
    def full(self) -> bool:
        """Whether the next has to wait: a flood waits in its own socket."""
        return len(self._under_way) >= self._most

    def take(self, payload: bytes | None) -> None:
        """Takes on what came in one message; None for one of text."""
        service, arrived = self._service, time.monotonic()
        try:
            fields = _decode(payload)
        except WireError as error:
            service.refuse("other", error, self._sender.peer, self._sender.robot)
            self._send(msgpack.encode(refusal(error)))
            return
        self._taken += 1
        number = self._taken

        # By its number: a reply that knew its job would be a cycle, for the garbage collector to find, and robots wait
        # meanwhile.
        def reply(fields: Fields) -> None:
            self._send(msgpack.encode(fields))
            if self._under_way.pop(number, None) is not None:
                self._more()

        job = service.answer(fields, arrived, self._sender, reply)
        if job is not None:
            self._under_way[number] = job

    def end(self) -> None:
        """Forgets what is under way: the robot is gone."""
        for job in self._under_way.values():
            self._service.forget(job)
        self._under_way.clear()


def _decode(payload: bytes | None) -> Fields:
    if payload is None:
        raise WireError(ErrorCode.BAD_MESSAGE, "messages are binary frames of msgpack, this one is text")
    return msgpack.decode(payload)
