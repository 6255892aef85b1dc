"""Runs the application on a socket until a signal, and then drains the requests in flight."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn

from specact.errors import ConfigError
from specact.server.acceptor import Acceptor
from specact.server.app import create_app
from specact.server.service import Service
from specact.server.tls import Certificate
from specact.server.transport import BoundedWebSocket

_log = logging.getLogger("specact.server")
_KEEP_ALIVE_S, _PING_S, _SWEEP_S = 75, 20.0, 5.0
# File descriptors reserved for libraries, devices, the event loop and logs.
_OWN_DESCRIPTORS, _MIN_CONNECTIONS = 64, 16
# Timeout for closing connections after draining.
_CLOSE_TIMEOUT_S = 6.0


def serve(service: Service, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT; then drains the requests in flight and returns.

    Args:
        service: with the target.
        announce: called with the address when the server listens.

    Raises:
        ConfigError: if the address cannot be bound, or certificate and key are invalid.
        BundleError: if the target cannot answer.
    """
    settings = service.settings
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another port or host"
        ) from None
    service.limit_connections(_descriptors(settings.max_robots + settings.max_pending))
    try:
        certificate = Certificate(settings.certificate, settings.key) if settings.certificate and settings.key else None
    except ConfigError:
        listener.close()
        raise
    config = uvicorn.Config(
        create_app(service),
        http=partial(Acceptor, service.connections, certificate),  # type: ignore[arg-type]
        ws=BoundedWebSocket,
        loop="uvloop",
        ws_max_size=service.limit,
        # Compressing a few kilobytes takes longer than sending them.
        ws_per_message_deflate=False,
        ws_ping_interval=_PING_S,
        ws_ping_timeout=_PING_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        # All connections are closed by then; a remaining one must not block the exit.
        timeout_graceful_shutdown=int(_CLOSE_TIMEOUT_S) + 2,
        # Faults of peers are in the access log.
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    config.load()
    server = _DrainingServer(config, service, certificate)
    scheme = "wss" if certificate else "ws"
    host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
    server.announce = lambda: announce(f"{scheme}://{host}:{listener.getsockname()[1]}")
    with listener:
        # Before startup, where a blocking target cannot be interrupted and its error would be a traceback.
        service.batcher.warm_up()
        # Excludes the loaded objects from garbage collection, whose pauses delay robots.
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])


def _descriptors(wanted: int) -> int:
    """Number of connections that this process has file descriptors for, after raising the soft limit.

    Raises:
        ConfigError: if there are too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OWN_DESCRIPTORS
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < _OWN_DESCRIPTORS + _MIN_CONNECTIONS:
        raise ConfigError(
            f"this process may open {soft} files, and a server needs {_OWN_DESCRIPTORS + _MIN_CONNECTIONS} at "
            "least; raise the limit with ulimit -n"
        )
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - _OWN_DESCRIPTORS)


class _DrainingServer(uvicorn.Server):
    """Drains requests in flight before it closes the connections; a second signal ends that."""

    def __init__(self, config: uvicorn.Config, service: Service, certificate: Certificate | None) -> None:
        super().__init__(config)
        self._service, self._certificate = service, certificate
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.announce: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self._service.settings
        if self._certificate or settings.tokens or settings.access_log:
            # Without files to reload, SIGHUP keeps its default and ends the server.
            signal.signal(signal.SIGHUP, lambda *_: self._reload_soon())
        await super().startup(sockets)
        if self.started:
            self._sweep()
            self.announce()

    def _reload_soon(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reload)

    def _reload(self) -> None:
        self._service.reload()
        try:
            if self._certificate is not None:
                self._certificate.reload()
        except ConfigError as error:
            _log.error("the certificate of before stays in use: %s", error)

    def _sweep(self) -> None:
        self._service.connections.sweep()
        asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        # Peers that do not read, or never complete a request, would block the shutdown.
        self._service.connections.abort_all()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self.should_exit:
            super().handle_exit(sig, frame)
        elif self._service.draining:
            # On the event loop: a signal's handler runs in the middle of anything.
            self._loop.call_soon_threadsafe(self._service.abandon)
        else:
            self._service.draining = True
            self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True
