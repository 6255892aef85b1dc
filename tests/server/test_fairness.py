"""A robot among others that ask too much or nonsense: what counts is how much is done for them in between."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.children import wait_for
from tests.serving import Doubling, Here, Process, Robot, bearer, busy, requests, state

from specact import Pair
from specact.errors import WireError

VICTIM, CROWD, STRANGER = map(bearer, ("the-token-of-the-victim", "the-token-of-the-crowd", "a-token-of-nobody-here"))
ANYBODY = bearer("the-token-of-everybody")
# The requests of the victim, and the number of those that keep the server from them.
COUNT, OTHERS = 200, 32


@pytest.fixture
def guarded(ball: Pair[Any], tmp_path: Path) -> Iterator[Process]:
    """A real server in which the victim and the crowd have a token each."""
    names = {"victim": VICTIM, "crowd": CROWD}
    rows = (f"{name} {shown['Authorization'].split()[1]}\n" for name, shown in names.items())
    (tmp_path / "tokens").write_text("".join(rows))
    options, token = ["--tokens", str(tmp_path / "tokens")], ANYBODY["Authorization"].split()[1]
    with Process(ball.exchange.contract, "ball", *options, token=token) as server:
        yield server


def beside(
    server: Process, flood: bytes, shown: dict[str, str], others: int = OTHERS
) -> tuple[Counter[str], list[int]]:
    """How many requests have which outcome while the victim, whose requests all wait, gets its replies; bytes sent."""

    def outcomes() -> Counter[str]:
        counts = Counter[str]()
        for (_, outcome), number in server.outcomes(**VICTIM).items():
            counts[outcome] += int(number)
        return counts

    with server.robot(**VICTIM) as victim, server.crowd(others, flood, **shown) as sent:
        wait_for(outcomes, "it has begun")
        before = outcomes()
        victim.raw(requests(server.contract, server.contract.observation.zeros(), COUNT))
        assert replies(victim, COUNT) == list(range(COUNT))
        return outcomes() - before, list(sent)


def replies(robot: Robot, count: int) -> list[int]:
    return [robot.reply().id for _ in range(count)]


def test_what_is_malformed_is_refused_in_turns(guarded: Process) -> None:
    zeros, nan = struct.pack("<2f", 0, 0), struct.pack("<2f", float("nan"), 0)
    flood = requests(guarded.contract, guarded.contract.observation.zeros(), 100).replace(zeros, nan)
    outcomes, _ = beside(guarded, flood, ANYBODY)
    # In equal times: a refusal takes a tenth of the time of a reply or less. A read of a connection has 600.
    assert 0 < outcomes["bad_message"] < 100 * OTHERS * COUNT


def test_one_token_on_many_connections_is_one_robot(guarded: Process) -> None:
    outcomes, _ = beside(guarded, requests(guarded.contract, guarded.contract.observation.zeros(), 100), CROWD)
    # Its own, and in its share of the time not many more of the others.
    assert COUNT < outcomes["ok"] < 8 * COUNT


def test_who_is_not_let_in_is_not_listened_to(guarded: Process) -> None:
    flood = requests(guarded.contract, guarded.contract.observation.zeros(), 100)
    _, sent = beside(guarded, flood, STRANGER, 4 * OTHERS)
    # No more than the buffers of the system hold.
    assert max(sent) < 24 << 20


def test_many_robots_with_many_requests_are_answered_and_none_is_refused() -> None:
    # The last one sends more than the server would keep of it.
    count, numbers = 128, [12] * 127 + [3000]
    with busy(count) as (server, robots), server.robot() as victim:
        for robot, number in zip(robots, numbers, strict=True):
            robot.raw(requests(server.contract, state(2.0), number))
        wait_for(lambda: server.status()["queued"] >= 4 * (count - 1), "many wait")
        victim.send(1, state(3.0))
        wait_for(victim.connection.ping().is_set, "its request was read")
        server.exchange.open.set()
        assert replies(victim, 1) == [1]
        # One batch was computed before; in the others is at most what the others may have in flight.
        assert server.exchange.places(3.0)[0] <= 1 + 4 * -(-count // 16)
        for robot, number in zip(robots[1:], numbers[1:], strict=True):
            assert replies(robot, number) == list(range(number))


def test_turns_are_charged_the_time_they_took() -> None:
    costly, cheap = 2.0, 3.0
    with busy(3, Doubling({costly: 0.02, cheap: 0.001}), max_batch=1) as (server, (_, greedy, modest)):
        for robot, cost in ((greedy, costly), (modest, cheap)):
            robot.raw(requests(server.contract, state(cost), 100))
            wait_for(lambda: server.status()["queued"], "they wait")
        server.exchange.open.set()
        assert replies(modest, 100) == list(range(100))
        # In equal times five of the costly ones; in equal turns a hundred.
        before = [place for place in server.exchange.places(costly) if place < server.exchange.places(cheap)[99]]
        assert 1 <= len(before) <= 30


@pytest.mark.parametrize("limit", ["max_robots", "max_per_address"])
def test_those_that_sleep_give_way_the_longest_asleep_first(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specact.server.service.IDLE_S", 0.0)
    limits: dict[str, Any] = {limit: 8}
    with Here(Doubling(), **limits) as server, ExitStack() as stack:
        sleepers = [stack.enter_context(server.robot()) for _ in range(6)]
        awake = stack.enter_context(server.robot())
        for number in range(20):
            awake.ask(number, state(1.0))
            sleepers.append(stack.enter_context(server.robot()))
            assert server.http("/healthz")[0] == server.http("/v1/status")[0] == 200
        assert {sleeper.end() for sleeper in sleepers[:-7]} == {1013}
        for robot in (awake, *sleepers[-7:]):
            robot.ask(99, state(1.0))


@pytest.mark.parametrize("limit", ["max_robots", "max_per_address"])
def test_who_waits_for_a_reply_does_not_give_way(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specact.server.service.IDLE_S", 0.0)
    limits: dict[str, Any] = {limit: 2}
    with busy(2, **limits) as (server, (robot, second)):
        second.send(1, state(2.0))
        server.waiting(1)
        with server.connect() as third:
            assert third.receive().code == "overloaded" and third.end() == 1013
        assert server.http("/healthz")[0] == 200
        server.exchange.open.set()
        assert replies(robot, 1) == [0] and replies(second, 1) == [1]


def test_those_without_a_hello_give_way() -> None:
    with Here(Doubling(), max_robots=5) as server, server.robot() as robot, ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(12)]
        with server.robot() as newcomer:
            newcomer.ask(1, state(1.0))
        robot.ask(1, state(1.0))
        assert idle[0].receive().code == "overloaded" and idle[0].end() == 1013


def test_a_robot_whose_deadline_cannot_be_kept_is_told_so() -> None:
    with Here(Doubling({0.0: 0.02}), max_batch=1) as server, server.robot() as plain, server.connect() as present:
        present.hello(rate_hz=2.0, deadline_ms=10_000.0)
        for wish in ({"rate_hz": 10.0, "deadline_ms": 1.0}, {"rate_hz": 1000.0, "deadline_ms": 10_000.0}):
            with server.connect() as refused:
                with pytest.raises(WireError, match=r"\d.* ms") as why:
                    refused.hello(**wish)
                assert why.value.code == "overloaded" and refused.end() == 1013
        for robot in (plain, present):
            robot.ask(1, state(1.0))
