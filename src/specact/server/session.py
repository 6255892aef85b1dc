"""One WebSocket at the server: its frames, its limits, and the messages of a robot on it."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from picows import WSCloseCode, WSFrame, WSListener, WSMsgType, WSTransport

from specact.errors import WireError
from specact.server.access import Caller
from specact.server.batcher import Job
from specact.server.service import Service
from specact.server.telemetry import Robot
from specact.server.turns import Lane
from specact.wire.messages import ErrorCode, Failure, Reply, bad, check_terms, encode, read_ask, read_hello, request_of

HELLO_TIMEOUT_S = 5.0
# A peer that does not answer a close frame in time is disconnected.
_CLOSE_TIMEOUT_S = 5.0
_MAX_WAITING, _MAX_WAITING_SIZES, _MAX_FRAGMENTS, _MAX_CONTROLS_PER_S = 64, 8, 1024, 200
_MAX_REASON_BYTES = 123  # RFC 6455, 5.5.1
_CLOSE_CODES = {
    ErrorCode.TOO_LARGE: WSCloseCode.MESSAGE_TOO_BIG,
    ErrorCode.SHUTTING_DOWN: WSCloseCode.SERVICE_RESTART,
    ErrorCode.OVERLOADED: WSCloseCode.TRY_AGAIN_LATER,
}


class Dialogue(Protocol):
    """The messages of one connection, in one of the two protocols."""

    @property
    def full(self) -> bool:
        """Whether the next message has to wait for a reply."""
        ...

    def begin(self) -> None:
        """The connection was accepted."""
        ...

    def take(self, message: bytes) -> None:
        """Handles a message; raises WireError if the connection cannot go on."""
        ...

    def say(self, error: WireError) -> None:
        """Sends an error that closes the connection."""
        ...

    def end(self) -> None:
        """The connection has ended."""
        ...


class Session(WSListener):
    """See :class:`~specact.server.service.Peer`; bounds what its peer can make the server do.

    One message is handled per turn of the event loop, so that connections with many of them do not delay the others.
    While a message waits, nothing is read.

    Args:
        service: of the server.
        dialogue: makes the dialogue of this session.
    """

    def __init__(self, service: Service, dialogue: Callable[[Session], Dialogue]) -> None:
        self.service, self.caller = service, Caller()
        self.robot: Robot | None = None
        self.address = self.host = "?"
        self._dialogue = dialogue(self)
        self._waiting: deque[bytes] = deque()
        self._fragments: list[bytes] = []
        self._writable, self._closing, self._scheduled = True, False, False
        self._second = self._controls = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport, self._socket = transport, transport.underlying_transport
        name = self._socket.get_extra_info("peername") or ("?", 0)
        self.address, self.host = f"{name[0]}:{name[1]}", _network(str(name[0]))
        try:
            self.service.join(self, transport.request.headers)
            self._timer = self._loop.call_later(HELLO_TIMEOUT_S, self._expire)
            self._dialogue.begin()
        except WireError as error:
            self.refuse(error)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        if kind == WSMsgType.CLOSE:
            transport.send_close()
            transport.disconnect()
        elif self._closing:
            return
        elif kind == WSMsgType.BINARY and frame.fin and not self._fragments:
            message, self._controls = frame.get_payload_as_bytes(), 0
            if frame.last_in_buffer and not self._waiting and self._can_take:
                self._take(message)
            else:
                self._wait(message)
        elif kind == WSMsgType.TEXT:
            self.refuse(bad("messages are binary frames, this one is text"))
        elif kind in (WSMsgType.BINARY, WSMsgType.CONTINUATION):
            self._assemble(frame)
        else:
            self._control(frame)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self.settle()
        self._closing = True
        self._waiting.clear()
        self._dialogue.end()
        self.service.leave(self)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self.resume()

    def settle(self) -> None:
        """The peer has shown that it belongs here."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.service.settle(self)

    def send(self, message: bytes | str) -> None:
        """Sends a message, text as a text frame; nothing if the connection is closing."""
        if not self._closing:
            self._transport.send(WSMsgType.TEXT if isinstance(message, str) else WSMsgType.BINARY, message)

    def refuse(self, error: WireError) -> None:
        """Says why, and closes the connection; waiting messages are dropped."""
        if not self._closing:
            self._dialogue.say(error)
            self.close(error)

    def close(self, error: WireError) -> None:
        """Closes the connection for this reason."""
        if self._closing:
            return
        self._closing = True
        self._waiting.clear()
        code = _CLOSE_CODES.get(ErrorCode(error.code), WSCloseCode.POLICY_VIOLATION)
        self._transport.send_close(code, str(error).encode()[:_MAX_REASON_BYTES].decode(errors="ignore"))
        self._socket.resume_reading()
        self._loop.call_later(_CLOSE_TIMEOUT_S, self._transport.disconnect, False)

    def resume(self) -> None:
        """Handles a waiting message in the next turn of the event loop, or reads on."""
        if self._waiting and self._can_take and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    @property
    def _can_take(self) -> bool:
        return self._writable and not self._closing and not self._dialogue.full

    def _wait(self, message: bytes) -> None:
        self._waiting.append(message)
        size = sum(map(len, self._waiting))
        if len(self._waiting) > _MAX_WAITING or size > _MAX_WAITING_SIZES * self.service.contract.max_message_bytes:
            self.refuse(bad(f"too many messages wait; more than {_MAX_WAITING} never may"))
            return
        self._socket.pause_reading()
        self.resume()

    def _next(self) -> None:
        self._scheduled = False
        if self._waiting and self._can_take:
            self._take(self._waiting.popleft())
            self.resume()
        if not self._waiting and not self._socket.is_closing():
            self._socket.resume_reading()

    def _take(self, message: bytes) -> None:
        try:
            self._dialogue.take(message)
        except WireError as error:
            self.refuse(error)

    def _assemble(self, frame: WSFrame) -> None:
        if (frame.msg_type == WSMsgType.BINARY) == bool(self._fragments):
            self.refuse(bad("a fragment does not fit to the one before it"))
            return
        self._fragments.append(frame.get_payload_as_bytes())
        if len(self._fragments) > _MAX_FRAGMENTS:
            self.refuse(bad(f"a message has at most {_MAX_FRAGMENTS} fragments"))
        elif sum(map(len, self._fragments)) > self.service.contract.max_message_bytes:
            self.refuse(WireError(ErrorCode.TOO_LARGE, "the message is longer than max_message_bytes"))
        elif frame.fin:
            message = b"".join(self._fragments)
            self._fragments.clear()
            self._wait(message)

    def _control(self, frame: WSFrame) -> None:
        now = int(time.monotonic())
        self._second, self._controls = now, self._controls + 1 if now == self._second else 1
        if self._controls > _MAX_CONTROLS_PER_S:
            self.refuse(bad(f"at most {_MAX_CONTROLS_PER_S} pings and pongs a second without a message"))
        elif frame.msg_type == WSMsgType.PING and self._writable:
            self._transport.send_pong(frame.get_payload_as_bytes())

    def _expire(self) -> None:
        self.refuse(bad(f"no hello came within {HELLO_TIMEOUT_S:g} s"))


class RobotDialogue:
    """See :class:`Dialogue`; the requests of one robot, answered as their results arrive."""

    def __init__(self, session: Session) -> None:
        self._session, self._service = session, session.service
        self._lane: Lane[Job] | None = None
        self._in_flight: dict[int, Job] = {}
        self._count = 0

    @property
    def full(self) -> bool:
        return len(self._in_flight) >= self._service.limits.max_under_way

    def begin(self) -> None:
        """Waits for the hello."""

    def take(self, message: bytes) -> None:
        if self._lane is None:
            self._welcome(message)
            return
        session, service, arrived = self._session, self._service, time.monotonic()
        ask = read_ask(message)
        try:
            request = request_of(ask, service.contract)
        # Process boundary: any failure becomes an error reply.
        except Exception as error:  # noqa: BLE001
            session.send(encode(service.failure(session, "other", error, ask.id)))
            return
        if session.robot is not None and ask.report:
            session.robot.report = ask.report
        self._count += 1
        number = self._count

        # By number: a closure over its job would be a reference cycle, and garbage collection delays robots.
        def reply(answer: Reply | Failure) -> None:
            session.send(encode(answer))
            if self._in_flight.pop(number, None) is not None:
                session.resume()

        job = service.answer(session, self._lane, ask.kind, request, ask.id, ask.deadline_ms, arrived, reply)
        if job is not None:
            self._in_flight[number] = job

    def say(self, error: WireError) -> None:
        kind = "hello" if self._lane is None else "other"
        self._session.send(encode(self._service.failure(self._session, kind, error)))

    def end(self) -> None:
        for job in self._in_flight.values():
            self._service.batcher.cancel(job)
        self._in_flight.clear()

    def _welcome(self, message: bytes) -> None:
        service, hello = self._service, read_hello(message)
        if hello.family is not None or hello.spec:
            check_terms(service.contract, hello.family, hello.spec)
        # Checked again: the server may have become full, or the token invalid, before the hello arrived.
        service.check_room()
        self._session.settle()
        self._lane = service.register(self._session, hello.robot)
        self._session.send(encode(service.welcome))


def _network(host: str) -> str:
    """The unit of the limit per address: an IPv4 address, or the /64 network of an IPv6 address, a customer's."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
