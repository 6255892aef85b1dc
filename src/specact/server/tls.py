"""The server's certificate, which can be reloaded while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from specact.errors import ConfigError


class Certificate:
    """A certificate and its key.

    Args:
        certificate, key: PEM files.

    Attributes:
        context: for new connections; open ones keep theirs.

    Raises:
        ConfigError: if the files cannot be used.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self.context = self._load()

    def reload(self) -> None:
        """Reads the files again.

        Raises:
            ConfigError: if they cannot be used; the previous certificate stays valid.
        """
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        # A new context: a failed load into the current one could leave it with a certificate and key that do not match.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would prompt on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use {self._certificate} and {self._key} for TLS: {error}") from None
        return context
