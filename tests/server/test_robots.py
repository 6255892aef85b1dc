"""Robots at the server: the handshake, exact answers, deadlines, order, and what one can do to another."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.children import wait_for
from tests.server.conftest import HERE, PATIENCE, Doubling, Here, Process, busy, state, waiting
from websockets.exceptions import InvalidStatus

from specact import Pair
from specact.errors import WireError
from specact.observation import Window
from specact.server import Limits
from specact.wire.exchange import Request
from specact.wire.messages import Failure, Reply, ask, encode


def windows(ball: Pair[Any], count: int) -> list[Window]:
    rng = np.random.default_rng(0)
    return [
        Window({name: rng.normal(size=field.window_shape).astype(np.float32) for name, field in
                ball.parts.spec.target.fields.items()})
        for _ in range(count)
    ]  # fmt: skip


def test_a_device_with_the_same_bundle_is_welcome_and_told_what_is_served(served: Here, ball: Pair[Any]) -> None:
    with served.connect() as robot:
        welcome = robot.hello()
    assert (welcome.bundle, welcome.family) == ("ball", "codes")
    assert welcome.spec == ball.exchange.contract.spec and welcome.kinds == ball.exchange.contract.describe()
    with served.connect() as robot:
        assert robot.hello(family=None, spec={}) == welcome


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"family": "chunks"}, "mismatch"),
        ({"spec": {}}, "mismatch"),
        ({"protocol": 2}, "unsupported_protocol"),
        ({"robot": "\x1b[2J"}, "bad_message"),
    ],
)
def test_a_device_that_does_not_fit_is_told_why(doubling: Here, changes: dict[str, object], code: str) -> None:
    with doubling.connect() as robot:
        with pytest.raises(WireError) as refused:
            robot.hello(**changes)
        assert refused.value.code == code
        assert robot.closed() == 1008


def test_a_connection_begins_with_a_hello_and_has_one(doubling: Here) -> None:
    with doubling.connect() as robot:
        robot.send(1, state(1.0))
        assert robot.failure().code == "bad_message" and robot.closed() == 1008
    with doubling.robot() as robot:
        with pytest.raises(WireError):
            robot.hello()
        assert robot.closed() == 1008


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specact.server.session.HELLO_TIMEOUT_S", 0.05)
    with Here(Doubling()) as server, server.connect() as robot:
        assert robot.failure().code == "bad_message"
        assert robot.closed() == 1008


def test_a_reply_depends_on_its_request_alone(served: Here, ball: Pair[Any]) -> None:
    seen = windows(ball, 8)
    with served.robot() as robot, served.robot() as other:
        alone = [robot.ask(number, window)["logits"].tobytes() for number, window in enumerate(seen)]
        for number in np.random.default_rng(1).permutation(8).tolist():
            other.ask(99, seen[-number])
            assert robot.ask(number, seen[number])["logits"].tobytes() == alone[number]


def test_a_request_whose_arrays_cannot_be_used_is_refused_by_its_id_and_the_robot_goes_on(doubling: Here) -> None:
    with doubling.robot() as robot:
        for number, value in enumerate((np.nan, np.inf), start=3):
            robot.send(number, state(value))
            failure = robot.failure()
            assert (failure.id, failure.code) == (number, "bad_message") and "state" in failure.message
        robot.connection.send(encode(ask(Request(state(1.0), HERE), doubling.contract, "infer", 9, 1.0)).replace(
            b"\xa5infer", b"\xa5other"))  # fmt: skip
        assert robot.failure().id == 9
        assert robot.ask(5, state(1.0))["x"].tolist() == [2.0, 2.0]


def test_an_answer_that_is_not_finite_is_an_error_of_its_request_alone() -> None:
    with busy(2) as (server, (robot, other)):
        robot.send(1, state(3e38))
        other.send(2, state(1.0))
        waiting(server, 2)
        server.exchange.open.set()
        assert isinstance(robot.receive(), Reply) and robot.failure().id == 1
        assert isinstance(other.receive(), Reply)
        assert server.exchange.batches == [1, 2]


@pytest.mark.parametrize("error", [RuntimeError("secret"), SystemExit("secret"), WireError("bad_message", "secret")])
def test_a_target_that_fails_says_nothing_of_its_inside_and_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with Here(Doubling()) as server, server.robot() as robot:
        server.exchange.fails = error
        robot.send(1, state(1.0))
        failure = robot.failure()
        assert (failure.id, failure.code) == (1, "internal") and "secret" not in failure.message
        server.exchange.fails = None
        robot.ask(2, state(1.0))
    assert "secret" in caplog.text


def test_a_deadline_in_the_past_is_not_computed(doubling: Here) -> None:
    with doubling.robot() as robot:
        robot.send(1, state(1.0), deadline_ms=0.0)
        assert robot.failure().code == "expired" and doubling.exchange.batches == []


def test_a_batch_is_what_came_in_while_the_last_was_computed_one_request_of_each_robot() -> None:
    with busy(2, max_batch=3, max_under_way=10) as (server, (greedy, modest)):
        for number in range(1, 6):
            greedy.send(number, state(number))
        waiting(server, 5)
        modest.send(50, state(5.0))
        waiting(server, 6)
        server.exchange.open.set()
        first = modest.receive()
        assert isinstance(first, Reply) and (first.id, first.batch) == (50, 2)
        assert [greedy.receive().id for _ in range(6)] == list(range(6))
        assert server.exchange.batches == [1, 2, 1, 1, 1, 1]


def test_kinds_of_one_batch_are_computed_apart() -> None:
    with busy(2) as (server, (robot, other)):
        robot.send(1, state(1.0))
        other.send(2, state(2.0), "verify", arrays={"x": np.zeros(2, np.float32)})
        waiting(server, 2)
        server.exchange.open.set()
        assert [robot.receive().id for _ in range(2)] == [0, 1] and other.receive().id == 2
        assert server.exchange.batches == [1, 1, 1]


def test_of_a_robot_with_many_requests_no_more_are_read_and_all_are_answered() -> None:
    with busy(2, max_under_way=2) as (server, (robot, other)):
        for number in range(1, 40):
            robot.send(number, state(number))
        waiting(server, 1)
        other.send(50, state(1.0))
        waiting(server, 2)
        server.exchange.open.set()
        assert other.receive().id == 50
        assert [robot.receive().id for _ in range(40)] == list(range(40))
        assert server.exchange.batches[:2] == [1, 2]


def test_who_leaves_takes_its_requests_along() -> None:
    with busy() as (server, (robot,)):
        with server.robot() as other:
            other.send(1, state(1.0))
            wait_for(lambda: len(server.service.batcher.jobs) == 2, "both are in flight")
        wait_for(lambda: len(server.service.batcher.jobs) == 1, "it is cancelled")
        server.exchange.open.set()
        robot.receive()
        waiting(server, 0)
        assert server.exchange.batches == [1]


@pytest.mark.parametrize("limit", ["max_robots", "max_per_address"])
def test_there_is_room_for_so_many_robots_and_connections_from_one_address(limit: str) -> None:
    limits: dict[str, Any] = {limit: 1}
    with Here(Doubling(), Limits(**limits)) as server:
        with server.robot() as robot, server.connect() as other:
            assert other.failure().code == "overloaded" and other.closed() == 1013
            robot.ask(1, state(1.0))
        wait_for(lambda: not server.service.sessions, "they have left")
        with server.robot() as robot:
            robot.ask(1, state(1.0))


def test_a_websocket_elsewhere_is_refused_and_told_the_protocol(doubling: Here) -> None:
    with pytest.raises(InvalidStatus) as refused, doubling.connect("/v1/stream"):
        pass
    assert refused.value.response.status_code == 426
    assert b"unsupported_protocol" in (refused.value.response.body or b"")


def test_health_metrics_and_status_say_what_happened(doubling: Here) -> None:
    with doubling.robot() as robot:
        robot.send(1, state(1.0))
        reply = robot.receive()
        assert isinstance(reply, Reply) and 0.0 <= reply.queue_ms + reply.target_ms <= reply.total_ms
        robot.send(2, state(1.0), deadline_ms=0.0)
        robot.failure()
        wait_for(lambda: doubling.status()["robots"], "it is shown")
        [row] = doubling.status()["robots"]
        assert (row["name"], row["requests"], row["errors"]) == ("tester", 1, 1)
    assert doubling.counts("specact_requests_total") == {("infer", "ok"): 1, ("infer", "expired"): 1}
    assert doubling.http("/healthz")[0] == 200
    status, headers, body = doubling.http("/?token=x")
    assert (status == 200 and b"</html>" in body[-20:]) or b"<script" in body
    assert headers["X-Content-Type-Options"] == "nosniff" and "default-src 'none'" in headers["Content-Security-Policy"]
    assert doubling.http("/nothing")[0] == 404
    doubling.call(lambda: setattr(doubling.service.batcher, "ready", False))
    wait_for(lambda: doubling.http("/healthz")[0] == 503, "it is not ready any more")
    doubling.service.batcher.ready = True


def test_what_a_robot_reports_is_on_the_page(doubling: Here) -> None:
    report = {"steps": 10, "transmitted": 5, "missed": 1, "verified": 4, "accepted": 3}
    with doubling.robot() as robot:
        robot.ask(1, state(1.0), report=report)
        [row] = doubling.status()["robots"]
    assert (row["sent"], row["accepted"], row["missed"]) == (0.5, 0.75, 1)


def test_a_server_that_stops_answers_what_is_under_way_and_says_goodbye(ball: Pair[Any]) -> None:
    with Process(ball.exchange.contract, "ball") as server, server.robot() as robot:
        for number in range(4):
            robot.send(number, ball.parts.spec.target.zeros())
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        answers: list[Reply | Failure] = []
        while not (answers and isinstance(answers[-1], Failure) and answers[-1].id is None):
            answers.append(robot.receive())
        assert [answer.id for answer in answers if answer.id is not None] == list(range(4))
        assert {answer.code for answer in answers if isinstance(answer, Failure)} == {"shutting_down"}
        assert robot.closed() == 1012
        stopping.join(PATIENCE)
        assert server.stop() == 0
        assert "everything under way was answered" in server.output


def test_a_server_does_not_wait_for_a_target_that_is_stuck() -> None:
    with busy() as (server, (robot,)):
        robot.send(1, state(1.0))
        wait_for(lambda: len(server.service.batcher.jobs) == 2, "it is stuck")
        server.call(server.service.abandon)
        assert [robot.failure().code for _ in range(2)] == ["shutting_down"] * 2
        assert server.service.abandoned == 2
