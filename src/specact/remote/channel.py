"""The seam between the client and what carries its messages."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from specact.errors import ConfigError, unknown_name

Fields = dict[str, Any]
PORT = 8600


class ChannelClosedError(Exception):
    """The channel cannot be used any more; whoever opened it may open another."""


class Channel(Protocol):
    """One open line to a server, used by one thread at a time."""

    pings: bool
    # Whether nothing can be sent before another reply has come.
    busy: bool

    def encode(self, fields: Fields) -> bytes:
        """A message as what :meth:`send` takes."""
        ...

    def decode(self, payload: bytes) -> Fields:
        """What :meth:`receive` gave, as a message.

        Raises:
            WireError: if it is none.
        """
        ...

    def send(self, kind: str, payload: bytes, timeout: float) -> None:
        """Hands a message of this type to the network.

        Raises:
            ChannelClosedError: if that is impossible within ``timeout`` seconds.
        """
        ...

    def receive(self, timeout: float) -> bytes | None:
        """The next message, or None if there is none within ``timeout`` seconds; 0 only looks.

        Raises:
            ChannelClosedError: if none will come any more.
        """
        ...

    def ping(self) -> None:
        """Asks for a sign of life, where the channel has such a thing."""
        ...

    @property
    def heard(self) -> float:
        """When the last byte arrived, in seconds of the monotonic clock."""
        ...

    def close(self) -> None:
        """Ends it at once; may be called twice."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and how to be let in.

    Attributes:
        scheme: ``ws`` or ``wss`` (WebSocket, msgpack); ``http`` or ``https`` (JSON, the paper's way).
        host, port: of the server.
        token: bearer token, or None.
        tls: context for ``wss`` and ``https``; None for the system's certificates.
    """

    scheme: str
    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> Endpoint:
        """From ``ws://host:port``; ``wss``, ``http``, ``https`` likewise; port 8600 if not given.

        Raises:
            ConfigError: if it is no such URL.
        """
        try:
            parts = urlsplit(url if "://" in url else f"ws://{url}")
            host, port = parts.hostname, parts.port or PORT
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a server's URL ({error}); write ws://host:port") from None
        if parts.scheme not in ("ws", "wss", "http", "https"):
            raise unknown_name("scheme of a server's URL", parts.scheme, ("ws", "wss", "http", "https"))
        if not host or parts.path not in ("", "/"):
            raise ConfigError(f"{url!r} is not a server's URL; write ws://host:port, without a path")
        return cls(parts.scheme, host, port, token, tls)

    @property
    def encrypted(self) -> bool:
        return self.scheme in ("wss", "https")

    def context(self) -> ssl.SSLContext:
        """The TLS context to connect with."""
        return self.tls or ssl.create_default_context()

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"
