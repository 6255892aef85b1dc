"""A server in a thread of the test, or as a process of its own, and a robot that says whatever a test wants."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tests.children import wait_for
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from specact import Pair, load_pair
from specact.errors import WireError
from specact.lab.rollout.processes import ServerProcess
from specact.observation import Window, vectors
from specact.rng import StepAddress
from specact.server import Address, Limits, Service
from specact.server.serve import bind, run
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Contract, Kind, Request
from specact.wire.messages import PATH, PROTOCOL, Failure, Hello, Reply, Welcome, ask, encode, read_reply, read_welcome

PATIENCE = 120.0  # seconds before a test gives up
HERE = StepAddress(0, 0, 0, 0)


class Doubling:
    """An exchange whose answer is twice the state, under a test's control.

    Attributes:
        batches: how many requests each inference had.
        open: inferences wait while it is not set; with ``wait`` it is not at first, except for the warm-up.
        fails: the error that the next inference raises.
    """

    name, fingerprint, steady = "doubling", "0" * 16, False

    def __init__(self, wait: bool = False) -> None:
        number = Layout({"x": ArraySpec((2,), np.float32)})
        kinds = {"infer": Kind(Layout({}), number), "verify": Kind(number, number)}
        self.contract = Contract("doubling", {"width": 2}, vectors(1, state=2), kinds)
        self.batches: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.fails: BaseException | None = None
        self.waits = wait

    def read(self, arrays: Arrays) -> Any:
        return arrays["x"]

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        self.batches.append(len(requests))
        assert self.open.wait(PATIENCE)
        if self.fails is not None:
            raise self.fails
        with np.errstate(over="ignore"):
            return [{"x": 2 * request.window["state"][0]} for request in requests]


def state(value: float) -> Window:
    return Window({"state": np.full((1, 2), value, np.float32)})


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
        arrays: Arrays | None = None, report: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        request = Request(window, HERE, {} if arrays is None else arrays)
        self.connection.send(encode(ask(request, self.contract, kind, number, deadline_ms, report)))

    def receive(self) -> Reply | Failure:
        return read_reply(self._receive())

    def failure(self) -> Failure:
        """The next reply, which is an error."""
        answer = self.receive()
        assert isinstance(answer, Failure), answer
        return answer

    def ask(self, number: int, window: Window, kind: str = "infer", **options: Any) -> Arrays:
        """The arrays of the reply to a request."""
        self.send(number, window, kind, **options)
        answer = self.receive()
        assert isinstance(answer, Reply) and answer.id == number, answer
        return self.contract.kinds[kind].reply.unpack(answer.arrays)

    def closed(self) -> int:
        """The code with which the server closes; no message comes before."""
        with pytest.raises(ConnectionClosed) as closing:
            self.connection.recv(timeout=PATIENCE)
        assert closing.value.rcvd is not None, closing.value
        return int(closing.value.rcvd.code)

    def _receive(self) -> bytes:
        payload = self.connection.recv(timeout=PATIENCE)
        assert isinstance(payload, bytes), payload
        return payload


class Listening:
    """What a client needs of a server on this machine: its port."""

    port: int
    contract: Contract
    tls: ssl.SSLContext | None = None

    def http(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        options: dict[str, Any] = {} if self.tls is None else {"context": self.tls}
        kind = http.client.HTTPConnection if self.tls is None else http.client.HTTPSConnection
        connection = kind("127.0.0.1", self.port, timeout=PATIENCE, **options)
        try:
            connection.request(method, path, None, headers)
            response = connection.getresponse()
            return response.status, dict(response.headers), response.read()
        finally:
            connection.close()

    def status(self, **headers: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.http("/v1/status", **headers)[2])
        return found

    def counts(self, name: str) -> dict[tuple[str, ...], float]:
        """A metric's samples by their labels' values."""
        text = self.http("/metrics")[2].decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == name}

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    @contextmanager
    def connect(self, path: str = PATH, **headers: str) -> Iterator[Robot]:
        """A WebSocket before its hello."""
        scheme = "ws" if self.tls is None else "wss"
        with connect(
            f"{scheme}://127.0.0.1:{self.port}{path}", additional_headers=headers, open_timeout=PATIENCE,
            compression=None, max_size=None, ssl=self.tls, proxy=None, ping_interval=None,
        ) as connection:  # fmt: skip
            yield Robot(connection, self.contract)

    @contextmanager
    def robot(self, **headers: str) -> Iterator[Robot]:
        """A WebSocket that was welcomed."""
        with self.connect(**headers) as robot:
            robot.hello()
            yield robot


class Here(Listening):
    """A server in a thread."""

    def __init__(self, exchange: Any, limits: Limits | None = None, token: str | None = None, **address: Any) -> None:
        self.exchange, self.contract = exchange, exchange.contract
        self.service = Service(exchange, limits, Address(**{"port": 0} | address), token)
        self._up = threading.Event()

    def __enter__(self) -> Here:
        with ExitStack() as stack:
            listener = stack.enter_context(bind(self.service))
            self.service.batcher.warm_up()
            if isinstance(self.exchange, Doubling):
                self.exchange.batches.clear()
                if self.exchange.waits:
                    self.exchange.open.clear()
            self.port = listener.getsockname()[1]
            self._thread = threading.Thread(target=lambda: uvloop.run(self._run(listener)), name="server")
            self._thread.start()
            assert self._up.wait(PATIENCE)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._stack.close()

    def call(self, what: Callable[[], object]) -> None:
        """Calls this on the server's event loop."""
        self._loop.call_soon_threadsafe(what)

    async def _run(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(run(self.service, listener, lambda url: self._up.set()))
        await asyncio.gather(self._task, return_exceptions=True)


@contextmanager
def busy(robots: int = 1, **limits: Any) -> Iterator[tuple[Here, list[Robot]]]:
    """A server whose target computes the first robot's request 0 until ``exchange.open`` is set, and the robots."""
    with ExitStack() as stack:
        server = stack.enter_context(Here(Doubling(wait=True), Limits(**limits)))
        made = [stack.enter_context(server.robot()) for _ in range(robots)]
        made[0].send(0, state(0.0))
        wait_for(lambda: server.exchange.batches == [1], "the target is busy")
        yield server, made
        server.exchange.open.set()


def waiting(server: Here, count: int) -> None:
    """Waits until so many requests are queued."""
    wait_for(lambda: len(server.service.batcher.queue) == count, "they wait")


class Process(ServerProcess, Listening):
    """``specact serve`` as a process."""

    def __init__(self, contract: Contract, *options: str, token: str = "", path: Path | None = None) -> None:
        extra = {"SPECACT_TOKEN": token} | ({} if path is None else {"PYTHONPATH": str(path)})
        super().__init__(["serve", *options, *(() if "--port" in options else ("--port", "0"))], extra)
        self.contract = contract

    def __enter__(self) -> Process:
        super().__enter__()
        return self

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


@pytest.fixture(scope="session")
def ball() -> Pair[Any]:
    return load_pair("ball")


@pytest.fixture
def doubling() -> Iterator[Here]:
    with Here(Doubling()) as server:
        yield server


@pytest.fixture(scope="module")
def served(ball: Pair[Any]) -> Iterator[Here]:
    """The target of ``ball``, one request per inference: answers are then exact."""
    with Here(ball.exchange, Limits(max_batch=1)) as server:
        yield server
