"""One robot with a deadline beside others that ask as much as they can: how many of its steps are missed."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect

from specact.errors import RemoteError
from specact.families.codes.bundle import Bundle, load_bundle
from specact.lab.evaluation.load import encoded_request
from specact.wire import msgpack
from specact.wire.handshake import Hello, hello_fields, read_welcome

# Requests that each neighbour keeps under way; rate and deadline of the robot.
UNDER_WAY, RATE_HZ, DEADLINE_MS = 32, 20.0, 50.0
_READY_WITHIN_S = 60.0
# The robot starts once all neighbours have had this time to begin.
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Beside:
    """What a robot met beside its neighbours.

    Attributes:
        neighbours: connections that ask again as soon as they are answered, each with ``UNDER_WAY`` requests.
        steps: requests of the robot.
        missed: of them not answered with a result within the deadline.
        waits_ms: for those that were answered, from sending to the answer ``[n]``.
    """

    neighbours: int
    steps: int
    missed: int
    waits_ms: NDArray[np.float64]

    def summary(self) -> dict[str, Any]:
        """As plain values, times in ms."""
        found = self.waits_ms if len(self.waits_ms) else np.array([np.nan])
        p50, p99 = np.quantile(found, (0.5, 0.99)).tolist()
        return {
            "neighbours": self.neighbours,
            "under_way": UNDER_WAY,
            "rate_hz": RATE_HZ,
            "deadline_ms": DEADLINE_MS,
            "steps": self.steps,
            "missed": self.missed,
            "p50_ms": p50,
            "p99_ms": p99,
        }


def run_beside(port: int, bundle: Bundle, neighbours: int, steps: int) -> Beside:
    """Asks the server on this machine's ``port`` 20 times a second while neighbours flood it from another process.

    Args:
        port: of the server, on loopback.
        bundle: what it serves.
        neighbours: connections that flood; 0 for none.
        steps: how often the robot asks; one that is answered after 50 ms, or with an error, is missed.

    Raises:
        RemoteError: if the server refuses a connection or the neighbours do not start.
    """
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    arguments = (port, bundle.path, neighbours, steps / RATE_HZ, ready, done)
    flooding = context.Process(target=_flood, args=arguments)
    if neighbours:
        flooding.start()
        if not ready.wait(_READY_WITHIN_S):
            flooding.kill()
            raise RemoteError(f"{neighbours} neighbours did not start within {_READY_WITHIN_S:.0f} s")
    try:
        waits = asyncio.run(_drive(port, bundle, steps))
    finally:
        done.set()
        if neighbours:
            flooding.join(_READY_WITHIN_S)
            flooding.kill()
    answered = np.array([1e3 * wait for wait in waits if wait is not None])
    return Beside(neighbours, steps, steps - int((answered <= DEADLINE_MS).sum()), answered)


async def _drive(port: int, bundle: Bundle, steps: int) -> list[float | None]:
    """How long each step waited for its result [s]; None where there was none."""
    socket = await _join(port, bundle, "steady")
    rng = np.random.default_rng(0)
    sent: dict[int, float] = {}
    waits: list[float | None] = [None] * steps

    async def read() -> None:
        async for frame in socket:
            now, fields = time.monotonic(), msgpack.decode(frame if isinstance(frame, bytes) else frame.encode())
            if fields["type"] == "distribution":
                waits[fields["id"]] = now - sent[fields["id"]]

    reading = asyncio.create_task(read())
    start = time.monotonic()
    for step in range(steps):
        await asyncio.sleep(max(0.0, start + step / RATE_HZ - time.monotonic()))
        payload = encoded_request(bundle.spec.target, rng, step, DEADLINE_MS)
        sent[step] = time.monotonic()
        await socket.send(payload)
    # What is not there after as long again is missed anyway.
    await asyncio.sleep(2e-3 * DEADLINE_MS)
    reading.cancel()
    await socket.close()
    return waits


async def _join(port: int, bundle: Bundle, robot: str) -> ClientConnection:
    """A stream to the server on this machine's ``port``, after its welcome.

    Raises:
        WireError: if the server refuses it.
    """
    socket = await connect(f"ws://127.0.0.1:{port}/v1/stream", compression=None, ping_interval=None)
    dialect = bundle.codec.dialect
    await socket.send(msgpack.encode(hello_fields(Hello(robot, dialect.family, dialect.agreed))))
    read_welcome(msgpack.decode(await socket.recv(decode=False)))
    return socket


def _flood(port: int, path: Path, robots: int, seconds: float, ready: Event, done: Event) -> None:
    """The neighbours' process; it ends when it is told to, and by itself some seconds after the time is over."""
    asyncio.run(_flood_all(port, load_bundle(path), robots, seconds + 10.0, ready, done))


async def _flood_all(port: int, bundle: Bundle, robots: int, seconds: float, ready: Event, done: Event) -> None:
    sockets = [await _join(port, bundle, f"neighbour {number}") for number in range(robots)]
    asking = [asyncio.create_task(_ask_on(socket, bundle)) for socket in sockets]
    await asyncio.sleep(_SETTLE_S)
    ready.set()
    until = time.monotonic() + seconds
    while not done.is_set() and time.monotonic() < until:
        await asyncio.sleep(0.05)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    # Not closed one by one: the answers to what is under way would have to be read first.
    for socket in sockets:
        socket.transport.abort()


async def _ask_on(socket: ClientConnection, bundle: Bundle) -> None:
    """Keeps so many requests under way, and asks again for whatever is answered, also with an error."""
    rng = np.random.default_rng(0)
    payloads = [encoded_request(bundle.spec.target, rng, number, 10_000.0) for number in range(1024)]
    turn = itertools.cycle(payloads)
    for _ in range(UNDER_WAY):
        await socket.send(next(turn))
    async for _ in socket:
        await socket.send(next(turn))
