"""The service of a target: who is connected, what is answered, and the books about both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specact import __version__
from specact.errors import ConfigError, WireError
from specact.server.access import Access, Address, Limits
from specact.server.batcher import Batcher, Job, Lane, overloaded
from specact.server.telemetry import AccessLog, Telemetry
from specact.wire.exchange import Exchange
from specact.wire.messages import PROTOCOL, ErrorCode, Failure, Welcome

if TYPE_CHECKING:
    from specact.server.session import Session

_log = logging.getLogger("specact.server")


class Service:
    """A target, its batcher, access control, log and telemetry. Used on the event loop only.

    Attributes:
        sessions: all connections.
        abandoned: number of requests that were in flight when the server stopped waiting for them.

    Raises:
        ConfigError: if tokens or log cannot be used, or other machines could connect without a token.
    """

    def __init__(
        self, exchange: Exchange[Any], limits: Limits | None = None, address: Address | None = None,
        token: str | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.address = limits or Limits(), address or Address()
        self.contract = contract = exchange.contract
        self.access = Access(token, self.address)
        self.welcome = Welcome(
            PROTOCOL, exchange.name, exchange.fingerprint, __version__, contract.max_message_bytes, contract.family,
            {**contract.spec, **contract.stated}, contract.describe(),
        )  # fmt: skip
        self.telemetry, self.batcher = Telemetry(exchange.name), Batcher(exchange, self.limits)
        self.log = AccessLog(self.limits.access_log)
        self.abandoned = 0
        self.sessions: set[Session] = set()
        # Those that have not said hello, oldest first.
        self._pending: dict[Session, None] = {}
        self._per_host: Counter[str] = Counter()
        self._lanes: dict[str, Lane[Job]] = {}

    def join(self, session: Session, headers: Mapping[str, str]) -> None:
        """Takes a new connection, which is pending until :meth:`settle`, or refuses it (WireError)."""
        self.sessions.add(session)
        self._pending[session] = None
        self._per_host[session.host] += 1
        session.caller = self.access.caller(headers)
        self.check_room()
        if self._per_host[session.host] > self.limits.max_per_address:
            raise overloaded("the server takes no more connections from this address")
        if len(self._pending) > self.limits.max_pending:
            oldest = next(iter(self._pending))
            self.settle(oldest)
            oldest.refuse(overloaded("too many connections without a hello"))

    def check_room(self) -> None:
        """Refuses another robot (WireError) if the server is full or shutting down."""
        if not self.batcher.ready:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        if len(self.telemetry.robots) >= self.limits.max_robots:
            raise overloaded(f"the server accepts at most {self.limits.max_robots} robots")

    def settle(self, session: Session) -> None:
        """A connection has shown that it belongs here, and is not closed for a new one."""
        self._pending.pop(session, None)

    def register(self, session: Session, name: str) -> Lane[Job]:
        """Puts a robot on the status page, by its token's name if it has one; returns its queue, one for each token."""
        key = session.caller.name
        session.robot = self.telemetry.connected(key or name)
        self.log.write("connected", peer=session.address, robot=session.robot.name)
        lane = self.batcher.queue.lane()
        return lane if key is None else self._lanes.setdefault(key, lane)

    def leave(self, session: Session) -> None:
        """A connection has ended; idempotent."""
        self.settle(session)
        if session not in self.sessions:
            return
        self.sessions.remove(session)
        self._per_host -= Counter((session.host,))
        if (robot := session.robot) is not None:
            self.telemetry.robots.remove(robot)
            seconds = round(time.monotonic() - robot.since, 3)
            totals = {"requests": robot.requests, "errors": robot.errors, "seconds": seconds}
            self.log.write("disconnected", peer=session.address, robot=robot.name, **totals)

    def failure(self, session: Session, kind: str, error: Exception, identity: int | None = None) -> Failure:
        """The reply to a request that failed, recorded in telemetry and log; internal errors are not disclosed."""
        if not isinstance(error, WireError):
            _log.error("a request failed", exc_info=error)
            error = WireError(ErrorCode.INTERNAL, "the request failed; see the server's log")
        self.telemetry.record_error(kind, error.code, session.robot)
        name = session.robot.name if session.robot else None
        self.log.write_refusal(kind, error.code, session.address, str(error), name)
        return Failure(identity, ErrorCode(error.code), str(error))

    def reload(self) -> None:
        """Reloads the tokens; robots whose token was removed are disconnected."""
        try:
            self.access.reload()
        except ConfigError as error:
            _log.error("the tokens of before stay valid: %s", error)
        for session in [session for session in self.sessions if not self.access.is_valid(session.caller)]:
            self._lanes.pop(session.caller.name or "", None)
            session.refuse(WireError(ErrorCode.UNAUTHORIZED, "this token is no longer valid"))

    async def drain(self) -> None:
        """Refuses new requests and waits for those in flight, for at most ``drain_s`` seconds; then abandons them."""
        self.batcher.ready, until = False, time.monotonic() + self.limits.drain_s
        while self.batcher.jobs and time.monotonic() < until:
            await asyncio.sleep(0.005)
        self.abandon()

    def abandon(self) -> None:
        """Answers the requests still in flight with ``shutting_down``; so there is nothing left to drain."""
        self.abandoned += self.batcher.abandon()

    def close(self) -> None:
        """Closes all connections, and the log."""
        for session in list(self.sessions):
            session.refuse(WireError(ErrorCode.SHUTTING_DOWN, "the server has stopped"))
        self.log.close()
