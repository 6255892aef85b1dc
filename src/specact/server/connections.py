"""Limits on connections, in total and per address, with eviction of pending ones."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

_STATE = "specact.connection"


class Connection:
    """One connection, from its acceptance to its end.

    Attributes:
        peer: address and port, for logs.
        host: unit of the per-address limit: an IPv4 address, or the /64 network of an IPv6 address.
    """

    __slots__ = ("_transport", "host", "peer", "was_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        name = transport.get_extra_info("peername") or ("?", 0)
        self.peer, self.host = f"{name[0]}:{name[1]}", _network(str(name[0]))
        self.was_closing = False

    @property
    def closing(self) -> bool:
        """Whether it was closed; written data may still be unsent."""
        return self._transport.is_closing()

    def abort(self) -> None:
        """Closes it immediately."""
        self._transport.abort()


class Connections:
    """The open connections. Those that are not admitted yet are *pending* and can be evicted for new ones.

    A connection is pending until its first request with the right token, or its hello. If there are too many, the
    oldest pending connection of the address with most of them is closed, so that one address cannot exclude another.
    Used on the event loop only.

    Args:
        most: maximum number of connections.
        most_pending: maximum number of pending ones.
        most_per_address: maximum number from one address.
        dropped: called with each connection that was refused or evicted, and the reason.
    """

    def __init__(
        self, most: int, most_pending: int, most_per_address: int, dropped: Callable[[Connection, str], None]
    ) -> None:
        self._max_connections, self._max_pending, self._max_per_address = most, most_pending, most_per_address
        self._dropped = dropped
        self._all: set[Connection] = set()
        self._per_address: Counter[str] = Counter()
        # By address, oldest first.
        self._pending: dict[str, dict[Connection, None]] = {}
        self._pending_count = 0

    def __len__(self) -> int:
        return len(self._all)

    def allow(self, most: int, most_pending: int) -> None:
        """Sets the maximum number of connections, and of pending ones."""
        self._max_connections, self._max_pending = most, most_pending

    @property
    def pending(self) -> int:
        """Number of pending connections."""
        return self._pending_count

    def add(self, connection: Connection) -> bool:
        """Adds a new connection, as pending; False if it is refused."""
        host = connection.host
        if self._per_address[host] >= self._max_per_address:
            room = self._make_room(host, f"more than {self._max_per_address} connections from this address")
        elif len(self._all) >= self._max_connections or self._pending_count >= self._max_pending:
            room = self._make_room(self._address_with_most_pending(), "too many connections")
        else:
            room = True
        if not room:
            self._dropped(connection, "no room for another connection")
            return False
        self._all.add(connection)
        self._per_address[host] += 1
        self._pending.setdefault(host, {})[connection] = None
        self._pending_count += 1
        return True

    def admit(self, connection: Connection) -> None:
        """Marks a connection with a valid token or hello as no longer pending, so that it is not evicted."""
        waiting = self._pending.get(connection.host, {})
        if connection in waiting:
            del waiting[connection]
            self._pending_count -= 1
            if not waiting:
                del self._pending[connection.host]

    def remove(self, connection: Connection) -> None:
        """Removes it; idempotent."""
        self.admit(connection)
        if connection in self._all:
            self._all.remove(connection)
            self._per_address[connection.host] -= 1
            if not self._per_address[connection.host]:
                del self._per_address[connection.host]

    def drop(self, connection: Connection, why: str) -> None:
        """Closes and removes it."""
        self.remove(connection)
        connection.abort()
        self._dropped(connection, why)

    def sweep(self) -> None:
        """Aborts connections that were already closing at the last sweep, because their peer does not read."""
        for connection in list(self._all):
            if connection.was_closing:
                connection.abort()
            connection.was_closing = connection.closing

    def abort_all(self) -> None:
        """Aborts all of them."""
        for connection in list(self._all):
            connection.abort()

    def _make_room(self, host: str | None, why: str) -> bool:
        waiting = self._pending.get(host or "")
        if not waiting:
            return False
        self.drop(next(iter(waiting)), why)
        return True

    def _address_with_most_pending(self) -> str | None:
        return max(self._pending, key=lambda host: len(self._pending[host]), default=None)


def set_connection(state: dict[str, Any], connection: Connection) -> None:
    """Stores a request's connection in the state of its ASGI scope."""
    state[_STATE] = connection


def connection_of(scope: Mapping[str, Any]) -> Connection | None:
    """A request's connection; None if the server is not specact's own."""
    found = scope.get("state", {}).get(_STATE)
    return found if isinstance(found, Connection) else None


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # A customer usually owns a whole /64.
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
