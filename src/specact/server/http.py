"""JSON over HTTP, as in the paper's test bed: the same messages, one per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import Receive

from specact.errors import WireError
from specact.server.access import Caller, unauthorized
from specact.server.connections import connection_of
from specact.server.openapi import route_schema
from specact.server.service import Fields, Sender, Service, refusal
from specact.wire import json
from specact.wire.checks import ErrorCode

_BODY_TIMEOUT_S = 5.0
# HTTP status of each error code.
STATUS = {
    ErrorCode.BAD_MESSAGE: 400,
    ErrorCode.UNSUPPORTED_PROTOCOL: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.MISMATCH: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.OVERLOADED: 503,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.EXPIRED: 504,
    ErrorCode.INTERNAL: 500,
}


def message_routes(service: Service) -> APIRouter:
    """``POST /v1/hello``, ``/v1/infer`` and, for families that verify at the server, ``/v1/verify``."""
    router = APIRouter(dependencies=service.access.dependencies)

    def endpoint(kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def post(request: Request) -> Response:
            arrived, body = time.monotonic(), None
            try:
                caller = authenticate(request, service)
                body = await _body(request, service.limit)
                fields = json.decode(body)
                if fields.get("type") != kind:
                    raise WireError(ErrorCode.BAD_MESSAGE, f"this address takes messages of type {kind}")
                if kind == "hello":
                    reply = service.hello(fields)[1]
                else:
                    sender = Sender(service.lane(caller), peer(request.scope))
                    reply = await _answer(service, fields, arrived, sender, request.receive)
            except WireError as error:
                service.record_error(kind, error, peer(request.scope))
                reply = refusal(error)
            except ClientDisconnect:
                # The client has disconnected.
                return Response()
            status = STATUS[ErrorCode(reply["code"])] if reply["type"] == "error" else 200
            return _response(reply, status, whole=body is not None)

        return post

    for kind in ("hello", *service.dialect.exchanges):
        router.add_api_route(
            f"/v1/{kind}",
            endpoint(kind),
            methods=["POST"],
            name=kind,
            summary=f"A message of type {kind}, see docs/protocol.md",
            response_class=Response,
            **route_schema(kind, service.dialect),
        )
    return router


async def _answer(service: Service, fields: Fields, arrived: float, sender: Sender, receive: Receive) -> Fields:
    """The reply to a request.

    Args:
        service, fields, arrived, sender: see :meth:`~specact.server.service.Service.answer`.
        receive: of the ASGI request, whose body was read completely.

    Raises:
        ClientDisconnect: if the client disconnects first; the request is cancelled.
    """
    replied: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
    job = service.answer(fields, arrived, sender, replied.set_result)
    if job is None:
        return replied.result()
    # After the body, the only message is the one that the client has disconnected.
    disconnected = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((replied, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not replied.done():
            raise ClientDisconnect
        return replied.result()
    finally:
        disconnected.cancel()
        if not replied.done():
            service.cancel(job)


def authenticate(request: HTTPConnection, service: Service) -> Caller:
    """The request's caller; marks its connection as no longer pending.

    Raises:
        WireError: ``unauthorized``.
    """
    caller = caller_of(request, service)
    connection = connection_of(request.scope)
    if connection is not None:
        service.connections.admit(connection)
    return caller


def caller_of(request: HTTPConnection, service: Service) -> Caller:
    """The request's caller.

    Raises:
        WireError: ``unauthorized``.
    """
    caller = service.access.caller(request.headers)
    if caller is None:
        raise unauthorized()
    return caller


def peer(scope: Mapping[str, Any]) -> str | None:
    """Address and port of the request's peer."""
    connection = connection_of(scope)
    return None if connection is None else connection.peer


async def _body(request: Request, limit: int) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise WireError(ErrorCode.BAD_MESSAGE, "the body must be application/json")
    # The announced size is checked before reading, the actual size while reading.
    announced = request.headers.get("content-length", "0")
    # Its length is checked before the conversion: it may have thousands of digits.
    if not announced.isdecimal() or len(digits := announced.lstrip("0")) > 18 or int(digits or "0") > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise WireError(ErrorCode.BAD_MESSAGE, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


def _too_large(limit: int) -> WireError:
    return WireError(ErrorCode.TOO_LARGE, f"a message of this bundle has at most {limit} bytes")


def _response(reply: dict[str, Any], status: int, whole: bool) -> Response:
    # An unread body is not drained; the connection is closed.
    headers = {} if whole else {"Connection": "close"}
    return Response(json.encode(reply), status, headers, media_type="application/json")
