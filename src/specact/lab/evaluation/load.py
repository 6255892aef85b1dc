"""Many robots at one server: how many verified steps it gives per second, and how long the slowest wait."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect

from specact.errors import RemoteError
from specact.families.codes.bundle import Bundle
from specact.lab.processes import ServerProcess
from specact.observation import ObservationSpec, Window
from specact.rng import StepAddress
from specact.wire import msgpack
from specact.wire.handshake import Hello, hello_fields, read_welcome
from specact.wire.messages import Request, request_fields

_DEADLINE_MS = 10_000.0
# Robots of a soak, their requests per second together, and seconds between two looks at the server's memory.
_SOAK_ROBOTS, _SOAK_HZ, _SOAK_LOOK_S = 64, 500.0, 10.0


@dataclass(frozen=True)
class Load:
    """What a number of robots met.

    Attributes:
        robots: connections.
        offered_hz: requests per second of all robots together; None where each asks again as soon as it is answered.
        seconds: how long they asked.
        latencies_ms: of every answered request, from its due time to its answer ``[n]``.
        batch: requests per inference, on average.
        errors: requests answered with an error.
    """

    robots: int
    offered_hz: float | None
    seconds: float
    latencies_ms: NDArray[np.float64]
    batch: float
    errors: int

    def summary(self) -> dict[str, Any]:
        """As plain values; throughput in verified steps per second, latencies in ms."""
        p50, p99 = np.quantile(self.latencies_ms, (0.5, 0.99)).tolist()
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


def run_load(port: int, bundle: Bundle, robots: int, seconds: float, offered_hz: float | None) -> Load:
    """Asks the server on this machine's ``port`` with many robots at once.

    Args:
        port: of the server, on loopback.
        bundle: what it serves.
        robots: connections, each with one request under way.
        seconds: how long.
        offered_hz: requests per second of all robots together, evenly spread; a robot that is not answered in time
            falls behind and its waiting counts from when the request was due. None for as fast as possible.

    Raises:
        RemoteError: if the server refuses a robot or answers nothing.
    """
    return asyncio.run(_run(port, bundle, robots, seconds, offered_hz))


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
    began, samples = time.monotonic(), []
    while (passed := time.monotonic() - began) < seconds:
        progress(int(passed), int(seconds))
        run_load(server.port, bundle, _SOAK_ROBOTS, min(_SOAK_LOOK_S, seconds), _SOAK_HZ)
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


async def _run(port: int, bundle: Bundle, robots: int, seconds: float, offered_hz: float | None) -> Load:
    sockets = [await join(port, bundle, f"load {number}") for number in range(robots)]
    results: list[tuple[float, int]] = []
    errors = itertools.count()
    try:
        start = time.monotonic() + 0.05
        period_s, stagger_s = (robots / offered_hz, 1.0 / offered_hz) if offered_hz else (None, 0.0)
        await asyncio.gather(
            *(
                _ask(socket, bundle, start + number * stagger_s, period_s, start + seconds, results, errors)
                for number, socket in enumerate(sockets)
            )
        )
    finally:
        await asyncio.gather(*(socket.close() for socket in sockets))
    if not results:
        raise RemoteError("the server answered none of the requests")
    latencies, batches = np.array(results, dtype=np.float64).T
    # Each inference of b requests was seen b times.
    return Load(robots, offered_hz, seconds, 1e3 * latencies, len(batches) / float((1.0 / batches).sum()), next(errors))


async def join(port: int, bundle: Bundle, robot: str) -> ClientConnection:
    """A stream to the server on this machine's ``port``, after its welcome.

    Raises:
        RemoteError: if the server refuses it.
    """
    socket = await connect(f"ws://127.0.0.1:{port}/v1/stream", compression=None, ping_interval=None)
    dialect = bundle.codec.dialect
    hello = Hello(robot, dialect.family, dialect.agreed)
    await socket.send(msgpack.encode(hello_fields(hello)))
    read_welcome(msgpack.decode(_bytes(await socket.recv())))
    return socket


def encoded_request(spec: ObservationSpec, rng: np.random.Generator, identity: int, deadline_ms: float) -> bytes:
    """A request about a random observation, as the bytes of its frame."""
    arrays = {
        name: np.zeros(field.window_shape, np.uint8)
        if field.is_image
        else rng.uniform(-1, 1, field.window_shape).astype(np.float32)
        for name, field in spec.fields.items()
    }
    request = Request("infer", identity, deadline_ms, Window(arrays), StepAddress(0, 0, 0, identity))
    return msgpack.encode(request_fields(request, spec))


async def _ask(
    socket: ClientConnection,
    bundle: Bundle,
    due: float,
    period_s: float | None,
    until: float,
    results: list[tuple[float, int]],
    errors: itertools.count[int],
) -> None:
    rng = np.random.default_rng(int(1e6 * due) % 2**32)
    for identity in itertools.count():
        now = time.monotonic()
        if period_s is None:
            due = now
        elif due > now:
            await asyncio.sleep(due - now)
        if due >= until:
            return
        await socket.send(encoded_request(bundle.spec.target, rng, identity, _DEADLINE_MS))
        fields = msgpack.decode(_bytes(await socket.recv()))
        if fields["type"] == "error":
            next(errors)
        else:
            results.append((time.monotonic() - due, fields["times"]["batch"]))
        due += period_s or 0.0


def _bytes(frame: str | bytes) -> bytes:
    if isinstance(frame, str):
        raise RemoteError("the server replied with a text frame, a binary frame is expected")
    return frame


def _resident_mib(pid: int) -> float:
    """Memory that a process holds [MiB], from Linux' /proc."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20
