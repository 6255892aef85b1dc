"""Robots at the server: the handshake, exact replies, deadlines, order, errors, and how a server stops."""

from __future__ import annotations

import signal
import threading
from asyncio import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.children import wait_for
from tests.serving import HELLO, HERE, PATIENCE, Here, Process, busy, opening, requests, state
from websockets.exceptions import InvalidStatus

from specact import Pair
from specact.errors import WireError
from specact.families.chunks.sources import chunk_policy
from specact.load import load_exchange
from specact.observation import Window
from specact.wire.exchange import Request
from specact.wire.messages import Failure, ask, encode


def test_a_device_with_the_same_bundle_is_welcome_and_told_what_is_served(served: Here, ball: Pair[Any]) -> None:
    with served.connect() as robot:
        welcome = robot.hello()
    assert (welcome.bundle, welcome.family) == ("ball", "codes")
    assert welcome.spec == ball.exchange.contract.spec and welcome.kinds == ball.exchange.contract.describe()
    with served.connect() as robot:
        assert robot.hello(family=None, spec={}) == welcome


WRONG_HELLOS: list[tuple[dict[str, Any], str]] = [
    ({"family": "chunks"}, "mismatch"), ({"spec": {}}, "mismatch"), ({"protocol": 2}, "unsupported_protocol"),
    ({"robot": "\x1b[2J"}, "bad_message"), ({"robot": "x" * 65}, "bad_message"), ({"rate_hz": -1.0}, "bad_message"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code"), WRONG_HELLOS, ids=str)
def test_a_device_that_does_not_fit_is_told_why(doubling: Here, changes: dict[str, Any], code: str) -> None:
    with doubling.connect() as robot:
        with pytest.raises(WireError) as refused:
            robot.hello(**changes)
        assert refused.value.code == code and str(refused.value).isprintable()
        assert robot.end() == 1008


def test_a_connection_begins_with_a_hello_and_has_one(doubling: Here) -> None:
    with doubling.connect() as robot:
        robot.send(1, state(1.0))
        assert robot.receive().code == "bad_message" and robot.end() == 1008
    with doubling.robot() as robot:
        with pytest.raises(WireError):
            robot.hello()
        assert robot.end() == 1008
    with pytest.raises(InvalidStatus) as refused, doubling.connect("/v1/stream"):
        pass
    assert refused.value.response.status_code == 426
    assert b"unsupported_protocol" in (refused.value.response.body or b"")


def test_a_reply_depends_on_its_request_alone(served: Here, ball: Pair[Any]) -> None:
    rng, zeros = np.random.default_rng(0), ball.parts.spec.target.zeros().arrays
    seen = [Window({name: rng.normal(size=array.shape).astype(np.float32) for name, array in zeros.items()})
            for _ in range(8)]  # fmt: skip
    with served.robot() as robot, served.robot() as neighbour:
        alone = [robot.ask(number, window)["logits"].tobytes() for number, window in enumerate(seen)]
        for number in rng.permutation(8).tolist():
            neighbour.ask(99, seen[-number])
            assert robot.ask(number, seen[number])["logits"].tobytes() == alone[number]


def test_a_request_that_cannot_be_used_is_refused_by_its_id_and_the_robot_goes_on(doubling: Here) -> None:
    with doubling.robot() as robot, doubling.robot() as neighbour:
        for number, value in enumerate((np.nan, np.inf), start=3):
            robot.send(number, state(value))
            failure = robot.receive()
            assert (failure.id, failure.code) == (number, "bad_message") and "state" in failure.message
        whole = encode(ask(Request(state(1.0), HERE), doubling.contract, "infer", 9, 60_000.0))
        for replaced in ((b"\xa5infer", b"\xa5\x1b[2Jr"), (b"\xa5infer", b"\xa6verify")):
            robot.connection.send(whole.replace(*replaced))
            failure = robot.receive()
            assert (failure.id, failure.code) == (9, "bad_message") and failure.message.isprintable()
        robot.send(1, state(1.0), deadline_ms=0.0)
        assert robot.receive().code == "expired" and doubling.exchange.batches == []
        for asking in (robot, neighbour):
            assert asking.ask(5, state(1.0))["x"].tolist() == [2.0, 2.0]


def test_what_is_not_finite_is_an_error_of_its_request_alone_even_in_a_batch() -> None:
    with busy(4) as (server, robots):
        for robot, value in zip(robots, (3e38, np.nan, 1.0, 2.0), strict=True):
            robot.send(1, state(value))
        server.waiting(4)
        server.exchange.open.set()
        assert [robot.reply().id for robot in (robots[0], *robots[2:])] == [0, 1, 1]
        failures = [robot.receive() for robot in robots[:2]]
        assert [(failure.id, failure.code) for failure in failures] == [(1, "bad_message")] * 2
        assert len(server.exchange.batches[1]) == 3


@pytest.mark.parametrize(
    "error",
    [RuntimeError("secret"), SystemExit("secret"), CancelledError("secret"), WireError("bad_message", "secret")],
)
def test_a_target_that_fails_says_nothing_of_its_inside_and_goes_on(
    error: BaseException, doubling: Here, caplog: pytest.LogCaptureFixture
) -> None:
    with doubling.robot() as robot:
        doubling.exchange.fails = error
        robot.send(1, state(1.0))
        failure = robot.receive()
        assert (failure.id, failure.code) == (1, "internal") and "secret" not in failure.message
        doubling.exchange.fails = None
        robot.ask(2, state(1.0))
    assert "secret" in caplog.text


def test_a_batch_is_what_came_in_while_the_last_was_computed_one_request_of_each_robot_and_of_one_kind() -> None:
    with busy(3, max_batch=3, max_under_way=10) as (server, (greedy, modest, third)):
        for number in range(1, 6):
            greedy.send(number, state(number))
        server.waiting(5)
        modest.send(50, state(50.0))
        third.send(60, state(60.0), "verify")
        server.waiting(7)
        server.exchange.open.set()
        first = modest.reply()
        assert (first.id, first.batch, third.reply().id) == (50, 2, 60)
        assert [greedy.receive().id for _ in range(6)] == list(range(6))
        assert sorted(server.exchange.batches[1:3]) == [[1.0, 50.0], [60.0]]
        assert server.exchange.batches[3:] == [[2.0], [3.0], [4.0], [5.0]]


def test_who_leaves_takes_its_requests_along() -> None:
    with busy() as (server, (robot,)):
        with server.robot() as leaver:
            leaver.send(1, state(2.0))
            server.waiting(1)
        wait_for(lambda: len(server.status()["robots"]) == 1, "it has left")
        server.exchange.open.set()
        robot.receive()
        robot.ask(1, state(3.0))
        assert server.exchange.batches == [[1.0], [3.0]]


def test_health_metrics_and_status_say_what_happened(doubling: Here) -> None:
    with doubling.robot() as robot:
        robot.send(1, state(1.0), report={"steps": 10, "transmitted": 5, "missed": 1, "verified": 4, "accepted": 3})
        reply = robot.reply()
        assert 0.0 <= reply.queue_ms + reply.target_ms <= reply.total_ms
        robot.send(2, state(1.0), deadline_ms=0.0)
        robot.receive()
        wait_for(lambda: doubling.status()["robots"], "it is shown")
        [row] = doubling.status()["robots"]
        assert (row["name"], row["requests"], row["errors"]) == ("tester", 1, 1)
        assert row["report"] == [10, 5, 1, 4, 3] and len(row["total_ms"]) == 1
    assert doubling.outcomes() == {("infer", "ok"): 1, ("infer", "expired"): 1}
    assert (doubling.http("/healthz")[0], doubling.http("/nothing")[0]) == (200, 404)
    for path in ("/?token=x", "/healthz", "/metrics", "/nothing"):
        headers = doubling.http(path)[1]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in headers["Content-Security-Policy"]


@chunk_policy(observation={"state": (2,)}, chunk=1, actions=2, rate_hz=10.0)
def stuck(seen: Any) -> Any:
    """Whoever asks with a state is never answered."""
    threading.Event().wait(PATIENCE if seen["state"].any() else 0.0)
    return np.zeros((len(seen["state"]), 1, 2))


@pytest.mark.parametrize("how", ["at once", "by a second signal"])
def test_a_server_does_not_wait_for_a_target_that_is_stuck(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    module, drain_s = "tests.server.test_robots:stuck", "0" if how == "at once" else "60"
    with Process(load_exchange(module).contract, module, "--drain-s", drain_s) as server, server.robot() as robot:
        robot.raw(requests(server.contract, state(1.0), 2))
        server.waiting(1)
        server.signal(signal.SIGTERM)
        if how != "at once":
            # Until then it drains: it is not ready, and takes no more.
            wait_for(lambda: server.http("/healthz")[0] == 503, "it drains")
            robot.send(2, state(1.0))
            assert robot.receive().code == "shutting_down"
            server.signal(signal.SIGTERM)
        assert [robot.receive().code for _ in range(3)] == ["shutting_down"] * 3
        assert robot.end() == 1012
        assert server.stop() == 0 and "2 requests under way were not answered" in server.output


def test_a_server_that_stops_answers_what_is_under_way_and_says_goodbye(ball: Pair[Any]) -> None:
    with Process(ball.exchange.contract, "ball") as server, server.robot() as robot:
        robot.raw(requests(server.contract, server.contract.observation.zeros(), 4))
        server.signal(signal.SIGTERM)
        answers = [robot.receive()]
        while answers[-1].id is not None:
            answers.append(robot.receive())
        assert [answer.id for answer in answers] == [0, 1, 2, 3, None] and robot.end() == 1012
        assert {answer.code for answer in answers if isinstance(answer, Failure)} == {"shutting_down"}
        assert server.stop() == 0 and "everything under way was answered" in server.output


@pytest.mark.nightly
def test_who_is_gone_without_a_word_is_noticed(doubling: Here) -> None:
    with doubling.side() as side:
        side.sendall(opening() + HELLO)
        wait_for(lambda: doubling.status()["robots"], "it is there")
        wait_for(lambda: not doubling.status()["robots"], "it answers no ping")
