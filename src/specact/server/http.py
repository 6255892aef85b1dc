"""JSON over HTTP, as in the paper's test bed: the same messages, one per request."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specact.errors import WireError
from specact.server.access import Access
from specact.server.openapi import described
from specact.server.service import Fields, Service, refusal
from specact.wire import json
from specact.wire.protocol import ErrorCode

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
    router = APIRouter()

    def endpoint(kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def post(request: Request) -> Response:
            arrived = time.monotonic()
            try:
                fields = await _message(request, service.limit, access)
                if fields.get("type") != kind:
                    raise WireError(ErrorCode.BAD_MESSAGE, f"this address takes messages of type {kind}")
                reply = service.hello(fields)[1] if kind == "hello" else await service.answer(fields, arrived)
            except WireError as error:
                service.telemetry.refused(kind, error.code, None)
                reply = refusal(error)
            status = STATUS[ErrorCode(reply["code"])] if reply["type"] == "error" else 200
            return _response(reply, status)

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


async def _message(request: Request, limit: int, access: Access) -> Fields:
    if not access.allows(request.headers):
        raise WireError(ErrorCode.UNAUTHORIZED, "show the server's token as a bearer token")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise WireError(ErrorCode.BAD_MESSAGE, "the body must be application/json")
    # The size that is announced is checked before anything is read, the size that comes while it is read.
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _too_large(limit)
    return json.decode(bytes(body))


def _too_large(limit: int) -> WireError:
    return WireError(ErrorCode.TOO_LARGE, f"a message of this bundle has at most {limit} bytes")


def _response(reply: dict[str, Any], status: int) -> Response:
    headers = {"Connection": "close"} if status in (401, 413) else {}
    return Response(json.encode(reply), status, headers, media_type="application/json")
