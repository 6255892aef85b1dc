"""Which connection is let in, and which makes room."""

from __future__ import annotations

from typing import Any, cast

import pytest

from specact.server.connections import Connection, Connections


class Transport:
    """As much of a transport as is asked for here."""

    def __init__(self, host: str) -> None:
        self.host, self.closing, self.aborted = host, False, False

    def get_extra_info(self, name: str) -> tuple[str, int]:
        assert name == "peername"
        return self.host, 4321

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


class House:
    """Connections, and what became of each transport."""

    def __init__(self, most: int = 100, most_pending: int = 100, most_per_address: int = 100) -> None:
        self.dropped: list[tuple[str, str]] = []
        self.connections = Connections(
            most, most_pending, most_per_address, lambda connection, why: self.dropped.append((connection.peer, why))
        )
        self.transports: list[Transport] = []

    def enter(self, host: str) -> tuple[bool, Connection]:
        self.transports.append(Transport(host))
        connection = Connection(cast(Any, self.transports[-1]))
        return self.connections.add(connection), connection

    @property
    def aborted(self) -> list[int]:
        return [number for number, transport in enumerate(self.transports) if transport.aborted]


def test_the_oldest_pending_of_the_address_with_most_makes_room() -> None:
    house = House(most_pending=4)
    for host in ("1.1.1.1", "6.6.6.6", "6.6.6.6", "6.6.6.6", "2.2.2.2", "2.2.2.2", "2.2.2.2"):
        assert house.enter(host)[0]
    assert house.aborted == [1, 2, 4]
    assert house.dropped[0] == ("6.6.6.6:4321", "too many connections")
    assert (len(house.connections), house.connections.pending) == (4, 4)


def test_who_proved_itself_makes_no_room() -> None:
    house = House(most=3)
    for _ in range(3):
        house.connections.admit(house.enter("1.1.1.1")[1])
    assert house.enter("2.2.2.2")[0] is False
    assert house.aborted == []
    assert house.dropped == [("2.2.2.2:4321", "no room for another connection")]
    # A refused one was never counted.
    assert len(house.connections) == 3


def test_an_address_has_so_many_and_its_own_pending_ones_make_room() -> None:
    house = House(most_per_address=3)
    proven = [house.enter("1.1.1.1")[1] for _ in range(2)]
    for connection in proven:
        house.connections.admit(connection)
    assert house.enter("1.1.1.1")[0] and house.enter("2.2.2.2")[0]
    assert house.enter("1.1.1.1")[0]
    assert house.aborted == [2]
    house.connections.admit(Connection(cast(Any, house.transports[4])))  # one that is not counted: nothing happens
    assert house.connections.pending == 2
    for connection in proven:
        house.connections.remove(connection)
        house.connections.remove(connection)
    assert len(house.connections) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_a_network_of_ipv6_is_one_address(one: str, other: str, same: bool) -> None:
    hosts = [Connection(cast(Any, Transport(host))).host for host in (one, other)]
    assert (hosts[0] == hosts[1]) is same


def test_what_was_closed_and_is_not_read_is_ended_at_the_second_sweep() -> None:
    house = House()
    closed, _ = (house.enter("1.1.1.1")[1] for _ in range(2))
    house.transports[0].closing = True
    house.connections.sweep()
    assert house.aborted == []
    house.connections.sweep()
    assert house.aborted == [0]
    house.connections.remove(closed)
    house.connections.sweep()
    assert len(house.connections) == 1


def test_all_can_be_ended() -> None:
    house = House()
    for _ in range(3):
        house.enter("1.1.1.1")
    house.connections.abort_all()
    assert house.aborted == [0, 1, 2]
