"""Settings of a server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from specact.errors import ConfigError
from specact.server.access import check_token


@dataclass(frozen=True)
class ServerSettings:
    """Address, access control and limits of a server.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        token: shared bearer token; needed if other machines can connect, unless ``tokens`` is given.
        tokens: file of names and tokens, one robot per line, in addition to or instead of the shared token.
        certificate, key: PEM files for TLS; both or none.
        max_batch: maximum number of requests in one inference.
        max_queue: maximum number of queued requests; more are refused as ``overloaded``.
        max_under_way: maximum number of requests of one robot in flight; above it its connection is not read.
        max_wait_ms: how long the target waits for a batch to fill; 0 takes the queued requests when it becomes free.
        inline_below_ms: a built-in network with a shorter inference runs on the event loop, because a thread switch
            would take as long; 0 runs every target in a thread, as all other policies are.
        max_robots: maximum number of streams.
        max_pending: maximum number of connections without a valid token or hello; the oldest are closed for new ones.
        max_per_address: maximum number of connections from one address.
        access_log: file for a line of JSON about each connection and refusal.
        log_steps: whether it also has a line about each answered request.
        drain_s: how long a shutdown waits for requests in flight.

    Raises:
        ConfigError: for a value outside its range, or a host that other machines can reach without a token.
    """

    host: str = "127.0.0.1"
    port: int = 8600
    token: str | None = field(default=None, repr=False)
    tokens: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    max_batch: int = 16
    max_queue: int = 256
    max_under_way: int = 4
    max_wait_ms: float = 0.0
    inline_below_ms: float = 1.0
    max_robots: int = 1024
    max_pending: int = 256
    max_per_address: int = 512
    access_log: Path | None = None
    log_steps: bool = False
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token)
        if self.token is None and self.tokens is None and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines, so a token is needed: set SPECACT_TOKEN "
                "(at least 16 characters), --token-file or --tokens, or bind to 127.0.0.1"
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key")
        for file in (self.certificate, self.key):
            if file is not None and not file.is_file():
                raise ConfigError(f"there is no file {file}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"a port must lie between 0 and 65535, got {self.port}")
        for name in ("max_batch", "max_queue", "max_under_way", "max_robots", "max_pending", "max_per_address"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.log_steps and self.access_log is None:
            raise ConfigError("log_steps needs an access_log to write to")
        if not (0.0 <= self.max_wait_ms <= 60_000.0 and 0.0 <= self.drain_s <= 60.0):
            raise ConfigError("max_wait_ms must lie between 0 and 60000, and drain_s between 0 and 60")
        if not 0.0 <= self.inline_below_ms <= 100.0:
            raise ConfigError(f"inline_below_ms must lie between 0 and 100, got {self.inline_below_ms}")


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address, which only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
