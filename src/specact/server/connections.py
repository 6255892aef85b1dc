"""How many connections there may be, of whom, and which one makes room for another."""

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
        host: what counts as one address: an IPv4 address, or the /64 network of an IPv6 address.
    """

    __slots__ = ("_transport", "host", "peer", "was_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        name = transport.get_extra_info("peername") or ("?", 0)
        self.peer, self.host = f"{name[0]}:{name[1]}", _network(str(name[0]))
        self.was_closing = False

    @property
    def closing(self) -> bool:
        """Whether it was closed; what was written may still wait for the peer to read it."""
        return self._transport.is_closing()

    def abort(self) -> None:
        """Ends it at once."""
        self._transport.abort()


class Connections:
    """The connections that there are. Those that have not proved themselves are *pending* and make room for new ones.

    A connection is pending until its first request with the right token, or its hello. Of the address with most pending
    connections the oldest is closed where there are too many, so no number of them keeps another address out. Used on
    the event loop only.

    Args:
        most: connections in all.
        most_pending: of them pending.
        most_per_address: from one address.
        dropped: told of each connection that was refused or had to make room, and why.
    """

    def __init__(
        self, most: int, most_pending: int, most_per_address: int, dropped: Callable[[Connection, str], None]
    ) -> None:
        self._most, self._most_pending, self._most_per_address = most, most_pending, most_per_address
        self._dropped = dropped
        self._all: set[Connection] = set()
        self._of: Counter[str] = Counter()
        # By address, oldest first.
        self._pending: dict[str, dict[Connection, None]] = {}
        self._pending_count = 0

    def __len__(self) -> int:
        return len(self._all)

    def allow(self, most: int, most_pending: int) -> None:
        """Sets how many there may be, and how many of them pending."""
        self._most, self._most_pending = most, most_pending

    @property
    def pending(self) -> int:
        """How many have not proved themselves."""
        return self._pending_count

    def enter(self, connection: Connection) -> bool:
        """Counts a new connection, as pending; False if there is no room for it."""
        host = connection.host
        if self._of[host] >= self._most_per_address:
            room = self._make_room(host, f"more than {self._most_per_address} connections from this address")
        elif len(self._all) >= self._most or self._pending_count >= self._most_pending:
            room = self._make_room(self._most_crowded(), "too many connections")
        else:
            room = True
        if not room:
            self._dropped(connection, "no room for another connection")
            return False
        self._all.add(connection)
        self._of[host] += 1
        self._pending.setdefault(host, {})[connection] = None
        self._pending_count += 1
        return True

    def prove(self, connection: Connection) -> None:
        """Notes that it showed the right token, or a hello that fits: it no longer makes room for others."""
        waiting = self._pending.get(connection.host, {})
        if connection in waiting:
            del waiting[connection]
            self._pending_count -= 1
            if not waiting:
                del self._pending[connection.host]

    def leave(self, connection: Connection) -> None:
        """Forgets it; may be called twice."""
        self.prove(connection)
        if connection in self._all:
            self._all.remove(connection)
            self._of[connection.host] -= 1
            if not self._of[connection.host]:
                del self._of[connection.host]

    def drop(self, connection: Connection, why: str) -> None:
        """Ends it at once."""
        self.leave(connection)
        connection.abort()
        self._dropped(connection, why)

    def sweep(self) -> None:
        """Ends those that were closed before the last sweep already, and whose peer does not read what is left."""
        for connection in list(self._all):
            if connection.was_closing:
                connection.abort()
            connection.was_closing = connection.closing

    def abort_all(self) -> None:
        """Ends all of them at once."""
        for connection in list(self._all):
            connection.abort()

    def _make_room(self, host: str | None, why: str) -> bool:
        waiting = self._pending.get(host or "")
        if not waiting:
            return False
        self.drop(next(iter(waiting)), why)
        return True

    def _most_crowded(self) -> str | None:
        return max(self._pending, key=lambda host: len(self._pending[host]), default=None)


def remember(state: dict[str, Any], connection: Connection) -> None:
    """Writes down whose request it is, in the state of its ASGI scope."""
    state[_STATE] = connection


def connection_of(scope: Mapping[str, Any]) -> Connection | None:
    """Whose request it is; None without a transport of ours."""
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
    # One customer has a whole /64.
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
