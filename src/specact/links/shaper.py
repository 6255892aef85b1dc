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
    """Listens on a port and relays every connection to a target, as late and as slowly as a link model says.

    Each connection has a link of its own, whose time 0 is when the shaper started. What one ``recv`` gives (at most
    16 KiB) counts as a message: it enters when the link is no longer busy with those ahead of it
    (:class:`~specact.links.relay.Pacer`), and arrives ``delay`` later, never earlier, in order. At most 4 MiB per
    direction are under way; beyond that the sender has to wait, as with a full window. Connecting is not delayed.

    Two threads per direction sleep until a message is due: more exact than an event loop, whose timers count whole
    milliseconds. In a process whose other threads keep the interpreter busy they wake up to its switch interval (5 ms)
    late; run ``specact proxy`` beside such a process instead. :attr:`lateness` says how exact it was.

    A context manager: the port is open inside. All controls may be called from any thread but that of ``on_event``.

    Args:
        link: the model, for both directions.
        host, port: the target's.
        seed: of the link's random draws: connection ``n`` uses the stream (seed, LINK, robot ``n``), its step 0
            upwards and 1 downwards.
        listen_host: where to listen; anyone who can reach it can use it.
        listen_port: 0 for a free one, which :attr:`port` then tells.
        on_event: is called with a :class:`LinkEvent`, in threads of the shaper, and must return soon.

    Raises:
        ConfigError: if an address does not exist or cannot be listened on, or for a seed outside [0, 2^64).
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
        """Where it listens."""
        return self._listener.port

    @property
    def connections(self) -> int:
        """How many connections were accepted so far."""
        return self._opened

    @property
    def up_bytes(self) -> int:
        """Bytes passed on to the target."""
        return self._passed[1]

    @property
    def down_bytes(self) -> int:
        """Bytes passed on to clients."""
        return self._passed[0]

    @property
    def lateness(self) -> Floats:
        """By how many seconds the last messages left later than they were due, float64 ``[n]``, n <= 10,000.

        What a receiver that does not read, or this machine's other work, added to the model.
        """
        with self._lock:
            return np.array(self._late, dtype=np.float64)

    def black_hole(self, seconds: float) -> None:
        """Holds back all data for ``seconds``; connections stay open, and held data is relayed afterwards.

        A second call extends the first. New connections are accepted meanwhile, but nothing of them moves either.
        """
        self._held_until = max(self._held_until, time.monotonic() + seconds)

    def refuse(self, seconds: float) -> None:
        """Refuses new connections for ``seconds``; existing ones continue. A second call extends the first."""
        self._listener.refuse(seconds)

    def reset_all(self) -> None:
        """Ends all connections with a TCP reset to both sides; data in flight is lost."""
        self._end_all("reset")

    def half_open(self) -> None:
        """Never serves the existing connections again, though both sides see them open; new ones work.

        As when a robot leaves the radio's reach, or a server loses power: no end and no reset is ever sent, until
        :meth:`reset_all` or the end of the shaper.
        """
        self._end_all("frozen")

    # What connections need: the protocol Host of the relay.

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
        except OSError:  # out of sockets
            client.close()
            return
        with self._lock:
            self._opened += 1
            self._connections = [other for other in self._connections if not other.gone] + [connection]
        try:
            self._notify(connection, "opened")
        finally:
            connection.start()
