"""A real server for the tests of links: it sends back whatever comes."""

import socket
from collections.abc import Iterator

import pytest
from tests.remote.conftest import listening


def echo(side: socket.socket) -> None:
    while data := side.recv(65536):
        side.sendall(data)


@pytest.fixture
def echo_port() -> Iterator[int]:
    with listening(echo) as port:
        yield port
