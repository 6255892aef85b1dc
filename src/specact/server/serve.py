"""Runs a service on a socket until a signal, and then drains the requests in flight."""

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

import uvloop
from picows import WSListener, WSUpgradeRequest, WSUpgradeResponseWithListener, ws_create_server

from specact.errors import ConfigError, WireError
from specact.server.http import answer, refusal
from specact.server.openpi import OpenpiDialogue
from specact.server.service import Service
from specact.server.session import HELLO_TIMEOUT_S, RobotDialogue, Session
from specact.wire.messages import PATH, PROTOCOL, ErrorCode

_log = logging.getLogger("specact.server")
_BACKLOG, _PING_S = 1024, 20.0
# File descriptors reserved for libraries, devices, the event loop and logs.
_OWN_DESCRIPTORS, _MIN_CONNECTIONS = 64, 16
# Timeout for closing connections after draining.
_CLOSE_TIMEOUT_S = 2.0


def serve(service: Service, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT; then drains the requests in flight and returns.

    Args:
        service: with the target.
        announce: called with the address when the server listens.

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
        uvloop.run(run(service, listener, announce, signals=True))


def bind(service: Service) -> socket.socket:
    """The socket of a service.

    Raises:
        ConfigError: if the address cannot be bound, or this process may open too few files.
    """
    address, limits = service.address, service.limits
    service.limit_connections(_descriptors(limits.max_robots + limits.max_pending))
    listener = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror}; choose another port or host"
        ) from None
    return listener


async def run(
    service: Service, listener: socket.socket, announce: Callable[[str], None], *, signals: bool = False
) -> None:
    """Serves on a socket from :func:`bind` until cancellation; with ``signals`` until SIGTERM or SIGINT.

    SIGHUP then reloads tokens, certificate and log. The target should be warmed up.
    """
    tls = service.address.load_certificate()
    server = await ws_create_server(
        partial(_route, service), sock=listener, backlog=_BACKLOG, ssl=tls,
        websocket_handshake_timeout=HELLO_TIMEOUT_S, ssl_handshake_timeout=HELLO_TIMEOUT_S if tls else None,
        enable_auto_ping=True, auto_ping_idle_timeout=_PING_S, auto_ping_reply_timeout=_PING_S,
        # Pings are answered within the limits of a session.
        enable_auto_pong=False, max_frame_size=service.contract.max_message_bytes,
    )  # fmt: skip
    stopped = asyncio.Event()
    loop, draining = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def drain() -> None:
        await service.drain()
        stopped.set()

    def stop() -> None:
        if draining:
            # The second signal: do not wait.
            service.abandon()
            stopped.set()
        else:
            draining.add(loop.create_task(drain()))

    def reload() -> None:
        service.reload()
        try:
            service.address.load_certificate(tls)
        except ConfigError as error:
            _log.error("the certificate of before stays in use: %s", error)

    if signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if tls or service.address.tokens or service.limits.access_log:
            # Without files to reload, SIGHUP keeps its default and ends the server.
            loop.add_signal_handler(signal.SIGHUP, reload)
    service.batcher.start()
    try:
        host, port = listener.getsockname()[:2]
        announce(f"{'wss' if tls else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}")
        await stopped.wait()
    finally:
        server.close()
        service.batcher.stop()
        service.close()
        # Peers that do not read would block the end.
        until = loop.time() + _CLOSE_TIMEOUT_S
        while service.peers and loop.time() < until:
            await asyncio.sleep(0.01)


def _route(service: Service, request: WSUpgradeRequest) -> WSListener | WSUpgradeResponseWithListener:
    """The session of a WebSocket, or the response to any other request."""
    if request.headers.get("upgrade", "").lower() != "websocket":
        return WSUpgradeResponseWithListener(answer(request, service), None)
    if request.path == PATH.encode():
        return Session(service, RobotDialogue)
    if request.path == b"/":
        return Session(service, OpenpiDialogue)
    said = f"this server has protocol {PROTOCOL} at {PATH}, and openpi's at /; install the same version on both"
    error = WireError(ErrorCode.UNSUPPORTED_PROTOCOL, said)
    return WSUpgradeResponseWithListener(refusal(error, HTTPStatus.UPGRADE_REQUIRED), None)


def _descriptors(wanted: int) -> int:
    """Number of connections that this process has file descriptors for, after raising the soft limit.

    Raises:
        ConfigError: if there are too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, least = wanted + _OWN_DESCRIPTORS, _OWN_DESCRIPTORS + _MIN_CONNECTIONS
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < least:
        raise ConfigError(
            f"this process may open {soft} files, and a server needs {least} at least; raise the limit with ulimit -n"
        )
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - _OWN_DESCRIPTORS)
