"""Acceptance of a new connection: connection limits, TLS, then HTTP."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import uvloop.loop
from uvicorn.config import Config
from uvicorn.server import ServerState

from specact.errors import WireError
from specact.server.connections import Connection, Connections
from specact.server.service import refusal
from specact.server.tls import Certificate
from specact.server.transport import BoundedHttp
from specact.wire import json
from specact.wire.checks import ErrorCode

_HANDSHAKE_TIMEOUT_S, _SHUTDOWN_TIMEOUT_S = 10.0, 5.0
# Not loop.start_tls, which loses data that arrives before it starts. Nor create_server's ssl, which reports a
# connection only after the handshake, so that unfinished handshakes could not be limited.
_SSLProtocol: Any = uvloop.loop.SSLProtocol  # type: ignore[attr-defined]


class Acceptor(asyncio.Protocol):
    """Replaces uvicorn's protocol for HTTP, and hands accepted connections over to it.

    Args:
        connections: registry of connections.
        certificate: for TLS, or None.
        config, server_state, app_state, _loop: what uvicorn passes to its protocols.
    """

    def __init__(
        self,
        connections: Connections,
        certificate: Certificate | None,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._connections, self._certificate = connections, certificate
        self._http = BoundedHttp(config, server_state, app_state, _loop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        connection = Connection(plain)
        if not self._connections.add(connection):
            if self._certificate is None:
                plain.write(_no_room())
                plain.close()
            else:
                plain.abort()
            return
        self._http.opened(connection, self._connections)
        protocol = self._http if self._certificate is None else _Tls(self._http, self._certificate)
        plain.set_protocol(protocol)
        protocol.connection_made(plain)


class _Tls(_SSLProtocol):  # type: ignore[misc]
    """TLS; HTTP starts after its handshake."""

    def __init__(self, http: BoundedHttp, certificate: Certificate) -> None:
        super().__init__(
            http.loop, http, certificate.context, None, server_side=True,
            ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S, ssl_shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )  # fmt: skip
        self._http = http

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # HTTP is not notified if it had not started.
        self._http.closed()


def _no_room() -> bytes:
    body = json.encode(
        refusal(WireError(ErrorCode.OVERLOADED, "the server takes no more connections; try again later"))
    )
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
