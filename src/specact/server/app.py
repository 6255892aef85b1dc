"""The server's application: stream, HTTP, health, metrics and status page on one port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket

from specact import __version__
from specact.errors import WireError
from specact.server.http import STATUS, authenticate, message_routes, peer
from specact.server.openapi import refusals
from specact.server.openpi import serve_openpi
from specact.server.service import Service, refusal
from specact.server.stream import serve_stream
from specact.wire.checks import ErrorCode

_PAGE = Path(__file__).with_name("status.html")
# The page is self-contained and connects to this server only.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_REFUSED = refusals({401: "wrong token"})


def create_app(service: Service) -> FastAPI:
    """The application of one service; it warms the target up when it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        service.batcher.stop()
        # Those whose target did not answer in time; none if the server was drained before.
        service.abandon()
        service.log.close()

    described = service.access.dependencies
    page_text = _PAGE.read_text(encoding="utf-8")
    app = FastAPI(title="specact", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(message_routes(service))

    @app.websocket("/v1/stream")
    async def stream(socket: WebSocket) -> None:
        await serve_stream(socket, service)

    @app.websocket("/")
    async def openpi(socket: WebSocket) -> None:
        await serve_openpi(socket, service)

    @app.get("/healthz", summary="Whether requests are answered now", responses={503: {"description": "not now"}})
    async def healthz() -> Response:
        ready = service.batcher.ready and not service.draining
        return JSONResponse({"ready": ready, "bundle": service.name}, 200 if ready else 503)

    @app.get(
        "/metrics",
        summary="Counters and histograms for Prometheus",
        response_class=Response,
        responses=_REFUSED,
        dependencies=described,
    )
    async def metrics(request: Request) -> Response:
        authenticate(request, service)
        return Response(service.telemetry.prometheus(service.batcher.queued), media_type="text/plain; version=0.0.4")

    @app.get(
        "/v1/status",
        summary="The live numbers of the status page",
        responses=_REFUSED,
        dependencies=described,
    )
    async def status(request: Request) -> Response:
        authenticate(request, service)
        ready = service.batcher.ready and not service.draining
        return JSONResponse(service.telemetry.status(service.batcher.queued, ready))

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        # The page holds no data; its requests need the token.
        return HTMLResponse(page_text, headers={"Content-Security-Policy": _POLICY})

    @app.exception_handler(WireError)
    async def refused(request: Request, error: WireError) -> Response:
        service.log.write_refusal(request.url.path, error.code, peer(request.scope), str(error))
        return JSONResponse(refusal(error), STATUS[ErrorCode(error.code)])

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = "there is nothing at this address" if error.status_code == 404 else str(error.detail)
        return JSONResponse(refusal(WireError(ErrorCode.BAD_MESSAGE, text)), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse(refusal(WireError(ErrorCode.BAD_MESSAGE, "this request cannot be read")), 400)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return JSONResponse(refusal(WireError(ErrorCode.INTERNAL, "the server failed; see its log")), 500)

    return app
