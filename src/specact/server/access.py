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
from specact.wire.checks import ErrorCode

SHORTEST_TOKEN = 16
_LONGEST_NAME, _MOST = 64, 10_000
# How a client of openpi's shows its token.
_API_KEY = b"Api-Key "


def check_token(token: str) -> None:
    """Raises for a token that is too short, or that no device could send.

    Raises:
        ConfigError: if it has fewer than 16 characters, or others than printable ASCII.
    """
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"a token needs at least {SHORTEST_TOKEN} characters, this one has {len(token)}")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("a token must be one line of printable ASCII")


def read_tokens(file: Path) -> dict[str, str]:
    """Token by name.

    A line holds a name, white space, and the name's token; empty lines and those that begin with ``#`` are skipped.

    Raises:
        ConfigError: if the file cannot be read, or a line is not of this form, or a name or token occurs twice; the
            message never holds a token.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read tokens from {file}: {error}") from None
    found: dict[str, str] = {}
    taken: set[str] = set()
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            if len(words) != 2:
                raise ConfigError("a line must hold a name and its token, separated by a space")
            name, token = words
            if len(name) > _LONGEST_NAME or not name.isprintable():
                raise ConfigError(f"a name must have at most {_LONGEST_NAME} printable characters")
            check_token(token)
            if name in found:
                raise ConfigError(f"the name {name} occurs twice; give each robot its own line")
            if token in taken:
                raise ConfigError(f"the token of {name} is already used by another robot; give each robot its own")
        except ConfigError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
        found[name] = token
        taken.add(token)
    if not 0 < len(found) <= _MOST:
        raise ConfigError(f"{file} holds {len(found)} tokens; it needs between 1 and {_MOST}")
    return found


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
        if shown.startswith(_API_KEY):
            shown = b"Bearer " + shown.removeprefix(_API_KEY)
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
