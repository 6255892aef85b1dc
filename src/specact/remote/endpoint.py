"""Address of a server, and the socket to it."""

from __future__ import annotations

import re
import socket
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from specact.errors import ConfigError, RemoteError, unknown_name

PORT = 8600
_HOST = re.compile(r"[0-9A-Za-z_.:%-]+")


@dataclass(frozen=True)
class Endpoint:
    """Address of a server, and credentials.

    Attributes:
        scheme: ``ws``, or ``wss`` with TLS.
        host, port: of the server.
        token: bearer token, or None.
        tls: context for ``wss``; None for the system's certificates.

    Raises:
        ConfigError: for an invalid scheme, host, port or token.
    """

    scheme: str
    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.scheme not in ("ws", "wss"):
            raise unknown_name("scheme of a server's URL", self.scheme, ("ws", "wss"))
        labels = self.host.removesuffix(".").split(".")
        if not _HOST.fullmatch(self.host) or not all(0 < len(label) < 64 for label in labels):
            raise ConfigError(f"{self.host!r} is not the name or address of a host")
        if not 0 < self.port < 65536:
            raise ConfigError(f"a server's port must lie between 1 and 65535, got {self.port}")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise ConfigError("a token must be one line of printable ASCII")

    @classmethod
    def parse(cls, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> Endpoint:
        """From ``ws://host:port`` or ``wss://host:port``; port 8600 if not given.

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
        """Whether it uses TLS."""
        return self.scheme == "wss"

    def connect(self, until: float) -> socket.socket:
        """A connected socket, with TLS for ``wss``.

        Args:
            until: deadline, in seconds of the monotonic clock.

        Raises:
            RemoteError: if there is no connection by then.
        """
        try:
            side = socket.create_connection((self.host, self.port), max(0.001, until - time.monotonic()))
        except OSError as error:
            why = f"{error.strerror or error}; check the address, and that specact serve runs"
            raise RemoteError(f"no connection to {self}: {why}") from None
        try:
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.encrypted:
                side.settimeout(max(0.001, until - time.monotonic()))
                side = (self.tls or ssl.create_default_context()).wrap_socket(side, server_hostname=self.host)
            return side
        except OSError as error:
            side.close()
            why = f"{error}; an authority that the system does not trust is named by --ca; without TLS use ws://"
            raise RemoteError(f"no connection to {self}: {why}") from None

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
