"""Who may talk to the server: the bearer of a token, and no web page of somebody else."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.security import HTTPBearer

from specact.errors import ConfigError, WireError
from specact.server.tokens import read_tokens
from specact.wire.protocol import ErrorCode


@dataclass(frozen=True)
class Caller:
    """Whose request it is.

    Attributes:
        name: that goes with the token; None for the one token of all, and where none is needed.
    """

    name: str | None = None
    shown: bytes = field(default=b"", repr=False)


class Access:
    """Decides on a request's headers.

    Args:
        token: a bearer token for everybody, or None.
        tokens: a file with a token for each robot, or None; without both, loopback is protection enough.

    Attributes:
        described: dependencies of the routes that want a token.

    Raises:
        ConfigError: if the file cannot be used.
    """

    def __init__(self, token: str | None, tokens: Path | None = None) -> None:
        self._token, self._tokens = token, tokens
        self._open = token is None and tokens is None
        # For OpenAPI; it is caller() that decides.
        self.described = [] if self._open else [Depends(HTTPBearer(auto_error=False))]
        self.reload()

    def reload(self) -> None:
        """Reads the file again.

        Raises:
            ConfigError: if it cannot be used; then what was read before stays valid.
        """
        named = {} if self._tokens is None else read_tokens(self._tokens)
        pairs: list[tuple[str | None, str]] = [*named.items()]
        if self._token is not None:
            if self._token in named.values():
                raise ConfigError(
                    f"{self._tokens} assigns the shared token to one robot; give each robot its own token"
                )
            pairs.append((None, self._token))
        self._callers = [Caller(name, f"Bearer {token}".encode()) for name, token in pairs]

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Who it is, if the token is right and the origin our own; every token takes the same time."""
        # A page of another site could otherwise reach a server on the user's loopback through the user's browser.
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return None
        if self._open:
            return Caller() if _is_address(host) else None
        shown = headers.get("authorization", "").encode("utf-8", "surrogateescape")
        found = None
        # All of them, also after one was right.
        for caller in self._callers:
            if hmac.compare_digest(shown, caller.shown):
                found = caller
        return found

    @property
    def names(self) -> set[str]:
        """That go with a token."""
        return {caller.name for caller in self._callers if caller.name is not None}

    def knows(self, caller: Caller) -> bool:
        """Whether it would still be let in under this name."""
        return self._open or caller in self._callers


def unauthorized() -> WireError:
    """The one refusal for all of it."""
    return WireError(
        ErrorCode.UNAUTHORIZED,
        "the token is wrong or missing: SPECACT_TOKEN or --token-file must hold the same on both sides; a server "
        "without one is asked by address or as localhost, and never from another site's page",
    )


def _is_address(host: str) -> bool:
    """Whether a Host header holds an address or localhost: any other name its owner could have pointed here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name) is not None
    except ValueError:
        return False
