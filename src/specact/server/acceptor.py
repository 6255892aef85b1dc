"""What a new connection meets first: a place among the others, TLS, and then HTTP."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from specact.errors import WireError
from specact.server.connections import Connection, Connections
from specact.server.service import refusal
from specact.server.tls import Certificate
from specact.server.transport import BoundedHttp
from specact.wire import json
from specact.wire.protocol import ErrorCode

_HANDSHAKE_WITHIN_S, _SHUTDOWN_WITHIN_S = 10.0, 5.0


class Acceptor(asyncio.Protocol):
    """Takes the place of uvicorn's protocol for HTTP and creates that for who is let in.

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
        self._state = server_state
        self._early = bytearray()
        self._lost = False

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
        if self._certificate is None:
            self._hand_over(plain)
        else:
            self._state.tasks.add(
                task := asyncio.get_running_loop().create_task(self._encrypt(plain, self._certificate.context))
            )
            task.add_done_callback(self._state.tasks.discard)

    async def _encrypt(self, plain: asyncio.Transport, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                plain, self, context, server_side=True,
                ssl_handshake_timeout=_HANDSHAKE_WITHIN_S, ssl_shutdown_timeout=_SHUTDOWN_WITHIN_S,
            )  # fmt: skip
        # What a peer can do wrong here is an OSError, ssl.SSLError among them; a peer that leaves gives None or that.
        except OSError:
            secured = None
        if secured is None or self._lost:
            plain.abort()
            self._http.closed()
            return
        self._hand_over(secured)

    def _hand_over(self, transport: asyncio.Transport) -> None:
        transport.set_protocol(self._http)
        self._http.connection_made(transport)
        if self._early:
            self._http.data_received(bytes(self._early))

    # While TLS begins: what is decrypted in the same moment in which the handshake ends comes here.

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True


def _no_room() -> bytes:
    body = json.encode(
        refusal(WireError(ErrorCode.OVERLOADED, "the server takes no more connections; try again later"))
    )
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
