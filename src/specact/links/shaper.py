"""A TCP relay that makes real sockets behave as if a link model lay between them, faults included."""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from specact.errors import ConfigError
from specact.links.model import Link
from specact.rng import Role, stream
from specact.types import Floats

Address = tuple[socket.AddressFamily, Any]
Ending = Literal["closed", "reset", "refused", "frozen"]
Kind = Literal["opened"] | Ending
Chunk = tuple[bytes | None, float]
_CHUNK_BYTES, _MAX_IN_FLIGHT, _BACKLOG, _MAX_SAMPLES = 16 * 1024, 256, 1024, 10_000


@dataclass(frozen=True)
class LinkEvent:
    """An event of a connection of a :class:`Shaper`.

    Attributes:
        connection: its number, from 0.
        kind: ``opened``, or how it ended: ``closed`` by both sides, ``reset``, ``refused`` by the target, ``frozen``.
        up_bytes, down_bytes: relayed so far.
    """

    connection: int
    kind: Kind
    up_bytes: int
    down_bytes: int


class Pacer:
    """One direction of one connection: a queue that preserves the order of messages.

    A message waits while the link is :meth:`~specact.links.model.Link.busy` with those before it; one that would
    overtake by jitter arrives together with the one before it.

    Args:
        link: the model.
        up: direction.
        start: time 0 of the link [s].
        rng: random generator of this direction.
    """

    def __init__(self, link: Link, up: bool, start: float, rng: np.random.Generator) -> None:
        self._link, self._up, self._start, self._rng = link, up, start, rng
        self._free = self._due = start

    def due(self, payload_bytes: int, now: float) -> float:
        """Arrival time of a message sent ``now``, on the clock of ``start`` [s]; at least ``now``."""
        entry = max(now, self._free)
        at = entry - self._start
        self._free = entry + self._link.busy(payload_bytes, self._up, at)
        self._due = max(self._due, entry + self._link.delay(payload_bytes, self._up, at, self._rng))
        return self._due


class _Connection:
    """What is known of a connection: bytes passed down and up, how it is to end, and whether it has ended."""

    def __init__(self, number: int) -> None:
        self.number, self.passed = number, [0, 0]
        self.requested: Ending = "closed"
        self.ended = asyncio.Event()


class Shaper:
    """Listens on a port and relays every connection to a target, with the delay and rate of a link model.

    Each connection has its own link, whose time 0 is the start of the shaper. The result of one ``recv`` (at most
    16 KiB) counts as a message: it arrives ``delay`` after the link was no longer busy with those before it, in order.
    At most 256 messages per direction are in flight; beyond that the sender has to wait, as with a full window.

    An event loop in a thread of its own relays. If other threads keep the interpreter busy, it wakes up to its switch
    interval (5 ms) late; then run ``specact proxy`` in a process of its own. :attr:`lateness` measures the accuracy.

    A context manager: the port is open inside. All controls may be called from any thread except that of ``on_event``;
    where they overlap, the latest end counts.

    Args:
        link: the model, for both directions.
        host, port: of the target.
        seed: of the link's random draws: connection ``n`` uses the stream (seed, LINK, robot ``n``), step 0 for up and
            1 for down.
        listen_host: address to listen on; anyone who can reach it can use it.
        listen_port: 0 for a free one, see :attr:`port`.
        on_event: called with a :class:`LinkEvent` in the shaper's thread; must return soon and not raise.

    Attributes:
        port: the port it listens on.
        connections: number of connections accepted so far.
        up_bytes, down_bytes: relayed to the target, and to clients.

    Raises:
        ConfigError: if an address cannot be resolved or listened on, or for a seed outside [0, 2^64).
    """

    def __init__(
        self, link: Link, host: str, port: int, *, seed: int = 0, listen_host: str = "127.0.0.1", listen_port: int = 0,
        on_event: Callable[[LinkEvent], None] = lambda event: None,
    ) -> None:  # fmt: skip
        if not 0 <= seed < 2**64:
            raise ConfigError(f"the seed of a shaper must lie in [0, 2^64), got {seed}")
        self._link, self._seed, self._on_event = link, seed, on_event
        self._target, self._listen_at = resolve(host, port), resolve(listen_host, listen_port)
        self._open: dict[_Connection, asyncio.Task[None]] = {}
        self._late: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.port = self.connections = self.up_bytes = self.down_bytes = 0
        self._start = self._held_until = self._closed_until = 0.0

    def __enter__(self) -> Self:
        self._start, self._listener = time.monotonic(), _listener(self._listen_at)
        self.port = self._listener.getsockname()[1]
        self._loop = asyncio.SelectorEventLoop(_PreciseSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="shaper", daemon=True)
        self._thread.start()
        self._accepting = asyncio.run_coroutine_threadsafe(self._accept(), self._loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accepting.cancel()
        self._end_all("closed")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()

    @property
    def lateness(self) -> Floats:
        """Delay of the last messages beyond their due time [s], float64 ``[n]``, n <= 10,000.

        Caused by a receiver that does not read, or by other load on this machine.
        """
        return np.array(list(self._late), dtype=np.float64)

    def black_hole(self, seconds: float) -> None:
        """Holds back all data for ``seconds``, of new connections too; it is relayed afterwards."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)

    def refuse(self, seconds: float) -> None:
        """Refuses new connections for ``seconds``; existing ones continue."""

        async def close() -> None:
            self._closed_until = max(self._closed_until, time.monotonic() + seconds)
            # On Linux a bound socket can listen again after a shutdown.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()

    def reset_all(self) -> None:
        """Ends all connections with a TCP reset to both sides; data in flight is lost."""
        self._end_all("reset")

    def half_open(self) -> None:
        """Freezes the existing connections: both sides see them open, but nothing is relayed; new ones work.

        As when a robot leaves radio range, or a server loses power: neither an end nor a reset is sent, until
        :meth:`reset_all` or the end of the shaper.
        """
        self._end_all("frozen")

    def pacer(self, connection: int, up: bool) -> Pacer:
        """What delays the messages of a connection in one direction."""
        rng = stream(self._seed, Role.LINK, robot=connection, step=0 if up else 1)
        return Pacer(self._link, up, self._start, rng)

    def _end_all(self, ending: Ending) -> None:
        async def end() -> None:
            ending_now = {connection: task for connection, task in self._open.items() if not task.done()}
            for connection, task in ending_now.items():
                connection.requested = ending
                connection.ended.clear()
                task.cancel()
            await asyncio.gather(*[connection.ended.wait() for connection in ending_now])

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()

    async def _accept(self) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(self._listener)
            except OSError:  # no longer listening, or out of file descriptors
                await asyncio.sleep(max(0.01, self._closed_until - time.monotonic()))
                if time.monotonic() >= self._closed_until:
                    self._listener.listen(_BACKLOG)
                continue
            connection = _Connection(self.connections)
            self.connections += 1
            self._open[connection] = task = asyncio.create_task(self._serve(connection, client))
            task.add_done_callback(partial(self._forget, connection))

    def _forget(self, connection: _Connection, task: asyncio.Task[None]) -> None:
        del self._open[connection]

    async def _serve(self, connection: _Connection, client: socket.socket) -> None:
        self._notify(connection, "opened")
        with socket.socket(self._target[0], socket.SOCK_STREAM) as server, client:
            try:
                ending = await self._relay(connection, client, server)
            except asyncio.CancelledError:
                ending = connection.requested
            self._notify(connection, ending)
            while ending == "frozen":
                connection.ended.set()
                with suppress(asyncio.CancelledError):
                    await self._loop.create_future()
                ending = connection.requested
            if ending in ("reset", "refused"):
                for side in (client, server):
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.ended.set()

    async def _relay(self, connection: _Connection, client: socket.socket, server: socket.socket) -> Ending:
        for side in (client, server):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self._loop.sock_connect(server, self._target[1])
        except OSError:
            return "refused"
        ending: Ending = "closed"
        try:
            async with asyncio.TaskGroup() as group:
                for up, source, sink in ((True, client, server), (False, server, client)):
                    chunks = asyncio.Queue[Chunk](_MAX_IN_FLIGHT)
                    group.create_task(self._read(source, self.pacer(connection.number, up), chunks))
                    group.create_task(self._write(sink, chunks, connection, up))
        except* OSError:  # one side is closed; the other one is closed too
            ending = "reset"
        return ending

    async def _read(self, source: socket.socket, pacer: Pacer, chunks: asyncio.Queue[Chunk]) -> None:
        """Gives each chunk its due time, also the end of the stream (empty) and a reset (None)."""
        chunk: bytes | None = b" "
        while chunk:
            try:
                chunk = await self._loop.sock_recv(source, _CHUNK_BYTES)
            except OSError:
                chunk = None
            await chunks.put((chunk, pacer.due(len(chunk or b""), time.monotonic())))

    async def _write(
        self, sink: socket.socket, chunks: asyncio.Queue[Chunk], connection: _Connection, up: bool
    ) -> None:
        """Sends each chunk when it is due."""
        while True:
            chunk, due = await chunks.get()
            while (left := max(due, self._held_until) - time.monotonic()) > 0.0:
                await asyncio.sleep(left)
            if chunk is None:
                raise ConnectionResetError
            if not chunk:
                sink.shutdown(socket.SHUT_WR)
                return
            self._late.append(-left)
            await self._loop.sock_sendall(sink, chunk)
            connection.passed[up] += len(chunk)
            self.up_bytes += len(chunk) * up
            self.down_bytes += len(chunk) * (not up)

    def _notify(self, connection: _Connection, kind: Kind) -> None:
        down, up = connection.passed
        self._on_event(LinkEvent(connection.number, kind, up, down))


class _PreciseSelector(selectors.DefaultSelector):
    """Waits to the microsecond, where epoll alone waits for whole milliseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0.0 and self.fileno() < 1024:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0.0
        return super().select(timeout)


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


def _listener(at: Address) -> socket.socket:
    family, (host, port, *rest) = at
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port or _free_port(at), *rest))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error
    listener.setblocking(False)
    return listener


def _free_port(at: Address) -> int:
    """A free port by number: Linux keeps a port over a shutdown only if it was bound by number."""
    with socket.socket(at[0], socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(at[1])
        port: int = probe.getsockname()[1]
        return port
