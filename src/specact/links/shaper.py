"""A TCP relay that makes real sockets behave as if a link model lay between them, faults included."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import numpy as np

from specact.errors import ConfigError
from specact.links.listener import Listener, resolve
from specact.links.model import Link
from specact.links.relay import Connection, Ending, Pacer
from specact.rng import Role, stream
from specact.types import Floats

_MAX_SAMPLES = 10_000


@dataclass(frozen=True)
class LinkEvent:
    """An event of a connection of a :class:`Shaper`.

    Attributes:
        connection: its number, from 0.
        kind: ``opened``, or how it ended: ``closed`` by both sides, ``reset``, ``refused`` by the target, ``frozen``.
        up_bytes, down_bytes: relayed so far.
    """

    connection: int
    kind: Literal["opened"] | Ending
    up_bytes: int
    down_bytes: int


class Shaper:
    """Listens on a port and relays every connection to a target, with the delay and rate of a link model.

    Each connection has its own link, whose time 0 is the start of the shaper. The result of one ``recv`` (at most
    16 KiB) counts as a message: it enters when the link is no longer busy with the ones ahead of it
    (:class:`~specact.links.relay.Pacer`), and arrives ``delay`` later, never earlier, in order. At most 4 MiB per
    direction are in flight; beyond that the sender has to wait, as with a full window. Connecting is not delayed.

    Two threads per direction sleep until a message is due, which is more accurate than an event loop with timers of
    whole milliseconds. If other threads of the process keep the interpreter busy, they wake up to its switch interval
    (5 ms) late; then run ``specact proxy`` in a process of its own. :attr:`lateness` measures the accuracy.

    A context manager: the port is open inside. All controls may be called from any thread except that of ``on_event``.

    Args:
        link: the model, for both directions.
        host, port: of the target.
        seed: of the link's random draws: connection ``n`` uses the stream (seed, LINK, robot ``n``), step 0 for up and
            1 for down.
        listen_host: address to listen on; anyone who can reach it can use it.
        listen_port: 0 for a free one, see :attr:`port`.
        on_event: called with a :class:`LinkEvent` in threads of the shaper; must return soon and not raise.

    Raises:
        ConfigError: if an address cannot be resolved or listened on, or for a seed outside [0, 2^64).
    """

    def __init__(
        self,
        link: Link,
        host: str,
        port: int,
        *,
        seed: int = 0,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
        on_event: Callable[[LinkEvent], None] | None = None,
    ) -> None:
        if not 0 <= seed < 2**64:
            raise ConfigError(f"the seed of a shaper must lie in [0, 2^64), got {seed}")
        self._link, self._seed, self._on_event = link, seed, on_event
        self._target, self._listen_at = resolve(host, port), resolve(listen_host, listen_port)
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._late: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._opened, self._passed = 0, [0, 0]
        self._start = self._held_until = 0.0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._listener = Listener(self._listen_at, self._relay)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self._end_all("closed")

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._listener.port

    @property
    def connections(self) -> int:
        """Number of connections accepted so far."""
        return self._opened

    @property
    def up_bytes(self) -> int:
        """Bytes relayed to the target."""
        return self._passed[1]

    @property
    def down_bytes(self) -> int:
        """Bytes relayed to clients."""
        return self._passed[0]

    @property
    def lateness(self) -> Floats:
        """Delay of the last messages beyond their due time [s], float64 ``[n]``, n <= 10,000.

        Caused by a receiver that does not read, or by other load on this machine.
        """
        with self._lock:
            return np.array(self._late, dtype=np.float64)

    def black_hole(self, seconds: float) -> None:
        """Holds back all data for ``seconds``; connections stay open, and held data is relayed afterwards.

        Overlapping calls last until the latest end. Data of new connections is held back too.
        """
        self._held_until = max(self._held_until, time.monotonic() + seconds)

    def refuse(self, seconds: float) -> None:
        """Refuses new connections for ``seconds``; existing ones continue.

        Overlapping calls last until the latest end.
        """
        self._listener.refuse(seconds)

    def reset_all(self) -> None:
        """Ends all connections with a TCP reset to both sides; data in flight is lost."""
        self._end_all("reset")

    def half_open(self) -> None:
        """Freezes the existing connections: both sides see them open, but nothing is relayed; new ones work.

        As when a robot leaves radio range, or a server loses power: neither an end nor a reset is sent, until
        :meth:`reset_all` or the end of the shaper.
        """
        self._end_all("frozen")

    # The protocol Host of the relay, for connections.

    def pacer(self, connection: int, up: bool) -> Pacer:
        rng = stream(self._seed, Role.LINK, robot=connection, step=0 if up else 1)
        return Pacer(self._link, up, self._start, rng)

    def held_until(self) -> float:
        return self._held_until

    def delivered(self, up: bool, payload_bytes: int, late: float) -> None:
        with self._lock:
            self._late.append(late)
            self._passed[up] += payload_bytes

    def ended(self, connection: Connection) -> None:
        self._notify(connection, connection.ending or "closed")

    def _notify(self, connection: Connection, kind: Literal["opened"] | Ending) -> None:
        if self._on_event is not None:
            down, up = connection.passed
            self._on_event(LinkEvent(connection.number, kind, up, down))

    def _end_all(self, ending: Ending) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end(ending)
        for connection in connections:
            connection.join()

    def _relay(self, client: socket.socket) -> None:
        try:
            connection = Connection(self._opened, client, self._target, self)
        except OSError:  # out of file descriptors
            client.close()
            return
        with self._lock:
            self._opened += 1
            self._connections = [other for other in self._connections if not other.gone] + [connection]
        try:
            self._notify(connection, "opened")
        finally:
            connection.start()
