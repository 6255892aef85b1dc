"""The service of a target: who is connected, what is answered, and the books about both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from specact import __version__
from specact.errors import ConfigError, WireError
from specact.server.access import Access, Caller
from specact.server.access_log import AccessLog
from specact.server.batcher import Batcher, Job, Result
from specact.server.settings import Address, Limits
from specact.server.telemetry import Robot, Telemetry
from specact.server.turns import Lane, overloaded
from specact.wire.exchange import Exchange, Request
from specact.wire.messages import PROTOCOL, ErrorCode, Failure, Reply, Welcome

_log = logging.getLogger("specact.server")


class Peer(Protocol):
    """A connection: who it is, its address, the unit of the limit per address, and its entry on the status page."""

    caller: Caller
    address: str
    host: str
    robot: Robot | None

    def refuse(self, error: WireError) -> None:
        """Says the error and closes the connection."""
        ...


class Service:
    """A target, its batcher, access control, logs and telemetry. Used on the event loop only.

    Args:
        exchange: of the served target.
        limits: what the server takes on.
        address: where it listens.
        token: that all devices share, or None.

    Attributes:
        abandoned: number of requests that were in flight when the server stopped waiting for them.

    Raises:
        ConfigError: if tokens or logs cannot be used, or other machines could connect without a token.
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
            dict(contract.spec), contract.describe(),
        )  # fmt: skip
        self.telemetry, self.batcher = Telemetry(exchange.name), Batcher(exchange, self.limits)
        self.log = AccessLog(self.limits.access_log, self.limits.log_steps)
        self.max_robots, self.draining, self.abandoned = self.limits.max_robots, False, 0
        self._lanes: dict[str, Lane[Job]] = {}
        # All connections, and those that have not said hello, oldest first.
        self.peers: dict[Peer, None] = {}
        self._pending: dict[Peer, None] = {}
        self._per_host: Counter[str] = Counter()

    @property
    def ready(self) -> bool:
        """Whether requests are answered now."""
        return self.batcher.ready and not self.draining

    def limit_connections(self, descriptors: int) -> None:
        """Limits robots to the number of available file descriptors."""
        self.max_robots = max(1, min(self.limits.max_robots, descriptors - self.limits.max_pending))
        if self.max_robots < self.limits.max_robots:
            _log.warning(
                "this process may open too few files for %d robots: it takes %d; raise the limit with ulimit -n",
                self.limits.max_robots, self.max_robots,
            )  # fmt: skip

    def join(self, peer: Peer, headers: Mapping[str, str]) -> None:
        """Takes a new connection, which is pending until :meth:`settle`.

        Raises:
            WireError: if it is refused.
        """
        self.peers[peer] = self._pending[peer] = None
        self._per_host[peer.host] += 1
        peer.caller = self.access.caller(headers)
        self.check_room()
        if self._per_host[peer.host] > self.limits.max_per_address:
            raise overloaded("the server takes no more connections from this address")
        if len(self._pending) > self.limits.max_pending:
            oldest = next(iter(self._pending))
            self.settle(oldest)
            oldest.refuse(overloaded("too many connections without a hello"))

    def check_room(self) -> None:
        """Refuses another robot if the server is full or shutting down.

        Raises:
            WireError: ``shutting_down`` or ``overloaded``.
        """
        if self.draining:
            raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        if len(self.telemetry.robots) >= self.max_robots:
            raise overloaded(f"the server accepts at most {self.max_robots} robots")

    def settle(self, peer: Peer) -> None:
        """A connection has shown that it belongs here, and is not closed for a new one."""
        self._pending.pop(peer, None)

    def register(self, peer: Peer, name: str) -> Lane[Job]:
        """Puts a robot on the status page; the name of its token takes precedence. Returns the queue of its requests.

        All connections with one token share a queue.
        """
        key = peer.caller.name
        peer.robot = self.telemetry.connected(key or name)
        self.log.write("connected", peer=peer.address, robot=peer.robot.name)
        return self.batcher.lane() if key is None else self._lanes.setdefault(key, self.batcher.lane())

    def leave(self, peer: Peer) -> None:
        """A connection has ended; idempotent."""
        self.settle(peer)
        if self.peers.pop(peer, self) is self:
            return
        self._per_host -= Counter((peer.host,))
        if (robot := peer.robot) is not None:
            del self.telemetry.robots[robot.id]
            totals = {"requests": robot.requests, "errors": robot.errors}
            seconds = round(time.monotonic() - robot.since, 3)
            self.log.write("disconnected", peer=peer.address, robot=robot.name, seconds=seconds, **totals)

    def answer(
        self, peer: Peer, lane: Lane[Job], kind: str, request: Request, identity: int, deadline_ms: float,
        arrived: float, reply: Callable[[Reply | Failure], None],
    ) -> Job | None:  # fmt: skip
        """Answers a request of a registered robot; failures become error replies, never exceptions.

        Args:
            peer, lane: of the robot.
            kind, request, identity, deadline_ms: the request, already validated.
            arrived: when its frame arrived, in seconds of the monotonic clock.
            reply: called once with the reply, immediately or later.

        Returns:
            The job, for :meth:`Batcher.cancel`; None if the reply was immediate.
        """

        def finish(outcome: Result | WireError) -> None:
            if isinstance(outcome, WireError):
                reply(self.failure(peer, kind, outcome, identity))
                return
            total_ms, queue_ms = 1e3 * (time.monotonic() - arrived), max(0.0, 1e3 * outcome.queued_s)
            answer = Reply(identity, queue_ms, 1e3 * outcome.target_s, total_ms, outcome.batch, outcome.arrays)
            reply(answer)
            # After the reply, so that the robot does not wait for it.
            if peer.robot is not None:
                self.telemetry.record_reply(kind, answer, peer.robot)
            if self.log.steps:
                spent = {"queue_ms": queue_ms, "total_ms": total_ms, "batch": outcome.batch}
                self.log.write("step", what=kind, peer=peer.address, robot=peer.robot and peer.robot.name, **spent)

        job = Job(kind, request, deadline_ms, arrived, finish)
        try:
            if self.draining:
                raise WireError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
            self.batcher.submit(lane, job)
        except WireError as error:
            finish(error)
            return None
        return job

    def failure(self, peer: Peer, kind: str, error: Exception, identity: int | None = None) -> Failure:
        """The reply to a request that failed, recorded in telemetry and log; internal errors are not disclosed."""
        if not isinstance(error, WireError):
            _log.error("a request failed", exc_info=error)
            error = WireError(ErrorCode.INTERNAL, "the request failed; see the server's log")
        self.telemetry.record_error(kind, error.code, peer.robot)
        self.log.write_refusal(kind, error.code, peer.address, str(error), peer.robot.name if peer.robot else None)
        return Failure.of(error, identity)

    def reload(self) -> None:
        """Reloads the tokens and reopens the access log; robots whose token was removed are disconnected."""
        for step in (self.access.reload, self.log.reopen):
            try:
                step()
            except ConfigError as error:
                _log.error("what was read before stays valid: %s", error)
        self._lanes = {name: lane for name, lane in self._lanes.items() if name in self.access.names}
        for peer in [peer for peer in self.peers if not self.access.is_valid(peer.caller)]:
            with contextlib.suppress(WireError):
                peer.refuse(WireError(ErrorCode.UNAUTHORIZED, "this token is no longer valid"))

    async def drain(self) -> None:
        """Refuses new requests and waits for those in flight, for at most ``drain_s`` seconds; then abandons them."""
        self.draining, until = True, time.monotonic() + self.limits.drain_s
        while self.batcher.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.005)
        self.abandon()

    def abandon(self) -> None:
        """Answers the requests still in flight with ``shutting_down``; so there is nothing left to drain."""
        self.abandoned += self.batcher.abandon()

    def close(self) -> None:
        """Closes all connections, and the log."""
        for peer in list(self.peers):
            peer.refuse(WireError(ErrorCode.SHUTTING_DOWN, "the server has stopped"))
        self.log.close()
