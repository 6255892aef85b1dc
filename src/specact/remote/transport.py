"""The transport interface of the client, and its sockets."""

from __future__ import annotations

import math
import re
import select
import socket
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from specact.errors import ConfigError, RemoteError, unknown_name

Fields = dict[str, Any]
PORT = 8600
# Bytes per read: a hostile peer's thousands of tiny frames in one read cost at most about 40 ms.
_READ_BYTES = 1 << 13
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_HOST = re.compile(r"[0-9A-Za-z_.:%-]+")


class TransportClosedError(Exception):
    """The transport is closed; its owner may open another."""


class Transport(Protocol):
    """An open connection to a server, used by one thread at a time."""

    pings: bool
    # Whether an outstanding reply blocks further requests.
    busy: bool

    def encode(self, fields: Fields) -> bytes:
        """A message as the payload for :meth:`send`."""
        ...

    def decode(self, payload: bytes) -> Fields:
        """A payload from :meth:`receive` as a message.

        Raises:
            WireError: if it is malformed.
        """
        ...

    def send(self, kind: str, payload: bytes, timeout: float) -> None:
        """Sends a message of this type.

        Raises:
            TransportClosedError: if it cannot be sent within ``timeout`` seconds.
        """
        ...

    def receive(self, timeout: float) -> bytes | None:
        """The next message, or None if none arrives within ``timeout`` seconds; 0 does not block.

        Raises:
            TransportClosedError: if the connection has ended.
        """
        ...

    def ping(self) -> None:
        """Sends a ping, if the transport has pings."""
        ...

    @property
    def last_activity_s(self) -> float:
        """When the last byte arrived or, without pings, the last request was sent; seconds of the monotonic clock."""
        ...

    def close(self) -> None:
        """Closes it immediately; idempotent."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """Address of a server, and credentials.

    Attributes:
        scheme: ``ws`` or ``wss`` (WebSocket, msgpack); ``http`` or ``https`` (JSON, the paper's way).
        host, port: of the server.
        token: bearer token, or None.
        tls: context for ``wss`` and ``https``; None for the system's certificates.

    Raises:
        ConfigError: for an invalid scheme, host, port or token.
    """

    scheme: str
    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.scheme not in ("ws", "wss", "http", "https"):
            raise unknown_name("scheme of a server's URL", self.scheme, ("ws", "wss", "http", "https"))
        labels = self.host.removesuffix(".").split(".")
        if not _HOST.fullmatch(self.host) or not all(0 < len(label) < 64 for label in labels):
            raise ConfigError(f"{self.host!r} is not the name or address of a host")
        if not 0 < self.port < 65536:
            raise ConfigError(f"a server's port must lie between 1 and 65535, got {self.port}")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise ConfigError("a token must be one line of printable ASCII")

    @classmethod
    def parse(cls, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> Endpoint:
        """From ``ws://host:port``; ``wss``, ``http``, ``https`` likewise; port 8600 if not given.

        A server of openpi's protocol has a :class:`~specact.remote.openpi.OpenpiEndpoint` instead.

        Raises:
            ConfigError: if it is no such URL.
        """
        try:
            parts = urlsplit(url if "://" in url else f"ws://{url}")
            host, port = parts.hostname, PORT if parts.port is None else parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a server's URL ({error}); write ws://host:port") from None
        if not host or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(f"{url!r} is not a server's URL; write ws://host:port and nothing else")
        return cls(parts.scheme, host, port, token, tls)

    @property
    def encrypted(self) -> bool:
        return self.scheme in ("wss", "https")

    def connect(self, until: float) -> socket.socket:
        """A connected non-blocking socket, with TLS for ``wss`` and ``https``.

        Args:
            until: deadline, in seconds of the monotonic clock.

        Raises:
            RemoteError: if there is no connection by then.
        """
        try:
            side = socket.create_connection((self.host, self.port), max(0.001, until - time.monotonic()))
        except OSError as error:
            why = error.strerror or error
            raise RemoteError(
                f"no connection to {self}: {why}; check the address, and that specact serve runs"
            ) from None
        try:
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.encrypted:
                side.settimeout(max(0.001, until - time.monotonic()))
                side = (self.tls or ssl.create_default_context()).wrap_socket(side, server_hostname=self.host)
            side.setblocking(False)
            return side
        except OSError as error:
            side.close()
            raise RemoteError(
                f"no connection to {self}: {error}; name a certificate authority that the system does not trust with "
                f"--ca; for a server without TLS use {self.scheme.removesuffix('s')}://"
            ) from None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def tls_context(ca: Path | None) -> ssl.SSLContext | None:
    """A TLS context that trusts this certificate authority (a PEM file) alone; None for the system's default.

    Raises:
        ConfigError: if the file is missing or invalid.
    """
    try:
        return None if ca is None else ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ConfigError(
            f"cannot use {ca} as the PEM file of a certificate authority: {error.strerror or error}"
        ) from None


def send_all(side: socket.socket, data: bytes, timeout: float) -> None:
    """Sends bytes.

    Args:
        side: from :meth:`Endpoint.connect`.
        data: the bytes.
        timeout: for handing all of them to the operating system [s].

    Raises:
        TransportClosedError: on failure; an unknown part may have been sent.
    """
    left, until = memoryview(data), time.monotonic() + max(0.001, timeout)
    try:
        while left:
            try:
                left = left[side.send(left) :]
            except _WOULD_BLOCK as error:
                waits_for = select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT
                if not _ready(side, waits_for, until - time.monotonic()):
                    raise TimeoutError("timed out") from None
    except OSError as error:
        raise TransportClosedError(f"the connection was lost while sending: {error}") from None


def receive_some(side: socket.socket, timeout: float) -> bytes | None:
    """The data that arrives within ``timeout`` seconds; None if there is none, empty if the peer has closed.

    Raises:
        TransportClosedError: if the connection failed.
    """
    try:
        # Poll does not report data that TLS has already decrypted.
        if (isinstance(side, ssl.SSLSocket) and side.pending()) or _ready(side, select.POLLIN, timeout):
            return side.recv(_READ_BYTES)
    except _WOULD_BLOCK:
        pass
    except OSError as error:
        raise TransportClosedError(f"the connection was lost: {error}") from None
    return None


def _ready(side: socket.socket, event: int, timeout: float) -> bool:
    """Waits for at most ``timeout`` seconds; uses poll because select fails for descriptors above 1023."""
    waiting = select.poll()
    waiting.register(side, event)
    return bool(waiting.poll(max(0, math.ceil(1e3 * timeout))))
