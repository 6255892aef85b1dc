"""Load test of a server: throughput in verified steps per second, tail latency, and neighbours.

Servers with and without batching are asked by many robots, in turn in each round, as fast as they can and at a rate.
Then one robot at 20 Hz with a deadline of 50 ms runs beside neighbours that keep 32 requests in flight each.

Run: python benchmarks/server.py [--bundle NAME] [--robots N ...] [--rounds N] [--seconds S] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from specact.errors import RemoteError
from specact.lab.rollout.processes import serving
from specact.load import load_pair
from specact.pair import Pair
from specact.rng import StepAddress
from specact.wire.exchange import Contract, Request
from specact.wire.messages import PATH, PROTOCOL, Hello, Reply, ask, encode, read_reply

_JOIN_WITHIN_S, _SETTLE_S, _MOST_REQUESTS = 30.0, 0.5, 64
# Neighbours, the requests that each keeps in flight, and of the robot beside them rate, deadline and steps.
NEIGHBOURS, UNDER_WAY, RATE_HZ, DEADLINE_MS, STEPS = (0, 8, 32), 32, 20.0, 50.0, 160
OFFERED_HZ, BATCHES = 1000.0, (64, 1)


@dataclass(frozen=True)
class Workload:
    """The messages that robots send to a server over their WebSockets.

    Attributes:
        path: of the URL.
        opening: the first message, which the server answers once; None where the server sends first.
        requests: sent cyclically.
        batch: batch size of the inference behind a reply; 0 for an error.
    """

    path: str
    opening: bytes | None
    requests: Sequence[bytes]
    batch: Callable[[bytes], int]


@dataclass(frozen=True)
class Load:
    """The result of a load test.

    Attributes:
        robots: connections.
        offered_hz: requests per second of all robots together; None for a closed loop without pauses.
        seconds: from the first request to the last answer.
        latencies_ms: of every answered request, from its due time to its answer ``[n]``.
        robot: index of the robot of each request ``[n]``.
        batch: mean batch size.
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

    async def join() -> Robot:
        robot = _WebSocketRobot(asyncio.get_running_loop(), workload)
        await ws_connect(lambda: robot, f"ws://127.0.0.1:{port}{workload.path}")
        await robot.welcomed
        return robot

    return uvloop.run(run_robots(join, robots, seconds, offered_hz, under_way, started))


def workload_of(contract: Contract, deadline_ms: float = 10_000.0) -> Workload:
    """Requests with observations of zeros, which a server does not take shorter for."""
    window = contract.observation.zeros()
    requests = [
        encode(ask(Request(window, StepAddress(0, 0, 0, number)), contract, "infer", number, deadline_ms))
        for number in range(_MOST_REQUESTS)
    ]
    hello = Hello(PROTOCOL, "load", contract.family, dict(contract.spec))
    return Workload(PATH, encode(hello), requests, _batch)


def run_beside(port: int, bundle: Pair[Any], neighbours: int) -> dict[str, Any]:
    """The steps that one robot misses while neighbours flood the same server from another process."""
    context = multiprocessing.get_context("spawn")
    # Half a period less, so that no further request becomes due.
    ready, seconds = context.Event(), (STEPS - 0.5) / RATE_HZ
    assert bundle.path is not None
    # It ends by itself some seconds later, should this process fail to kill it.
    flooding = context.Process(target=_flood, args=(port, bundle.path, neighbours, seconds + 10.0, ready))
    if neighbours:
        flooding.start()
    try:
        if neighbours and not ready.wait(60.0):
            raise RemoteError(f"{neighbours} neighbours did not start within a minute")
        load = run_load(port, workload_of(bundle.exchange.contract, DEADLINE_MS), 1, seconds, RATE_HZ)
    finally:
        if neighbours:
            flooding.kill()
            flooding.join()
    missed = STEPS - int((load.latencies_ms <= DEADLINE_MS).sum())
    return {"neighbours": neighbours, "steps": STEPS, "missed": missed, **load.summary()}


def _flood(port: int, path: Path, robots: int, seconds: float, ready: Event) -> None:
    workload = workload_of(load_pair(path).exchange.contract)
    run_load(port, workload, robots, seconds, None, under_way=UNDER_WAY, started=ready.set)


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
    rows = [(*result, number) for number, robot in enumerate(connected) for result in robot.results]
    results = np.array(rows, dtype=np.float64).reshape(-1, 3)
    if not len(results):
        raise RemoteError("the server answered none of the requests")
    latencies, batches, owners = results[results[:, 1] > 0].T
    # Each inference of b requests occurs b times.
    batch = len(batches) / max(1.0, float((1.0 / batches).sum()))
    errors = len(results) - len(latencies)
    return Load(robots, offered_hz, took_s, 1e3 * latencies, owners.astype(np.intp), batch, errors)


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
    """One connection, with minimal work per message, because it shares the processor with the server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workload: Workload) -> None:
        super().__init__(loop)
        self._workload, self._sent = workload, 0
        self.welcomed: asyncio.Future[None] = loop.create_future()

    def send(self) -> None:
        self._transport.send(WSMsgType.BINARY, self._workload.requests[self._sent % len(self._workload.requests)])
        self._sent += 1

    def hang_up(self) -> None:
        self._transport.disconnect(False)

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        if self._workload.opening is not None:
            transport.send(WSMsgType.BINARY, self._workload.opening)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        for future in (self.welcomed, self.finished):
            if not future.done():
                future.set_exception(RemoteError("the server closed a robot's connection"))

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type != WSMsgType.BINARY:
            transport.disconnect(False)
        elif self.welcomed.done():
            self.answered(self._workload.batch(frame.get_payload_as_bytes()))
        else:
            self.welcomed.set_result(None)


def _batch(payload: bytes) -> int:
    reply = read_reply(payload)
    return reply.batch if isinstance(reply, Reply) else 0


def measure(bundle: str, robots: Sequence[int], rounds: int, seconds: float) -> dict[str, Any]:
    """A row of each number of robots, offered load and batch size in each round, and what neighbours do."""
    pair = load_pair(bundle)
    assert pair.path is not None
    workload, rows, beside = workload_of(pair.exchange.contract), [], []
    with ExitStack() as stack:
        limits = {size: ("--max-batch", str(size), "--max-queue", "1024") for size in BATCHES}
        servers = {size: stack.enter_context(serving(pair.path, *words)) for size, words in limits.items()}
        for turn in range(rounds):
            for count in robots:
                for offered_hz in (None, OFFERED_HZ):
                    for size, server in servers.items():
                        load = run_load(server.port, workload, count, seconds, offered_hz)
                        rows.append({"max_batch": size, "round": turn, **load.summary()})
                        print(rows[-1], flush=True)
        usual = stack.enter_context(serving(pair.path))
        for neighbours in NEIGHBOURS:
            beside.append(run_beside(usual.port, pair, neighbours))
            print(beside[-1], flush=True)
    return {"bundle": pair.name, "seconds": seconds, "rows": rows, "beside": beside}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", default="ball")
    parser.add_argument("--robots", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = measure(options.bundle, options.robots, options.rounds, options.seconds)
    if options.out is not None:
        options.out.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
