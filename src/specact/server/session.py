"""One WebSocket at the server: its frames, its limits, and the messages of a robot on it."""

from __future__ import annotations

import asyncio
import time

from picows import WSCloseCode, WSFrame, WSListener, WSMsgType, WSTransport

from specact.errors import WireError
from specact.server.access import Caller
from specact.server.capacity import Demand
from specact.server.queue import Job, Lane, Outcome
from specact.server.service import Service
from specact.server.telemetry import Robot
from specact.wire.messages import Ask, ErrorCode, Failure, Reply, bad, check_terms, encode, read_ask, read_hello

HELLO_TIMEOUT_S = 5.0
# A peer that does not answer a close frame in time is disconnected; sooner if it sends so many frames instead.
_CLOSE_TIMEOUT_S, _LINGER_S, _MAX_IGNORED = 5.0, 0.2, 16
# Requests that were read at once and wait, parts of a message, and pings and pongs.
_MAX_WAITING, _MAX_FRAGMENTS, _MAX_CONTROLS_PER_S = 2048, 1024, 200
_MAX_REASON_BYTES = 123  # RFC 6455, 5.5.1
_CLOSE_CODES = {
    ErrorCode.TOO_LARGE: WSCloseCode.MESSAGE_TOO_BIG,
    ErrorCode.SHUTTING_DOWN: WSCloseCode.SERVICE_RESTART,
    ErrorCode.OVERLOADED: WSCloseCode.TRY_AGAIN_LATER,
}


class Session(WSListener):
    """A connection in specact's own protocol: a hello, and then requests, answered as their results arrive.

    It bounds what its peer can make the server do. While ``max_jobs`` requests are in flight, or the peer does not read
    replies, nothing more is read. What was read by then waits in the robot's lane, up to ``max_waiting`` requests.

    Attributes:
        robot, lane: its books and its queue; None before the hello.
        demand: what the robot expects to ask for; None if it did not say.
        jobs: its requests in flight.
        used: when its last message came [s], of the monotonic clock.
        pending: whether the peer has not shown yet that it belongs here.
    """

    def __init__(self, service: Service, max_jobs: int, max_waiting: int = _MAX_WAITING) -> None:
        self.service, self.caller = service, Caller()
        self.robot: Robot | None = None
        self.lane: Lane | None = None
        self.demand: Demand | None = None
        self.jobs, self.used, self.pending = set[Job](), time.monotonic(), True
        self._max_jobs, self._max_waiting = max_jobs, max_waiting
        self._partial, self._fragments = bytearray(), 0
        self._writable, self._closing = True, False
        self._second = self._controls = self._ignored = 0

    def begin(self) -> None:
        """The connection was accepted."""

    def handle(self, message: bytes, arrived: float) -> None:
        """Handles a message; raises WireError if the connection cannot go on."""
        if self.robot is None:
            self._welcome(message)
            return
        ask = read_ask(message)
        if ask.report:
            self.robot.report = ask.report
        self.submit(ask, arrived)

    def reply(self, answer: Reply | Failure) -> None:
        """Sends the reply to a request."""
        self.send(encode(answer))

    def explain(self, error: WireError) -> None:
        """Sends the error for which the connection is closed next."""
        self.reply(self.failure("other" if self.robot else "hello", error))

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport, self._socket = transport, transport.underlying_transport
        self._loop = asyncio.get_running_loop()
        peer: tuple[str, int] = self._socket.get_extra_info("peername") or ("?", 0)
        self.host, self.address = peer[0], f"{peer[0]}:{peer[1]}"
        late = bad(f"no hello came within {HELLO_TIMEOUT_S:g} s")
        self._timer = self._loop.call_later(HELLO_TIMEOUT_S, self.refuse, late)
        try:
            self.service.join(self, transport.request.headers)
            self.begin()
        except WireError as error:
            self.refuse(error)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        if kind == WSMsgType.CLOSE:
            transport.send_close()
            transport.disconnect()
        elif self._closing:
            self._ignored += 1
            if self._ignored == _MAX_IGNORED:
                # It goes on without reading why: what else it sends is not worth the time.
                self._socket.pause_reading()
                self._loop.call_later(_LINGER_S, transport.disconnect, False)
        elif kind == WSMsgType.BINARY and frame.fin and not self._fragments:
            self._controls = 0
            self.take(frame.get_payload_as_bytes())
        elif kind == WSMsgType.TEXT:
            self.refuse(bad("messages are binary frames, this one is text"))
        elif kind in (WSMsgType.BINARY, WSMsgType.CONTINUATION):
            self._assemble(frame)
        else:
            self._control(frame)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self.settle()
        self._closing = True
        for job in self.jobs:
            job.wanted = False
        self.jobs.clear()
        self.service.leave(self)

    def pause_writing(self) -> None:
        self._writable = False
        self._socket.pause_reading()

    def resume_writing(self) -> None:
        self._writable = True
        self._read_on()

    def settle(self) -> None:
        """The peer has shown that it belongs here."""
        self.pending = False
        self._timer.cancel()

    def send(self, message: bytes | str) -> None:
        """Sends a message, text as a text frame; nothing if the connection is closing."""
        if not self._closing:
            self._transport.send(WSMsgType.TEXT if isinstance(message, str) else WSMsgType.BINARY, message)

    def submit(self, ask: Ask, arrived: float) -> None:
        """Has a request answered, by :meth:`reply`; ``arrived`` is when [s] of the monotonic clock."""
        assert self.lane is not None, "otherwise there are no requests"
        if len(self.jobs) >= self._max_waiting:
            raise bad(f"{len(self.jobs)} requests of this connection wait; wait for replies first")
        job = Job(ask, self.lane, arrived, arrived + ask.deadline_ms / 1e3, self._finish)
        self.jobs.add(job)
        if len(self.jobs) == self._max_jobs:
            self._socket.pause_reading()
        self.service.batcher.submit(job)

    def failure(self, kind: str, error: WireError, identity: int | None = None) -> Failure:
        """An error reply, recorded in telemetry and log; ``kind`` is that of the request."""
        self.service.telemetry.record_error(kind, error.code, self.robot)
        name = self.robot.name if self.robot else None
        self.service.log.write_refusal(kind, error.code, self.address, str(error), name)
        return Failure(identity, ErrorCode(error.code), str(error))

    def refuse(self, error: WireError) -> None:
        """Says why, and closes the connection."""
        if not self._closing:
            self.explain(error)
            self.close(error)

    def close(self, error: WireError) -> None:
        """Closes the connection for this reason."""
        if self._closing:
            return
        self._closing = True
        code = _CLOSE_CODES.get(ErrorCode(error.code), WSCloseCode.POLICY_VIOLATION)
        self._transport.send_close(code, str(error).encode()[:_MAX_REASON_BYTES].decode(errors="ignore"))
        self._socket.resume_reading()
        self._loop.call_later(_CLOSE_TIMEOUT_S, self._transport.disconnect, False)

    def take(self, message: bytes) -> None:
        """Handles a message, or closes the connection."""
        self.used = time.monotonic()
        try:
            self.handle(message, self.used)
        except WireError as error:
            self.refuse(error)

    def _welcome(self, message: bytes) -> None:
        service, hello, demand = self.service, read_hello(message), None
        if hello.family is not None or hello.spec:
            check_terms(service.contract, hello.family, hello.spec)
        if hello.rate_hz is not None and hello.deadline_ms is not None:
            demand = Demand(hello.rate_hz, hello.deadline_ms / 1e3)
        # Checked again: the server may have become full before the hello arrived.
        service.check_room(self, demand)
        self.demand = demand
        self.settle()
        service.register(self, hello.robot)
        self.send(encode(service.welcome))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        self.jobs.discard(job)
        if isinstance(outcome, WireError):
            self.reply(self.failure(job.ask.kind, outcome, job.ask.id))
        else:
            outcome.total_ms = 1e3 * (time.monotonic() - job.arrived)
            self.reply(outcome)
            # After the reply, so that the robot does not wait for it.
            assert self.robot is not None
            self.service.telemetry.record_reply(job.ask.kind, outcome, self.robot)
        if len(self.jobs) == self._max_jobs - 1:
            self._read_on()

    def _read_on(self) -> None:
        if self._writable and len(self.jobs) < self._max_jobs and not self._socket.is_closing():
            self._socket.resume_reading()

    def _assemble(self, frame: WSFrame) -> None:
        first = frame.msg_type == WSMsgType.BINARY
        self._fragments += 1
        self._partial += frame.get_payload_as_memoryview()
        if first != (self._fragments == 1):
            self.refuse(bad("a fragment does not fit to the one before it"))
        elif self._fragments > _MAX_FRAGMENTS:
            self.refuse(bad(f"a message has at most {_MAX_FRAGMENTS} fragments"))
        elif len(self._partial) > self.service.welcome.max_message_bytes:
            self.refuse(WireError(ErrorCode.TOO_LARGE, "the message is longer than max_message_bytes"))
        elif frame.fin:
            message, self._partial, self._fragments = bytes(self._partial), bytearray(), 0
            self.take(message)

    def _control(self, frame: WSFrame) -> None:
        now = int(time.monotonic())
        self._second, self._controls = now, self._controls + 1 if now == self._second else 1
        if self._controls > _MAX_CONTROLS_PER_S:
            self.refuse(bad(f"at most {_MAX_CONTROLS_PER_S} pings and pongs a second without a message"))
        elif frame.msg_type == WSMsgType.PING and self._writable:
            self._transport.send_pong(frame.get_payload_as_bytes())
