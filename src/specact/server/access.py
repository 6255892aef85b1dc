"""Who may use a server and how much of it: address, limits, bearer tokens, and a check of Origin and Host headers."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from specact.errors import ConfigError, WireError
from specact.records import Count, Record, check_fields
from specact.wire.messages import ErrorCode

MIN_TOKEN_CHARS = 16
_MAX_NAME_CHARS, _MAX_TOKENS = 64, 10_000
# Authorization scheme of openpi's client.
_API_KEY = b"Api-Key "
_UNAUTHORIZED = WireError(
    ErrorCode.UNAUTHORIZED,
    "the token is wrong or missing: SPECACT_TOKEN or --token-file must hold the same on both sides; a server without "
    "one is asked by address or as localhost, and never from another site's page",
)


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
        """The context for TLS, or None without a certificate; a running server's has it as it is now.

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


def check_token(token: str) -> None:
    """Refuses a token that is too short or cannot be sent in a header.

    Raises:
        ConfigError: if it has fewer than 16 characters, or characters that are not printable ASCII.
    """
    if len(token) < MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable()):
        raise ConfigError(f"a token is one line of at least {MIN_TOKEN_CHARS} printable ASCII characters")


def read_tokens(file: Path) -> dict[str, str]:
    """Tokens by name.

    A line holds a name, white space, and the name's token; empty lines and those that start with ``#`` are skipped.

    Raises:
        ConfigError: if the file cannot be read, or a line is not of this form, or a name or token occurs twice; the
            message never holds a token.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read tokens from {file}: {error}") from None
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[0]) > _MAX_NAME_CHARS or not words[0].isprintable():
            raise ConfigError(
                f"{file}, line {number}: a line is a name of at most {_MAX_NAME_CHARS} printable characters, a space "
                "and the name's token"
            )
        name, token = words
        try:
            check_token(token)
        except ConfigError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
        if name in tokens or token in tokens.values():
            raise ConfigError(f"{file}, line {number}: name or token of {name} occurs twice; give each robot its own")
        tokens[name] = token
    if not 0 < len(tokens) <= _MAX_TOKENS:
        raise ConfigError(f"{file} holds {len(tokens)} tokens; it needs between 1 and {_MAX_TOKENS}")
    return tokens


@dataclass(frozen=True)
class Caller:
    """An authenticated caller, by the name of its token (None for the shared one, or none) and its credentials."""

    name: str | None = None
    credentials: bytes = field(default=b"", repr=False)


class Access:
    """Authenticates requests by their headers: by a bearer token that all devices share, or by a file of tokens.

    Without both, access is open.

    Raises:
        ConfigError: if token or file cannot be used, or other machines could connect without a token.
    """

    def __init__(self, token: str | None, address: Address) -> None:
        if token is not None:
            check_token(token)
        self._token, self._tokens = token, address.tokens
        self._open = token is None and address.tokens is None
        if self._open and not address.is_loopback():
            raise ConfigError(
                f"{address.host} can be reached from other machines, so a token is needed: set SPECACT_TOKEN "
                f"(at least {MIN_TOKEN_CHARS} characters), --token-file or --tokens, or bind to 127.0.0.1"
            )
        self.reload()

    def reload(self) -> None:
        """Reads the file again.

        Raises:
            ConfigError: if it cannot be used; the previous tokens stay valid.
        """
        named = {} if self._tokens is None else read_tokens(self._tokens)
        if self._token in named.values():
            raise ConfigError(f"{self._tokens} assigns the shared token to one robot; give each robot its own token")
        pairs = [*named.items(), *([(None, self._token)] if self._token else [])]
        self._callers = [Caller(name, f"Bearer {token}".encode()) for name, token in pairs]

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller; takes constant time for every token.

        Raises:
            WireError: ``unauthorized`` if the token is wrong or the origin is foreign.
        """
        # Otherwise another site's page could reach a server on the user's loopback through the user's browser.
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            raise _UNAUTHORIZED
        if self._open:
            if not _is_address(host):
                raise _UNAUTHORIZED
            return Caller()
        shown = headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if shown.startswith(_API_KEY):
            shown = b"Bearer " + shown.removeprefix(_API_KEY)
        # Each is compared, without an early exit.
        matching = [caller for caller in self._callers if hmac.compare_digest(shown, caller.credentials)]
        if not matching:
            raise _UNAUTHORIZED
        return matching[0]

    def is_valid(self, caller: Caller) -> bool:
        """Whether its token is still valid."""
        return self._open or caller in self._callers


def _is_address(host: str) -> bool:
    """Whether a Host header holds an address or localhost; any other name could be DNS rebinding."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name) is not None
    except ValueError:
        return False
