"""Runs the application on a socket until it is told to stop, and stops without losing what is under way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from specact.errors import ConfigError
from specact.server.app import create_app
from specact.server.service import Service
from specact.server.transport import BoundedHttp, BoundedWebSocket

_KEEP_ALIVE_S, _PING_S = 75, 20.0
# How long connections may take to close once everything is answered.
_GOODBYE_S = 6.0


def serve(service: Service, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT; then answers what is under way and returns.

    Args:
        service: what is served.
        announce: told the address when the server listens.

    Raises:
        ConfigError: if the address cannot be bound, or certificate and key are none.
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
    config = uvicorn.Config(
        create_app(service),
        http=BoundedHttp,
        ws=BoundedWebSocket,
        ws_max_size=service.limit,
        # Compression would cost more time than a few kilobytes save.
        ws_per_message_deflate=False,
        ws_ping_interval=_PING_S,
        ws_ping_timeout=_PING_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
    )
    try:
        config.load()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot use {settings.certificate} and {settings.key} for TLS: {error}") from None
    server = _DrainingServer(config, service)
    scheme = "wss" if settings.certificate else "ws"
    host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
    server.announce = lambda: announce(f"{scheme}://{host}:{listener.getsockname()[1]}")
    with listener:
        server.run(sockets=[listener])


class _DrainingServer(uvicorn.Server):
    """Before it closes the connections it lets their requests finish; a second signal cuts that short."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.announce: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_GOODBYE_S, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        # Who does not read what it is sent, or does not send what it began, would keep us.
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._service.draining:
            super().handle_exit(sig, frame)
            return
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True
