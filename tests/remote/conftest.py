"""A server that misbehaves as told, in either protocol, and a device that asks it numbered questions."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.children import wait_for
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as HttpRequest
from websockets.protocol import State
from websockets.server import ServerProtocol

from specact.errors import RemoteError
from specact.families.chunks.pair import ChunkParts, PairSpec
from specact.families.chunks.remote import target_endpoint
from specact.families.chunks.sources import chunk_policy
from specact.observation import Window
from specact.remote import Client, Endpoint, RemoteTarget
from specact.rng import StepAddress
from specact.types import ActionUnits, Miss
from specact.wire import openpi
from specact.wire.messages import PROTOCOL, Hello, Reply, Welcome, encode, read_ask, read_hello, request_of

QUICK = {"first_delay_s": 0.01, "longest_delay_s": 0.05}
PATIENT_MS = 20_000.0
BOTH = ("specact", "openpi")


def frame(payload: bytes) -> bytes:
    """A server's frame."""
    return bytes(Frame(Opcode.BINARY, payload).serialize(mask=False))


class Peer:
    """A device's connection, as a misbehaving server sees it."""

    def __init__(self, side: socket.socket, greeting: bytes | str | None = None) -> None:
        self.side, self.protocol, self.greeting = side, ServerProtocol(max_size=None), greeting
        self.headers, self.path = dict[str, str](), ""
        self._lock = threading.Lock()

    def say(self, message: bytes | str | msgspec.Struct, pieces: int = 1) -> None:
        """Sends a message, text as a text frame, in so many fragments."""
        first = Opcode.TEXT if isinstance(message, str) else Opcode.BINARY
        data = message.encode() if isinstance(message, str) else message
        data = encode(data) if isinstance(data, msgspec.Struct) else data
        size = -(-len(data) // pieces) or 1
        for start in range(0, max(1, len(data)), size):
            part, last = data[start : start + size], start + size >= len(data)
            self.raw(Frame(Opcode.CONT if start else first, part, fin=last).serialize(mask=False))

    def raw(self, data: bytes) -> None:
        """Sends these very bytes."""
        with self._lock:
            self.side.sendall(data)

    def messages(self) -> Iterator[bytes]:
        """What the device sends, until either ends the connection; answers the opening handshake, pings, closing."""
        while data := self.side.recv(65536):
            self.protocol.receive_data(data)
            for event in self.protocol.events_received():
                if isinstance(event, HttpRequest):
                    self.headers, self.path = dict(event.headers.raw_items()), event.path
                    self.protocol.send_response(self.protocol.accept(event))
                    self.raw(b"".join(self.protocol.data_to_send()))
                    if self.greeting is not None:
                        self.say(self.greeting)
                elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                    # As libraries do: a ping is answered before what came after it.
                    self.raw(b"".join(self.protocol.data_to_send()))
                    yield bytes(event.data)
            self.raw(b"".join(self.protocol.data_to_send()))
            if self.protocol.state is not State.OPEN:
                return


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Hands every connection to ``serve``, in a thread; yields the port."""
    sides = list[socket.socket]()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            sides.append(self.request)
            with suppress(OSError):
                self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                serve(self.request)

    class Server(ThreadingTCPServer):
        def shutdown_request(self, request: Any) -> None:
            # Without a shutdown first, so that a side that is set to end with a reset does.
            self.close_request(request)

    with Server(("127.0.0.1", 0), Handler) as server:
        accepting = threading.Thread(target=server.serve_forever, args=(0.01,))
        accepting.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            accepting.join(20)
            for side in sides:
                with suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)


@chunk_policy(observation={"state": (2,)}, chunk=3, actions=2, rate_hz=20.0, low=[-500, -500], high=[500, 500])
def draft(seen: Any) -> Any:
    return np.zeros((len(seen["state"]), 3, 2))


RANGE = ActionUnits.of_range(np.full(2, -500, np.float32), np.full(2, 500, np.float32))
PAIR = ChunkParts("foreign", draft, RANGE, PairSpec(draft.spec, 1), None).pair()
CONTRACT = PAIR.exchange.contract


def answer_to(number: float) -> np.ndarray:
    """The chunk for the question with this number: no other has it."""
    return np.array([[number, 1.0], [number, 2.0], [number, 3.0]], np.float32)


@dataclass
class Question:
    """A request as the server reads it: what tells it from others, and its id in specact's protocol."""

    number: float
    id: int = 0


Behave = Callable[["FakeServer", Peer, Question], None]


def honest(server: FakeServer, peer: Peer, question: Question) -> None:
    peer.say(server.reply(question))


def silent(server: FakeServer, peer: Peer, question: Question) -> None:
    """Says nothing."""


class FakeServer:
    """A server of a chunk policy that greets and answers as told.

    Attributes:
        behave: told of every question; :func:`honest` answers as a server should.
        greeting: its first message, of openpi's protocol unasked; None for none.
        questions, peers: all of them, whichever connection they came by; and the connections.
        hellos: first messages of specact's protocol.
        open: cleared, new connections wait for it; or end at once if they are ``refused``.
    """

    def __init__(self, protocol: str) -> None:
        self.native = protocol == "specact"
        self.behave: Behave = honest
        welcome = Welcome(PROTOCOL, "foreign", "0" * 16, "0", 1 << 20, CONTRACT.family, dict(CONTRACT.spec),
                          CONTRACT.describe())  # fmt: skip
        self.greeting: Any = welcome if self.native else openpi.encode({"reset_pose": [0.0, 1.0]})
        self.questions: list[Question] = []
        self.peers: list[Peer] = []
        self.hellos: list[Hello] = []
        self.released, self.open, self.refused = threading.Event(), threading.Event(), False
        self.open.set()

    def reply(self, question: Question, number: float | None = None, **fields: Any) -> Any:
        """The right reply, or one with another number everywhere, or other fields of the message."""
        chunk = answer_to(question.number) if number is None else np.full((3, 2), number, np.float32)
        if self.native:
            payload = CONTRACT.kinds["infer"].reply.pack({"chunk": chunk})
            return msgspec.structs.replace(Reply(question.id, 0.0, 0.1, 0.2, 1, payload), **fields)
        return openpi.encode({"actions": chunk, "server_timing": {"infer_ms": 0.5}} | fields)

    def serve(self, side: socket.socket) -> None:
        if self.refused or not self.open.wait(60):
            return
        peer, greeted = Peer(side, None if self.native else self.greeting), not self.native
        self.peers.append(peer)
        for payload in peer.messages():
            if not greeted:
                self.hellos.append(read_hello(payload))
                peer.say(self.greeting)
            elif self.native:
                ask = read_ask(payload)
                self.questions.append(Question(float(request_of(ask, CONTRACT).window["state"][0, 0]), ask.id))
            else:
                self.questions.append(Question(float(openpi.decode(payload)["observation/state"][0])))
            if greeted:
                self.behave(self, peer, self.questions[-1])
            greeted = True


class Device:
    """Asks the numbered questions; an answer to another one fails the test.

    Attributes:
        causes: the misses so far.
    """

    def __init__(self, client: Client, deadline_ms: float) -> None:
        self.client, self.causes, self._number = client, Counter[str](), 0
        self._target = RemoteTarget(client, PAIR.exchange, deadline_ms)

    def ask(self) -> str | None:
        """The cause of the miss, or None for the answer."""
        self._number += 1
        window, address = Window({"state": np.array([[self._number, 0.0]], np.float32)}), StepAddress(0, 0, 0, 0)
        outcome = self._target.submit(window, address).result()
        if isinstance(outcome, Miss):
            self.causes[outcome.cause] += 1
            return outcome.cause
        np.testing.assert_array_equal(outcome.value, answer_to(self._number))
        return None

    def asks(self, count: int) -> list[str | None]:
        return [self.ask() for _ in range(count)]

    def find_back(self) -> None:
        """Asks until there is an answer again."""
        wait_for(lambda: self.ask() is None)


def endpoint_of(protocol: str, port: int) -> Endpoint:
    return at(port) if protocol == "specact" else target_endpoint(f"openpi:ws://127.0.0.1:{port}", None, None, CONTRACT)


@contextmanager
def timeouts(**changes: float) -> Iterator[None]:
    """Clients with other timeouts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in changes.items():
            patch.setattr(f"specact.remote.client.{name.upper()}", seconds)
        yield


@contextmanager
def asking(protocol: str, port: int, deadline_ms: float = PATIENT_MS, **changes: float) -> Iterator[Device]:
    """A device that is connected to a server."""
    with timeouts(**QUICK | changes), Client(endpoint_of(protocol, port), CONTRACT) as client:
        client.connect(10.0)
        yield Device(client, deadline_ms)


@contextmanager
def misbehaving(protocol: str) -> Iterator[tuple[FakeServer, int]]:
    """A server that does as it is told, and its port."""
    server = FakeServer(protocol)
    with listening(server.serve) as port:
        try:
            yield server, port
        finally:
            server.released.set()
            server.open.set()


def refusal(client: Client) -> str:
    """Why a client has no connection, as soon as it knows."""
    wait_for(lambda: client.problem is None or not client.problem.endswith(" yet"))
    with pytest.raises(RemoteError) as caught:
        client.connect(0.0)
    return str(caught.value)


def at(port: int) -> Endpoint:
    return Endpoint("ws", "127.0.0.1", port)
