"""The client: connects to a server and reconnects in the background, and never makes the control loop wait."""

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

_SUSPECT_AFTER = 3
_LOOK_EVERY_S, _PROBE_EVERY_S = 0.25, 0.05
# A server answers what it is asked; one that says this much more on one connection is hung up on.
_MOST_UNASKED = 256
# What reading replies that nobody waits for may take of a control step.
_GLANCE_S = 0.002


@dataclass(frozen=True)
class ClientSettings:
    """Timeouts of a client.

    Attributes:
        connect_timeout_s: for connecting and the handshake together [s].
        first_delay_s, longest_delay_s: the wait before a reconnection, doubled from one failure to the next [s]. A
            connection that did not last for ``longest_delay_s`` is a failure, too; after one that did the wait is 0. A
            random part is added, up to half of the wait and at least up to half of ``first_delay_s``, so that the
            robots of one server do not all come back at once.
        silence_s: the connection is closed if nothing was received for this long, although pings were sent [s].

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
    """Sends requests and waits for their replies, from the control loop's thread; a thread of its own keeps it open.

    A request whose reply did not come in time is forgotten: the reply is dropped and counted when it comes, and
    nothing is sent again after a reconnection. After three missed deadlines in a row nothing more is sent until
    something is received from the server, and then one request until one is answered in time: a dead link costs three
    deadlines and not one per step.

    Use it as a context manager, or call :meth:`close`.

    Args:
        endpoint: the server.
        dialect: what this device speaks.
        robot: its name on the server's status page.
        settings: its timeouts.
        jpeg_quality: 1 to 95 sends camera frames as JPEG, which needs Pillow and a WebSocket; None sends them raw.

    Attributes:
        dialect, jpeg_quality: as given.
        welcome: the server's answer to the hello, or None before the first connection.
        problem: why there is no connection at the moment, or None.
        report: counters that travel with every request, for the server's status page; a policy's ``counts``.
        counts: ``connections``, ``sent``, ``answered``, ``late`` (replies after their deadline), ``unwanted`` (replies
            nobody waited for, because the request had left on a wrong prediction), ``unreadable``.
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
        # Requests whose reply may still come, and under what it is counted then; and messages that answer none.
        self._open: dict[int, str] = {}
        self._unasked = 0
        # Unlike everything else that is random not addressed by a seed: robots must not draw the same.
        self._random = random.Random()
        # The reply to the newest request, if it came before it was waited for.
        self._early: Fields | None = None
        # Deadlines missed in a row, when the last of them was, and when a ping was sent.
        self._misses, self._missed, self._pinged = 0, 0.0, 0.0
        self.welcome: Welcome | None = None
        self.problem: str | None = f"no connection to {endpoint} yet"
        self.report: Mapping[str, int] = {}
        self.counts: Counter[str] = Counter()
        self._keeper = threading.Thread(target=self._keep, name=f"specact client to {endpoint}", daemon=True)
        self._keeper.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up and ends the thread, within ``connect_timeout_s``; may be called twice."""
        self._closing.set()
        self._wake.set()
        self._keeper.join()
        with self._lock:
            self._drop("closed")

    def connect(self, timeout: float) -> Welcome:
        """Waits for the first connection, before a robot moves.

        Raises:
            RemoteError: if there is none within ``timeout`` seconds; it says why.
        """
        if not self._connected.wait(timeout) or self.welcome is None:
            raise RemoteError(f"{self.problem} (tried for {timeout:g} s)")
        return self.welcome

    def send(self, kind: str, fields: Callable[[int], Fields], deadline_s: float, patient: bool) -> int | None:
        """Sends a request at once; never waits for a connection.

        Args:
            kind: the message's type.
            fields: makes the message, given its id.
            deadline_s: how long the network may take to accept the request; after that the connection is given up.
            patient: whether to wait as long for an unwanted reply that blocks the transport, as it can with HTTP.

        Returns:
            The id, or None if there is no connection, or none that responds, or none that is free in time.
        """
        until = time.monotonic() + deadline_s
        with self._lock:
            transport = self._transport
            if transport is None:
                return None
            self._next_id += 1
            if self._early is not None:
                self._early = None
                self.counts["unwanted"] += 1
            try:
                self._drain(transport, deadline_s if patient and not self._suspects(transport) else 0.0)
                if self._suspects(transport):
                    return None
                if transport.busy:
                    if patient:
                        self._miss()
                    return None
                payload = transport.encode(fields(self._next_id))
                transport.send(kind, payload, until - time.monotonic())
            except TransportClosedError as error:
                self._drop(str(error))
                return None
            self._open[self._next_id] = "unwanted"
            self.counts["sent"] += 1
            return self._next_id

    def wait(self, identity: int, timeout: float) -> Fields | Cause:
        """The reply to a request, or why there is none to read: ``deadline``, ``disconnected`` or ``invalid``."""
        until = time.monotonic() + timeout
        with self._lock:
            early = self._early
            if early is not None and request_id(early) == identity:
                self._early, self._misses = None, 0
                self.counts["answered"] += 1
                return early
            if self._transport is None or identity not in self._open:
                return "disconnected"
            self._open[identity] = "late"
            try:
                return self._await(self._transport, identity, until)
            except TransportClosedError as error:
                self._drop(str(error))
                return "disconnected"

    def answered(self, identity: int) -> bool:
        """Whether :meth:`wait` would not have to: the newest request's reply is there, or none can come any more."""
        with self._lock:
            try:
                if self._transport is not None:
                    self._drain(self._transport)
            except TransportClosedError as error:
                self._drop(str(error))
            early = self._early is not None and request_id(self._early) == identity
            return early or self._transport is None or identity not in self._open

    def _await(self, transport: Transport, identity: int, until: float) -> Fields | Cause:
        # What has arrived already is looked at even where the time is up.
        last = max(until, time.monotonic() + _GLANCE_S)
        while True:
            # Where replies come one at a time, the next one is this request's, readable or not.
            only = transport.busy
            payload = transport.receive(max(0.0, until - time.monotonic()))
            if payload is None:
                self._miss()
                return "deadline"
            fields = self._read(transport, payload)
            if fields is not None and request_id(fields) == identity:
                self._misses = 0
                del self._open[identity]
                self.counts["answered"] += 1
                return fields
            self._count_unasked(fields)
            if only:
                return "invalid"
            if time.monotonic() > last:
                self._miss()
                return "deadline"

    def _keep(self) -> None:
        delay, since = 0.0, 0.0
        while not self._closing.is_set():
            if self._transport is not None:
                self._look_after()
                if time.monotonic() - since > self._settings.longest_delay_s:
                    delay = 0.0
                self._wake.wait(_LOOK_EVERY_S if self._misses < _SUSPECT_AFTER else _PROBE_EVERY_S)
                self._wake.clear()
                continue
            # A robot that wants to send must not shorten the back-off, nor may a connection that did not last.
            if not self._closing.wait(delay + self._random.uniform(0.0, max(delay, self._settings.first_delay_s) / 2)):
                delay = min(max(2.0 * delay, self._settings.first_delay_s), self._settings.longest_delay_s)
                self._connect()
                since = time.monotonic()

    def _connect(self) -> None:
        try:
            transport, welcome = greet(self._endpoint, self._hello, self._settings.connect_timeout_s, self._limit)
        except RemoteError as error:
            self.problem = printable(str(error))
            return
        with self._lock:
            self._transport, self.welcome, self.problem, self._misses = transport, welcome, None, 0
            self._unasked = 0
            self.counts["connections"] += 1
        self._connected.set()

    def _look_after(self) -> None:
        """Drains unsolicited messages, and pings a silent server."""
        # The control loop goes first: it looks after the transport itself while it holds it.
        if not self._lock.acquire(blocking=False):
            return
        try:
            transport = self._transport
            if transport is None:
                return
            self._drain(transport)
            if not transport.pings and not transport.busy:
                # Nothing was asked, so nothing can be heard.
                return
            silence, patience = time.monotonic() - transport.heard, self._settings.silence_s
            if silence > patience:
                raise TransportClosedError(f"nothing received from the server for {silence:.1f} s")
            # A second question could not overtake the first, and where segments are lost would only hold up others.
            if self._pinged <= transport.heard and (silence > patience / 3 or self._suspects(transport)):
                self._pinged = time.monotonic()
                transport.ping()
        except TransportClosedError as error:
            self._drop(str(error))
        finally:
            self._lock.release()

    def _drain(self, transport: Transport, patience_s: float = 0.0) -> None:
        """Reads replies that nobody waits for at the moment, for a bounded time; the rest the next time."""
        last = time.monotonic() + patience_s + _GLANCE_S
        while (payload := transport.receive(patience_s if transport.busy else 0.0)) is not None:
            fields, newest = self._read(transport, payload), self._next_id
            if fields is not None and request_id(fields) == newest and self._open.get(newest) == "unwanted":
                # It was sent ahead of the draft, and may be asked for when that is there.
                self._early = fields
                del self._open[newest]
            else:
                self._count_unasked(fields)
            if time.monotonic() > last:
                return

    def _miss(self) -> None:
        self._misses, self._missed = self._misses + 1, time.monotonic()
        self._wake.set()

    def _suspects(self, transport: Transport) -> bool:
        """Whether the server may be gone. Not after something was received, until the next miss: one try, not three.

        If all replies are late, each would otherwise allow more requests than it answers.
        """
        return self._misses >= _SUSPECT_AFTER and transport.heard <= self._missed

    def _read(self, transport: Transport, payload: bytes) -> Fields | None:
        try:
            return transport.decode(payload)
        except WireError:
            return None

    def _count_unasked(self, fields: dict[str, Any] | None) -> None:
        identity = None if fields is None else request_id(fields)
        self._unasked += identity not in self._open
        self.counts["unreadable" if identity is None else self._open.pop(identity, "unwanted")] += 1
        if self._unasked > _MOST_UNASKED:
            raise TransportClosedError("the server sends too many unrequested messages")

    def _drop(self, why: str) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport, self.problem = None, printable(why)
            # Whatever was under way is lost; an old id can never match again.
            self._open.clear()
            self._wake.set()


def greet(endpoint: Endpoint, hello: Hello, timeout: float, limit: int) -> tuple[Transport, Welcome]:
    """Opens a transport and shakes hands over it; the caller closes it.

    Args:
        endpoint: the server.
        hello: what the device says of itself.
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
        raise RemoteError(f"{endpoint} refuses this device: {error}") from None
    texts = (welcome.bundle, welcome.target, welcome.version, welcome.family)
    bundle, target, version, family = (printable(text, 64) for text in texts)
    return transport, replace(welcome, bundle=bundle, target=target, version=version, family=family)


def _check_jpeg(quality: int, endpoint: Endpoint) -> None:
    if not 1 <= quality <= 95 or endpoint.scheme in ("http", "https") or isinstance(endpoint, OpenpiEndpoint):
        raise ConfigError(
            f"JPEG frames need a quality from 1 to 95 and a ws or wss server of specact's own protocol, got {quality} "
            f"and {endpoint}"
        )
    # Whatever is missing is found before a robot moves.
    to_jpeg(np.zeros((1, 8, 8, 3), np.uint8), quality)
