"""Load on a server of this machine by many robots, and its service time, which that shows."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop
from numpy.typing import NDArray
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from specact.errors import RemoteError, SpecactError
from specact.rng import StepAddress
from specact.server.access import Address, Limits
from specact.server.capacity import ServiceTime
from specact.server.serve import serve
from specact.server.service import Service
from specact.wire.exchange import Contract, Exchange, Request
from specact.wire.messages import PATH, PROTOCOL, Hello, Reply, ask, encode, read_reply

_JOIN_WITHIN_S, _SETTLE_S, _MOST_REQUESTS = 30.0, 0.5, 64
# To measure a service time: rounds with a stage for each number of robots, at most so many, and its duration [s]. No
# round starts after the last second.
_ROUNDS, _MOST_ROBOTS, _STAGE_S, _MOST_S = 5, 256, 0.12, 5.0


@dataclass(frozen=True)
class Workload:
    """The messages that robots send to a server over their WebSockets.

    Attributes:
        path: of the URL.
        opening: the first message, which the server answers once; None where the server sends first.
        requests: sent cyclically.
        batch: batch size of the inference behind a reply; 0 for an error.
        headers: of the request that opens it.
    """

    path: str
    opening: bytes | None
    requests: Sequence[bytes]
    batch: Callable[[bytes], int]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """The result of a load test.

    Attributes:
        robots: connections.
        offered_hz: requests per second of all robots together; None for a closed loop without pauses.
        seconds: from the first request to the last answer.
        latencies_ms: of every answered request, from its due time to its answer ``[n]``.
        batch: mean batch size.
        errors: requests answered with an error.
    """

    robots: int
    offered_hz: float | None
    seconds: float
    latencies_ms: NDArray[np.float64]
    batch: float
    errors: int

    def summary(self) -> dict[str, Any]:
        """The result as plain values; throughput in verified steps per second, latencies in ms."""
        p50, p99 = np.quantile(self.latencies_ms if len(self.latencies_ms) else [np.nan], (0.5, 0.99)).tolist()
        return {
            "robots": self.robots, "offered_hz": self.offered_hz, "answered": len(self.latencies_ms),
            "errors": self.errors, "steps_per_s": len(self.latencies_ms) / self.seconds, "p50_ms": p50, "p99_ms": p99,
            "batch": self.batch,
        }  # fmt: skip


def measure_service(load: Callable[[], Exchange[Any]], max_batch: int) -> ServiceTime:
    """The time that a server on this machine takes for a batch, messages included.

    The server is a process of its own, on loopback, with the exchange of ``load``. If 4 robots or more ask without
    pause, requests wait while a batch is computed, so that it never waits; with 4 ``max_batch`` its batches are full.

    Raises:
        SpecactError: if the target cannot be served, or the server refuses a robot or a request.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe()
    server = context.Process(target=_serve, args=(load, max_batch, sender), daemon=True)
    server.start()
    sender.close()
    try:
        if isinstance(reply := receiver.recv(), Exception):
            raise reply
        counts = [count for power in range(max_batch.bit_length()) if (count := 4 << power) <= _MOST_ROBOTS]
        return _measure(reply[0], reply[1], counts)
    except EOFError:
        raise RemoteError("the server ended before it listened; what it printed says why") from None
    finally:
        server.kill()
        server.join()


def _serve(load: Callable[[], Exchange[Any]], max_batch: int, pipe: Connection) -> None:
    """Tells the server's port and its workload, or an error."""
    try:
        exchange = load()
        service = Service(exchange, Limits(max_batch=max_batch), Address(port=0))
        serve(service, lambda url: pipe.send((urlsplit(url).port, workload_of(exchange.contract))))
    except SpecactError as error:
        pipe.send(error)


def _measure(port: int, workload: Workload, counts: Sequence[int]) -> ServiceTime:
    stages, started = defaultdict[int, list[tuple[float, float]]](list), time.monotonic()
    for _ in range(_ROUNDS):
        for count in counts:
            load = run_load(port, workload, count, _STAGE_S, None)
            if load.errors:
                raise RemoteError("the server refused requests; what it printed says why")
            stages[count].append((load.batch, load.seconds * load.batch / len(load.latencies_ms)))
        if time.monotonic() - started > _MOST_S:
            break
    rows = (zip(*stage, strict=True) for stage in stages.values())
    return ServiceTime.fit({float(np.median(batches)): times for batches, times in rows})


def run_load(
    port: int, workload: Workload, robots: int, seconds: float, offered_hz: float | None, under_way: int = 1,
    started: Callable[[], None] | None = None,
) -> Load:  # fmt: skip
    """Sends requests of many robots concurrently to the server on this machine.

    Args:
        port: of the server, on loopback.
        workload: the messages.
        robots: connections.
        seconds: duration.
        offered_hz: requests per second of all robots together, evenly spaced. Latency counts from the due time of a
            request, also where the previous answer was late; requests not sent by the end are dropped. None for as
            fast as possible.
        under_way: requests in flight per robot; latencies are valid for 1.
        started: called half a second after the start.

    Raises:
        RemoteError: if the server refuses a robot or answers nothing.
    """
    join = partial(connected_robot, port, workload)
    return uvloop.run(run_robots(join, robots, seconds, offered_hz, under_way, started))


async def connected_robot(port: int, workload: Workload) -> Robot:
    """A robot that the server on this machine has welcomed."""
    robot = _WebSocketRobot(asyncio.get_running_loop(), workload)
    await ws_connect(lambda: robot, f"ws://127.0.0.1:{port}{workload.path}", extra_headers=workload.headers)
    await robot.welcomed
    return robot


def workload_of(
    contract: Contract, deadline_ms: float = 10_000.0, kind: str = "infer", requests: Sequence[Request] = (),
    token: str = "",
) -> Workload:  # fmt: skip
    """These requests in turn, or one with an observation of zeros."""
    requests = requests or [Request(contract.observation.zeros(), StepAddress(0, 0, 0, 0))]
    messages = [
        encode(ask(replace(request, address=StepAddress(0, 0, 0, number)), contract, kind, number, deadline_ms))
        for number, request in zip(range(_MOST_REQUESTS), cycle(requests), strict=False)
    ]
    hello = Hello(PROTOCOL, "load", contract.family, dict(contract.spec))
    return Workload(PATH, encode(hello), messages, _batch, {"Authorization": f"Bearer {token}"})


async def run_robots(
    join: Callable[[], Awaitable[Robot]], robots: int, seconds: float, offered_hz: float | None, under_way: int = 1,
    started: Callable[[], None] | None = None,
) -> Load:  # fmt: skip
    """:func:`run_load` for any protocol: ``join`` connects one robot."""
    loop = asyncio.get_running_loop()
    connected: list[Robot] = []
    try:
        for _ in range(robots):
            connected.append(await asyncio.wait_for(join(), _JOIN_WITHIN_S))  # noqa: PERF401 - all are hung up on
        start = time.monotonic() + 0.05
        period_s, stagger_s = (robots / offered_hz, 1.0 / offered_hz) if offered_hz else (None, 0.0)
        for number, robot in enumerate(connected):
            robot.start(start + number * stagger_s, period_s, start + seconds, under_way)
        if started is not None:
            loop.call_later(_SETTLE_S, started)
        await asyncio.gather(*(robot.finished for robot in connected))
        took_s = time.monotonic() - start
    except TimeoutError:
        raise RemoteError("the server did not welcome a robot in time") from None
    finally:
        for robot in connected:
            robot.hang_up()
    results = np.array([result for robot in connected for result in robot.results], np.float64).reshape(-1, 2)
    if not len(results):
        raise RemoteError("the server answered none of the requests")
    latencies, batches = results[results[:, 1] > 0].T
    # Each inference of b requests occurs b times.
    batch = len(batches) / max(1.0, float((1.0 / batches).sum()))
    return Load(robots, offered_hz, took_s, 1e3 * latencies, batch, len(results) - len(latencies))


class Robot(ABC):
    """Sends requests repeatedly; a subclass implements the protocol and calls :meth:`answered` for each answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due, self._until = 0.0, 0.0
        self._period_s: float | None = None
        self.finished: asyncio.Future[None] = loop.create_future()
        self.results: list[tuple[float, int]] = []

    def start(self, due: float, period_s: float | None, until: float, under_way: int) -> None:
        """Sends from ``due`` to ``until`` [s, monotonic clock], periodically or without pauses."""
        self._due, self._period_s, self._until = due, period_s, until
        for _ in range(under_way):
            self._loop.call_later(due - time.monotonic(), self._ask)

    def answered(self, batch: int) -> None:
        """Records an answer and the batch size of its inference; 0 for an error."""
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


class _WebSocketRobot(Robot, WSListener):
    """A robot with one connection and minimal work per message, because it shares the processor with the server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workload: Workload) -> None:
        super().__init__(loop)
        self._opening, self._batch, self._requests = workload.opening, workload.batch, cycle(workload.requests)
        self.welcomed: asyncio.Future[None] = loop.create_future()

    def send(self) -> None:
        self._transport.send(WSMsgType.BINARY, next(self._requests))

    def hang_up(self) -> None:
        self._transport.disconnect(False)

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        if self._opening is not None:
            transport.send(WSMsgType.BINARY, self._opening)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        for future in (self.welcomed, self.finished):
            if not future.done():
                future.set_exception(RemoteError("the server closed a robot's connection"))

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type != WSMsgType.BINARY:
            transport.disconnect(False)
        elif self.welcomed.done():
            self.answered(self._batch(frame.get_payload_as_bytes()))
        else:
            self.welcomed.set_result(None)


def _batch(payload: bytes) -> int:
    reply = read_reply(payload)
    return reply.batch if isinstance(reply, Reply) else 0
