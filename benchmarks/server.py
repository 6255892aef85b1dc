"""Load on a server of this machine: greedy neighbours, and minutes of work.

One robot at 20 Hz with a deadline of 50 ms runs beside crowds that send as fast as they can. With ``--soak`` 64 robots
ask without pause for so many minutes, in which memory and open files of the server must not grow. Servers have the
first core, everything else the second.

Run: python benchmarks/server.py [--bundle NAME] [--steps N] [--soak MINUTES] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from specact.errors import RemoteError
from specact.lab.rollout.processes import ServerProcess, serving
from specact.load import load_pair
from specact.rng import StepAddress
from specact.wire.exchange import Contract, Request
from specact.wire.messages import PATH, PROTOCOL, Hello, Reply, ask, encode, read_reply

_JOIN_WITHIN_S, _SETTLE_S, _MOST_REQUESTS = 30.0, 0.5, 64
RATE_HZ, DEADLINE_MS = 20.0, 50.0
# Of crowds: connections, and requests that each keeps in flight.
CROWDS = {
    "nobody": (0, 0), "32 in flight each": (32, 32), "4 in flight each": (128, 4), "malformed requests": (32, 32),
    "one token": (32, 32), "no token": (32, 1), "rounds of a flow": (1, 32),
}  # fmt: skip
FLOW, TOKENS = "ball-chase-flow", {"robot": "the-token-of-the-robot", "crowd": "the-token-of-the-crowd"}
SOAK_ROBOTS, SOAK_PIECES, GROWTH = 64, 40, 1.02
_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def core(number: int) -> Iterator[None]:
    """This process, and those that it starts, on one core, if the machine has two or more."""
    if len(_CORES) > 1:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_CORES[number]})
    try:
        yield
    finally:
        if len(_CORES) > 1:
            os.sched_setaffinity(0, before)


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
        await ws_connect(lambda: robot, f"ws://127.0.0.1:{port}{workload.path}", extra_headers=workload.headers)
        await robot.welcomed
        return robot

    return uvloop.run(run_robots(join, robots, seconds, offered_hz, under_way, started))


def workload_of(
    contract: Contract, deadline_ms: float = 10_000.0, kind: str = "infer", requests: Sequence[Request] = (),
    robot: str = "load",
) -> Workload:  # fmt: skip
    """These requests in turn, or one with an observation of zeros."""
    given = requests or [Request(contract.observation.zeros(), StepAddress(0, 0, 0, 0))]
    messages = [
        encode(ask(replace(request, address=StepAddress(0, 0, 0, number)), contract, kind, number, deadline_ms))
        for number, request in zip(range(_MOST_REQUESTS), cycle(given), strict=False)
    ]
    hello = Hello(PROTOCOL, robot, contract.family, dict(contract.spec))
    return Workload(PATH, encode(hello), messages, _batch, {"Authorization": f"Bearer {TOKENS.get(robot, '')}"})


def run_beside(server: ServerProcess, bundle: str, crowd: str, steps: int) -> dict[str, Any]:
    """The steps that one robot misses while a crowd floods the same server from another process."""
    context = multiprocessing.get_context("spawn")
    # Half a period less, so that no further request becomes due.
    ready, seconds = context.Event(), (steps - 0.5) / RATE_HZ
    # It ends by itself some seconds later, should this process fail to kill it.
    flooding = context.Process(target=_flood, args=(server.port, bundle, crowd, seconds + 10.0, ready))
    if CROWDS[crowd][0]:
        flooding.start()
    try:
        if CROWDS[crowd][0] and not ready.wait(60.0):
            raise RemoteError(f"the crowd, {crowd}, did not start within a minute")
        watched = workload_of(load_pair(bundle).exchange.contract, DEADLINE_MS, robot="robot")
        before = processor_s(server.pid)
        load = run_load(server.port, watched, 1, seconds, RATE_HZ)
        busy = (processor_s(server.pid) - before) / load.seconds
    finally:
        if CROWDS[crowd][0]:
            flooding.kill()
            flooding.join()
    missed = steps - int((load.latencies_ms <= DEADLINE_MS).sum())
    told = load.summary()
    return {
        "crowd": crowd, "connections": CROWDS[crowd][0], "steps": steps, "missed": missed, "share": missed / steps,
        "busy": busy, "p50_ms": told["p50_ms"], "p99_ms": told["p99_ms"],
    }  # fmt: skip


def processor_s(process: int) -> float:
    """What a process has had of a processor so far [s], with the threads that have ended."""
    return time.clock_gettime(~process << 3 | 2)  # Linux: the clock of another process


def _flood(port: int, bundle: str, crowd: str, seconds: float, ready: Event) -> None:
    # The robot, which has the same core, goes first.
    os.nice(10)
    robots, under_way = CROWDS[crowd]
    pair = load_pair(bundle)
    contract = pair.exchange.contract
    workload = workload_of(contract, robot="crowd")
    if crowd == "no token":
        from others import HttpRobot

        async def join() -> Robot:
            unnamed = b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            return HttpRobot(asyncio.get_running_loop(), port, [unnamed])

        uvloop.run(run_robots(join, robots, seconds, None, under_way, ready.set))
        return
    still = Request(contract.observation.zeros(), StepAddress(0, 0, 0, 0))
    if crowd == "malformed requests":
        short, strange = (ask(still, contract, "infer", 0, DEADLINE_MS) for _ in range(2))
        del short.window[1:]
        strange.window[:] = np.full(len(strange.window) // 4, np.nan, np.float32).tobytes()
        workload = replace(workload, requests=[encode(short), encode(strange)])
    elif crowd == "rounds of a flow":
        proposal = pair.drafter().propose(pair.observation.zeros(), np.random.default_rng(0))
        arrays = pair.exchange.request(proposal)  # type: ignore[attr-defined]
        workload = workload_of(contract, kind="verify", requests=[replace(still, arrays=arrays)], robot="crowd")
    run_load(port, workload, robots, seconds, None, under_way, ready.set)


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


def beside(bundle: str, steps: int) -> list[dict[str, Any]]:
    """What a robot at 20 Hz misses beside every crowd."""
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokens = folder / "tokens"
        tokens.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
        usual, flow = (stack.enter_context(started(name)) for name in (bundle, FLOW))
        locked = stack.enter_context(started(bundle, "--tokens", str(tokens)))
        for crowd in CROWDS:
            name, server = (FLOW, flow) if "flow" in crowd else (bundle, locked if "token" in crowd else usual)
            rows.append({"on": name, **run_beside(server, name, crowd, steps)})
            print(rows[-1], flush=True)
    return rows


def soak(bundle: str, minutes: float) -> dict[str, Any]:
    """Memory and open files of a server through many robots that come, ask without pause and go."""
    workload, rows = workload_of(load_pair(bundle).exchange.contract), []
    with started(bundle) as server:
        for piece in range(SOAK_PIECES + 1):
            load = run_load(server.port, workload, SOAK_ROBOTS, 60 * minutes / SOAK_PIECES, None)
            status = Path(f"/proc/{server.pid}/status").read_text()
            resident = int(status.partition("VmRSS:")[2].split()[0]) / 1024
            row = {"resident_mb": resident, "files": len([*Path(f"/proc/{server.pid}/fd").iterdir()])}
            if piece:  # the first one warms up
                rows.append({**row, "answered": len(load.latencies_ms), "errors": load.errors})
                print(rows[-1], flush=True)
    third = SOAK_PIECES // 3
    ends = {name: [float(np.median([row[name] for row in part])) for part in (rows[:third], rows[third:-third],
            rows[-third:])] for name in ("resident_mb", "files")}  # fmt: skip
    grew = any(end > GROWTH * start for start, _, end in ends.values())
    totals = {name: sum(row[name] for row in rows) for name in ("answered", "errors")}
    return {"minutes": minutes, "robots": SOAK_ROBOTS, **ends, **totals, "grew": grew}


@contextmanager
def started(bundle: str, *options: str) -> Iterator[ServerProcess]:
    """``specact serve`` on the first core."""
    server = serving(bundle, *options)
    with core(0):
        server.__enter__()
    try:
        yield server
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", default="ball")
    parser.add_argument("--steps", type=int, default=240, help="of the robot beside crowds")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with core(1):
        measured: Any = soak(options.bundle, options.soak) if options.soak else beside(options.bundle, options.steps)
    if options.out is not None:
        options.out.write_text(json.dumps(measured, indent=1) + "\n")
    if options.soak:
        print(measured)
        sys.exit("the server grew" if measured["grew"] else 0)


if __name__ == "__main__":
    main()
