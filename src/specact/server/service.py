"""From a request to its reply, for both the stream and HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specact import __version__
from specact.errors import ConfigError, WireError
from specact.server.access import Access, Caller
from specact.server.access_log import AccessLog
from specact.server.batcher import Batcher, Job, Outcome
from specact.server.connections import Connection, Connections
from specact.server.settings import ServerSettings
from specact.server.telemetry import Robot, Telemetry
from specact.server.turns import Lane
from specact.wire.checks import ErrorCode, request_id
from specact.wire.handshake import Welcome, check_hello, read_hello, welcome_fields
from specact.wire.messages import ErrorReply, Reply, Responder, ServerTimes, read_request, reply_fields
from specact.wire.sizes import max_message_bytes

Fields = dict[str, Any]
_log = logging.getLogger("specact.server")


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a request.

    Attributes:
        lane: queue of its requests.
        peer: address and port, if known.
        robot: its entry on the status page, if it has one.
    """

    lane: Lane[Job]
    peer: str | None = None
    robot: Robot | None = None

    @property
    def name(self) -> str | None:
        """The robot's name, if known."""
        return None if self.robot is None else self.robot.name


class Service:
    """A target, its batcher, access control, logs and telemetry.

    Args:
        responder: the served target.
        settings: limits of the server.

    Attributes:
        abandoned: number of requests that were in flight when the server stopped waiting for them.
    """

    def __init__(self, responder: Responder, settings: ServerSettings) -> None:
        self.name, self.dialect, self.settings = responder.name, responder.dialect, settings
        self.limit = max_message_bytes(responder.dialect)
        self.telemetry = Telemetry(responder.name)
        self.batcher = Batcher(responder, settings)
        self.welcome = Welcome(
            responder.name, responder.fingerprint, __version__, self.limit, self.dialect.family, self.dialect.agreed
        )
        self.access = Access(settings.token, settings.tokens)
        self.log = AccessLog(settings.access_log, settings.log_steps)
        self.connections = Connections(
            settings.max_robots + settings.max_pending, settings.max_pending, settings.max_per_address, self._dropped
        )
        self.max_robots = settings.max_robots
        self.draining = False
        self.abandoned = 0
        self._lanes: dict[str, Lane[Job]] = {}
        self._streams: dict[int, tuple[Caller, Callable[[], Coroutine[Any, Any, None]]]] = {}
        self._disconnecting: set[asyncio.Task[None]] = set()

    def limit_connections(self, descriptors: int) -> None:
        """Limits connections to the number of available file descriptors."""
        most = min(self.settings.max_robots + self.settings.max_pending, descriptors)
        pending = min(self.settings.max_pending, most // 4)
        self.connections.allow(most, pending)
        self.max_robots = min(self.settings.max_robots, most - pending)
        if self.max_robots < self.settings.max_robots:
            _log.warning(
                "this process may open too few files for %d robots: it takes %d; raise the limit with ulimit -n",
                self.settings.max_robots, self.max_robots,
            )  # fmt: skip

    def reload(self) -> None:
        """Reloads the tokens and reopens the access log; robots whose token was removed are disconnected."""
        for step in (self.access.reload, self.log.reopen):
            try:
                step()
            except ConfigError as error:
                _log.error("what was read before stays valid: %s", error)
        self._lanes = {name: lane for name, lane in self._lanes.items() if name in self.access.names}
        for caller, disconnect in self._streams.values():
            if not self.access.is_valid(caller):
                task = asyncio.get_running_loop().create_task(disconnect())
                self._disconnecting.add(task)
                task.add_done_callback(self._disconnecting.discard)

    @contextmanager
    def robot(
        self, caller: Caller, name: str, peer: str | None, disconnect: Callable[[], Coroutine[Any, Any, None]]
    ) -> Iterator[Sender]:
        """Registers a robot while its stream is open.

        Args:
            caller: from its token.
            name: from its hello; the token's name takes precedence.
            peer: its address and port.
            disconnect: closes the stream when its token is no longer valid.
        """
        key = self.telemetry.connected(caller.name or name)
        robot = self.telemetry.robots[key]
        self._streams[key] = caller, disconnect
        self.log.write("connected", peer=peer, robot=robot.name)
        try:
            yield Sender(self.lane(caller), peer, robot)
        finally:
            del self._streams[key]
            self.telemetry.disconnected(key)
            seconds = round(time.monotonic() - robot.since, 3)
            totals = {"seconds": seconds, "requests": robot.requests, "errors": robot.errors}
            self.log.write("disconnected", peer=peer, robot=robot.name, **totals)

    def lane(self, caller: Caller) -> Lane[Job]:
        """The queue of a caller's requests: one for each token name, otherwise a new one."""
        if caller.name is None:
            return self.batcher.lane()
        return self._lanes.setdefault(caller.name, self.batcher.lane())

    def hello(self, fields: Fields) -> tuple[str, Fields]:
        """The robot's name and the welcome.

        Raises:
            WireError: if device and server are incompatible.
        """
        hello = read_hello(fields)
        check_hello(hello, self.dialect)
        return hello.robot, welcome_fields(self.welcome)

    def answer(self, fields: Fields, arrived: float, sender: Sender, reply: Callable[[Fields], None]) -> Job | None:
        """Answers a request; failures become error replies, never exceptions.

        Args:
            fields: the decoded message.
            arrived: when its frame arrived, in seconds of the monotonic clock.
            sender: of the request.
            reply: called once with the reply, immediately or later.

        Returns:
            The job, for :meth:`cancel`; None if the reply was immediate.
        """
        named = fields.get("type")
        kind = named if isinstance(named, str) and named in self.dialect.exchanges else "other"

        def finish(outcome: Outcome) -> None:
            try:
                if isinstance(outcome, WireError):
                    raise outcome
                times = outcome.times(arrived)
                reply(reply_fields(Reply(request.id, self.dialect.exchanges[kind].answer, outcome.arrays, times)))
            except Exception as error:  # noqa: BLE001
                reply(self.error_reply(kind, error, fields, sender))
            else:
                # After the reply: nobody waits for the books.
                self._record_reply(kind, times, sender)

        try:
            request = read_request(fields, self.dialect)
            if sender.robot is not None and request.report:
                sender.robot.report = request.report
            if self.draining:
                raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
            return self.batcher.submit(sender.lane, request, arrived, finish)
        # Process boundary: any failure becomes an error reply.
        except Exception as error:  # noqa: BLE001
            reply(self.error_reply(kind, error, fields, sender))
            return None

    def cancel(self, job: Job) -> None:
        """Cancels a request, after its sender has disconnected."""
        self.batcher.cancel(job)

    def _record_reply(self, kind: str, times: ServerTimes, sender: Sender) -> None:
        self.telemetry.record_reply(kind, times, sender.robot)
        if self.log.steps:
            spent = {"queue_ms": times.queue_ms, "total_ms": times.total_ms, "batch": times.batch}
            self.log.write("step", what=kind, peer=sender.peer, robot=sender.name, **spent)

    def error_reply(self, kind: str, error: Exception, fields: Fields, sender: Sender) -> Fields:
        """The reply to a request that failed, recorded in telemetry and log; internal errors are not disclosed."""
        if not isinstance(error, WireError):
            _log.error("a request failed", exc_info=error)
            error = WireError(ErrorCode.INTERNAL, "the request failed; see the server's log")
        self.record_error(kind, error, sender.peer, sender.robot)
        return reply_fields(ErrorReply(request_id(fields), ErrorCode(error.code), str(error)))

    def record_error(self, what: str, error: WireError, peer: str | None, robot: Robot | None = None) -> None:
        """Records an error reply in telemetry and log."""
        self.telemetry.record_error(what, error.code, robot)
        self.log.write_refusal(what, error.code, peer, str(error), None if robot is None else robot.name)

    def _dropped(self, connection: Connection, why: str) -> None:
        self.log.write_refusal("connection", "dropped", connection.peer, why)

    async def drain(self) -> None:
        """Refuses new requests and waits for those in flight, for at most ``drain_s`` seconds; then abandons them."""
        self.draining = True
        until = time.monotonic() + self.settings.drain_s
        while self.batcher.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.005)
        self.abandon()

    def abandon(self) -> None:
        """Answers the requests still in flight with ``shutting_down``; so there is nothing left to drain."""
        self.abandoned += self.batcher.abandon()


def refusal(error: WireError) -> Fields:
    """An error reply without a request's id."""
    return reply_fields(ErrorReply(None, ErrorCode(error.code), str(error)))
