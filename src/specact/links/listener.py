"""A listening socket that can be closed temporarily and keeps its port."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from specact.errors import ConfigError

Address = tuple[socket.AddressFamily, Any]

_BACKLOG = 1024


def resolve(host: str, port: int) -> Address:
    """Resolves a TCP end point to its family and address; IPv4 is preferred, as many servers do not listen on IPv6.

    Raises:
        ConfigError: if it cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"cannot resolve the address {host}:{port} ({error}); write HOST:PORT") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


class Listener:
    """Accepts connections in a background thread.

    Args:
        at: address; port 0 for a free one.
        accepted: called in that thread with every accepted socket, which it then owns; must not raise.

    Attributes:
        port: the port it listens on.

    Raises:
        ConfigError: if it cannot listen on the address.
    """

    def __init__(self, at: Address, accepted: Callable[[socket.socket], None]) -> None:
        self._accepted = accepted
        self._socket = _bind(at)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._open, self._closed_until = False, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shaper-listener", daemon=True)
        self._listen()
        self._thread.start()

    def refuse(self, seconds: float) -> None:
        """Refuses connections for ``seconds``; overlapping calls last until the latest end."""
        with self._lock:
            self._closed_until = max(self._closed_until, time.monotonic() + seconds)
            self._stop_listening()

    def close(self) -> None:
        """Stops listening permanently."""
        with self._lock:
            self._stop.set()
            self._stop_listening()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._open = True

    def _stop_listening(self) -> None:
        """Stops listening and wakes the thread. On Linux a bound socket can listen again after a shutdown."""
        if self._open:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._open = False

    def _run(self) -> None:
        arriving = select.poll()
        arriving.register(self._socket, select.POLLIN)
        while self._reopened():
            arriving.poll()
            try:
                client, _ = self._socket.accept()
            except OSError:  # no longer listening, or out of file descriptors
                self._stop.wait(0.01)
                continue
            self._accepted(client)

    def _reopened(self) -> bool:
        """Waits while connections are refused, then listens again; False after :meth:`close`."""
        while not self._stop.is_set():
            with self._lock:
                left = self._closed_until - time.monotonic()
                if left <= 0.0:
                    if not self._open and not self._stop.is_set():
                        self._listen()
                    return not self._stop.is_set()
            self._stop.wait(left)
        return False


def _bind(at: Address) -> socket.socket:
    """A bound socket. A probe finds a free port: Linux keeps the port over a shutdown only if bound by number."""
    family, (host, port, *rest) = at
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            for side in (probe, bound):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port == 0:
                probe.bind(at[1])
                port = probe.getsockname()[1]
            bound.bind((host, port, *rest))
        except OSError as error:
            bound.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error
    return bound
