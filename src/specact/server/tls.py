"""The certificate the server shows; it can change while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from specact.errors import ConfigError


class Certificate:
    """A certificate and its key.

    Args:
        certificate, key: PEM files.

    Attributes:
        context: for the connections that come; those that are open keep what they began with.

    Raises:
        ConfigError: if the files cannot be used.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self.context = self._load()

    def reload(self) -> None:
        """Reads the files again.

        Raises:
            ConfigError: if they cannot be used; then what was read before stays valid.
        """
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        # A new one: loading into one that is in use could leave it with the certificate of one key and another key.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use {self._certificate} and {self._key} for TLS: {error}") from None
        return context
