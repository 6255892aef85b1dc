"""The client: connects to a server, reconnects in the background, and never blocks beyond a deadline."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from specact.errors import ConfigError, RemoteError, WireError
from specact.pair import Pending
from specact.remote.endpoint import Endpoint, Stream, StreamClosedError
from specact.remote.openpi import OpenpiConversation, OpenpiEndpoint
from specact.types import Cause, Miss, OffloadTimes
from specact.wire import messages
from specact.wire.arrays import Arrays, Layout
from specact.wire.exchange import HANDSHAKE_BYTES, Contract, Request
from specact.wire.images import to_jpeg
from specact.wire.messages import ErrorCode, Failure, Reply, Welcome, bad, check_terms, device_times, printable

T = TypeVar("T")
_MAX_MISSES = 3
_POLL_INTERVAL_S, _PROBE_INTERVAL_S = 0.25, 0.05
# Messages that answer no outstanding request, per connection; above this it is closed. And requests that wait.
_MAX_UNSOLICITED = _MAX_OUTSTANDING = 256
# Time budget of a control step for reading replies that nobody waits for.
_DRAIN_BUDGET_S = 0.002
_CAUSES: dict[ErrorCode, Cause] = {ErrorCode.OVERLOADED: "overloaded", ErrorCode.EXPIRED: "expired"}
# For connecting and the handshake together [s]; a connection without any sign of life for SILENCE_S is closed.
CONNECT_TIMEOUT_S, SILENCE_S = 2.0, 3.0
# Exponential backoff of reconnections [s], with up to half of it, or of FIRST_DELAY_S, as jitter, so that the robots of
# one server do not reconnect simultaneously. After a connection that lasted for LONGEST_DELAY_S it begins anew.
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0


class NativeConversation(Stream):
    """A connection after its handshake, used by one thread at a time; without a contract it asks for the server's.

    Its methods raise StreamClosedError if it has ended, and :meth:`reply` WireError for an unreadable message.

    Attributes:
        single: whether an outstanding reply blocks further requests.
        welcome: the server's.

    Raises:
        RemoteError: if the server cannot be reached in time, or refuses this device, or is not the one expected.
    """

    single = False

    def __init__(
        self, endpoint: Endpoint, timeout: float, robot: str, contract: Contract | None, jpeg_quality: int | None = None
    ) -> None:
        until, self._contract, self._jpeg_quality = time.monotonic() + timeout, contract, jpeg_quality
        limit = HANDSHAKE_BYTES if contract is None else contract.max_message_bytes
        terms = () if contract is None else (contract.family, dict(contract.spec))
        super().__init__(endpoint, messages.PATH, "Bearer", timeout, limit)
        with self.handshake("refuses this device"):
            # The server may have refused and closed already; then it has said why.
            with suppress(StreamClosedError):
                self.send(messages.encode(messages.Hello(messages.PROTOCOL, robot, *terms)), until - time.monotonic())
            self.welcome = self._read_welcome(until)

    def ask(
        self, kind: str, request: Request, identity: int, deadline_ms: float, report: Mapping[str, int], timeout: float
    ) -> None:
        """Sends a request within ``timeout`` seconds."""
        assert self._contract is not None, "otherwise there are no requests"
        message = messages.ask(request, self._contract, kind, identity, deadline_ms, report, self._jpeg_quality)
        self.send(messages.encode(message), timeout)

    def reply(self, timeout: float) -> Reply | Failure | None:
        """The next reply, or None if none arrives within ``timeout`` seconds; 0 does not block."""
        message = self.receive(timeout)
        if message is None:
            return None
        if isinstance(message[0], str):
            raise bad("text messages are not part of the protocol")
        return messages.read_reply(message[0])

    def _read_welcome(self, until: float) -> Welcome:
        message = self.receive(max(0.0, until - time.monotonic()))
        if message is None:
            raise StreamClosedError("the server did not answer the hello in time")
        welcome = messages.read_welcome(message[0] if isinstance(message[0], bytes) else b"")
        if self._contract is not None:
            check_terms(self._contract, welcome.family, welcome.spec)
            # A server may offer more.
            if any(welcome.kinds.get(name) != arrays for name, arrays in self._contract.describe().items()):
                raise WireError(
                    ErrorCode.MISMATCH,
                    "device and server differ in the arrays of their messages; install the same version of specact, "
                    "or of the family, on both",
                )
        texts = {name: printable(getattr(welcome, name), 64) for name in ("bundle", "target", "version", "family")}
        return replace(welcome, **texts)


Conversation = NativeConversation | OpenpiConversation


class Client:
    """Sends requests and waits for replies on the control loop's thread; a background thread keeps the connection open.

    Nothing is sent again, and after three consecutive missed deadlines nothing is sent until something is received,
    then one request at a time: a dead link costs three deadlines. Use it as a context manager. ``jpeg_quality`` (1 to
    95) sends camera frames as JPEG, which needs Pillow; ``robot`` is its name on the server's status page.

    Attributes:
        welcome, problem: the server's reply to the hello, and why there is currently no connection; each None if not.
        report: counters sent with every request, for the server's status page; a policy's ``counts``.
        counts: ``connections``, ``requests`` sent, ``answered``, ``late``, ``unwanted`` (that answer no request),
            ``unreadable``.
    """

    def __init__(
        self, endpoint: Endpoint, contract: Contract, robot: str = "robot",
        jpeg_quality: int | None = None,
    ) -> None:  # fmt: skip
        if jpeg_quality is not None:
            if not 1 <= jpeg_quality <= 95 or isinstance(endpoint, OpenpiEndpoint):
                raise ConfigError(
                    "JPEG frames need a quality from 1 to 95 and a server of specact's own protocol, got "
                    f"{jpeg_quality} and {endpoint}"
                )
            # Raises now, before a robot moves, if Pillow is missing.
            to_jpeg(np.zeros((1, 8, 8, 3), np.uint8), jpeg_quality)
        self._endpoint, self._jpeg_quality = endpoint, jpeg_quality
        self.contract, self._robot = contract, robot
        self._lock = threading.Lock()
        self._wake, self._connected, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._conversation: Conversation | None = None
        self._next_id = self._unsolicited = 0
        # Requests without a reply, also those that nobody waits for any more.
        self._outstanding: dict[int, PendingReply] = {}
        # Not seeded: the jitter must differ between robots.
        self._random = random.Random()
        # Consecutive missed deadlines, time of the last one, and time of the last ping.
        self._misses, self._last_miss_s, self._last_ping_s = 0, 0.0, 0.0
        self.welcome: Welcome | None = None
        self.problem: str | None = f"no connection to {endpoint} yet"
        self.report: Mapping[str, int] = {}
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"specact client to {endpoint}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends the thread, within ``CONNECT_TIMEOUT_S``; idempotent."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        with self._lock:
            self._drop("closed")

    def connect(self, timeout: float) -> Welcome:
        """Waits for the first connection, before a robot moves.

        Raises:
            RemoteError: if there is none within ``timeout`` seconds, with the reason.
        """
        if not self._connected.wait(timeout) or self.welcome is None:
            raise RemoteError(f"{self.problem} (tried for {timeout:g} s)")
        return self.welcome

    def request(
        self, kind: str, request: Request, deadline_ms: float, *, wait_if_busy: bool = False
    ) -> Pending[tuple[Arrays, OffloadTimes]]:
        """Sends a request immediately, or not at all where there is no connection, an unresponsive or a busy one.

        Args:
            kind, request: one of the contract's, and the request itself.
            deadline_ms: of its reply, from now; after it the connection is closed if the request could not be sent.
            wait_if_busy: whether to wait for the last reply of a server that answers one request at a time (openpi's).

        Returns:
            Its arrays, finite and in range, and the times; or why there are none.
        """
        pending = PendingReply(self, self.contract.kinds[kind].reply, deadline_ms)
        with self._lock:
            self._use(lambda conversation: self._send(conversation, kind, request, pending, wait_if_busy))
            if not pending.sent:
                pending.cause = pending.cause or "disconnected"
        pending.encode_s = time.monotonic() - pending.started_s
        return Pending(pending.result, pending.done, pending.sent)

    def poll(self) -> None:
        """Reads what has arrived, without blocking."""
        with self._lock:
            self._use(self._drain)

    def wait(self, pending: PendingReply) -> None:
        """Waits for a reply, until its deadline at most; what has arrived by now is read even after that."""
        last = max(pending.until, time.monotonic() + _DRAIN_BUDGET_S)
        with self._lock:
            while pending.open and self._conversation is not None:
                left = max(0.0, pending.until - time.monotonic())
                arrived = self._use(lambda conversation: self._read(conversation, left))  # noqa: B023
                if pending.reply is None and pending.cause is None and (not arrived or time.monotonic() > last):
                    self._misses, self._last_miss_s, pending.cause = self._misses + 1, time.monotonic(), "deadline"
                    self._wake.set()
            if pending.reply is not None:
                self._misses = 0
                self.counts["answered"] += 1

    def _use(self, act: Callable[[Conversation], T]) -> T | None:
        """What ``act`` makes of the connection, under the lock; None if there is none, or if it ends now."""
        try:
            return None if self._conversation is None else act(self._conversation)
        except StreamClosedError as error:
            self._drop(str(error))
            return None

    def _send(self, conversation: Conversation, kind: str, request: Request, pending: PendingReply, wait: bool) -> None:
        """Sends a request, or gives it the cause for which it is not sent."""
        self._drain(conversation)
        while conversation.single and self._outstanding:
            if not (wait and self._read(conversation, pending.until - time.monotonic())):
                pending.cause = "deadline"
                return
        if self._is_unresponsive(conversation):
            pending.cause = "disconnected"
            return
        self._next_id += 1
        left = pending.until - time.monotonic()
        conversation.ask(kind, request, self._next_id, pending.deadline_ms, self.report, left)
        self._outstanding[self._next_id], pending.sent = pending, True
        if len(self._outstanding) > _MAX_OUTSTANDING:
            oldest = self._outstanding.pop(next(iter(self._outstanding)))
            oldest.cause = oldest.cause or "deadline"
        self.counts["requests"] += 1

    def _read(self, conversation: Conversation, timeout: float) -> bool:
        """Reads one message and hands it to the request that it answers; False if none arrives in time."""
        try:
            reply = conversation.reply(timeout)
        except WireError:
            self.counts["unreadable"] += 1
            if conversation.single and self._outstanding:
                self._outstanding.popitem()[1].cause = "invalid"
                return True
            reply = Failure(None, ErrorCode.BAD_MESSAGE, "")
        if reply is None:
            return False
        pending = None if reply.id is None else self._outstanding.pop(reply.id, None)
        if pending is None:
            self.counts["unwanted"] += 1
            self._unsolicited += 1
            if self._unsolicited > _MAX_UNSOLICITED:
                raise StreamClosedError("the server sends too many messages that answer no request")
        elif pending.cause is not None:
            self.counts["late"] += 1
        else:
            pending.reply, pending.arrived_s = reply, time.monotonic()
        return True

    def _drain(self, conversation: Conversation) -> None:
        """Reads what has arrived, within a time budget."""
        last = time.monotonic() + _DRAIN_BUDGET_S
        while self._read(conversation, 0.0) and time.monotonic() <= last:
            pass

    def _run(self) -> None:
        delay, since = 0.0, 0.0
        while not self._closing.is_set():
            if self._conversation is not None:
                # The control loop has priority; it reads by itself.
                if self._lock.acquire(blocking=False):
                    try:
                        self._use(self._check)
                    finally:
                        self._lock.release()
                if time.monotonic() - since > LONGEST_DELAY_S:
                    delay = 0.0
                self._wake.wait(_POLL_INTERVAL_S if self._misses < _MAX_MISSES else _PROBE_INTERVAL_S)
                self._wake.clear()
                continue
            # Neither a send nor a short-lived connection shortens the backoff.
            if not self._closing.wait(delay + self._random.uniform(0.0, max(delay, FIRST_DELAY_S) / 2)):
                delay = min(max(2.0 * delay, FIRST_DELAY_S), LONGEST_DELAY_S)
                self._connect()
                since = time.monotonic()

    def _connect(self) -> None:
        endpoint, timeout = self._endpoint, CONNECT_TIMEOUT_S
        try:
            conversation: Conversation = (
                OpenpiConversation(endpoint, timeout, self.contract)
                if isinstance(endpoint, OpenpiEndpoint)
                else NativeConversation(endpoint, timeout, self._robot, self.contract, self._jpeg_quality)
            )
        except RemoteError as error:
            self.problem = printable(str(error))
            return
        with self._lock:
            self._conversation, self.welcome, self.problem = conversation, conversation.welcome, None
            self._misses = self._unsolicited = 0
            self.counts["connections"] += 1
        self._connected.set()

    def _check(self, conversation: Conversation) -> None:
        """Reads what nobody waits for, and pings a silent server."""
        self._drain(conversation)
        if conversation.single and not self._outstanding:
            # Its silence is normal.
            return
        silence, patience = time.monotonic() - conversation.last_activity_s, SILENCE_S
        if silence > patience:
            raise StreamClosedError(f"nothing received from the server for {silence:.1f} s")
        # At most one ping is outstanding: on a lossy link more would only delay other messages. A server of openpi's
        # protocol gets none, because its inference may block its pongs.
        quiet = silence > patience / 3 or self._is_unresponsive(conversation)
        if quiet and not conversation.single and self._last_ping_s <= conversation.last_activity_s:
            self._last_ping_s = time.monotonic()
            conversation.ping()

    def _is_unresponsive(self, conversation: Conversation) -> bool:
        """Whether too many deadlines were missed without a sign of life since, which allows one request."""
        return self._misses >= _MAX_MISSES and conversation.last_activity_s <= self._last_miss_s

    def _drop(self, why: str) -> None:
        if self._conversation is not None:
            self._conversation.close()
            self._conversation, self.problem = None, printable(why)
            # Outstanding requests are lost; ids are never reused.
            for pending in self._outstanding.values():
                pending.cause = pending.cause or "disconnected"
            self._outstanding.clear()
            self._wake.set()


class PendingReply:
    """A request of :class:`Client`: whether it was sent, and its reply, or why there is none as far as is known."""

    def __init__(self, client: Client, layout: Layout, deadline_ms: float) -> None:
        self._client, self._layout, self.deadline_ms = client, layout, deadline_ms
        self.started_s = time.monotonic()
        self.until, self.encode_s, self.arrived_s = self.started_s + deadline_ms / 1e3, 0.0, 0.0
        self.sent = False
        self.reply: Reply | Failure | None = None
        self.cause: Cause | None = None

    @property
    def open(self) -> bool:
        """Whether a reply is still expected."""
        return self.reply is None and self.cause is None

    def done(self) -> bool:
        """Whether :meth:`result` would not block: always True after the deadline."""
        if self.open and time.monotonic() < self.until:
            self._client.poll()
        return not self.open or time.monotonic() >= self.until

    def result(self) -> tuple[Arrays, OffloadTimes] | Miss:
        """The reply's arrays, finite and in range, or why there are none; blocks until the deadline at most."""
        self._client.wait(self)
        reply, now = self.reply, time.monotonic()
        times = OffloadTimes(network=now - self.started_s)
        if reply is None:
            return Miss(self.cause or "disconnected", times, sent=self.sent)
        if isinstance(reply, Failure):
            return Miss(_CAUSES.get(reply.code, "refused"), times)
        try:
            arrays = self._layout.unpack(reply.arrays)
        except WireError:
            return Miss("invalid", times)
        waited_s = max(0.0, self.arrived_s - self.started_s - self.encode_s)
        return arrays, device_times(reply, self.encode_s, waited_s, time.monotonic() - now)
