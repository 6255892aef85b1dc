"""One relayed TCP connection: a client, the target, and two threads for each direction between them."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from specact.links.listener import Address
from specact.links.model import Link


class Pacer:
    """One direction of one connection: a queue that preserves the order of messages.

    A message waits while the link is :meth:`~specact.links.model.Link.busy` with those before it; one that would
    overtake by jitter arrives together with the one before it.

    Args:
        link: the model.
        up: direction.
        start: time 0 of the link [s].
        rng: random generator of this direction.
    """

    def __init__(self, link: Link, up: bool, start: float, rng: np.random.Generator) -> None:
        self._link, self._up, self._start, self._rng = link, up, start, rng
        self._free = self._due = start

    def due(self, payload_bytes: int, now: float) -> float:
        """Arrival time of a message sent ``now``, on the clock of ``start`` [s]; at least ``now``."""
        entry = max(now, self._free)
        at = entry - self._start
        self._free = entry + self._link.busy(payload_bytes, self._up, at)
        self._due = max(self._due, entry + self._link.delay(payload_bytes, self._up, at, self._rng))
        return self._due


class Pipe:
    """A FIFO queue of chunks between two threads, bounded by bytes, that can be closed from a third.

    Args:
        limit_bytes: a chunk is accepted while the queue holds less than this.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._size, self._closed = limit_bytes, 0, False
        self._chunks: deque[tuple[bytes | None, float]] = deque()
        self._changed = threading.Condition()

    def put(self, chunk: bytes | None, due: float) -> bool:
        """Appends a chunk with its due time, blocking while the pipe is full; False if it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._size < self._limit)
            self._chunks.append((chunk, due))
            self._size += len(chunk or b"")
            self._changed.notify_all()
            return not self._closed

    def get(self) -> tuple[bytes | None, float] | None:
        """The oldest chunk with its due time, blocking while the pipe is empty; None if it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._chunks)
            if self._closed:
                return None
            chunk, due = self._chunks.popleft()
            self._size -= len(chunk or b"")
            self._changed.notify_all()
            return chunk, due

    def close(self) -> None:
        """Unblocks all callers and drops the content."""
        with self._changed:
            self._closed = True
            self._chunks.clear()
            self._changed.notify_all()


Ending = Literal["closed", "reset", "refused", "frozen"]

CHUNK_BYTES = 16 * 1024
LIMIT_BYTES = 4 * 1024 * 1024


class Host(Protocol):
    """The interface of the shaper for its connections."""

    def pacer(self, connection: int, up: bool) -> Pacer:
        """The pacer of a direction."""
        ...

    def held_until(self) -> float:
        """Monotonic time until which all data is held back [s]."""
        ...

    def delivered(self, up: bool, payload_bytes: int, late: float) -> None:
        """Counts a chunk that was passed on ``late`` seconds after it was due."""
        ...

    def ended(self, connection: Connection) -> None:
        """Called once at its end, on its last thread."""
        ...


class Connection:
    """Relays between two sockets until both sides have closed, one has reset, or :meth:`end` is called.

    A reader assigns each chunk its due time; a writer waits until then and sends it. The end of the stream and a reset
    are delayed like any chunk. The last thread to end closes the sockets, unless the connection is frozen.

    Args:
        number: its number in the shaper, from 0.
        client: its accepted socket, which belongs to the connection from now on.
        target: address family and address to connect to.
        host: the shaper.
    """

    def __init__(self, number: int, client: socket.socket, target: Address, host: Host) -> None:
        self.number = number
        self.ending: Ending | None = None
        self.passed = [0, 0]  # bytes down and up
        self._host, self._target = host, target
        self._client, self._server = client, socket.socket(target[0], socket.SOCK_STREAM)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)  # readable after end(), to wake threads in poll
        self._stop = threading.Event()  # set by end(), to wake threads that wait for a due time
        self._pipes = {True: Pipe(LIMIT_BYTES), False: Pipe(LIMIT_BYTES)}
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._running, self._closed = 0, False
        self._done = threading.Event()

    def start(self) -> None:
        """Connects to the target and relays, in the connection's threads."""
        self._spawn(self._connect)

    def end(self, ending: Ending) -> None:
        """Ends it immediately and drops data in flight: ``closed``, ``reset`` (TCP resets on both sides) or ``frozen``.

        A frozen connection stays open on both sides but transfers nothing, until it is closed or reset.
        """
        with self._lock:
            if self._closed or self.ending == ending:
                return
            if self._done.is_set():  # it was frozen
                self.ending = ending
                self._close()
                return
            self.ending = self.ending or ending
            os.eventfd_write(self._wake, 1)
        self._stop.set()
        for pipe in self._pipes.values():
            pipe.close()

    def join(self) -> None:
        """Waits for the end of all threads; call :meth:`end` first."""
        self._done.wait()
        for thread in self._threads:
            thread.join()

    @property
    def gone(self) -> bool:
        """Whether its sockets are closed and its threads have ended."""
        return self._closed and not any(thread.is_alive() for thread in self._threads)

    def _spawn(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=self._run, args=(work, *arguments), name=f"shaper-{self.number}", daemon=True)
        with self._lock:
            self._running += 1
            self._threads.append(thread)
        thread.start()

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except OSError:  # one side is closed; the other one is closed too
            self.end("reset")
        with self._lock:
            self._running -= 1
            if self._running:
                return
            self.ending = self.ending or "closed"
            if self.ending != "frozen":
                self._close()
            self._done.set()
        self._host.ended(self)

    def _close(self) -> None:
        self._closed = True
        for side in (self._client, self._server):
            if self.ending in ("reset", "refused"):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            side.close()
        os.close(self._wake)

    def _connect(self) -> None:
        for side in (self._client, self._server):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        failure = self._server.connect_ex(self._target[1])
        if failure == errno.EINPROGRESS:
            if not self._ready(self._poll(self._server, select.POLLOUT)):
                return
            failure = self._server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            self.end("refused")
            return
        for up, source, sink in ((True, self._client, self._server), (False, self._server, self._client)):
            self._spawn(self._read, source, self._host.pacer(self.number, up), self._pipes[up])
            self._spawn(self._write, sink, self._pipes[up], up)

    def _read(self, source: socket.socket, pacer: Pacer, pipe: Pipe) -> None:
        readable = self._poll(source, select.POLLIN)
        chunk: bytes | None = b" "
        while chunk and self._ready(readable):
            try:
                chunk = source.recv(CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                chunk = None  # None marks a reset, b"" the end of the stream
            if not pipe.put(chunk, pacer.due(len(chunk or b""), time.monotonic())):
                return

    def _write(self, sink: socket.socket, pipe: Pipe, up: bool) -> None:
        _sharpen_timers()
        writable = self._poll(sink, select.POLLOUT)
        while (entry := pipe.get()) and self._wait(entry[1]):
            chunk, due = entry
            late = time.monotonic() - max(due, self._host.held_until())
            if chunk is None:
                self.end("reset")
                return
            if not chunk:
                sink.shutdown(socket.SHUT_WR)
                return
            if not self._send(sink, chunk, writable):
                return
            self.passed[up] += len(chunk)
            self._host.delivered(up, len(chunk), late)

    def _wait(self, due: float) -> bool:
        """Sleeps until ``due`` and while data is held back; False if the connection ends first."""
        while not self._stop.is_set():
            left = max(due, self._host.held_until()) - time.monotonic()
            if left <= 0.0:
                return True
            if left > 2e-3:
                self._stop.wait(left - 1e-3)  # can be interrupted, but is less accurate than the sleep that follows
            else:
                time.sleep(left)
        return False

    def _send(self, sink: socket.socket, chunk: bytes, writable: select.poll) -> bool:
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[sink.send(rest) :]
            except BlockingIOError:
                if not self._ready(writable):
                    return False
        return True

    def _poll(self, side: socket.socket, event: int) -> select.poll:
        poll = select.poll()
        poll.register(side, event)
        poll.register(self._wake, select.POLLIN)
        return poll

    def _ready(self, poll: select.poll) -> bool:
        """Waits until the socket is ready; False if the connection ends first."""
        return all(fd != self._wake for fd, _ in poll.poll())


def _sharpen_timers() -> None:
    """Sets this thread's timer slack to 1 microsecond instead of 50, on Linux."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1000")
