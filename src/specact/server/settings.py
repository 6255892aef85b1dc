"""Settings of a server."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from specact.errors import ConfigError
from specact.records import Count, Record, check_fields


class Address(Record, frozen=True):
    """Where a server listens, and who may use it.

    Attributes:
        host: address to listen on; one that other machines can reach needs a token.
        port: port to listen on; 0 takes a free one.
        tokens: file with a token for each robot: a name, a space and its token on each line; read again on SIGHUP.
        certificate: PEM file for TLS; read again on SIGHUP.
        key: PEM file of its key.

    Raises:
        ConfigError: for a value that is not allowed, or one of certificate and key alone.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8600
    tokens: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key")

    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def load_certificate(self, context: ssl.SSLContext | None = None) -> ssl.SSLContext | None:
        """The context for TLS, or None without a certificate.

        Args:
            context: a running server's, which new connections use with the certificate as it is now.

        Raises:
            ConfigError: if the files cannot be used; a running server keeps its certificate.
        """
        if self.certificate is None:
            return None
        fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Into a new context first: half of a failed load would stay in the running one. Without a password OpenSSL
            # would prompt on the terminal.
            for target in (fresh, context or fresh):
                target.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use {self.certificate} and {self.key} for TLS: {error}") from None
        return context or fresh


class Limits(Record, frozen=True):
    """What a server takes on.

    Attributes:
        max_batch: requests in one inference.
        max_queue: requests that may wait; more are refused as overloaded.
        max_under_way: requests of one robot in flight; above it its connection is not read.
        max_robots: connected robots; more are refused as overloaded.
        max_pending: connections that have not said hello yet; the oldest are closed for new ones.
        max_per_address: connections from one address.
        access_log: file for a line of JSON about each connection and refusal; opened again when it was moved.
        drain_s: how long a shutdown waits for requests in flight [s].
    """

    max_batch: Count = 16
    max_queue: Count = 256
    max_under_way: Count = 4
    max_robots: Count = 1024
    max_pending: Count = 256
    max_per_address: Count = 512
    access_log: Path | None = None
    drain_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 5.0
