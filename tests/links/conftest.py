"""Real sockets for the tests of links: a server that answers."""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from tests.remote.conftest import listening

Serve = Callable[[socket.socket], None]
Serving = Callable[[Serve], AbstractContextManager[int]]


def _echo(side: socket.socket) -> None:
    """Sends back whatever comes, until the other side ends or resets."""
    while data := side.recv(65536):
        side.sendall(data)


@pytest.fixture(scope="session")
def serving() -> Serving:
    """Starts servers: ``with serving(what_to_do_with_a_socket) as port``."""
    return listening


@pytest.fixture
def echo_port() -> Iterator[int]:
    with listening(_echo) as port:
        yield port
