"""A server in a thread of the test, or as a process of its own; robots that say whatever a test wants, and crowds."""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

import msgspec
import numpy as np
import uvloop
from tests.children import wait_for
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from specact.errors import WireError
from specact.lab.rollout.processes import ServerProcess
from specact.observation import Window, vectors
from specact.rng import StepAddress
from specact.server import Address, Limits, Service
from specact.server.serve import bind, run
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Contract, Kind, Request
from specact.wire.messages import PATH, PROTOCOL, Hello, Reply, Welcome, ask, encode, read_reply, read_welcome

PATIENCE = 120.0  # seconds before a test gives up
HERE = StepAddress(0, 0, 0, 0)


class Doubling:
    """An exchange whose answer is twice the state; the state of a warm-up is zero.

    Attributes:
        batches: of each inference the first number of every request.
        open: inferences wait while it is not set.
        each_s: how long they take for each request [s], by its first number.
        fails: the error that they raise.
    """

    name, steady = "doubling", False

    def __init__(self, each_s: Mapping[float, float] | None = None) -> None:
        number = Layout({"x": ArraySpec((2,), np.float32)})
        kinds = {"infer": Kind(Layout({}), number), "verify": Kind(number, number)}
        self.contract = Contract("doubling", {"width": 2}, vectors(1, state=2), kinds, fingerprint="0" * 16)
        self.batches, self.open, self.each_s = list[list[float]](), threading.Event(), each_s or {}
        self.fails: BaseException | None = None
        self.open.set()

    def read(self, arrays: Arrays) -> Any:
        return arrays["x"]

    def places(self, number: float) -> list[int]:
        """Which inferences had a request with this first number."""
        return [place for place, batch in enumerate(self.batches) if number in batch]

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        states = [request.window["state"][0] for request in requests]
        numbers = [float(state[0]) for state in states]
        time.sleep(sum(self.each_s.get(number, 0.0) for number in numbers))
        if any(numbers):
            self.batches.append(numbers)
            assert self.open.wait(PATIENCE)
        if self.fails is not None:
            raise self.fails
        with np.errstate(over="ignore"):
            return [{"x": 2 * state} for state in states]


def state(value: float) -> Window:
    return Window({"state": np.full((1, 2), value, np.float32)})


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    """A frame as a client sends it, masked with zeros, or one that none may send."""
    size = len(payload)
    length = bytes((0x80 | size,)) if size < 126 else struct.pack(">BH", 0x80 | 126, size)
    return bytes((opcode | 0x80 * fin,)) + length + bytes(4) + payload


def requests(
    contract: Contract, window: Window, count: int, kind: str = "infer", deadline_ms: float = 60_000.0
) -> bytes:
    """Frames with so many requests, numbered from 0."""
    request = Request(window, HERE, contract.kinds[kind].request.example())
    return b"".join(frame(0x2, encode(ask(request, contract, kind, number, deadline_ms))) for number in range(count))


HELLO = frame(0x2, encode(Hello(PROTOCOL, "crowd")))
UPGRADE = {"Host": "127.0.0.1", "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
           "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}  # fmt: skip


def opening(path: str = PATH, **headers: str) -> bytes:
    """The head with which a WebSocket begins."""
    lines = [f"{name}: {value}" for name, value in (UPGRADE | headers).items()]
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()


def bearer(token: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {token}"}


class Robot:
    """A WebSocket to a server of a contract."""

    def __init__(self, connection: ClientConnection, contract: Contract) -> None:
        self.connection, self.contract = connection, contract

    def hello(self, **changes: Any) -> Welcome:
        hello = Hello(PROTOCOL, "tester", self.contract.family, dict(self.contract.spec))
        self.connection.send(encode(msgspec.structs.replace(hello, **changes)))
        return read_welcome(self._receive())

    def send(
        self, number: int, window: Window, kind: str = "infer", deadline_ms: float = 60_000.0,
        report: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        request = Request(window, HERE, self.contract.kinds[kind].request.example())
        self.connection.send(encode(ask(request, self.contract, kind, number, deadline_ms, report)))

    def raw(self, data: bytes) -> None:
        self.connection.socket.sendall(data)

    def receive(self) -> Any:
        """A reply or failure."""
        return read_reply(self._receive())

    def reply(self) -> Reply:
        reply = self.receive()
        assert isinstance(reply, Reply), reply
        return reply

    def ask(self, number: int, window: Window, **options: Any) -> Arrays:
        """The arrays of the reply to a request for an inference."""
        self.send(number, window, **options)
        reply = self.reply()
        assert reply.id == number
        return self.contract.kinds["infer"].reply.unpack(reply.arrays)

    def end(self) -> int | None:
        """The code of the close frame that the server sends, after any messages; None if there is none."""
        with suppress(ConnectionClosed):
            while True:
                self.connection.recv(timeout=PATIENCE)
        return self.connection.close_code

    def _receive(self) -> bytes:
        payload = self.connection.recv(timeout=PATIENCE)
        assert isinstance(payload, bytes), payload
        return payload


class Listening:
    """What a client needs of a server on this machine: its port."""

    port: int
    contract: Contract
    tls: ssl.SSLContext | None = None

    def http(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        kind: Any = HTTPConnection if self.tls is None else partial(HTTPSConnection, context=self.tls)
        with closing(kind("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request("GET", path, None, headers)
            response = connection.getresponse()
            return response.status, dict(response.headers), response.read()

    def status(self, **headers: str) -> dict[str, Any]:
        return msgspec.json.decode(self.http("/v1/status", **headers)[2], type=dict[str, Any])

    def outcomes(self, **headers: str) -> dict[tuple[str, str], float]:
        """The number of requests by kind and outcome."""
        text = self.http("/metrics", **headers)[2].decode()
        rows = re.findall(r'^specact_requests_total{kind="(.*)",outcome="(.*)"} (.*)$', text, re.MULTILINE)
        return {(kind, outcome): float(number) for kind, outcome, number in rows}

    def waiting(self, count: int) -> None:
        """Waits until so many requests are queued."""
        wait_for(lambda: self.status()["queued"] == count, "they wait")

    def side(self) -> socket.socket:
        """A connection on which nothing was said yet."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    @contextmanager
    def connect(self, path: str = PATH, **headers: str) -> Iterator[Robot]:
        """A WebSocket before its hello."""
        url = f"{'wss' if self.tls else 'ws'}://127.0.0.1:{self.port}{path}"
        options: Any = dict.fromkeys(("proxy", "max_size", "max_queue", "ping_interval", "compression"))
        with connect(url, additional_headers=headers, ssl=self.tls, open_timeout=PATIENCE, **options) as connection:
            yield Robot(connection, self.contract)

    @contextmanager
    def robot(self, **headers: str) -> Iterator[Robot]:
        """A WebSocket that was welcomed."""
        with self.connect(**headers) as robot:
            robot.hello()
            yield robot

    @contextmanager
    def crowd(self, count: int, flood: bytes, **headers: str) -> Iterator[list[int]]:
        """Connections that send these bytes without end and read, and come again; how many bytes each has sent."""
        done, ready, sent = threading.Event(), selectors.DefaultSelector(), list[int]()

        def join() -> None:
            side = self.side()
            side.sendall(opening(**headers) + HELLO)
            side.setblocking(False)
            ready.register(side, selectors.EVENT_READ | selectors.EVENT_WRITE, len(sent))
            sent.append(0)

        def run() -> None:
            while not done.is_set():
                for key, event in ready.select(0.05):
                    side: Any = key.fileobj
                    try:
                        if event & selectors.EVENT_READ and not side.recv(1 << 20):
                            raise ConnectionError
                        if event & selectors.EVENT_WRITE:
                            sent[key.data] += side.send(memoryview(flood)[sent[key.data] % len(flood) :])
                    except ConnectionError:
                        ready.unregister(side)
                        side.close()
                        join()
            for key in list(ready.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

        with ready, ThreadPoolExecutor(1) as pool:
            for _ in range(count):
                join()
            pool.submit(run)
            try:
                yield sent
            finally:
                done.set()


class Here(Listening):
    """A server in a thread."""

    def __init__(self, exchange: Any, token: str | None = None, port: int = 0, **limits: Any) -> None:
        self.exchange, self.contract = exchange, exchange.contract
        self.service = Service(exchange, Limits(**limits), Address(port=port), token)
        self._up = threading.Event()

    def __enter__(self) -> Here:
        self._listener = bind(self.service)
        self.service.batcher.warm_up()
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        assert self._up.wait(PATIENCE)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE)
        self._listener.close()
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(run(self.service, self._listener, lambda url: self._up.set()))
        await asyncio.gather(self._task, return_exceptions=True)


@contextmanager
def busy(robots: int = 1, exchange: Doubling | None = None, **limits: Any) -> Iterator[tuple[Here, list[Robot]]]:
    """A server whose target computes the first robot's request 0 until ``exchange.open`` is set, and the robots."""
    with ExitStack() as stack:
        server = stack.enter_context(Here(exchange or Doubling(), **limits))
        server.exchange.open.clear()
        made = [stack.enter_context(server.robot()) for _ in range(robots)]
        made[0].send(0, state(1.0))
        wait_for(lambda: server.exchange.batches, "the target is busy")
        yield server, made
        server.exchange.open.set()


class Process(ServerProcess, Listening):
    """``specact serve`` as a process."""

    def __init__(self, contract: Contract, *options: str, token: str = "") -> None:
        super().__init__(["serve", *options, "--port", "0"], {"SPECACT_TOKEN": token})
        self.contract = contract

    def __enter__(self) -> Process:
        super().__enter__()
        return self

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
