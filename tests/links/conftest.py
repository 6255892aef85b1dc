"""Real sockets for the tests of links: a server that answers."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

Serve = Callable[[socket.socket], None]
Serving = Callable[[Serve], AbstractContextManager[int]]


@contextmanager
def _serving(serve: Serve) -> Iterator[int]:
    """A server on loopback that gives each connection to ``serve`` in a thread; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def handle(side: socket.socket) -> None:
        with side:
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            side.settimeout(20.0)
            serve(side)

    def accept() -> None:
        while True:
            try:
                side, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=handle, args=(side,)))
            threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join(20)
        listener.close()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)


def _echo(side: socket.socket) -> None:
    """Sends back whatever comes, until the other side ends or resets."""
    try:
        while data := side.recv(65536):
            side.sendall(data)
    except OSError:
        return


@pytest.fixture(scope="session")
def serving() -> Serving:
    """Starts servers: ``with serving(what_to_do_with_a_socket) as port``."""
    return _serving


@pytest.fixture
def echo_port() -> Iterator[int]:
    with _serving(_echo) as port:
        yield port
