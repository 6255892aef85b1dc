"""What the server says over HTTP: health, metrics, and the status page with its numbers."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import msgspec
from picows import WSUpgradeRequest, WSUpgradeResponse

from specact.errors import WireError
from specact.server.service import Service
from specact.wire.messages import ErrorCode

_PAGE = Path(__file__).with_name("status.html").read_text(encoding="utf-8").encode()
# The page is self-contained and connects to this server only.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_JSON = "application/json"


def answer(request: WSUpgradeRequest, service: Service) -> WSUpgradeResponse:
    """The response to a request that opens no WebSocket."""
    path, queued = request.path.partition(b"?")[0], service.batcher.queued
    if path == b"/healthz":
        body = msgspec.json.encode({"ready": service.ready, "bundle": service.welcome.bundle})
        return _response(body, _JSON, HTTPStatus.OK if service.ready else HTTPStatus.SERVICE_UNAVAILABLE)
    if path == b"/":
        # The page holds no data; its requests need the token.
        return _response(_PAGE, "text/html; charset=utf-8")
    if path not in (b"/metrics", b"/v1/status"):
        return refusal(WireError(ErrorCode.BAD_MESSAGE, "there is nothing at this address"), HTTPStatus.NOT_FOUND)
    try:
        service.access.caller(request.headers)
    except WireError as error:
        service.log.write_refusal(path.decode(), error.code, None, str(error))
        return refusal(error, HTTPStatus.UNAUTHORIZED)
    if path == b"/metrics":
        return _response(service.telemetry.prometheus(queued), "text/plain; version=0.0.4")
    return _response(msgspec.json.encode(service.telemetry.status(queued, service.ready)), _JSON)


def refusal(error: WireError, status: HTTPStatus) -> WSUpgradeResponse:
    """The response that says an error, as JSON with its code and message."""
    return _response(msgspec.json.encode({"type": "error", "code": error.code, "message": str(error)}), _JSON, status)


def _response(body: bytes, content_type: str, status: HTTPStatus = HTTPStatus.OK) -> WSUpgradeResponse:
    headers = {"Content-Type": content_type, "Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff",
               "Cache-Control": "no-store"}  # fmt: skip
    response: WSUpgradeResponse = (
        WSUpgradeResponse.create_ok_response(body, headers)
        if status < HTTPStatus.BAD_REQUEST
        else WSUpgradeResponse.create_error_response(status, body, headers)
    )
    return response
