"""From a message to its reply: the one way through the server, for the stream and for HTTP."""

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
        lane: where its requests wait.
        peer: address and port, where they are known.
        robot: its entry on the status page, where it has one.
    """

    lane: Lane[Job]
    peer: str | None = None
    robot: Robot | None = None

    @property
    def name(self) -> str | None:
        """The robot's, where it is known."""
        return None if self.robot is None else self.robot.name


class Service:
    """A target, its worker, and the books on both.

    Args:
        responder: the target that is served.
        settings: how much the server takes on.

    Attributes:
        abandoned: requests that were not answered when the server stopped waiting for them.
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
        self._under_way = self.abandoned = 0
        self._lanes: dict[str, Lane[Job]] = {}
        self._present: dict[int, tuple[Caller, Callable[[], Coroutine[Any, Any, None]]]] = {}
        self._goodbyes: set[asyncio.Task[None]] = set()

    def fit(self, descriptors: int) -> None:
        """Takes on no more connections than there are file descriptors for them."""
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
        """Reads tokens again and opens the access log anew; who is connected with a token that is gone has to leave."""
        for step in (self.access.reload, self.log.reopen):
            try:
                step()
            except ConfigError as error:
                _log.error("what was read before stays valid: %s", error)
        self._lanes = {name: lane for name, lane in self._lanes.items() if name in self.access.names}
        for caller, dismiss in self._present.values():
            if not self.access.knows(caller):
                task = asyncio.get_running_loop().create_task(dismiss())
                self._goodbyes.add(task)
                task.add_done_callback(self._goodbyes.discard)

    @contextmanager
    def robot(
        self, caller: Caller, said: str, peer: str | None, dismiss: Callable[[], Coroutine[Any, Any, None]]
    ) -> Iterator[Sender]:
        """A robot's time on its stream.

        Args:
            caller: by its token.
            said: what it calls itself; the name that goes with its token counts more.
            peer: its address and port.
            dismiss: ends the stream, if its token is no longer valid.
        """
        key = self.telemetry.connected(caller.name or said)
        robot = self.telemetry.robots[key]
        self._present[key] = caller, dismiss
        self.log.write("connected", peer=peer, robot=robot.name)
        try:
            yield Sender(self.lane(caller), peer, robot)
        finally:
            del self._present[key]
            self.telemetry.disconnected(key)
            seconds = round(time.monotonic() - robot.since, 3)
            books = {"seconds": seconds, "requests": robot.requests, "errors": robot.errors}
            self.log.write("disconnected", peer=peer, robot=robot.name, **books)

    def lane(self, caller: Caller) -> Lane[Job]:
        """Where requests wait: one lane for each name that goes with a token, otherwise a new one."""
        if caller.name is None:
            return self.batcher.lane()
        return self._lanes.setdefault(caller.name, self.batcher.lane())

    def hello(self, fields: Fields) -> tuple[str, Fields]:
        """The robot's name and the welcome.

        Raises:
            WireError: if device and server do not fit together.
        """
        hello = read_hello(fields)
        check_hello(hello, self.dialect)
        return hello.robot, welcome_fields(self.welcome)

    def answer(self, fields: Fields, arrived: float, sender: Sender, reply: Callable[[Fields], None]) -> Job | None:
        """Answers a request; with an error where there is no result, never with an exception.

        Args:
            fields: the decoded message.
            arrived: when its frame came in, in seconds of the monotonic clock.
            sender: whose request it is.
            reply: called once with the reply, now or later.

        Returns:
            What :meth:`forget` takes; None where the reply was given already.
        """
        said = fields.get("type")
        kind = said if isinstance(said, str) and said in self.dialect.exchanges else "other"

        def finish(outcome: Outcome) -> None:
            self._under_way -= 1
            try:
                if isinstance(outcome, WireError):
                    raise outcome
                times = outcome.times(arrived)
                reply(reply_fields(Reply(request.id, self.dialect.exchanges[kind].answer, outcome.arrays, times)))
            except Exception as error:  # noqa: BLE001
                reply(self.refused(kind, error, fields, sender))
            else:
                # After the reply: nobody waits for the books.
                self._note(kind, times, sender)

        try:
            request = read_request(fields, self.dialect)
            if sender.robot is not None and request.report:
                sender.robot.report = request.report
            if self.draining:
                raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
            job = self.batcher.submit(sender.lane, request, arrived, finish)
        # The border of the process: no message may cost its sender more than an error reply.
        except Exception as error:  # noqa: BLE001
            reply(self.refused(kind, error, fields, sender))
            return None
        self._under_way += 1
        return job

    def forget(self, job: Job) -> None:
        """Notes that nobody waits for the reply any more."""
        job.wanted = False
        self._under_way -= 1

    def _note(self, kind: str, times: ServerTimes, sender: Sender) -> None:
        self.telemetry.answered(kind, times, sender.robot)
        if self.log.steps:
            written = {"queue_ms": times.queue_ms, "total_ms": times.total_ms, "batch": times.batch}
            self.log.write("step", what=kind, peer=sender.peer, robot=sender.name, **written)

    def refused(self, kind: str, error: Exception, fields: Fields, sender: Sender) -> Fields:
        """The reply to a request that cannot be answered, noted in the books; what went wrong inside is not said."""
        if not isinstance(error, WireError):
            _log.error("a request failed", exc_info=error)
            error = WireError(ErrorCode.INTERNAL, "the request failed; see the server's log")
        self.refuse(kind, error, sender.peer, sender.robot)
        return reply_fields(ErrorReply(request_id(fields), ErrorCode(error.code), str(error)))

    def refuse(self, what: str, error: WireError, peer: str | None, robot: Robot | None = None) -> None:
        """Notes an error reply in the books and in the log."""
        self.telemetry.refused(what, error.code, robot)
        self.log.refused(what, error.code, peer, str(error), None if robot is None else robot.name)

    def _dropped(self, connection: Connection, why: str) -> None:
        self.log.refused("connection", "dropped", connection.peer, why)

    async def drain(self) -> None:
        """Refuses what is new and waits for what is under way, for ``drain_s`` seconds at most."""
        self.draining = True
        until = time.monotonic() + self.settings.drain_s
        while self._under_way and time.monotonic() < until:
            await asyncio.sleep(0.005)
        self.give_up()

    def give_up(self) -> None:
        """Notes what is still under way: nobody waits for it any longer."""
        self.abandoned = self._under_way


def refusal(error: WireError) -> Fields:
    """An error that belongs to no request."""
    return reply_fields(ErrorReply(None, ErrorCode(error.code), str(error)))
