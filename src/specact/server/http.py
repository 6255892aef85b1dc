"""JSON over HTTP, as in the paper's test bed: the same messages, one per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from specact.errors import WireError
from specact.server.access import Access, unauthorized
from specact.server.openapi import described
from specact.server.service import Service, refusal
from specact.wire import json
from specact.wire.protocol import ErrorCode

_BODY_WITHIN_S = 5.0
# How an error reply is told in HTTP, so that a proxy in between understands it too.
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


def message_routes(service: Service, access: Access) -> APIRouter:
    """``POST /v1/hello``, ``/v1/infer`` and ``/v1/verify``."""
    router = APIRouter(dependencies=access.described)

    def endpoint(kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def post(request: Request) -> Response:
            arrived, body = time.monotonic(), None
            try:
                body = await _body(request, service.limit, access)
                fields = json.decode(body)
                if fields.get("type") != kind:
                    raise WireError(ErrorCode.BAD_MESSAGE, f"this address takes messages of type {kind}")
                reply = service.hello(fields)[1] if kind == "hello" else await service.answer(fields, arrived)
            except WireError as error:
                service.telemetry.refused(kind, error.code, None)
                reply = refusal(error)
            except ClientDisconnect:
                # There is nobody to tell.
                return Response()
            status = STATUS[ErrorCode(reply["code"])] if reply["type"] == "error" else 200
            return _response(reply, status, whole=body is not None)

        return post

    for kind in ("hello", "infer", "verify"):
        router.add_api_route(
            f"/v1/{kind}",
            endpoint(kind),
            methods=["POST"],
            name=kind,
            summary=f"A message of type {kind}, see docs/protocol.md",
            response_class=Response,
            **described(kind, service.bundle.spec),
        )
    return router


async def _body(request: Request, limit: int, access: Access) -> bytes:
    if not access.allows(request.headers):
        raise unauthorized()
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise WireError(ErrorCode.BAD_MESSAGE, "the body must be application/json")
    # The size that is announced is checked before anything is read, the size that comes while it is read.
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise WireError(ErrorCode.BAD_MESSAGE, f"the body did not arrive within {_BODY_WITHIN_S:g} s") from None
    return bytes(body)


def _too_large(limit: int) -> WireError:
    return WireError(ErrorCode.TOO_LARGE, f"a message of this bundle has at most {limit} bytes")


def _response(reply: dict[str, Any], status: int, whole: bool) -> Response:
    # What was not read of a request is not waited for.
    headers = {} if whole else {"Connection": "close"}
    return Response(json.encode(reply), status, headers, media_type="application/json")
