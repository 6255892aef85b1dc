"""Who may use a server and how much of it: address, limits, bearer tokens, and a check of Origin and Host headers."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from specact.errors import ConfigError, WireError
from specact.records import Count, Record, check_fields
from specact.wire.messages import ErrorCode

_MIN_CHARS = 16
_LINE = re.compile(rf"(\S{{1,64}})\s+([!-~]{{{_MIN_CHARS},}})")
_SCHEMES = ("Bearer", "Api-Key")  # the second is that of openpi's client


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


class Limits(Record, frozen=True):
    """What a server takes on.

    Attributes:
        max_batch: requests in one inference.
        max_under_way: requests of one connection in flight; above it the connection is not read.
        max_robots, max_per_address: connections in all, and from one address; beyond, one without a hello is closed for
            a new one, or else the one that has been idle for longest, for 5 s at least; or the new one is refused.
        access_log: file for a line of JSON about each connection and refusal; opened again when it was moved.
        drain_s: how long a shutdown waits for requests in flight [s].
    """

    max_batch: Count = 16
    max_under_way: Count = 4
    max_robots: Count = 1024
    max_per_address: Count = 512
    access_log: Path | None = None
    drain_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 5.0


def read_tokens(file: Path | None, shared: str | None = None) -> dict[str | None, str]:
    """Tokens by name, that which all devices share by None.

    A line holds a name, white space, and the name's token; empty lines and those that start with ``#`` are skipped.
    It is a ConfigError if the file cannot be read or has no token, a line is not of this form, or a name or token
    occurs twice; the message never holds a token.
    """
    tokens: dict[str | None, str] = {None: shared} if shared else {}
    if file is None:
        return tokens
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read tokens from {file}: {error}") from None
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or not match[1].isprintable() or match[1] in tokens or match[2] in tokens.values():
            raise ConfigError(
                f"{file}, line {number}: a line is a name of at most 64 printable characters, a space and the name's "
                f"token, of at least {_MIN_CHARS} printable ASCII characters; none occurs twice, nor the shared token"
            )
        tokens[match[1]] = match[2]
    if not tokens.keys() - {None}:
        raise ConfigError(f"{file} has no token; each line is a name, a space and the name's token")
    return tokens


@dataclass(frozen=True)
class Caller:
    """An authenticated caller: the name of its token, None for the shared one or none, and the token's digest."""

    name: str | None = None
    digest: bytes = b""


class Access:
    """Authenticates requests by their headers: by a bearer token that all devices share, or by a file of tokens.

    Without both, access is open. ``tls`` is the context with the address' certificate, if it has one. It is a
    ConfigError if token or files cannot be used, or other machines could connect without a token.
    """

    def __init__(self, token: str | None, address: Address) -> None:
        if token is not None and not (len(token) >= _MIN_CHARS and token.isascii() and token.isprintable()):
            raise ConfigError(f"a token is one line of at least {_MIN_CHARS} printable ASCII characters")
        self._token, self._address = token, address
        self._open = token is None and address.tokens is None
        if self._open and not getattr(_ip(address.host), "is_loopback", False):
            raise ConfigError(
                f"{address.host} can be reached from other machines, so a token is needed: set SPECACT_TOKEN "
                f"(at least {_MIN_CHARS} characters), --token-file or --tokens, or bind to 127.0.0.1"
            )
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if address.certificate else None
        self.reload()

    def reload(self) -> None:
        """Reads the files again; ConfigError if one cannot be used, whose earlier content stays in use then."""
        tokens, certificate, key = self._address.tokens, self._address.certificate, self._address.key
        named = read_tokens(tokens, self._token).items()
        self._callers = {_digest(token): Caller(name, _digest(token)) for name, token in named}
        if self.tls is None or certificate is None:
            return
        try:
            # Into a new context first: half of a failed load would stay in the running one. Without a password OpenSSL
            # would prompt on the terminal.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.tls):
                context.load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use {certificate} and {key} for TLS: {error}") from None

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller; WireError, ``unauthorized``, if the token is wrong or the origin is foreign.

        How long that takes says nothing about a token, because digests are compared.
        """
        origin, host = headers.get("origin"), headers.get("host", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        caller = Caller() if self._open else self._callers.get(_digest(token))
        # Otherwise another site's page could reach a server on the user's loopback through the user's browser: with its
        # origin, or by a name of its own for the address.
        foreign = origin is not None and origin not in (f"http://{host}", f"https://{host}")
        rebound = self._open and _ip(re.sub(r":\d+$", "", host).strip("[]")) is None
        if caller is None or foreign or rebound or not (self._open or scheme in _SCHEMES):
            raise WireError(
                ErrorCode.UNAUTHORIZED,
                "the token is wrong or missing: SPECACT_TOKEN or --token-file must hold the same on both sides; a "
                "server without one is asked by address or as localhost, and never from another site's page",
            )
        return caller

    def is_valid(self, caller: Caller) -> bool:
        """Whether its token is still valid."""
        return self._open or caller == self._callers.get(caller.digest)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is, or localhost; None for any other name."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
