"""One robot with a deadline beside others that ask as much as they can: how many of its steps are not answered in time."""

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
from websockets.asyncio.client import ClientConnection

from specact.errors import RemoteError
from specact.evaluation.load import encoded_request, join
from specact.policies.bundle import Bundle, load_bundle
from specact.wire import msgpack

_READY_WITHIN_S = 60.0
# The neighbours' answers count from the moment in which all of them have their requests under way.
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Beside:
    """What a robot met beside its neighbours.

    Attributes:
        neighbours: connections that ask again as soon as they are answered.
        under_way: requests that each of them keeps under way.
        steps: requests of the robot.
        missed: of them not answered with a result within the deadline.
        waits_ms: for those that were answered, from sending to the answer ``[n]``.
    """

    neighbours: int
    under_way: int
    steps: int
    missed: int
    waits_ms: NDArray[np.float64]

    def summary(self) -> dict[str, Any]:
        """As plain values, times in ms."""
        found = self.waits_ms if len(self.waits_ms) else np.array([np.nan])
        p50, p99 = np.quantile(found, (0.5, 0.99)).tolist()
        return {
            "neighbours": self.neighbours,
            "under_way": self.under_way,
            "steps": self.steps,
            "missed": self.missed,
            "p50_ms": p50,
            "p99_ms": p99,
        }


def run_beside(
    port: int, bundle: Bundle, neighbours: int, under_way: int, rate_hz: float, deadline_ms: float, steps: int
) -> Beside:
    """Asks the server on this machine's ``port`` at a steady rate while neighbours, in a process of their own, flood it.

    Args:
        port: of the server, on loopback.
        bundle: what it serves.
        neighbours: connections that flood; 0 for none.
        under_way: requests that each of them keeps under way.
        rate_hz: of the robot.
        deadline_ms: of the robot; a step that is answered later, or with an error, is missed.
        steps: how often the robot asks.

    Raises:
        RemoteError: if the server refuses a connection or the neighbours do not start.
    """
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    seconds = steps / rate_hz
    flooding = context.Process(target=_flood, args=(port, bundle.path, neighbours, under_way, seconds, ready, done))
    if neighbours:
        flooding.start()
        if not ready.wait(_READY_WITHIN_S):
            flooding.kill()
            raise RemoteError(f"{neighbours} neighbours did not start within {_READY_WITHIN_S:.0f} s")
    try:
        waits = asyncio.run(_drive(port, bundle, rate_hz, deadline_ms / 1e3, steps))
    finally:
        done.set()
        if neighbours:
            flooding.join(_READY_WITHIN_S)
            flooding.kill()
    late = sum(wait is None or wait > deadline_ms / 1e3 for wait in waits)
    answered = np.array([1e3 * wait for wait in waits if wait is not None])
    return Beside(neighbours, under_way, steps, late, answered)


async def _drive(port: int, bundle: Bundle, rate_hz: float, deadline_s: float, steps: int) -> list[float | None]:
    """How long each step waited for its result [s]; None where there was none."""
    socket = await join(port, bundle, "steady")
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
        await asyncio.sleep(max(0.0, start + step / rate_hz - time.monotonic()))
        payload = encoded_request(bundle.spec, rng, step, 1e3 * deadline_s)
        sent[step] = time.monotonic()
        await socket.send(payload)
    # What is not there after as long again is missed anyway.
    await asyncio.sleep(2.0 * deadline_s)
    reading.cancel()
    await socket.close()
    return waits


def _flood(port: int, path: Path, robots: int, under_way: int, seconds: float, ready: Event, done: Event) -> None:
    """The neighbours' process; it ends when it is told to, and by itself some seconds after the time is over."""
    asyncio.run(_flood_all(port, load_bundle(path), robots, under_way, seconds + 10.0, ready, done))


async def _flood_all(
    port: int, bundle: Bundle, robots: int, under_way: int, seconds: float, ready: Event, done: Event
) -> None:
    sockets = [await join(port, bundle, f"neighbour {number}") for number in range(robots)]
    asking = [asyncio.create_task(_ask_on(socket, bundle, under_way)) for socket in sockets]
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


async def _ask_on(socket: ClientConnection, bundle: Bundle, under_way: int) -> None:
    """Keeps so many requests under way, and asks again for whatever is answered, also with an error."""
    rng = np.random.default_rng(under_way)
    payloads = [encoded_request(bundle.spec, rng, number, 10_000.0) for number in range(1024)]
    turn = itertools.cycle(payloads)
    for _ in range(under_way):
        await socket.send(next(turn))
    async for _ in socket:
        await socket.send(next(turn))
