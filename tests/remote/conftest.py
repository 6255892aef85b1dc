"""A server that misbehaves as told, and a robot that checks itself."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.children import wait_for
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as HttpRequest
from websockets.protocol import State
from websockets.server import ServerProtocol

from specact import Pair, SpeculativePolicy, load_pair
from specact.errors import RemoteError
from specact.families.codes.policy import executed_codes
from specact.families.codes.sampling import verify
from specact.gates import Always
from specact.remote import Client, ClientSettings, Endpoint, remote_verifier
from specact.rng import Role, StepAddress, stream
from specact.safety import EXECUTE_DRAFT, Fallback
from specact.types import StepRecord
from specact.wire.exchange import Request
from specact.wire.messages import PROTOCOL, Ask, Failure, Reply, Welcome, encode, read_ask, request_of

QUICK = ClientSettings(first_delay_s=0.01, longest_delay_s=0.1)
PATIENT_MS = 20_000.0


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
        text = isinstance(message, str)
        encoded = encode(message) if isinstance(message, msgspec.Struct) else message
        data = encoded.encode() if isinstance(encoded, str) else encoded
        size = -(-len(data) // pieces) or 1
        parts = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
        for number, part in enumerate(parts):
            opcode = Opcode.CONT if number else Opcode.TEXT if text else Opcode.BINARY
            self.raw(Frame(opcode, part, fin=number == len(parts) - 1).serialize(mask=False))

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
    listener, sides, threads = socket.create_server(("127.0.0.1", 0)), list[socket.socket](), list[threading.Thread]()

    def handle(side: socket.socket) -> None:
        with side, suppress(OSError):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serve(side)

    def accept() -> None:
        with suppress(OSError):
            while True:
                sides.append(listener.accept()[0])
                threads.append(threading.Thread(target=handle, args=(sides[-1],)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join(20)
        listener.close()
        for side in sides:
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


class Cable:
    """A relay to a server of this machine, for :func:`listening`, that breaks as told.

    Attributes:
        flows: cleared, nothing passes, and nothing is lost.
        plugged: cleared, new connections end at once.
        endings: each ends all connections there are: ``reset``, or ``freeze``, after which they look open.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.flows, self.plugged, self._over = threading.Event(), threading.Event(), threading.Event()
        self.endings: list[str] = []
        self.mend()

    def mend(self) -> None:
        self.flows.set()
        self.plugged.set()

    def end(self) -> None:
        """Lets go of what is frozen."""
        self._over.set()
        self.mend()

    def serve(self, side: socket.socket) -> None:
        before = len(self.endings)
        if not self.plugged.is_set():
            return
        with socket.create_connection(("127.0.0.1", self._port)) as server:
            other = {side: server, server: side}
            while not self._over.is_set():
                for ready in select.select(list(other), [], [], 0.01)[0]:
                    self.flows.wait(60)
                    if len(self.endings) == before:
                        other[ready].sendall(data := ready.recv(65536))
                        if not data:
                            return
                if len(self.endings) > before:
                    if self.endings[-1] == "freeze":
                        self._over.wait(60)
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return


Behave = Callable[["Rogue", Peer, Ask], None]


class Rogue:
    """A server of a bundle that greets and answers as told.

    Attributes:
        behave: told of every request; :func:`honest` answers as a server should.
        greet: told of every hello.
        asks: all requests, whichever connection they came by.
    """

    def __init__(self, bundle: Pair[Any]) -> None:
        self.bundle, self.contract = bundle, bundle.exchange.contract
        self.behave: Behave = honest
        self.greet: Callable[[Peer], None] = lambda peer: peer.say(self.welcome())
        self.asks: list[Ask] = []
        self.peers: list[Peer] = []

    def welcome(self, **changes: Any) -> Welcome:
        contract = self.contract
        welcome = Welcome(
            PROTOCOL, "ball", "0" * 16, "0", 1 << 20, contract.family, dict(contract.spec), contract.describe()
        )
        return msgspec.structs.replace(welcome, **changes)

    def answer(self, ask: Ask, **fields: Any) -> Reply:
        """The right reply, with these fields of the message instead."""
        (arrays,) = self.bundle.exchange.answer(ask.kind, [request_of(ask, self.contract)])
        assert isinstance(arrays, dict)
        payload = self.contract.kinds[ask.kind].reply.pack(arrays)
        return msgspec.structs.replace(Reply(ask.id, 0.0, 0.1, 0.2, 1, payload), **fields)

    def serve(self, side: socket.socket) -> None:
        peer, greeted = Peer(side), False
        self.peers.append(peer)
        for payload in peer.messages():
            if greeted:
                self.asks.append(read_ask(payload))
                self.behave(self, peer, self.asks[-1])
            else:
                greeted = True
                self.greet(peer)


def honest(rogue: Rogue, peer: Peer, ask: Ask) -> None:
    peer.say(rogue.answer(ask))


def silent(rogue: Rogue, peer: Peer, ask: Ask) -> None:
    """Says nothing."""


def failing(code: Any) -> Behave:
    return lambda rogue, peer, ask: peer.say(Failure(ask.id, code, "no"))


class Robot:
    """A policy whose chunks are cut to one action, every step of which asks the target.

    Args:
        bundle, client: on the device.
        deadline_ms: of a step.
        sampling: where codes are drawn.
        fallback: for missed steps.
    """

    def __init__(
        self, bundle: Pair[Any], client: Client, *, deadline_ms: float = PATIENT_MS, sampling: Any = "device",
        fallback: Fallback = EXECUTE_DRAFT,
    ) -> None:  # fmt: skip
        self.bundle = bundle.composed(spec=msgspec.structs.replace(bundle.parts.spec, execute=1))
        self.client, self.fallback = client, fallback
        verifier = remote_verifier(client, bundle, deadline_ms, sampling)
        self.policy = SpeculativePolicy(self.bundle, Always(), verifier=verifier, fallback=fallback, seed=5)
        client.report = self.policy.counts
        self.records: list[StepRecord] = []
        self.actions: list[np.ndarray] = []
        self._walk = np.random.default_rng(0)

    def step(self) -> StepRecord:
        state = np.clip(0.6 * self._walk.standard_normal(self.bundle.observation["state"].shape), -1.0, 1.0)
        self.actions.append(self.policy.act({"state": state, "goal": np.array([0.3, -0.2])}))
        assert self.policy.record is not None
        self.records.append(self.policy.record)
        return self.policy.record

    def play(self, steps: int, period_s: float = 0.0) -> Robot:
        for _ in range(steps):
            self.step()
            time.sleep(period_s)
        return self

    def find_back(self, verified: int = 1) -> Robot:
        """Plays until so many more steps were verified."""
        wanted, until = self.verified + verified, time.monotonic() + 60.0
        while self.verified < wanted:
            assert time.monotonic() < until, self.client.problem
            self.play(1, 0.01)
        return self

    @property
    def verified(self) -> int:
        return sum(record.outcome is not None for record in self.records)

    @property
    def causes(self) -> Counter[str]:
        """Misses so far, by cause."""
        return Counter(record.miss for record in self.records if record.miss is not None)

    def check(self, *causes: str) -> None:
        """What holds whatever link and server do: misses have these causes, and no step has another's answer."""
        assert set(self.causes) <= set(causes), self.causes
        counts = self.policy.counts
        assert counts["missed"] == self.causes.total() and counts["transmitted"] == self.verified + counts["missed"]
        for record, action in zip(self.records, self.actions, strict=True):
            proposal, number = record.proposal, record.address.step
            codes, chunk = proposal.evidence.codes, proposal.actions
            if record.outcome is not None:
                target = self.bundle.parts.target.infer(proposal.window)
                rng = stream(5, Role.VERIFY, robot=0, episode=record.address.episode, step=number)
                codes = verify(target, proposal.evidence.draft, codes, rng).codes
                chunk = self.bundle.parts.tokenizer.decode(codes, target.offsets)
            assert np.array_equal(executed_codes(record), codes), f"step {number} has the answer to another step"
            if record.miss is None or self.fallback.on_miss == "execute_draft":
                assert np.array_equal(action, self.bundle.parts.tokenizer.to_environment(chunk[0])), f"step {number}"


@contextmanager
def driving(*robots: Robot) -> Iterator[None]:
    """Drives robots at 20 Hz, each in a thread, while the block does something to their link."""
    stop = threading.Event()

    def drive(robot: Robot) -> None:
        while not stop.is_set():
            robot.play(1, 0.05)

    with ThreadPoolExecutor(len(robots)) as pool:
        runs = [pool.submit(drive, robot) for robot in robots]
        try:
            yield
        finally:
            stop.set()
            for run in runs:
                run.result()


def refusal(client: Client) -> str:
    """Why a client has no connection, as soon as it knows."""
    wait_for(lambda: client.problem is None or not client.problem.endswith(" yet"))
    with pytest.raises(RemoteError) as caught:
        client.connect(0.0)
    return str(caught.value)


def at(port: int) -> Endpoint:
    return Endpoint("ws", "127.0.0.1", port)


def zeros(bundle: Pair[Any]) -> Request:
    return Request(bundle.parts.spec.target.zeros(), StepAddress(0, 0, 0, 0))


@pytest.fixture(scope="session")
def ball() -> Pair[Any]:
    return load_pair("ball")


@pytest.fixture
def rogue(ball: Pair[Any]) -> Iterator[tuple[Rogue, int]]:
    """A server that does as it is told, and its port."""
    made = Rogue(ball)
    with listening(made.serve) as port:
        yield made, port
