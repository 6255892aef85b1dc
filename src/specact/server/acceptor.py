"""What a new connection meets first: a place among the others, TLS, and then HTTP."""

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

_HANDSHAKE_WITHIN_S, _SHUTDOWN_WITHIN_S = 10.0, 5.0
# Not loop.start_tls: it takes a moment to begin, and loses what comes in it. Nor create_server's ssl: it shows a
# connection only after the handshake, so that nobody could count those that never finish theirs.
_SSLProtocol: Any = uvloop.loop.SSLProtocol  # type: ignore[attr-defined]


class Acceptor(asyncio.Protocol):
    """Takes the place of uvicorn's protocol for HTTP, and hands over to that who is let in.

    Args:
        connections: where a new one is counted.
        certificate: for TLS; None without.
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
        if not self._connections.enter(connection):
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
    """TLS, above which HTTP begins when the handshake is over."""

    def __init__(self, http: BoundedHttp, certificate: Certificate) -> None:
        super().__init__(
            http.loop, http, certificate.context, None, server_side=True,
            ssl_handshake_timeout=_HANDSHAKE_WITHIN_S, ssl_shutdown_timeout=_SHUTDOWN_WITHIN_S,
        )  # fmt: skip
        self._http = http

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # HTTP is not told where it had not begun.
        self._http.closed()


def _no_room() -> bytes:
    body = json.encode(
        refusal(WireError(ErrorCode.OVERLOADED, "the server takes no more connections; try again later"))
    )
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
