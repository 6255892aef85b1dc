"""The service of a target: who is connected, what is answered, and the books about both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specact import __version__
from specact.errors import ConfigError, WireError
from specact.server.access import Access, Address, Limits
from specact.server.batcher import Batcher
from specact.server.capacity import Demand, ServiceTime, missed
from specact.server.queue import Lane
from specact.server.telemetry import AccessLog, Telemetry
from specact.wire.exchange import Exchange
from specact.wire.messages import PROTOCOL, ErrorCode, Welcome

if TYPE_CHECKING:
    from specact.server.session import Session

_log = logging.getLogger("specact.server")
# A robot that has asked nothing for so long [s] gives way to a new one where there is no room.
IDLE_S = 5.0
# The largest share of late replies of any robot with which another is taken.
MAX_MISSED = 0.01


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
            PROTOCOL, exchange.name, contract.fingerprint, __version__, contract.max_message_bytes, contract.family,
            {**contract.spec, **contract.stated}, contract.describe(),
        )  # fmt: skip
        self.batcher = Batcher(exchange, self.limits.max_batch)
        self.telemetry = Telemetry(exchange.name, self.batcher.queue)
        self.log = AccessLog(self.limits.access_log)
        self.abandoned = 0
        self.sessions: set[Session] = set()
        self._lanes: dict[str, Lane] = {}

    def join(self, session: Session, headers: Mapping[str, str]) -> None:
        """Takes a new connection, or refuses it (WireError)."""
        self.sessions.add(session)
        session.caller = self.access.caller(headers)
        self.check_room(session)

    def check_room(self, session: Session, demand: Demand | None = None) -> None:
        """Refuses a robot (WireError) if the server is shutting down, or full, or too slow for it and those present."""
        if not self.batcher.ready:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        neighbours = [other for other in self.sessions if other.host == session.host]
        if len(neighbours) > self.limits.max_per_address:
            self._make_room(session, neighbours)
        if len(self.sessions) > self.limits.max_robots:
            self._make_room(session, self.sessions)
        if demand is None:
            return
        present = [other.demand for other in self.sessions if other.demand is not None]
        service = ServiceTime.fit({size: times for size, times in self.batcher.times.items() if times})
        share = missed([*present, demand], service, self.limits.max_batch, np.random.default_rng(len(present)))
        if share > MAX_MISSED:
            raise overloaded(
                f"with {len(present)} robots present and this one, at {demand.rate_hz:g} Hz with a deadline of "
                f"{1e3 * demand.deadline_s:g} ms, {share:.0%} of some robot's replies would be late: a batch of b "
                f"takes {1e3 * service.base_s:.2f} + {1e3 * service.per_request_s:.2f} b ms here. Ask less often, "
                "allow more time, or use another server"
            )

    def _make_room(self, session: Session, others: Iterable[Session]) -> None:
        """Closes the oldest of these without a hello, or else the one that is idle for longest, at least for 5 s."""
        idle = [
            other for other in others
            if other is not session and not other.jobs and (other.pending or session.used - other.used >= IDLE_S)
        ]  # fmt: skip
        if not idle:
            raise overloaded("the server has no room for another connection, and none is idle")
        longest = min(idle, key=lambda other: (not other.pending, other.used))
        longest.refuse(overloaded("another robot came, and this connection was idle for longest"))
        self.leave(longest)

    def register(self, session: Session, name: str) -> None:
        """Puts a robot on the status page, by its token's name if it has one; its queue is that of its token."""
        key = session.caller.name
        session.robot = self.telemetry.connected(key or name)
        self.log.write("connected", peer=session.address, robot=session.robot.name)
        session.lane = Lane() if key is None else self._lanes.setdefault(key, Lane())

    def leave(self, session: Session) -> None:
        """A connection has ended; idempotent."""
        if session in self.sessions and (robot := session.robot) is not None:
            self.telemetry.robots.remove(robot)
            seconds = round(time.monotonic() - robot.since, 3)
            totals = {"requests": robot.requests, "errors": robot.errors, "seconds": seconds}
            self.log.write("disconnected", peer=session.address, robot=robot.name, **totals)
        self.sessions.discard(session)

    def reload(self) -> None:
        """Reads tokens and certificate again; robots whose token was removed are disconnected."""
        try:
            self.access.reload()
        except ConfigError as error:
            _log.error("what was read before stays in use: %s", error)
        for session in [session for session in self.sessions if not self.access.is_valid(session.caller)]:
            self._lanes.pop(session.caller.name or "", None)
            session.refuse(WireError(ErrorCode.UNAUTHORIZED, "this token is no longer valid"))

    async def drain(self) -> None:
        """Refuses new requests and waits for those in flight, for at most ``drain_s`` seconds; then abandons them."""
        self.batcher.ready, until = False, time.monotonic() + self.limits.drain_s
        while any(session.jobs for session in self.sessions) and time.monotonic() < until:
            await asyncio.sleep(0.005)
        self.abandon()

    def abandon(self) -> None:
        """Answers the requests still in flight with ``shutting_down``; so there is nothing left to drain."""
        for job in [job for session in self.sessions for job in session.jobs]:
            self.abandoned += 1
            job.wanted = False
            job.finish(job, WireError(ErrorCode.SHUTTING_DOWN, "the server stopped before the target answered"))

    def close(self) -> None:
        """Closes all connections, and the log."""
        for session in list(self.sessions):
            session.refuse(WireError(ErrorCode.SHUTTING_DOWN, "the server has stopped"))
        self.log.close()


def overloaded(why: str) -> WireError:
    """The error for what the server does not take on."""
    return WireError(ErrorCode.OVERLOADED, why)
