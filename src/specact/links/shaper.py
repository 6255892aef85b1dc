"""Real traffic shaped like a link model: by a TCP relay, or by the kernel (netem)."""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, Self

import numpy as np

from specact.errors import ConfigError
from specact.links.model import AddedDelay, Link, LossyLink, SteadyLink
from specact.records import Seed, validated
from specact.rng import Role, stream
from specact.types import Floats

Address = tuple[socket.AddressFamily, Any]
Chunk = tuple[bytes | None, float]
Ending = Literal["closed", "reset", "refused"]
# Told of a connection's number, of what happened to it, and of the bytes up and down so far.
OnEvent = Callable[[int, Literal["opened"] | Ending, int, int], None]
_CHUNK_BYTES, _MAX_IN_FLIGHT, _BACKLOG, _MAX_SAMPLES = 16 * 1024, 256, 1024, 10_000


class Pacer:
    """One direction of one connection: a queue that preserves the order of messages.

    A message waits while the link is :meth:`~specact.links.model.Link.busy` with those before it; one that would
    overtake by jitter arrives together with the one before it. ``start`` is the link's time 0 [s].
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


class Shaper:
    """Listens on a port and relays every connection to a target, with the delay and rate of a link model.

    A context manager. Each connection has its own link, whose time 0 is the shaper's start, and random streams. What
    one ``recv`` gives is a message; at most 256 per direction are in flight, and beyond that the sender waits. Its
    event loop has a thread, which calls ``on_event`` when a connection is opened, closed by both sides, reset, or
    refused by the target: where others keep the interpreter busy, run ``specact proxy`` instead.

    Attributes:
        port, connections: that it listens on (0 takes a free one), and the number of those accepted so far.
        up_bytes, down_bytes: relayed to the target, and to clients.

    Raises:
        ConfigError: if an address cannot be resolved or listened on, or for a seed outside [0, 2^64).
    """

    @validated
    def __init__(
        self, link: Link, host: str, port: int, *, seed: Seed = 0, listen_host: str = "127.0.0.1", listen_port: int = 0,
        on_event: OnEvent = lambda connection, kind, up_bytes, down_bytes: None,
    ) -> None:  # fmt: skip
        self._link, self._seed, self._on_event = link, seed, on_event
        self._target, self._listen_at = resolve(host, port), resolve(listen_host, listen_port)
        self._late: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.port = self.connections = self.up_bytes = self.down_bytes = 0
        self._start, self._running = 0.0, threading.Event()

    def __enter__(self) -> Self:
        self._start, self._listener = time.monotonic(), _listener(self._listen_at)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="shaper", daemon=True)
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    @property
    def lateness(self) -> Floats:
        """Delay of the last messages beyond their due time [s], float64 ``[n]``, n <= 10,000.

        Caused by a receiver that does not read, or by other load on this machine.
        """
        return np.array(list(self._late), dtype=np.float64)

    def summary(self) -> str:
        """What it relayed, and how late, in words."""
        counts = f"{self.connections} connections, {self.up_bytes} bytes up, {self.down_bytes} bytes down"
        if not len(late_ms := 1e3 * self.lateness):
            return counts
        median, high = np.quantile(late_ms, [0.5, 0.99])
        return (
            f"{counts}; of the last {len(late_ms)} messages half left {median:.3f} ms late or less, 99 % {high:.3f} ms"
        )

    def pacer(self, connection: int, up: bool) -> Pacer:
        """What delays the messages of a connection in one direction."""
        rng = stream(self._seed, Role.LINK, robot=connection, step=0 if up else 1)
        return Pacer(self._link, up, self._start, rng)

    def _run(self) -> None:
        with (
            self._listener,
            suppress(asyncio.CancelledError),
            asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_PreciseSelector())) as runner,
        ):
            runner.run(self._accept())

    async def _accept(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._task = asyncio.get_running_loop(), task
        self._running.set()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    client, _ = await self._loop.sock_accept(self._listener)
                except OSError:  # out of file descriptors
                    await asyncio.sleep(0.01)
                    continue
                group.create_task(self._serve(self.connections, client))
                self.connections += 1

    async def _serve(self, number: int, client: socket.socket) -> None:
        passed = [0, 0]  # bytes down and up
        self._on_event(number, "opened", 0, 0)
        ending: Ending = "closed"
        with socket.socket(self._target[0], socket.SOCK_STREAM) as server, client:
            try:
                ending = await self._relay(number, client, server, passed)
            finally:
                self._on_event(number, ending, passed[1], passed[0])
            if ending != "closed":
                for side in (client, server):
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _relay(self, number: int, client: socket.socket, server: socket.socket, passed: list[int]) -> Ending:
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
                    group.create_task(self._read(source, self.pacer(number, up), chunks))
                    group.create_task(self._write(sink, chunks, passed, up))
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

    async def _write(self, sink: socket.socket, chunks: asyncio.Queue[Chunk], passed: list[int], up: bool) -> None:
        """Sends each chunk when it is due."""
        while True:
            chunk, due = await chunks.get()
            while (left := due - time.monotonic()) > 0.0:
                await asyncio.sleep(left)
            if chunk is None:
                raise ConnectionResetError
            if not chunk:
                sink.shutdown(socket.SHUT_WR)
                return
            self._late.append(-left)
            await self._loop.sock_sendall(sink, chunk)
            passed[up] += len(chunk)
            self.up_bytes += len(chunk) * up
            self.down_bytes += len(chunk) * (not up)


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
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"cannot resolve the address {host}:{port} ({error}); write HOST:PORT") from error
    family, _, _, _, address = min(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _listener(at: Address) -> socket.socket:
    family, address = at
    try:
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another port") from error
    listener.setblocking(False)
    return listener


def netem_options(link: Link, up: bool) -> str | None:
    """The options of ``tc qdisc add dev DEV root netem`` that emulate one direction of this link.

    None for a link that is recorded or has outages. A retransmission timeout has no option, because TCP has its own.
    ``up`` is the direction that leaves DEV on the robot.
    """
    extra_ms, rate, loss = 0.0, float("inf"), 0.0
    while not isinstance(link, SteadyLink):
        if isinstance(link, AddedDelay):
            extra_ms, rate = extra_ms + link.delay_ms / 2.0, min(rate, link.rate_mbit_s or rate)
        elif isinstance(link, LossyLink):
            loss = 1.0 - (1.0 - loss) * (1.0 - link.loss)
        else:
            return None
        link = link.link
    options = [f"delay {link.rtt_ms / 2.0 + extra_ms:.3f}ms"]
    if link.jitter_ms:
        options.append(f"{link.jitter_ms / 2.0**0.5:.3f}ms distribution normal")
    rate = min(rate, link.up_mbit_s if up else link.down_mbit_s)
    options.append(f"rate {rate * 1e3:.0f}kbit")
    if loss:
        options.append(f"loss random {100.0 * loss:g}%")
    return " ".join(options)


@contextmanager
def kernel_shaped(device: str, link: Link, up: bool) -> Iterator[str]:
    """Shapes all traffic that leaves a network device as on this link, inside the context; needs root.

    An existing queueing discipline of the device is neither replaced nor removed. Yields the command for it.

    Raises:
        ConfigError: for an unknown device, a recorded link or outages, or if ``tc`` fails.
    """
    devices = sorted(name for _, name in socket.if_nameindex())
    if device not in devices:
        raise ConfigError(f"unknown network device {device!r}; available: {', '.join(devices)}")
    if (options := netem_options(link, up)) is None:
        raise ConfigError("netem cannot emulate a recorded link, nor outages; use the relay, specact proxy")
    command = f"tc qdisc add dev {device} root netem {options}"
    _tc(command)
    try:
        yield command
    finally:
        _tc(f"tc qdisc del dev {device} root netem")


def _tc(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
    except OSError as error:
        done, said = None, f"{error.strerror}; tc is of the package iproute2"
    if done is None or done.returncode:
        raise ConfigError(
            f"{command!r} failed ({said}); it needs root, a kernel with sch_netem, and a device without another "
            "traffic shaper; the relay, specact proxy, needs none of them"
        )
