"""Runs a service on a socket, its pages over HTTP included, until a signal; then drains the requests in flight."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path

import msgspec
import uvloop
from picows import WSListener, WSUpgradeRequest, WSUpgradeResponse, WSUpgradeResponseWithListener, ws_create_server

from specact.errors import ConfigError, WireError
from specact.server.openpi import OpenpiSession
from specact.server.service import Service
from specact.server.session import HELLO_TIMEOUT_S, Session
from specact.wire.messages import PATH, PROTOCOL, ErrorCode, bad

# A peer that sends broken frames would fill the log. What fails in a session is written.
logging.getLogger("picows.server").addFilter(lambda record: not record.getMessage().startswith("WS parser error"))
_BACKLOG, _PING_S = 1024, 20.0
# Timeout for closing connections after draining.
_CLOSE_TIMEOUT_S = 2.0

_PAGE = Path(__file__).with_name("status.html").read_text(encoding="utf-8").encode()
# The page is self-contained and connects to this server only.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_JSON = "application/json"


def serve(service: Service, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains the requests in flight; ``announce`` is told the address.

    Raises:
        ConfigError: if the address cannot be bound, or certificate and key are invalid.
        BundleError: if the target cannot answer.
    """
    with bind(service) as listener:
        # Before the event loop, where a blocking target cannot be interrupted.
        service.batcher.warm_up()
        # Excludes the loaded objects from garbage collection, whose pauses delay robots.
        gc.collect()
        gc.freeze()
        # What a connection leaves behind dies in the youngest generation; collecting all would stop robots for 50 ms.
        gc.set_threshold(10_000, 10, 10)
        uvloop.run(run(service, listener, announce, signals=True))


def bind(service: Service) -> socket.socket:
    """The socket of a service; ConfigError if its address cannot be bound."""
    address = service.address
    # A robot takes a file, and the usual limit is 1024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        at = (address.host, address.port)
        return socket.create_server(at, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        why = f"{error.strerror}; choose another port or host"
        raise ConfigError(f"cannot listen on {address.host}:{address.port}: {why}") from None


async def run(
    service: Service, listener: socket.socket, announce: Callable[[str], None], *, signals: bool = False
) -> None:
    """Serves on a socket from :func:`bind` until cancellation; with ``signals`` until SIGTERM or SIGINT.

    SIGHUP then reloads tokens and certificate. The target should be warmed up.
    """
    tls, loop, stopping = service.access.tls, asyncio.get_running_loop(), asyncio.Event()
    server = await ws_create_server(
        partial(_route, service), sock=listener, backlog=_BACKLOG, ssl=tls,
        websocket_handshake_timeout=HELLO_TIMEOUT_S, ssl_handshake_timeout=HELLO_TIMEOUT_S if tls else None,
        enable_auto_ping=True, auto_ping_idle_timeout=_PING_S, auto_ping_reply_timeout=_PING_S,
        # Pings are answered within the limits of a session.
        enable_auto_pong=False, max_frame_size=service.contract.max_message_bytes,
    )  # fmt: skip

    def stop() -> None:
        if stopping.is_set():
            # The second signal: do not wait.
            service.abandon()
        stopping.set()

    if signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if tls or service.address.tokens or service.limits.access_log:
            # Without files to reload, SIGHUP keeps its default and ends the server.
            loop.add_signal_handler(signal.SIGHUP, service.reload)
    service.batcher.start()
    try:
        host, port = listener.getsockname()[:2]
        announce(f"{'wss' if tls else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}")
        await stopping.wait()
        await service.drain()
    finally:
        server.close()
        service.batcher.stop()
        service.close()
        # Peers that do not read would block the end.
        until = loop.time() + _CLOSE_TIMEOUT_S
        while service.sessions and loop.time() < until:
            await asyncio.sleep(0.01)


def _route(service: Service, request: WSUpgradeRequest) -> WSListener | WSUpgradeResponseWithListener:
    """The session of a WebSocket, or the response to any other request."""
    if request.headers.get("upgrade", "").lower() != "websocket":
        return WSUpgradeResponseWithListener(_answer(request, service), None)
    if request.path == PATH.encode():
        return Session(service, service.limits.max_under_way)
    if request.path == b"/":
        return OpenpiSession(service)
    why = f"this server has protocol {PROTOCOL} at {PATH}, and openpi's at /; install the same version on both"
    error = WireError(ErrorCode.UNSUPPORTED_PROTOCOL, why)
    return WSUpgradeResponseWithListener(_refusal(error, HTTPStatus.UPGRADE_REQUIRED), None)


def _answer(request: WSUpgradeRequest, service: Service) -> WSUpgradeResponse:
    """The response to a request that opens no WebSocket."""
    path, ready = request.path.partition(b"?")[0], service.batcher.ready
    if path == b"/":
        # The page holds no data; its requests need the token.
        return _response(_PAGE, "text/html; charset=utf-8")
    if path == b"/healthz":
        body = msgspec.json.encode({"ready": ready, "bundle": service.welcome.bundle})
        return _response(body, _JSON, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)
    if path not in (b"/metrics", b"/v1/status"):
        return _refusal(bad("there is nothing at this address"), HTTPStatus.NOT_FOUND)
    try:
        service.access.caller(request.headers)
    except WireError as error:
        service.log.write_refusal(path.decode(), error.code, None, str(error))
        return _refusal(error, HTTPStatus.UNAUTHORIZED)
    if path == b"/metrics":
        return _response(service.telemetry.prometheus(), "text/plain; version=0.0.4")
    return _response(service.telemetry.status(ready), _JSON)


def _refusal(error: WireError, status: HTTPStatus) -> WSUpgradeResponse:
    body = msgspec.json.encode({"type": "error", "code": error.code, "message": str(error)})
    return _response(body, _JSON, status)


def _response(body: bytes, content_type: str, status: HTTPStatus = HTTPStatus.OK) -> WSUpgradeResponse:
    headers = {"Content-Type": content_type, "Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff",
               "Cache-Control": "no-store"}  # fmt: skip
    ok = status < HTTPStatus.BAD_REQUEST
    make = WSUpgradeResponse.create_ok_response if ok else partial(WSUpgradeResponse.create_error_response, status)
    response: WSUpgradeResponse = make(body, headers)
    return response
