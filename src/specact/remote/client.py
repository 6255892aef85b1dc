"""The client: connects to a server, reconnects in the background, and never blocks beyond a deadline."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from specact.errors import ConfigError, RemoteError, WireError
from specact.remote.http import HttpTransport
from specact.remote.openpi import OpenpiEndpoint, OpenpiTransport
from specact.remote.transport import Endpoint, Fields, Transport, TransportClosedError
from specact.remote.websocket import WebSocketTransport
from specact.types import Cause
from specact.wire.checks import printable, request_id
from specact.wire.dialect import Dialect
from specact.wire.handshake import Hello, Welcome, hello_fields, read_welcome
from specact.wire.images import to_jpeg
from specact.wire.sizes import max_message_bytes

_MAX_MISSES = 3
_POLL_INTERVAL_S, _PROBE_INTERVAL_S = 0.25, 0.05
# Replies to no outstanding request, per connection; above this the connection is closed.
_MAX_UNSOLICITED = 256
# Time budget of a control step for reading unsolicited replies.
_DRAIN_BUDGET_S = 0.002


@dataclass(frozen=True)
class ClientSettings:
    """Timeouts of a client.

    Attributes:
        connect_timeout_s: for connecting and the handshake together [s].
        first_delay_s, longest_delay_s: exponential backoff of reconnections, doubled after each failure [s]. A
            connection that lasted for less than ``longest_delay_s`` counts as a failure; after a longer one the delay
            is 0. Jitter is added, up to half of the delay and at least up to half of ``first_delay_s``, so that the
            robots of one server do not reconnect simultaneously.
        silence_s: the connection is closed if nothing was received for this long despite pings [s].

    Raises:
        ConfigError: for a value that is not positive and finite.
    """

    connect_timeout_s: float = 2.0
    first_delay_s: float = 0.05
    longest_delay_s: float = 2.0
    silence_s: float = 3.0

    def __post_init__(self) -> None:
        if not all(0.0 < value < math.inf for value in vars(self).values()):
            raise ConfigError(f"the settings of a connection must all be positive and finite, got {self}")


DEFAULT_SETTINGS = ClientSettings()


class Client:
    """Sends requests and waits for replies on the control loop's thread; a background thread keeps the connection open.

    A late reply is dropped and counted, and nothing is sent again after a reconnection. After three consecutive
    missed deadlines nothing is sent until something is received from the server, and then one request at a time until
    one is answered in time: a dead link costs three deadlines and not one per step.

    Use it as a context manager, or call :meth:`close`.

    Args:
        endpoint: the server.
        dialect: of this device.
        robot: its name on the server's status page.
        settings: its timeouts.
        jpeg_quality: 1 to 95 sends camera frames as JPEG, which needs Pillow and a WebSocket; None sends them raw.

    Attributes:
        dialect, jpeg_quality: as given.
        welcome: the server's reply to the hello, or None before the first connection.
        problem: why there is currently no connection, or None.
        report: counters sent with every request, for the server's status page; a policy's ``counts``.
        counts: ``connections``, ``sent``, ``answered``, ``late`` (replies after their deadline), ``unwanted`` (replies
            to unused prefetched requests), ``unreadable``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dialect: Dialect,
        robot: str = "robot",
        settings: ClientSettings = DEFAULT_SETTINGS,
        jpeg_quality: int | None = None,
    ) -> None:
        if jpeg_quality is not None:
            _check_jpeg(jpeg_quality, endpoint)
        self._endpoint, self._settings, self.jpeg_quality = endpoint, settings, jpeg_quality
        self.dialect = dialect
        self._hello = Hello(robot, dialect.family, dialect.agreed)
        self._limit = max_message_bytes(dialect)
        self._lock = threading.Lock()
        self._wake, self._connected, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._transport: Transport | None = None
        self._next_id = 0
        # Requests without a reply, with the counter for it; and the number of unsolicited messages.
        self._outstanding: dict[int, str] = {}
        self._unsolicited = 0
        # Not seeded: the jitter must differ between robots.
        self._random = random.Random()
        # The reply to the newest request, if it arrived before wait was called.
        self._early_reply: Fields | None = None
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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends the thread, within ``connect_timeout_s``; idempotent."""
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

    def send(self, kind: str, fields: Callable[[int], Fields], deadline_s: float, wait_if_busy: bool) -> int | None:
        """Sends a request immediately; never waits for a connection.

        Args:
            kind: the message's type.
            fields: makes the message from its id.
            deadline_s: timeout for sending the request; after it the connection is closed.
            wait_if_busy: whether to wait up to ``deadline_s`` for an outstanding reply that blocks an HTTP transport.

        Returns:
            The id, or None if there is no connection, or it is unresponsive or busy.
        """
        until = time.monotonic() + deadline_s
        with self._lock:
            transport = self._transport
            if transport is None:
                return None
            self._next_id += 1
            if self._early_reply is not None:
                self._early_reply = None
                self.counts["unwanted"] += 1
            try:
                self._drain(transport, deadline_s if wait_if_busy and not self._is_unresponsive(transport) else 0.0)
                if self._is_unresponsive(transport):
                    return None
                if transport.busy:
                    if wait_if_busy:
                        self._miss()
                    return None
                payload = transport.encode(fields(self._next_id))
                transport.send(kind, payload, until - time.monotonic())
            except TransportClosedError as error:
                self._drop(str(error))
                return None
            self._outstanding[self._next_id] = "unwanted"
            self.counts["sent"] += 1
            return self._next_id

    def wait(self, identity: int, timeout: float) -> Fields | Cause:
        """The reply to a request, or the cause of its absence: ``deadline``, ``disconnected`` or ``invalid``."""
        until = time.monotonic() + timeout
        with self._lock:
            early = self._early_reply
            if early is not None and request_id(early) == identity:
                self._early_reply, self._misses = None, 0
                self.counts["answered"] += 1
                return early
            if self._transport is None or identity not in self._outstanding:
                return "disconnected"
            self._outstanding[identity] = "late"
            try:
                return self._await(self._transport, identity, until)
            except TransportClosedError as error:
                self._drop(str(error))
                return "disconnected"

    def has_reply(self, identity: int) -> bool:
        """Whether :meth:`wait` would not block: the newest request's reply has arrived, or none can arrive any more."""
        with self._lock:
            try:
                if self._transport is not None:
                    self._drain(self._transport)
            except TransportClosedError as error:
                self._drop(str(error))
            early = self._early_reply is not None and request_id(self._early_reply) == identity
            return early or self._transport is None or identity not in self._outstanding

    def _await(self, transport: Transport, identity: int, until: float) -> Fields | Cause:
        # Data that has already arrived is read even after the timeout.
        last = max(until, time.monotonic() + _DRAIN_BUDGET_S)
        while True:
            # A busy transport has one outstanding request: the next reply is its own, readable or not.
            only = transport.busy
            payload = transport.receive(max(0.0, until - time.monotonic()))
            if payload is None:
                self._miss()
                return "deadline"
            fields = self._read(transport, payload)
            if fields is not None and request_id(fields) == identity:
                self._misses = 0
                del self._outstanding[identity]
                self.counts["answered"] += 1
                return fields
            self._count_unsolicited(fields)
            if only:
                return "invalid"
            if time.monotonic() > last:
                self._miss()
                return "deadline"

    def _run(self) -> None:
        delay, since = 0.0, 0.0
        while not self._closing.is_set():
            if self._transport is not None:
                self._check_connection()
                if time.monotonic() - since > self._settings.longest_delay_s:
                    delay = 0.0
                self._wake.wait(_POLL_INTERVAL_S if self._misses < _MAX_MISSES else _PROBE_INTERVAL_S)
                self._wake.clear()
                continue
            # Neither a send nor a short-lived connection shortens the backoff.
            if not self._closing.wait(delay + self._random.uniform(0.0, max(delay, self._settings.first_delay_s) / 2)):
                delay = min(max(2.0 * delay, self._settings.first_delay_s), self._settings.longest_delay_s)
                self._connect()
                since = time.monotonic()

    def _connect(self) -> None:
        try:
            transport, welcome = open_transport(
                self._endpoint, self._hello, self._settings.connect_timeout_s, self._limit
            )
        except RemoteError as error:
            self.problem = printable(str(error))
            return
        with self._lock:
            self._transport, self.welcome, self.problem, self._misses = transport, welcome, None, 0
            self._unsolicited = 0
            self.counts["connections"] += 1
        self._connected.set()

    def _check_connection(self) -> None:
        """Drains unsolicited messages, and pings a silent server."""
        # The control loop has priority; it drains the transport itself.
        if not self._lock.acquire(blocking=False):
            return
        try:
            transport = self._transport
            if transport is None:
                return
            self._drain(transport)
            if not transport.pings and not transport.busy:
                # Nothing is outstanding, so silence is normal.
                return
            silence, patience = time.monotonic() - transport.last_activity_s, self._settings.silence_s
            if silence > patience:
                raise TransportClosedError(f"nothing received from the server for {silence:.1f} s")
            # At most one ping is outstanding: on a lossy link more would only delay other messages.
            if self._last_ping_s <= transport.last_activity_s and (
                silence > patience / 3 or self._is_unresponsive(transport)
            ):
                self._last_ping_s = time.monotonic()
                transport.ping()
        except TransportClosedError as error:
            self._drop(str(error))
        finally:
            self._lock.release()

    def _drain(self, transport: Transport, patience_s: float = 0.0) -> None:
        """Reads replies that no call waits for, within a time budget."""
        last = time.monotonic() + patience_s + _DRAIN_BUDGET_S
        while (payload := transport.receive(patience_s if transport.busy else 0.0)) is not None:
            fields, newest = self._read(transport, payload), self._next_id
            if fields is not None and request_id(fields) == newest and self._outstanding.get(newest) == "unwanted":
                # Prefetched: it may still be requested.
                self._early_reply = fields
                del self._outstanding[newest]
            else:
                self._count_unsolicited(fields)
            if time.monotonic() > last:
                return

    def _miss(self) -> None:
        self._misses, self._last_miss_s = self._misses + 1, time.monotonic()
        self._wake.set()

    def _is_unresponsive(self, transport: Transport) -> bool:
        """Whether the server has missed too many deadlines and sent nothing since.

        After something was received one request is allowed, not three: if all replies are late, each would otherwise
        allow more requests than it answers.
        """
        return self._misses >= _MAX_MISSES and transport.last_activity_s <= self._last_miss_s

    def _read(self, transport: Transport, payload: bytes) -> Fields | None:
        try:
            return transport.decode(payload)
        except WireError:
            return None

    def _count_unsolicited(self, fields: dict[str, Any] | None) -> None:
        identity = None if fields is None else request_id(fields)
        self._unsolicited += identity not in self._outstanding
        self.counts["unreadable" if identity is None else self._outstanding.pop(identity, "unwanted")] += 1
        if self._unsolicited > _MAX_UNSOLICITED:
            raise TransportClosedError("the server sends too many unrequested messages")

    def _drop(self, why: str) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport, self.problem = None, printable(why)
            # Outstanding requests are lost; ids are never reused.
            self._outstanding.clear()
            self._wake.set()


def open_transport(endpoint: Endpoint, hello: Hello, timeout: float, limit: int) -> tuple[Transport, Welcome]:
    """Opens a transport and performs the handshake; the caller closes it.

    Args:
        endpoint: the server.
        hello: the device's.
        timeout: for connecting and the handshake together [s].
        limit: a larger message closes the transport [bytes].

    Raises:
        RemoteError: if there is none in time, or the server refuses this device.
    """
    until = time.monotonic() + timeout
    transport: Transport
    if isinstance(endpoint, OpenpiEndpoint):
        transport = OpenpiTransport(endpoint, timeout, limit)
    else:
        kind = WebSocketTransport if endpoint.scheme in ("ws", "wss") else HttpTransport
        transport = kind(endpoint, timeout, limit)
    try:
        transport.send("hello", transport.encode(hello_fields(hello)), until - time.monotonic())
        payload = transport.receive(until - time.monotonic())
        if payload is None:
            raise TransportClosedError("the server did not answer the hello in time")
        welcome = read_welcome(transport.decode(payload))
    except (TransportClosedError, WireError) as error:
        transport.close()
        raise RemoteError(f"{endpoint} refuses this device: {printable(str(error))}") from None
    texts = (welcome.bundle, welcome.target, welcome.version, welcome.family)
    bundle, target, version, family = (printable(text, 64) for text in texts)
    return transport, replace(welcome, bundle=bundle, target=target, version=version, family=family)


def _check_jpeg(quality: int, endpoint: Endpoint) -> None:
    if not 1 <= quality <= 95 or endpoint.scheme in ("http", "https") or isinstance(endpoint, OpenpiEndpoint):
        raise ConfigError(
            f"JPEG frames need a quality from 1 to 95 and a ws or wss server of specact's own protocol, got {quality} "
            f"and {endpoint}"
        )
    # Raises now, before a robot moves, if Pillow is missing.
    to_jpeg(np.zeros((1, 8, 8, 3), np.uint8), quality)
