"""Who may talk to the server: the bearer of the token, and no web page of somebody else."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit


class Access:
    """Decides on a request's headers.

    Args:
        token: the bearer token, or None where loopback is protection enough.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    def allows(self, headers: Mapping[str, str]) -> bool:
        """Whether the token is right, in a time that does not depend on how much of it is, and the origin our own."""
        # A page of another site could otherwise reach a server on the user's loopback through the user's browser.
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return False
        if self._expected is None:
            return True
        shown = headers.get("authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(shown, self._expected)
