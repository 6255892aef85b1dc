"""The WebSocket stream: one robot's connection, from the hello to its end."""

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

_HELLO_TIMEOUT_S, _CLOSE_TIMEOUT_S = 5.0, 5.0


async def serve_stream(socket: WebSocket, service: Service) -> None:
    """Authenticates a robot, performs the handshake, and answers its requests independently of each other."""
    try:
        caller = caller_of(socket, service)
        check_room(service)
    except WireError as error:
        service.record_error("hello", error, peer(socket.scope))
        await socket.send_denial_response(JSONResponse(refusal(error), STATUS[ErrorCode(error.code)]))
        return
    await socket.accept()
    try:
        agreed = await _handshake(socket, service, caller)
        if agreed is None:
            return
        name, welcome = agreed
        with service.robot(caller, name, peer(socket.scope), lambda: _disconnect(socket)) as sender:
            if (connection := connection_of(socket.scope)) is not None:
                service.connections.admit(connection)
            await socket.send_bytes(msgpack.encode(welcome))
            await _serve_requests(socket, service, sender)
    except (WebSocketDisconnect, RuntimeError):
        # The robot has disconnected.
        return


async def _serve_requests(socket: WebSocket, service: Service, sender: Sender) -> None:
    """Answers requests until the robot disconnects."""
    messages = messages_of(socket, service.limit)
    requests = Requests(service, sender, messages.write, messages.deliver)
    try:
        await messages.serve(socket, requests)
    finally:
        requests.end()


async def _disconnect(socket: WebSocket) -> None:
    """Closes the stream of a robot whose token is no longer valid, within a timeout."""
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await socket.send_bytes(msgpack.encode(refusal(unauthorized())))
            await socket.close(1008)
    except (WebSocketDisconnect, RuntimeError):
        return
    except TimeoutError:
        if (connection := connection_of(socket.scope)) is not None:
            connection.abort()


def check_room(service: Service) -> None:
    """Refuses another robot if the server is full or shutting down.

    Raises:
        WireError: ``shutting_down`` or ``overloaded``.
    """
    if service.draining:
        raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
    if len(service.telemetry.robots) >= service.max_robots:
        raise WireError(ErrorCode.OVERLOADED, f"the server accepts at most {service.max_robots} robots")


async def _handshake(socket: WebSocket, service: Service, caller: Caller) -> tuple[str, Fields] | None:
    """The robot's name and its welcome, or None if it is refused."""
    try:
        name, welcome = service.hello(await _receive_hello(socket))
        # Checked again: the server may have become full, or the token invalid, before the hello arrived.
        check_room(service)
        if not service.access.is_valid(caller):
            raise unauthorized()
    except WireError as error:
        service.record_error("hello", error, peer(socket.scope))
        await socket.send_bytes(msgpack.encode(refusal(error)))
        await socket.close(1008)
        return None
    return name, welcome


async def _receive_hello(socket: WebSocket) -> Fields:
    try:
        frame = await asyncio.wait_for(socket.receive(), _HELLO_TIMEOUT_S)
    except TimeoutError:
        raise WireError(ErrorCode.BAD_MESSAGE, f"no hello came within {_HELLO_TIMEOUT_S:g} s") from None
    if frame["type"] != "websocket.receive":
        raise WebSocketDisconnect
    return _decode(frame.get("bytes"))


class Requests:
    """The requests of one robot on its stream, answered as their results arrive.

    Args:
        service: answers them.
        sender: the robot.
        send: sends the bytes of a reply.
        on_capacity: called after each asynchronous reply, when another request can be handled.
    """

    def __init__(
        self, service: Service, sender: Sender, send: Callable[[bytes], None], on_capacity: Callable[[], None]
    ) -> None:
        self._service, self._sender, self._send, self._on_capacity = service, sender, send, on_capacity
        self._max_in_flight = service.settings.max_under_way
        self._in_flight: dict[int, Job] = {}
        self._count = 0

    @property
    def full(self) -> bool:
        """Whether too many requests are in flight; further ones wait in the socket."""
        return len(self._in_flight) >= self._max_in_flight

    def take(self, payload: bytes | None) -> None:
        """Handles a message; None for a text message."""
        service, arrived = self._service, time.monotonic()
        try:
            fields = _decode(payload)
        except WireError as error:
            service.record_error("other", error, self._sender.peer, self._sender.robot)
            self._send(msgpack.encode(refusal(error)))
            return
        self._count += 1
        number = self._count

        # By number: a closure over its job would be a reference cycle, and garbage collection delays robots.
        def reply(fields: Fields) -> None:
            self._send(msgpack.encode(fields))
            if self._in_flight.pop(number, None) is not None:
                self._on_capacity()

        job = service.answer(fields, arrived, self._sender, reply)
        if job is not None:
            self._in_flight[number] = job

    def end(self) -> None:
        """Cancels the requests in flight, after the robot has disconnected."""
        for job in self._in_flight.values():
            self._service.cancel(job)
        self._in_flight.clear()


def _decode(payload: bytes | None) -> Fields:
    if payload is None:
        raise WireError(ErrorCode.BAD_MESSAGE, "messages are binary frames of msgpack, this one is text")
    return msgpack.decode(payload)
