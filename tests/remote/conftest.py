"""For the tests of the device's side: a real server, one that misbehaves as told, and a robot that checks itself."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from specact import Bundle, SpeculativePolicy, calibrated_gate, load_bundle
from specact.errors import RemoteError
from specact.fallback import EXECUTE_DRAFT, Fallback
from specact.families.codes.sampling import verify
from specact.families.codes.values import executed_codes
from specact.gates import Always
from specact.lab.processes import ServerProcess, serving
from specact.remote.client import DEFAULT_SETTINGS, Client, ClientSettings
from specact.remote.target import remote_verifier
from specact.remote.transport import Endpoint
from specact.rng import Role, stream
from specact.types import StepRecord
from specact.wire import messages as wire
from specact.wire import msgpack
from specact.wire.handshake import Welcome, welcome_fields
from specact.wire.messages import Reply, ServerTimes, reply_fields

PERIOD_S = 0.05
Fields = dict[str, Any]


@pytest.fixture(scope="session")
def ball() -> Bundle:
    return load_bundle("ball")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("ball") as process:
        yield process


@pytest.fixture(scope="module")
def exact_server() -> Iterator[ServerProcess]:
    """One request per inference: then even requests that a fault piled up get the very bits of a local target."""
    with serving("ball", "--max-batch", "1") as process:
        yield process


# ---- a server that misbehaves as told -------------------------------------------------------------------------------


class Peer:
    """A device's connection, as the misbehaving server sees it."""

    def __init__(self, side: socket.socket) -> None:
        self.side, self.protocol = side, ServerProtocol(max_size=None)
        self.path, self.headers = "", dict[str, str]()
        self.greeting = b""
        self.pings, self.pongs = list[bytes](), list[bytes]()
        self._lock = threading.Lock()

    def say(self, message: Fields | bytes | str, pieces: int = 1) -> None:
        """Sends a message, text as a text frame, in so many fragments."""
        text = isinstance(message, str)
        payload = message.encode() if isinstance(message, str) else message
        data = payload if isinstance(payload, bytes) else msgpack.encode(payload)
        size = -(-len(data) // pieces) or 1
        parts = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
        for i, part in enumerate(parts):
            opcode = Opcode.CONT if i else Opcode.TEXT if text else Opcode.BINARY
            self.raw(Frame(opcode, part, fin=i == len(parts) - 1).serialize(mask=False))

    def raw(self, data: bytes) -> None:
        """Sends these very bytes."""
        with self._lock:
            self.side.sendall(data)

    def reset(self) -> None:
        """Ends the connection as a crash would; only from the thread that serves it."""
        self.side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.side.close()

    def messages(self) -> Iterator[bytes]:
        """What the device sends, until it or we end the connection; answers the opening handshake, pings, closing.

        A ``greeting`` is said after the opening handshake.
        """
        while data := self.side.recv(65536):
            self.protocol.receive_data(data)
            for event in self.protocol.events_received():
                if isinstance(event, Request):
                    self.path, self.headers = event.path, dict(event.headers.raw_items())
                    self.protocol.send_response(self.protocol.accept(event))
                    if self.greeting:
                        self.protocol.send_binary(self.greeting)
                elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                    # As libraries do: a ping is answered before what came after it.
                    self.raw(b"".join(self.protocol.data_to_send()))
                    yield bytes(event.data)
                elif isinstance(event, Frame) and event.opcode in (Opcode.PING, Opcode.PONG):
                    (self.pings if event.opcode is Opcode.PING else self.pongs).append(bytes(event.data))
            self.raw(b"".join(self.protocol.data_to_send()))
            if self.protocol.state is not State.OPEN:
                return


Behave = Callable[[Peer, wire.Request], None]


class Rogue:
    """A server in a thread that greets and answers as told.

    Attributes:
        port: where it listens.
        behave: is told of every request; :meth:`honest` answers as a server should.
        greet: is told of every hello.
        answers_handshakes, reads_requests: whether it does.
        requests: all of them, whichever connection they came by.
    """

    def __init__(self, bundle: Bundle, behave: Behave | None) -> None:
        self._bundle = bundle
        self.behave: Behave = behave or self.honest
        self.greet: Callable[[Peer], None] = self.welcome
        self.answers_handshakes = self.reads_requests = True
        self.requests: list[wire.Request] = []
        self.peers: list[Peer] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = [threading.Thread(target=self._accept, name="rogue")]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(20)
        self._listener.close()
        for peer in self.peers:
            hang_up(peer.side)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def welcome(self, peer: Peer) -> None:
        dialect = self._bundle.codec.dialect
        peer.say(welcome_fields(Welcome("ball", "0" * 16, "0", 1 << 20, dialect.family, dialect.agreed)))

    def answer(self, request: wire.Request) -> Fields:
        """The right reply, as a map."""
        target, times = self._bundle.target.infer(request.window), ServerTimes(0.0, 0.1, 0.2, 1)
        if request.kind == "infer":
            answer: dict[str, np.ndarray] = {"probs": target.probs, "offsets": target.offsets}
            return reply_fields(Reply(request.id, "distribution", answer, times))
        seed, robot, episode, step = request.address
        rng = stream(seed, Role.VERIFY, robot=robot, episode=episode, step=step)
        draft = dataclasses.replace(target, probs=request.arrays["draft_probs"])
        verdict = verify(target, draft, request.arrays["codes"], rng)
        chunk = self._bundle.tokenizer.decode(verdict.codes, target.offsets)
        said: dict[str, np.ndarray] = {
            "codes": verdict.codes,
            "accepted": verdict.accepted,
            "rejection": verdict.rejection,
            "chunk": chunk,
        }
        return reply_fields(Reply(request.id, "verdict", said, times))

    def honest(self, peer: Peer, request: wire.Request) -> None:
        peer.say(self.answer(request))

    def _accept(self) -> None:
        while True:
            try:
                side, _ = self._listener.accept()
            except OSError:
                return
            self.peers.append(Peer(side))
            self._threads.append(threading.Thread(target=self._serve, args=(self.peers[-1],), name="rogue peer"))
            self._threads[-1].start()

    def _serve(self, peer: Peer) -> None:
        with peer.side:
            peer.side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeted = False
            try:
                while not self.answers_handshakes:
                    if not peer.side.recv(65536):
                        return
                for payload in peer.messages():
                    if greeted and self.reads_requests:
                        self.requests.append(wire.read_request(msgpack.decode(payload), self._bundle.codec.dialect))
                        self.behave(peer, self.requests[-1])
                    elif not greeted:
                        greeted = True
                        self.greet(peer)
            except OSError:
                return


Misbehaving = Callable[..., AbstractContextManager[Rogue]]


@pytest.fixture
def misbehaving(ball: Bundle) -> Misbehaving:
    """``with misbehaving(behave) as rogue``; without ``behave`` it is honest."""

    @contextmanager
    def make(behave: Behave | None = None) -> Iterator[Rogue]:
        rogue = Rogue(ball, behave)
        try:
            yield rogue
        finally:
            rogue.close()

    return make


@pytest.fixture
def listening() -> Callable[[Callable[[socket.socket], None]], AbstractContextManager[int]]:
    """``with listening(serve) as port`` hands every connection to ``serve``, in a thread."""

    @contextmanager
    def listen(serve: Callable[[socket.socket], None]) -> Iterator[int]:
        listener, sides = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()
        threads: list[threading.Thread] = []

        def handle(side: socket.socket) -> None:
            with side:
                try:
                    serve(side)
                except OSError:
                    return

        def accept() -> None:
            while True:
                try:
                    side, _ = listener.accept()
                except OSError:
                    return
                sides.append(side)
                threads.append(threading.Thread(target=handle, args=(side,), name="listening"))
                threads[-1].start()

        acceptor = threading.Thread(target=accept, name="listening")
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join(20)
            listener.close()
            for side in sides:
                hang_up(side)
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()

    return listen


def hang_up(side: socket.socket) -> None:
    """Wakes whoever reads or writes there."""
    try:
        side.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


# ---- a robot that checks itself -------------------------------------------------------------------------------------


class Metronome:
    """Measures what the machine itself does to a thread that wants to wake up: how late that is, at worst [s]."""

    def __enter__(self) -> Metronome:
        self.worst, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._tick, name="metronome")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._stop.is_set():
            due = time.monotonic() + 0.005
            time.sleep(0.005)
            self.worst = max(self.worst, time.monotonic() - due)


def queueing() -> dict[str, float]:
    """How long each thread of this process has waited for a processor so far [s], where Linux tells."""
    waited = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, IndexError):
            waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited


@dataclasses.dataclass(frozen=True)
class Step:
    """One control step: when ``act`` began, how long it took [s], what it did and gave.

    ``noise`` is how long threads of this process were ready meanwhile and had no processor; one may have held what the
    others needed, so all of them count.
    """

    began: float
    stall: float
    noise: float
    record: StepRecord
    action: np.ndarray


class Robot:
    """A policy in a control loop of 20 Hz, real time, every step of which infers.

    Args:
        bundle: its chunks are cut to one action.
        client: to the server.
        gated: with the deviation gate; otherwise every step is transmitted.
        deadline_ms: of a step.
        sampling: where codes are drawn.
        fallback: for missed steps.
    """

    def __init__(
        self,
        bundle: Bundle,
        client: Client,
        *,
        gated: bool = False,
        deadline_ms: float = 40.0,
        sampling: str = "device",
        fallback: Fallback = EXECUTE_DRAFT,
    ) -> None:
        self.bundle = dataclasses.replace(bundle, spec=dataclasses.replace(bundle.spec, execute=1))
        self.client, self.deadline_ms, self.fallback = client, deadline_ms, fallback
        gate = calibrated_gate(bundle, "deviation", 0.6) if gated else Always()
        self.policy = SpeculativePolicy(
            self.bundle,
            gate,
            verifier=remote_verifier(client, bundle, deadline_ms, sampling),  # type: ignore[arg-type]
            fallback=fallback,
            seed=5,
        )
        client.report = self.policy.counts
        self.steps: list[Step] = []
        self.noise = 0.0
        self._walk = np.random.default_rng(0)

    def run(self, proceed: Callable[[], bool], period_s: float = PERIOD_S) -> Robot:
        """Drives while ``proceed`` says so; never catches up."""
        with Metronome() as metronome:
            due = time.monotonic()
            while proceed():
                self._step()
                due = max(due + period_s, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
        self.noise = max(self.noise, metronome.worst)
        return self

    def play(self, steps: int, period_s: float = 0.0) -> Robot:
        """Drives for so many steps, without pause if not told otherwise."""
        until = len(self.steps) + steps
        return self.run(lambda: len(self.steps) < until, period_s)

    def find_back(self, verified: int = 1) -> Robot:
        """Drives until so many more steps were verified; a busy machine may need several tries."""
        wanted, until = self.verified + verified, time.monotonic() + 60.0
        self.run(lambda: self.verified < wanted and time.monotonic() < until, period_s=0.01)
        assert self.verified >= wanted
        return self

    def _step(self) -> None:
        state = np.clip(0.6 * self._walk.standard_normal(self.bundle.observation["state"].shape), -1.0, 1.0)
        observation = {"state": state, "goal": np.array([0.3, -0.2])}
        before, began = queueing(), time.monotonic()
        action = self.policy.act(observation)
        stall = time.monotonic() - began
        noise = sum(waited - before.get(thread, 0.0) for thread, waited in queueing().items())
        assert self.policy.record is not None
        self.steps.append(Step(began, stall, noise, self.policy.record, action))

    @property
    def verified(self) -> int:
        """Steps the target answered so far."""
        return sum(step.record.outcome is not None for step in self.steps)

    @property
    def causes(self) -> Counter[str]:
        """Misses so far, by cause."""
        return Counter(step.record.miss for step in self.steps if step.record.miss is not None)

    def waited(self, since: float, until: float) -> float:
        """Seconds that missed steps spent waiting for the target between two moments, all together, less noise."""
        missed = [step for step in self.steps if since <= step.began < until and step.record.miss is not None]
        return sum(max(0.0, step.record.times.offload.total - step.noise) for step in missed)

    def check(self, *causes: str) -> None:
        """Everything that has to hold whatever the link and the server do; misses may have these causes only."""
        # Deadline and one period, as promised. To this is added what is the machine's doing: how long the threads of
        # this process had to queue for a processor during the step, and by how much one that only sleeps overslept.
        for step in self.steps:
            longest = self.deadline_ms / 1e3 + PERIOD_S
            assert step.stall <= longest + step.noise + self.noise, f"{step.stall} s, {step.noise} + {self.noise} noise"
        counts = self.policy.counts
        # A server that had to wait for a processor says itself that the deadline passed.
        allowed = {*causes, "expired"} if "deadline" in causes else set(causes)
        assert set(self.causes) <= allowed, self.causes
        assert self.causes.total() == counts["missed"] and counts["steps"] == len(self.steps)
        assert counts["transmitted"] == self.verified + counts["missed"]
        for step in self.steps:
            assert step.record.decision.transmit == (step.record.outcome is not None or step.record.miss is not None)
            assert step.record.outcome is None or step.record.miss is None
            self._check_action(step)

    def _check_action(self, step: Step) -> None:
        """Bit for bit what this step's own window asks for, and no other's."""
        record, proposal = step.record, step.record.proposal
        number, codes, chunk = record.address.step, proposal.evidence.codes, proposal.actions
        if record.outcome is not None:
            target = self.bundle.target.infer(proposal.window)
            rng = stream(5, Role.VERIFY, robot=0, episode=0, step=number)
            codes = verify(target, proposal.evidence.draft, proposal.evidence.codes, rng).codes
            chunk = self.bundle.tokenizer.decode(codes, target.offsets)
            said = record.outcome.evidence.target
            assert said is None or (
                np.array_equal(said.probs, target.probs) and np.array_equal(said.offsets, target.offsets)
            ), f"step {number} has the target's answer to another step"
        assert np.array_equal(executed_codes(record), codes), f"step {number} has codes of another step"
        if record.miss is None or self.fallback.on_miss == "execute_draft":
            action = self.bundle.tokenizer.to_environment(chunk[0])
            assert np.array_equal(step.action, action), f"step {number} executes another step's action"


@pytest.fixture
def robot(ball: Bundle) -> Callable[..., Robot]:
    """Makes one: ``robot(client, gated=True)``."""
    return lambda client, **options: Robot(ball, client, **options)


@pytest.fixture
def fleet(ball: Bundle, robot: Callable[..., Robot]) -> Callable[..., AbstractContextManager[Sequence[Robot]]]:
    """``with fleet(port) as robots``: connected, each with a client of its own."""

    @contextmanager
    def make(
        port: int, settings: ClientSettings = DEFAULT_SETTINGS, deadline_ms: float = 40.0
    ) -> Iterator[list[Robot]]:
        with ExitStack() as stack:
            clients = [
                stack.enter_context(Client(Endpoint(scheme, "127.0.0.1", port), ball.codec.dialect, name, settings))
                for name, scheme in {"always": "ws", "gated": "ws", "paper": "http"}.items()
            ]
            for client in clients:
                client.connect(10.0)
            yield [
                robot(clients[0], deadline_ms=deadline_ms),
                robot(clients[1], deadline_ms=deadline_ms, gated=True),
                robot(clients[2], deadline_ms=deadline_ms, sampling="server"),
            ]

    return make


@pytest.fixture(scope="session")
def driving() -> Callable[..., AbstractContextManager[None]]:
    """``with driving(*robots)`` drives them, each in a thread, while the block does something to their link."""

    @contextmanager
    def drive(*robots: Robot) -> Iterator[None]:
        stop = threading.Event()
        with ThreadPoolExecutor(len(robots)) as pool:
            runs = [pool.submit(robot.run, lambda: not stop.is_set()) for robot in robots]
            try:
                yield
            finally:
                stop.set()
                for run in runs:
                    run.result()

    return drive


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., float]:
    """``wait_for(what, within_s)`` returns after how many seconds it came true."""

    def wait(what: Callable[[], bool], within_s: float = 60.0) -> float:
        start = time.monotonic()
        while not what():
            assert time.monotonic() - start < within_s, f"it did not happen within {within_s} s"
            time.sleep(0.005)
        return time.monotonic() - start

    return wait


@pytest.fixture(scope="session")
def refusal(wait_for: Callable[..., float]) -> Callable[[Client], str]:
    """Why a client has no connection, as soon as it knows."""

    def reason(client: Client) -> str:
        wait_for(lambda: client.problem is None or not client.problem.endswith(" yet"))
        with pytest.raises(RemoteError) as caught:
            client.connect(0.0)
        return str(caught.value)

    return reason
