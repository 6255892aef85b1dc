"""Who may talk to the server: the bearer of the token, and no web page of somebody else."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.security import HTTPBearer

from specact.errors import WireError
from specact.wire.protocol import ErrorCode


class Access:
    """Decides on a request's headers.

    Args:
        token: the bearer token, or None where loopback is protection enough.

    Attributes:
        described: dependencies of the routes that want the token.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        # For OpenAPI; it is allows() that decides.
        self.described = [] if token is None else [Depends(HTTPBearer(auto_error=False))]

    def allows(self, headers: Mapping[str, str]) -> bool:
        """Whether the token is right, in a time that does not depend on how much of it is, and the origin our own."""
        # A page of another site could otherwise reach a server on the user's loopback through the user's browser.
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return False
        if self._expected is None:
            return _is_address(host)
        shown = headers.get("authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(shown, self._expected)


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
