"""What a server is told when it starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from specact.errors import ConfigError


@dataclass(frozen=True)
class ServerSettings:
    """How a server listens, whom it lets in, and how much it takes on.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        token: bearer token every device and reader must show; needed where others than this machine can connect.
        certificate, key: PEM files for TLS; both or none.
        max_batch: requests answered by one inference, at most.
        max_queue: requests that may wait; more are refused as ``overloaded``.
        max_wait_ms: how long the target waits for a batch to fill; 0 takes what is queued when it becomes free.
        max_robots: connections at a time.
        drain_s: how long a shutdown waits for what is under way.

    Raises:
        ConfigError: for a value outside its range, or a bind that would let strangers in.
    """

    host: str = "127.0.0.1"
    port: int = 8600
    token: str | None = field(default=None, repr=False)
    certificate: Path | None = None
    key: Path | None = None
    max_batch: int = 16
    max_queue: int = 256
    max_wait_ms: float = 0.0
    max_robots: int = 1024
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < 16:
            raise ConfigError(f"a token needs at least 16 characters, this one has {len(self.token)}")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("a token is one line of printable ASCII, or no device could show it")
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines, so a token is needed: set SPECACT_TOKEN "
                "(at least 16 characters) or --token-file, or bind to 127.0.0.1"
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key")
        for file in (self.certificate, self.key):
            if file is not None and not file.is_file():
                raise ConfigError(f"there is no file {file}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"a port lies between 0 and 65535, got {self.port}")
        if min(self.max_batch, self.max_queue, self.max_robots) < 1:
            raise ConfigError("max_batch, max_queue and max_robots must be at least 1")
        if not (0.0 <= self.max_wait_ms <= 60_000.0 and 0.0 <= self.drain_s <= 60.0):
            raise ConfigError("max_wait_ms lies between 0 and 60000, drain_s between 0 and 60")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
