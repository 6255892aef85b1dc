"""The client: connects to a server, reconnects in the background, and never blocks beyond a deadline."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from msgspec import structs

from specact.errors import ConfigError, RefusedError, RemoteError, WireError
from specact.pair import Pending
from specact.remote.endpoint import Counts, Endpoint, Stream, StreamClosedError
from specact.remote.openpi import OpenpiConversation, OpenpiEndpoint
from specact.types import Cause, Miss, OffloadTimes
from specact.wire import messages
from specact.wire.arrays import Arrays, Layout
from specact.wire.exchange import HANDSHAKE_BYTES, Contract, Request
from specact.wire.images import to_jpeg
from specact.wire.messages import ErrorCode, Failure, Reply, Welcome, check_terms, device_times, printable

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
    """A connection to a server of specact's own protocol; without a contract it asks for the server's."""

    single, scheme, refusal = False, "Bearer", "refuses this device"

    def __init__(
        self, endpoint: Endpoint, timeout: float, robot: str, contract: Contract | None = None,
        jpeg_quality: int | None = None, rate_hz: float | None = None, deadline_ms: float | None = None,
    ) -> None:  # fmt: skip
        family, spec = (None, {}) if contract is None else (contract.family, dict(contract.spec))
        hello = messages.Hello(messages.PROTOCOL, robot, family, spec, rate_hz, deadline_ms)
        self._contract, self._jpeg_quality = cast(Contract, contract), jpeg_quality
        limit = HANDSHAKE_BYTES if contract is None else contract.max_message_bytes
        super().__init__(endpoint, messages.PATH, timeout, limit, messages.encode(hello))

    def ask(self, kind: str, request: Request, number: int, deadline_ms: float, report: Counts, timeout: float) -> None:
        message = messages.ask(request, self._contract, kind, number, deadline_ms, report, self._jpeg_quality)
        self.send(messages.encode(message), timeout)

    def reply(self, timeout: float) -> Reply | Failure | None:
        message = self.receive(timeout)
        return None if message is None else messages.read_reply(message)

    def _read_welcome(self, message: bytearray | str) -> Welcome:
        welcome, contract = messages.read_welcome(message), cast(Contract | None, self._contract)
        if contract is not None:
            # A server may offer more kinds of requests.
            terms = {**contract.spec, **contract.describe()}
            offered = {**welcome.spec, **welcome.kinds}
            check_terms(replace(contract, spec=terms), welcome.family, offered, printable(welcome.target, 64))
        texts = {name: printable(getattr(welcome, name), 64) for name in ("bundle", "target", "version", "family")}
        return structs.replace(welcome, **texts)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request: when it began, is due, was sent and was answered (monotonic clock), and what has become of it."""

    started_s: float
    until: float
    sent_s: float = 0.0
    arrived_s: float = 0.0
    sent: bool = False
    reply: Reply | Failure | None = None
    cause: Cause | None = None

    @property
    def open(self) -> bool:
        return self.reply is None and self.cause is None


class Client(AbstractContextManager["Client"]):
    """Sends requests and waits for replies on the control loop's thread; a background thread keeps the connection open.

    Nothing is sent again, and after three consecutive missed deadlines nothing is sent until something is received,
    then one request at a time: a dead link costs three deadlines. Use it as a context manager. ``jpeg_quality`` (1 to
    95) sends camera frames as JPEG, which needs Pillow; ``robot`` is its name on the server's status page. A server
    that could not keep ``deadline_ms`` for ``rate_hz`` requests a second, where they are known, refuses the robot.

    Attributes:
        welcome, problem, failure: reply to the hello, why there is no connection, and the server's last error, or None.
        report: counters sent with every request, for the server's status page; a policy's ``counts``.
        counts: ``connections``, ``requests`` sent, ``answered``, ``late``, ``unwanted`` (that answer no request),
            ``unreadable``.
    """

    def __init__(
        self, endpoint: Endpoint, contract: Contract, robot: str = "robot", jpeg_quality: int | None = None, *,
        rate_hz: float | None = None, deadline_ms: float | None = None,
    ) -> None:  # fmt: skip
        if jpeg_quality is not None:
            if not 1 <= jpeg_quality <= 95 or isinstance(endpoint, OpenpiEndpoint):
                raise ConfigError(f"JPEG needs a quality of 1 to 95, and not openpi, got {jpeg_quality} for {endpoint}")
            # Raises now, before a robot moves, if Pillow is missing.
            to_jpeg(np.zeros((1, 8, 8, 3), np.uint8), jpeg_quality)
        self.contract = contract
        self._open: Callable[[], Stream] = lambda: NativeConversation(
            endpoint, CONNECT_TIMEOUT_S, robot, contract, jpeg_quality, rate_hz, deadline_ms
        )
        if isinstance(endpoint, OpenpiEndpoint):
            self._open = lambda: OpenpiConversation(endpoint, CONNECT_TIMEOUT_S, contract)
        self.welcome: Welcome | None = None
        self.problem: str | None = f"no connection to {endpoint} yet"
        self.failure: str | None = None
        self.report: Counts = {}
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._wake, self._settled, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._stream: Stream | None = None
        self._next_id = self._unsolicited = 0
        # Requests without a reply, also those that nobody waits for any more.
        self._outstanding: dict[int, _Waiting] = {}
        # Consecutive missed deadlines, time of the last one, and time of the last ping.
        self._misses, self._last_miss_s, self._last_ping_s = 0, 0.0, 0.0
        self._thread = threading.Thread(target=self._run, name=f"specact client to {endpoint}", daemon=True)
        self._thread.start()

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

        RefusedError as soon as the server refuses this device, RemoteError if there is none within ``timeout`` seconds.
        """
        settled = self._settled.wait(timeout)
        if self.welcome is None:
            tried = "" if settled else f" (tried for {timeout:g} s)"
            raise (RefusedError if settled else RemoteError)(f"{self.problem}{tried}")
        return self.welcome

    def request(
        self, kind: str, request: Request, deadline_ms: float, *, wait_if_busy: bool = False
    ) -> Pending[tuple[Arrays, OffloadTimes]]:
        """Sends a request immediately, or not at all where there is no connection, an unresponsive or a busy one.

        The result are the reply's arrays, finite and in range, and the times; or why there are none. The deadline of
        the reply counts from now; after it the connection is closed if the request could not be sent. ``wait_if_busy``
        waits for the last reply of a server that answers one request at a time (openpi's).
        """
        now = time.monotonic()
        waiting, layout = _Waiting(now, now + deadline_ms / 1e3), self.contract.kinds[kind].reply

        def send(stream: Stream) -> None:
            if self._outstanding or self._misses:
                self._drain(stream)
                while stream.single and self._outstanding:
                    if not (wait_if_busy and self._read(stream, max(0.0, waiting.until - time.monotonic()))):
                        waiting.cause = "deadline"
                        return
                if self._is_unresponsive(stream):
                    waiting.cause = "held_back"
                    return
            if stream.single and kind != "infer":
                waiting.cause = "refused"  # openpi's protocol has no other kind
                return
            self._next_id += 1
            stream.ask(kind, request, self._next_id, deadline_ms, self.report, waiting.until - time.monotonic())
            self._outstanding[self._next_id], waiting.sent = waiting, True
            if len(self._outstanding) > _MAX_OUTSTANDING:
                oldest = self._outstanding.pop(next(iter(self._outstanding)))
                oldest.cause = oldest.cause or "deadline"
            self.counts["requests"] += 1

        with self._lock:
            self._use(send)
            if not waiting.sent and waiting.cause is None:
                waiting.cause = "disconnected"
        waiting.sent_s = time.monotonic()
        return Pending(lambda: self._result(waiting, layout), lambda: self._done(waiting), waiting.sent)

    def _use(self, act: Callable[[Stream], object]) -> None:
        """Does something with the connection, if there is one, under the lock; drops it if it ends now."""
        if self._stream is not None:
            try:
                act(self._stream)
            except StreamClosedError as error:
                self._drop(str(error))

    def _done(self, waiting: _Waiting) -> bool:
        """Whether the result is there, or the deadline has passed; reads what has arrived, without blocking."""
        if waiting.open and time.monotonic() < waiting.until:
            with self._lock:
                self._use(self._drain)
        return not waiting.open or time.monotonic() >= waiting.until

    def _result(self, waiting: _Waiting, layout: Layout) -> tuple[Arrays, OffloadTimes] | Miss:
        """The arrays of the reply, or why there are none; blocks until the deadline at most."""
        with self._lock:
            self._use(lambda stream: self._wait(stream, waiting))
            if waiting.reply is not None:
                self._misses = 0
                self.counts["answered"] += 1
        reply, now = waiting.reply, time.monotonic()
        if isinstance(reply, Reply):
            try:
                arrays = layout.unpack(reply.arrays)
                encode_s, waited_s = waiting.sent_s - waiting.started_s, max(0.0, waiting.arrived_s - waiting.sent_s)
                return arrays, device_times(reply, encode_s, waited_s, time.monotonic() - now)
            except WireError:
                waiting.cause = "invalid"
        elif reply is not None:
            waiting.cause, self.failure = _CAUSES.get(reply.code, "refused"), printable(reply.message)
        return Miss(waiting.cause or "disconnected", OffloadTimes(network=now - waiting.started_s), waiting.sent)

    def _wait(self, stream: Stream, waiting: _Waiting) -> None:
        """Reads until the reply is there or the deadline has passed; what has arrived is read even after that."""
        last = max(waiting.until, time.monotonic() + _DRAIN_BUDGET_S)
        while waiting.open:
            arrived = self._read(stream, max(0.0, waiting.until - time.monotonic()))
            if waiting.reply is None and (not arrived or time.monotonic() > last):
                waiting.cause = waiting.cause or "deadline"
                self._misses, self._last_miss_s = self._misses + 1, time.monotonic()
                self._wake.set()

    def _read(self, stream: Stream, timeout: float) -> bool:
        """Reads one message and hands it to the request that it answers; False if none arrives in time."""
        try:
            reply = stream.reply(timeout)
        except WireError:
            self.counts["unreadable"] += 1
            if stream.single and self._outstanding:
                self._outstanding.popitem()[1].cause = "invalid"
                return True
            reply = Failure(None, ErrorCode.BAD_MESSAGE, "")
        if reply is None:
            return False
        waiting = None if reply.id is None else self._outstanding.pop(reply.id, None)
        if waiting is None:
            self.counts["unwanted"] += 1
            self._unsolicited += 1
            if self._unsolicited > _MAX_UNSOLICITED:
                raise StreamClosedError("the server sends too many messages that answer no request")
        elif waiting.cause is not None:
            self.counts["late"] += 1
        else:
            waiting.reply, waiting.arrived_s = reply, time.monotonic()
        return True

    def _drain(self, stream: Stream) -> None:
        """Reads what has arrived, within a time budget."""
        last = time.monotonic() + _DRAIN_BUDGET_S
        while self._read(stream, 0.0) and time.monotonic() <= last:
            pass

    def _run(self) -> None:
        delay, since = 0.0, 0.0
        while not self._closing.is_set():
            if self._stream is not None:
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
            # Neither a send nor a short-lived connection shortens the backoff.
            elif not self._closing.wait(delay + random.SystemRandom().uniform(0.0, max(delay, FIRST_DELAY_S) / 2)):
                delay = min(max(2.0 * delay, FIRST_DELAY_S), LONGEST_DELAY_S)
                self._connect()
                since = time.monotonic()

    def _connect(self) -> None:
        try:
            stream = self._open()
        except RemoteError as error:
            self.problem = printable(str(error))
            if isinstance(error, RefusedError):
                self._settled.set()
            return
        with self._lock:
            self._stream, self.welcome, self.problem = stream, stream.welcome, None
            self._misses = self._unsolicited = 0
            self.counts["connections"] += 1
        self._settled.set()

    def _check(self, stream: Stream) -> None:
        """Reads what nobody waits for, and pings a silent server."""
        self._drain(stream)
        if stream.single and not self._outstanding:
            # Its silence is normal.
            return
        silence = time.monotonic() - stream.alive_s
        if silence > SILENCE_S:
            raise StreamClosedError(f"nothing received from the server for {silence:.1f} s")
        quiet = silence > SILENCE_S / 3 or self._is_unresponsive(stream)
        # One ping at a time: more would delay other messages. openpi's inference blocks pongs, so it gets none.
        if quiet and not stream.single and self._last_ping_s <= stream.alive_s:
            self._last_ping_s = time.monotonic()
            stream.send(b"", mark=b"alive?")

    def _is_unresponsive(self, stream: Stream) -> bool:
        """Whether too many deadlines were missed without a sign of life since, which allows one request."""
        return self._misses >= _MAX_MISSES and stream.alive_s <= self._last_miss_s

    def _drop(self, why: str) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream, self.problem = None, printable(why)
            for waiting in self._outstanding.values():
                waiting.cause = waiting.cause or "disconnected"
            self._outstanding.clear()
            self._wake.set()
