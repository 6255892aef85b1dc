"""JSON over HTTP, as ADAHI's test bed did it: one request at a time, and no way to drop a late reply but to hang up."""

from __future__ import annotations

import http.client
import select
import socket
import time
from typing import Any

from specact.errors import RemoteError
from specact.remote.channel import ChannelClosedError, Endpoint, Fields
from specact.wire import json

_PATHS = {"hello": "/v1/hello", "infer": "/v1/infer", "verify": "/v1/verify"}
_REST = 0.05


class HttpChannel:
    """A kept-alive HTTP connection; see :class:`~specact.remote.channel.Channel`.

    Args:
        endpoint: where to.
        timeout: for connecting [s].
        max_message_bytes: a larger reply closes the channel.

    Raises:
        RemoteError: if the server cannot be reached in time.
    """

    pings = False

    def __init__(self, endpoint: Endpoint, timeout: float, max_message_bytes: int) -> None:
        self._endpoint, self._limit = endpoint, max_message_bytes
        self._headers = {"Content-Type": "application/json"}
        if endpoint.token is not None:
            self._headers["Authorization"] = f"Bearer {endpoint.token}"
        options: dict[str, Any] = {"context": endpoint.context()} if endpoint.encrypted else {}
        kind = http.client.HTTPSConnection if endpoint.encrypted else http.client.HTTPConnection
        self._connection = kind(endpoint.host, endpoint.port, timeout=timeout, **options)
        self.busy = False
        self.heard = time.monotonic()
        try:
            self._connection.connect()
        except OSError as error:
            self._connection.close()
            raise RemoteError(f"no connection to {endpoint}: {error}") from None
        self._socket: socket.socket = self._connection.sock
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def encode(self, fields: Fields) -> bytes:
        return json.encode(fields)

    def decode(self, payload: bytes) -> Fields:
        return json.decode(payload)

    def send(self, kind: str, payload: bytes, timeout: float) -> None:
        if self.busy:
            self.close()
            raise ChannelClosedError("the last reply is still on its way, and HTTP cannot tell it from the next one")
        try:
            self._socket.settimeout(max(0.001, timeout))
            self._connection.request("POST", _PATHS[kind], payload, self._headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ChannelClosedError(f"the connection broke while sending: {error}") from None
        self.busy = True

    def receive(self, timeout: float) -> bytes | None:
        if not self.busy:
            return None
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(1e3 * timeout):
                return None
            # Its first byte is here; the rest of a small reply follows at once.
            self._socket.settimeout(max(_REST, timeout))
            response = self._connection.getresponse()
            payload = response.read(self._limit + 1)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.close()
            raise ChannelClosedError(f"the connection broke: {error}") from None
        self.busy = False
        self.heard = time.monotonic()
        if len(payload) > self._limit:
            self.close()
            raise ChannelClosedError("the reply is larger than any valid one")
        return payload

    def ping(self) -> None:
        """HTTP has no sign of life."""

    def close(self) -> None:
        self._connection.close()
