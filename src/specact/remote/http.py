"""JSON over HTTP, as in ADAHI's test bed; one request at a time."""

from __future__ import annotations

import re
import time

from specact.remote.transport import Endpoint, Fields, TransportClosedError, receive_some, send_all
from specact.wire import json

_MAX_HEADER_BYTES = 1 << 14
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*(?:\r\n|$)", re.IGNORECASE)


class HttpTransport:
    """A persistent HTTP connection; see :class:`~specact.remote.transport.Transport`.

    Replies are parsed here because the standard library's reader has no deadline for a whole reply.

    Args:
        endpoint: the server.
        timeout: for connecting [s].
        max_message_bytes: a larger reply closes the transport.

    Raises:
        RemoteError: if the server cannot be reached in time.
    """

    pings = False

    def __init__(self, endpoint: Endpoint, timeout: float, max_message_bytes: int) -> None:
        self._limit = max_message_bytes
        host = str(endpoint).partition("://")[2]
        self._headers = f"Host: {host}\r\nContent-Type: application/json\r\n"
        if endpoint.token is not None:
            self._headers += f"Authorization: Bearer {endpoint.token}\r\n"
        self._received = b""
        self.busy = False
        self._socket = endpoint.connect(time.monotonic() + timeout)
        self.last_activity_s = time.monotonic()

    def encode(self, fields: Fields) -> bytes:
        return json.encode(fields)

    def decode(self, payload: bytes) -> Fields:
        return json.decode(payload)

    def send(self, kind: str, payload: bytes, timeout: float) -> None:
        if self.busy:
            raise TransportClosedError(
                "the previous reply is still outstanding, and HTTP cannot distinguish it from the next one"
            )
        head = f"POST /v1/{kind} HTTP/1.1\r\n{self._headers}Content-Length: {len(payload)}\r\n\r\n"
        send_all(self._socket, head.encode() + payload, timeout)
        self.busy, self.last_activity_s = True, time.monotonic()

    def receive(self, timeout: float) -> bytes | None:
        until = time.monotonic() + (timeout if self.busy else 0.0)
        while (reply := self._reply()) is None:
            data = receive_some(self._socket, until - time.monotonic())
            if data is None:
                if time.monotonic() >= until:
                    return None
                continue
            if not data:
                raise TransportClosedError("the server closed the connection")
            if not self.busy:
                raise TransportClosedError("the server sent data without a request")
            self._received += data
            self.last_activity_s = time.monotonic()
        self.busy, self._received = False, b""
        return reply

    def ping(self) -> None:
        """Does nothing: HTTP has no ping."""

    def close(self) -> None:
        self._socket.close()

    def _reply(self) -> bytes | None:
        """The reply's body if it has arrived completely."""
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            if len(head) > _MAX_HEADER_BYTES:
                raise TransportClosedError("the header of the reply is larger than any valid one")
            return None
        length = _CONTENT_LENGTH.search(head)
        if not head.startswith(b"HTTP/1.") or length is None:
            raise TransportClosedError("the reply is not HTTP/1.1 with a Content-Length")
        size = int(length[1])
        if size > self._limit:
            raise TransportClosedError("the reply is larger than any valid one")
        if len(body) > size:
            raise TransportClosedError("the server sent more data than the reply's length")
        return body if len(body) == size else None
