"""The service time of a server, from robots on this machine that ask it as fast as it replies."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from specact.errors import RemoteError, SpecactError
from specact.rng import StepAddress
from specact.server.access import Address, Limits
from specact.server.capacity import ServiceTime
from specact.server.serve import serve
from specact.server.service import Service
from specact.wire.exchange import Exchange, Request
from specact.wire.messages import (
    MAX_DEADLINE_MS,
    PATH,
    PROTOCOL,
    Failure,
    Hello,
    ask,
    encode,
    printable,
    read_reply,
    read_welcome,
)

# A stage lasts so long [s], and until each robot has had so many replies, but no longer than the most. All numbers of
# robots have their stage in each round; no round starts after the last second.
_STAGE_S, _REPLIES, _MOST_STAGE_S, _ROUNDS, _MOST_S = 0.12, 6, 1.0, 5, 5.0
_MOST_ROBOTS = 256


def measure_service(load: Callable[[], Exchange[Any]], max_batch: int) -> ServiceTime:
    """The time that a server on this machine takes for a batch, messages included.

    The server is a process of its own, on loopback, with the exchange of ``load``. From 4 robots on requests wait while
    a batch is computed, so that it never waits, and with four times ``max_batch`` robots its batches are full.

    Raises:
        SpecactError: if the target cannot be served, or the server refuses a robot or a request.
    """
    context = get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(load, max_batch, there), daemon=True)
    server.start()
    there.close()
    try:
        if isinstance(told := here.recv(), Exception):
            raise told
        counts = [4 << power for power in range(max_batch.bit_length())]
        url, hello, request = told
        return uvloop.run(_measure(url, hello, request, [count for count in counts if count <= _MOST_ROBOTS]))
    except EOFError:
        raise RemoteError("the server ended before it listened; what it printed says why") from None
    finally:
        server.kill()
        server.join()


def _serve(load: Callable[[], Exchange[Any]], max_batch: int, pipe: Connection) -> None:
    """Tells the server's address, a hello and a request, or an error."""
    try:
        exchange = load()
        contract = exchange.contract
        hello = encode(Hello(PROTOCOL, "load", contract.family, dict(contract.spec)))
        idle = Request(contract.observation.zeros(), StepAddress(0, 0, 0, 0))
        request = encode(ask(idle, contract, "infer", 0, MAX_DEADLINE_MS))
        service = Service(exchange, Limits(max_batch=max_batch), Address(port=0))
        serve(service, lambda url: pipe.send((url, hello, request)))
    except SpecactError as error:
        pipe.send(error)


async def _measure(url: str, hello: bytes, request: bytes, counts: Sequence[int]) -> ServiceTime:
    robots, stages, started = list[_Robot](), defaultdict[int, list[tuple[float, float]]](list), time.monotonic()
    try:
        for _ in range(max(counts)):
            robots.append(_Robot())
            await ws_connect(lambda: robots[-1], f"{url}{PATH}")
            read_welcome(await robots[-1].ask(hello))
        for _ in range(_ROUNDS):
            for count in counts:
                stages[count].append(await _stage(robots[:count], request))
            if time.monotonic() - started > _MOST_S:
                break
    finally:
        for robot in robots:
            robot.hang_up()
    # By the typical batch of a number of robots.
    measured = {
        float(np.median(batches)): times for batches, times in (zip(*each, strict=True) for each in stages.values())
    }
    return ServiceTime.fit(measured)


async def _stage(robots: Sequence[_Robot], request: bytes) -> tuple[float, float]:
    """The mean batch size, and seconds per inference; of the first quarter of the replies neither."""
    started, replies = time.monotonic(), list[tuple[float, float]]()

    async def ask_on(robot: _Robot) -> None:
        while (spent := time.monotonic() - started) < _MOST_STAGE_S:
            if spent > _STAGE_S and len(replies) > _REPLIES * len(robots):
                break
            reply = read_reply(await robot.ask(request))
            if isinstance(reply, Failure):
                raise RemoteError(f"the server refused a request: {printable(reply.message)}")
            replies.append((time.monotonic(), 1.0 / reply.batch))

    await asyncio.gather(*map(ask_on, robots))
    when, shares = np.array(replies[len(replies) // 4 :]).T
    # Each reply is so large a part of an inference.
    return len(shares) / shares.sum(), float(np.polyfit(np.cumsum(shares), when - when[0], 1)[0])


class _Robot(WSListener):
    """A connection with one request at a time."""

    async def ask(self, message: bytes) -> bytes:
        """The server's answer to a message."""
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._transport.send(WSMsgType.BINARY, message)
        return await self._answer

    def hang_up(self) -> None:
        self._transport.disconnect(False)

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type == WSMsgType.BINARY and not self._answer.done():
            self._answer.set_result(frame.get_payload_as_bytes())

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        if not self._answer.done():
            self._answer.set_exception(RemoteError("the server closed a robot's connection"))
