"""Many robots at one server: how many verified steps it gives per second, and how long the slowest wait."""

from __future__ import annotations

import asyncio
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop
from msgpack import unpackb
from numpy.typing import NDArray

from specact.errors import RemoteError
from specact.families.codes.bundle import Bundle
from specact.lab.processes import ServerProcess
from specact.observation import ObservationSpec, Window
from specact.rng import StepAddress
from specact.wire import msgpack
from specact.wire.dialect import Dialect
from specact.wire.handshake import Hello, hello_fields
from specact.wire.messages import Request, request_fields

_JOIN_WITHIN_S, _SETTLE_S, _MOST_REQUESTS = 30.0, 0.5, 64
# Robots of a soak, their requests per second together, and seconds between two looks at the server's memory.
_SOAK_ROBOTS, _SOAK_HZ, _SOAK_LOOK_S = 64, 500.0, 10.0
_BINARY, _PING, _PONG = 0x82, 0x89, 0x8A


@dataclass(frozen=True)
class Speech:
    """What robots say to a server over their WebSockets.

    Attributes:
        path: of the URL.
        opening: the first message, to which the server has one answer; None where the server speaks first.
        requests: sent in turn.
        batch: of a reply: how many requests were answered by the same inference; 0 for an error.
    """

    path: str
    opening: bytes | None
    requests: Sequence[bytes]
    batch: Callable[[bytes], int]


@dataclass(frozen=True)
class Load:
    """What a number of robots met.

    Attributes:
        robots: connections.
        offered_hz: requests per second of all robots together; None where each asks again as soon as it is answered.
        seconds: from when the first of them asked to the last answer.
        latencies_ms: of every answered request, from its due time to its answer ``[n]``.
        robot: whose request each of these was ``[n]``.
        batch: requests per inference, on average.
        errors: requests answered with an error.
    """

    robots: int
    offered_hz: float | None
    seconds: float
    latencies_ms: NDArray[np.float64]
    robot: NDArray[np.intp]
    batch: float
    errors: int

    def summary(self) -> dict[str, Any]:
        """As plain values; throughput in verified steps per second, latencies in ms."""
        p50, p99 = np.quantile(self.latencies_ms if len(self.latencies_ms) else [np.nan], (0.5, 0.99)).tolist()
        return {
            "robots": self.robots,
            "offered_hz": self.offered_hz,
            "answered": len(self.latencies_ms),
            "errors": self.errors,
            "steps_per_s": len(self.latencies_ms) / self.seconds,
            "p50_ms": p50,
            "p99_ms": p99,
            "batch": self.batch,
        }


def run_load(
    port: int, speech: Speech, robots: int, seconds: float, offered_hz: float | None, under_way: int = 1,
    started: Callable[[], None] | None = None,
) -> Load:  # fmt: skip
    """Asks the server on this machine's ``port`` with many robots at once.

    Args:
        port: of the server, on loopback.
        speech: what the robots say.
        robots: connections.
        seconds: how long.
        offered_hz: requests per second of all robots together, evenly spread; a robot that is not answered in time
            falls behind and its waiting counts from when the request was due; what it has not asked when the time is
            over it never asks. None for as fast as possible.
        under_way: requests of each robot at a time; latencies are those of one.
        started: called when all have asked for half a second.

    Raises:
        RemoteError: if the server refuses a robot or answers nothing.
    """
    frames = [_frame(_BINARY, payload) for payload in speech.requests]

    async def join() -> Robot:
        loop = asyncio.get_running_loop()
        _, robot = await loop.create_connection(lambda: _WebSocketRobot(loop, speech, frames), "127.0.0.1", port)
        await robot.welcomed
        return robot

    return uvloop.run(run_robots(join, robots, seconds, offered_hz, under_way, started))


def speech_of(dialect: Dialect, deadline_ms: float = 10_000.0) -> Speech:
    """Requests about random observations, as a device that speaks this makes them."""
    rng = np.random.default_rng(0)
    requests = [_encoded_request(dialect.observation, rng, number, deadline_ms) for number in range(_MOST_REQUESTS)]
    hello = Hello("load", dialect.family, dialect.agreed)
    return Speech("/v1/stream", msgpack.encode(hello_fields(hello)), requests, _batch)


def run_soak(
    server: ServerProcess, bundle: Bundle, seconds: float, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Keeps 64 robots asking, 500 times a second together, and watches the memory that the server holds.

    Args:
        server: on this machine, which has to be Linux.
        bundle: what it serves.
        seconds: how long, more than 0.
        progress: told (seconds passed, seconds in all).

    Returns:
        ``seconds``, ``first_mib``, ``last_mib``, ``slope_mib_per_min`` (of a line through the second half) and
        ``samples``, each (seconds, MiB).

    Raises:
        RemoteError: if the server refuses a robot or answers nothing.
    """
    began, samples, speech = time.monotonic(), [], speech_of(bundle.codec.dialect)
    while (passed := time.monotonic() - began) < seconds:
        progress(int(passed), int(seconds))
        run_load(server.port, speech, _SOAK_ROBOTS, min(_SOAK_LOOK_S, seconds), _SOAK_HZ)
        samples.append((time.monotonic() - began, _resident_mib(server.pid)))
    when, held = np.array(samples).T
    later = when >= when[-1] / 2
    slope = float(np.polyfit(when[later], held[later], 1)[0]) if later.sum() > 1 else 0.0
    return {
        "seconds": when[-1],
        "first_mib": held[0],
        "last_mib": held[-1],
        "slope_mib_per_min": 60.0 * slope,
        "samples": samples,
    }


def _encoded_request(spec: ObservationSpec, rng: np.random.Generator, identity: int, deadline_ms: float) -> bytes:
    """A request about a random observation, as the bytes of its frame."""
    arrays = {
        name: np.zeros(field.window_shape, np.uint8)
        if field.is_image
        else rng.uniform(-1, 1, field.window_shape).astype(np.float32)
        for name, field in spec.fields.items()
    }
    request = Request("infer", identity, deadline_ms, Window(arrays), StepAddress(0, 0, 0, identity))
    return msgpack.encode(request_fields(request, spec))


async def run_robots(
    join: Callable[[], Awaitable[Robot]], robots: int, seconds: float, offered_hz: float | None, under_way: int = 1,
    started: Callable[[], None] | None = None,
) -> Load:  # fmt: skip
    """:func:`run_load`, whatever the robots speak: ``join`` connects one."""
    loop = asyncio.get_running_loop()
    asking: list[Robot] = []
    try:
        for _ in range(robots):
            asking.append(await asyncio.wait_for(join(), _JOIN_WITHIN_S))  # noqa: PERF401 - all are hung up on
        start = time.monotonic() + 0.05
        period_s, stagger_s = (robots / offered_hz, 1.0 / offered_hz) if offered_hz else (None, 0.0)
        for number, robot in enumerate(asking):
            robot.start(start + number * stagger_s, period_s, start + seconds, under_way)
        if started is not None:
            loop.call_later(_SETTLE_S, started)
        await asyncio.gather(*(robot.finished for robot in asking))
        took_s = time.monotonic() - start
    except TimeoutError:
        raise RemoteError("the server did not welcome a robot in time") from None
    finally:
        for robot in asking:
            robot.hang_up()
    rows = [(*found, number) for number, robot in enumerate(asking) for found in robot.results]
    results = np.array(rows, dtype=np.float64).reshape(-1, 3)
    if not len(results):
        raise RemoteError("the server answered none of the requests")
    latencies, batches, owners = results[results[:, 1] > 0].T
    # Each inference of b requests was seen b times.
    batch = len(batches) / max(1.0, float((1.0 / batches).sum()))
    errors = len(results) - len(latencies)
    return Load(robots, offered_hz, took_s, 1e3 * latencies, owners.astype(np.intp), batch, errors)


class Robot(ABC):
    """Asks again and again; how, says a subclass, which calls :meth:`take` for each answer.

    Args:
        loop: that it runs on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due, self._until = 0.0, 0.0
        self._period_s: float | None = None
        self.finished: asyncio.Future[None] = loop.create_future()
        self.results: list[tuple[float, int]] = []

    def start(self, due: float, period_s: float | None, until: float, under_way: int) -> None:
        """Asks from ``due`` to ``until`` [s, monotonic clock], every so many seconds or all the time."""
        self._due, self._period_s, self._until = due, period_s, until
        for _ in range(under_way):
            self._loop.call_later(due - time.monotonic(), self._ask)

    def take(self, batch: int) -> None:
        """An answer, and how many requests the same inference answered; 0 for an error."""
        self.results.append((time.monotonic() - self._due, batch))
        self._due += self._period_s or 0.0
        self._ask()

    @abstractmethod
    def send(self) -> None:
        """Sends a request."""

    @abstractmethod
    def hang_up(self) -> None:
        """Ends the connection, without waiting for the server."""

    def _ask(self) -> None:
        now = time.monotonic()
        if self._period_s is None:
            self._due = now
        if max(self._due, now) >= self._until:
            if not self.finished.done():
                self.finished.set_result(None)
        elif self._due > now:
            self._loop.call_later(self._due - now, self._ask)
        else:
            self.send()


class _WebSocketRobot(Robot, asyncio.Protocol):
    """One connection. It does as little as it can: it shares the processor with the server.

    Args:
        loop: that it runs on.
        speech: what it says.
        frames: its requests, as they cross.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, speech: Speech, frames: Sequence[bytes]) -> None:
        super().__init__(loop)
        self._speech, self._frames = speech, frames
        self._received, self._upgraded, self._sent = bytearray(), False, 0
        self.welcomed: asyncio.Future[None] = loop.create_future()

    def send(self) -> None:
        self._transport.write(self._frames[self._sent % len(self._frames)])
        self._sent += 1

    def hang_up(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        head = f"GET {self._speech.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        self._transport.write((head + key).encode())

    def connection_lost(self, exc: Exception | None) -> None:
        for waited in (self.welcomed, self.finished):
            if not waited.done():
                waited.set_exception(RemoteError("the server closed a robot's connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._upgraded:
            head, end, rest = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 101 "):
                self._transport.abort()
                return
            self._received, self._upgraded = rest, True
            if self._speech.opening is not None:
                self._transport.write(_frame(_BINARY, self._speech.opening))
        while (found := _first_frame(self._received)) is not None:
            kind, payload, size = found
            del self._received[:size]
            if kind == _PING:
                self._transport.write(_frame(_PONG, payload))
            elif kind != _BINARY:
                self._transport.abort()
            elif self.welcomed.done():
                self.take(self._speech.batch(payload))
            else:
                self.welcomed.set_result(None)


def _frame(kind: int, payload: bytes) -> bytes:
    """A whole frame of a client (RFC 6455, 5.2), masked with zeros, which change nothing."""
    size = len(payload)
    if size < 126:
        head = bytes((kind, 0x80 | size))
    elif size < 1 << 16:
        head = struct.pack(">BBH", kind, 0x80 | 126, size)
    else:
        head = struct.pack(">BBQ", kind, 0x80 | 127, size)
    return head + bytes(4) + payload


def _first_frame(data: bytearray) -> tuple[int, bytes, int] | None:
    """Kind, content and size of the server's first frame, if it is there as a whole."""
    if len(data) < 2:
        return None
    length, start = data[1], 2
    if length > 125:
        start = 4 if length == 126 else 10
        length = int.from_bytes(data[2:start])
    if len(data) < start + length:
        return None
    return data[0], bytes(data[start : start + length]), start + length


def _batch(payload: bytes) -> int:
    # Arrays stay packed: to read them would take the processor from the server.
    times = unpackb(payload).get("times")
    return int(times["batch"]) if times else 0


def _resident_mib(pid: int) -> float:
    """Memory that a process holds [MiB], from Linux' /proc."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20
