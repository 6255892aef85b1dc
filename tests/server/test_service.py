"""The parts of the server in this process, where a test can hold the clock, the target and the connection."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import hmac
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.server.requests import infer, infer_request

from specact import Bundle
from specact.errors import BundleError, ConfigError, WireError
from specact.families.codes.values import CodeDistribution
from specact.observation import Window
from specact.server import http as server_http
from specact.server import stream as server_stream
from specact.server.access import Access
from specact.server.app import create_app
from specact.server.batcher import Batcher, Job, Outcome
from specact.server.serve import serve
from specact.server.service import Sender, Service
from specact.server.settings import ServerSettings, is_loopback
from specact.server.stream import Requests
from specact.server.turns import Lane
from specact.wire import msgpack
from specact.wire.checks import ErrorCode
from specact.wire.messages import Request

if TYPE_CHECKING:
    from tests.server.conftest import Fields

TOKEN = "correct horse battery staple"
Message = MutableMapping[str, Any]


# Access.


def test_it_is_the_comparison_in_constant_time_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    verdicts = iter([True, False, True])

    def compare(shown: bytes, expected: bytes) -> bool:
        compared.append((shown, expected))
        return next(verdicts)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    access = Access(TOKEN)
    shown = [f"Bearer {TOKEN}x", f"Bearer {TOKEN}", ""]
    assert [access.caller({"authorization": text}) is not None for text in shown] == [True, False, True]
    # Nothing else looked at it before: not its length, not its scheme.
    assert compared == [(text.encode(), f"Bearer {TOKEN}".encode()) for text in shown]


# Settings.


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        *(({"host": host}, "a token is needed") for host in ("0.0.0.0", "::", "192.0.2.1", "robots.example", "", "1")),
        ({"token": "x" * 15}, "at least 16"),
        ({"token": "x" * 16 + "\n" + "y" * 16}, "one line"),
        ({"token": "\N{LOCK}" * 16}, "ASCII"),
        ({"certificate": Path("cert.pem")}, "both"),
        ({"key": Path("key.pem")}, "both"),
        ({"certificate": Path("none"), "key": Path("none")}, "there is no file"),
        *(({"port": port}, "port") for port in (-1, 65536)),
        *(
            ({name: 0}, f"{name} must be at least 1")
            for name in ("max_batch", "max_queue", "max_under_way", "max_robots", "max_pending", "max_per_address")
        ),
        ({"log_steps": True}, "needs an access_log"),
        *(({"max_wait_ms": value}, "max_wait_ms") for value in (-1.0, float("nan"), float("inf"), 1e9)),
        *(({"drain_s": value}, "drain_s") for value in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ServerSettings(**settings)


def test_a_token_opens_the_server_to_others_and_is_not_shown() -> None:
    settings = ServerSettings(host="0.0.0.0", token=TOKEN)
    assert TOKEN not in repr(settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_what_only_this_machine_reaches(host: str) -> None:
    assert is_loopback(host)
    ServerSettings(host=host)


# The batcher.


class Target:
    """Stands in for a policy: counts, and answers when it is let.

    Attributes:
        batches: the size of each inference that somebody asked for.
        broken: what to raise instead of an answer.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._policy = bundle.target
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: BaseException | None = None

    def infer(self, window: Window) -> CodeDistribution:
        return self._policy.infer(window)

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        if not windows[0]["state"].any():
            # The batcher warms it up.
            return self._policy.infer_batch(windows)
        assert self.gate.wait(30.0)
        self.batches.append(len(windows))
        if self.broken is not None:
            raise self.broken
        return self._policy.infer_batch(windows)


@pytest.fixture
def target(ball: Bundle) -> Target:
    return Target(ball)


@pytest.fixture(params=[0.0, 100.0], ids=["thread", "inline"])
def service(request: pytest.FixtureRequest, ball: Bundle, target: Target) -> Iterator[Service]:
    """With room for two in a batch and four in the queue; the target in a thread of its own, or on the event loop."""
    bundle = dataclasses.replace(ball, local_target=cast(Any, target))
    settings = ServerSettings(max_batch=2, max_queue=4, max_under_way=8, inline_below_ms=request.param)
    made = Service(bundle.responder, settings)
    yield made
    target.gate.set()
    made.batcher.stop()


def ask(batcher: Batcher, lane: Lane[Job], request: Request, arrived: float) -> tuple[Job, asyncio.Future[Outcome]]:
    """Submits a request; the future has its outcome."""
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    return batcher.submit(lane, request, arrived, future.set_result), future


def outcomes(batcher: Batcher, jobs: Sequence[tuple[Request, float]], then: Callable[[], None]) -> list[str]:
    """What becomes of requests that arrived so long ago [s], once ``then`` was called: ``ok`` or the error's code."""

    async def submit() -> list[Outcome]:
        futures = [ask(batcher, batcher.lane(), request, time.monotonic() - ago)[1] for request, ago in jobs]
        then()
        return await asyncio.wait_for(asyncio.gather(*futures), 30.0)

    return [result.code if isinstance(result, WireError) else "ok" for result in asyncio.run(submit())]


def test_what_has_expired_is_not_computed(service: Service, target: Target, windows: list[Window]) -> None:
    service.batcher.start()
    target.gate.clear()
    request = infer_request(windows[0], 1, 20_000.0)
    jobs = [(request, 0.0), (request, 20.1), (request, 20.1), (request, 20.1)]
    assert outcomes(service.batcher, jobs, target.gate.set) == ["ok", "expired", "expired", "expired"]
    assert target.batches == [1]


def test_a_batch_is_what_came_in_while_the_last_was_computed(
    service: Service, target: Target, windows: list[Window]
) -> None:
    target.gate.clear()
    service.batcher.start()
    jobs = [(infer_request(windows[number], number, 60_000.0), 0.0) for number in range(4)]
    assert outcomes(service.batcher, jobs, target.gate.set) == ["ok"] * 4
    assert sum(target.batches) == 4 and max(target.batches) == 2


def test_what_nobody_waits_for_is_not_computed(service: Service, target: Target, windows: list[Window]) -> None:
    request = infer_request(windows[0], 1, 60_000.0)

    async def submit() -> None:
        lane = service.batcher.lane()
        asked = [ask(service.batcher, lane, request, time.monotonic()) for _ in range(4)]
        for job, _ in asked[:3]:
            job.wanted = False
        service.batcher.start()
        await asyncio.wait_for(asked[3][1], 30.0)
        assert not any(future.done() for _, future in asked[:3])

    asyncio.run(submit())
    assert target.batches == [1]


def _note(answered: list[str], name: str, _: object) -> None:
    answered.append(name)


def test_who_was_served_last_waits_for_the_others(service: Service, windows: list[Window]) -> None:
    request, batcher, answered = infer_request(windows[0], 1, 60_000.0), service.batcher, list[str]()

    async def submit() -> None:
        futures = []
        lanes = {"greedy": batcher.lane(), "modest": batcher.lane()}
        for name in ("greedy", "greedy", "greedy", "modest"):
            futures.append(ask(batcher, lanes[name], request, time.monotonic())[1])
            futures[-1].add_done_callback(partial(_note, answered, name))
        batcher.start()
        await asyncio.wait_for(asyncio.gather(*futures), 30.0)

    asyncio.run(submit())
    assert answered == ["greedy", "modest", "greedy", "greedy"]


def test_a_robot_with_less_in_a_full_queue_displaces_what_came_last_of_another(
    service: Service, windows: list[Window]
) -> None:
    request = infer_request(windows[0], 1, 60_000.0)

    async def submit() -> list[Outcome]:
        batcher = service.batcher
        greedy, modest = batcher.lane(), batcher.lane()
        futures = [ask(batcher, lane, request, time.monotonic())[1] for lane in (greedy,) * 4 + (modest,)]
        batcher.start()
        return await asyncio.wait_for(asyncio.gather(*futures), 30.0)

    results = asyncio.run(submit())
    assert [getattr(result, "code", "ok") for result in results] == ["ok", "ok", "ok", "overloaded", "ok"]


def test_a_full_queue_and_a_closed_worker_refuse(service: Service, windows: list[Window]) -> None:
    request = infer_request(windows[0], 1, 60_000.0)

    async def submit() -> None:
        batcher = service.batcher
        for _ in range(4):
            ask(batcher, batcher.lane(), request, 0.0)
        with pytest.raises(WireError, match="4 requests are waiting") as refused:
            ask(batcher, batcher.lane(), request, 0.0)
        assert refused.value.code == "overloaded"
        batcher.stop()
        with pytest.raises(WireError) as refused:
            ask(batcher, batcher.lane(), request, 0.0)
        assert refused.value.code == "shutting_down"

    asyncio.run(submit())


def test_a_worker_that_stops_answers_what_is_queued_and_waits_for_no_more(ball: Bundle, windows: list[Window]) -> None:
    batcher = Batcher(ball.responder, ServerSettings(max_wait_ms=20_000.0))
    batcher.start()
    started = time.monotonic()
    jobs = [(infer_request(windows[number], number, 60_000.0), 0.0) for number in range(3)]
    assert outcomes(batcher, jobs, batcher.stop) == ["ok"] * 3
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(
    "error", [RuntimeError("secret inside"), MemoryError(), ValueError("secret inside"), SystemExit("secret inside")]
)
def test_a_target_that_fails_says_nothing_of_its_inside_and_goes_on(
    error: BaseException, service: Service, target: Target, windows: list[Window], caplog: pytest.LogCaptureFixture
) -> None:
    fields = infer(windows[0], 1, 60_000.0)
    service.batcher.start()

    async def asked() -> Fields:
        replied: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
        service.answer(fields, time.monotonic(), Sender(service.batcher.lane()), replied.set_result)
        return await asyncio.wait_for(replied, 30.0)

    target.broken = error
    with caplog.at_level(logging.CRITICAL, "specact.server"):
        reply = asyncio.run(asked())
    assert (reply["type"], reply["id"], reply["code"]) == ("error", 1, "internal")
    assert "secret" not in str(reply)
    target.broken = None
    assert asyncio.run(asked())["type"] == "distribution"


def test_a_target_that_cannot_answer_is_not_served(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(requests: object) -> None:
        raise BundleError("the policy cannot answer")

    monkeypatch.setattr(service.batcher._responder, "respond", fail)
    with pytest.raises(BundleError, match="cannot answer"):
        serve(service, lambda url: pytest.fail("it must not listen"))


def test_an_error_that_nobody_foresaw_is_an_error_reply(
    service: Service, windows: list[Window], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("secret inside")

    monkeypatch.setattr(service.batcher, "submit", fail)
    fields, replies = infer(windows[0], 1, 60_000.0), list[Any]()
    with caplog.at_level(logging.CRITICAL, "specact.server"):
        service.answer(fields, time.monotonic(), Sender(service.batcher.lane()), replies.append)
    [reply] = replies
    assert (reply["id"], reply["code"]) == (1, "internal")
    assert "secret" not in str(reply)


# The application, without a socket.


class Peer:
    """The other end of one ASGI call.

    Args:
        says: what it sends; then it is silent.

    Attributes:
        heard: what the application sent.
    """

    def __init__(self, *says: Message) -> None:
        self._says = list(says)
        self.heard: list[Message] = []

    async def receive(self) -> Message:
        if not self._says:
            await asyncio.Event().wait()
        return self._says.pop(0)

    async def send(self, message: Message) -> None:
        self.heard.append(message)

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.heard]

    @property
    def fields(self) -> list[Fields]:
        """The messages it was sent."""
        return [msgpack.decode(message["bytes"]) for message in self.heard if message["type"] == "websocket.send"]


def scope(kind: str, method: str, path: str) -> Message:
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    denial = {"extensions": {"websocket.http.response": {}}, "subprotocols": []} if kind == "websocket" else {}
    return {"type": kind, "state": {}, "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": kind, "headers": headers, "http_version": "1.1",
            **denial}  # fmt: skip


def call(service: Service, scope: Message, peer: Peer) -> Awaitable[None]:
    return asyncio.wait_for(create_app(service)(scope, peer.receive, peer.send), 30.0)


def get(service: Service, path: str) -> tuple[int, Fields]:
    peer = Peer({"type": "http.request", "body": b"", "more_body": False})
    asyncio.run(call(service, scope("http", "GET", path), peer))  # type: ignore[arg-type]
    return peer.heard[0]["status"], json.loads(peer.heard[1]["body"])


def test_healthz_says_503_until_the_target_is_warm_and_after_it_stopped(service: Service) -> None:
    assert get(service, "/healthz") == (503, {"ready": False, "bundle": "ball"})
    service.batcher.start()
    assert get(service, "/healthz") == (200, {"ready": True, "bundle": "ball"})
    service.draining = True
    assert get(service, "/healthz") == (503, {"ready": False, "bundle": "ball"})


def test_a_body_that_does_not_come_is_not_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_http, "_BODY_TIMEOUT_S", 0.01)
    peer = Peer({"type": "http.request", "body": b"{", "more_body": True})
    asyncio.run(call(service, scope("http", "POST", "/v1/infer"), peer))  # type: ignore[arg-type]
    assert peer.heard[0]["status"] == 400
    assert (b"connection", b"close") in peer.heard[0]["headers"]
    assert "did not arrive within" in json.loads(peer.heard[1]["body"])["message"]


def test_a_hello_that_does_not_come_is_not_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stream, "_HELLO_TIMEOUT_S", 0.01)
    peer = Peer({"type": "websocket.connect"})
    asyncio.run(call(service, scope("websocket", "GET", "/v1/stream"), peer))  # type: ignore[arg-type]
    assert peer.kinds == ["websocket.accept", "websocket.send", "websocket.close"]
    assert "no hello came within" in peer.fields[0]["message"]
    assert peer.heard[-1]["code"] == 1008


def test_there_is_room_for_so_many_robots(ball: Bundle, hello: Fields) -> None:
    service = Service(ball.responder, ServerSettings(max_robots=2))
    says = {"type": "websocket.connect"}, {"type": "websocket.receive", "bytes": msgpack.encode(hello)}
    app, address = create_app(service), scope("websocket", "GET", "/v1/stream")

    async def crowd() -> list[Peer]:
        # Five are let in before any of them has said hello, and one comes when it is full.
        peers = [Peer(*says) for _ in range(6)]
        calls = [asyncio.create_task(app(address, peer.receive, peer.send)) for peer in peers[:5]]
        while sum(bool(peer.fields) for peer in peers[:5]) < 5:
            await asyncio.sleep(0)
        await asyncio.wait_for(app(address, peers[5].receive, peers[5].send), 30.0)
        assert len(service.telemetry.robots) == 2
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return peers

    peers = asyncio.run(crowd())
    first = [peer.fields[0] for peer in peers[:5]]
    assert sorted(fields.get("code", "welcome") for fields in first) == ["overloaded"] * 3 + ["welcome"] * 2
    denial = peers[5].heard[0]
    assert (denial["type"], denial["status"]) == ("websocket.http.response.start", 503)
    assert json.loads(peers[5].heard[1]["body"])["code"] == ErrorCode.OVERLOADED
    assert not service.telemetry.robots


def test_a_device_that_leaves_takes_its_requests_along(service: Service, target: Target, windows: list[Window]) -> None:
    service.batcher.start()
    target.gate.clear()
    payload = msgpack.encode(infer(windows[0], 1, 60_000.0))
    sent: list[bytes] = []

    async def visit() -> None:
        requests = Requests(service, Sender(service.batcher.lane()), sent.append, lambda: None)
        for _ in range(3):
            requests.take(payload)
        requests.end()
        target.gate.set()
        service.batcher.stop()
        # What the target's thread has handed over by then.
        await asyncio.sleep(0)

    asyncio.run(visit())
    assert not sent
    # The first batch had begun, with one or two of the three.
    assert sum(target.batches) < 3
    asyncio.run(service.drain())
    assert service.abandoned == 0


def test_requests_leave_nothing_to_the_garbage_collector(service: Service, windows: list[Window]) -> None:
    """What it has to look for makes every robot wait."""
    service.batcher.start()
    payload, sent = msgpack.encode(infer(windows[0], 1, 60_000.0)), list[bytes]()

    async def ask(count: int) -> None:
        wanted, done = len(sent) + count, asyncio.Event()
        requests = Requests(
            service, Sender(service.batcher.lane()), sent.append, lambda: done.set() if len(sent) == wanted else None
        )
        for _ in range(count):
            requests.take(payload)
        await asyncio.wait_for(done.wait(), 30.0)

    async def count_garbage() -> int:
        await ask(4)
        gc.collect()
        gc.disable()
        try:
            for _ in range(25):
                await ask(4)
            return gc.collect()
        finally:
            gc.enable()

    # 100 requests; the waiting of this test itself leaves some.
    assert asyncio.run(count_garbage()) < 100


def test_a_reply_that_cannot_be_encoded_is_an_error_of_its_request_alone(
    service: Service, windows: list[Window], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = service.batcher._responder.respond
    broken = {"probs": "no array", "offsets": object()}

    def respond(requests: Sequence[Request]) -> list[Any]:
        return [broken if request.id == 1 else answer for request, answer in zip(requests, real(requests), strict=True)]

    service.batcher.start()
    monkeypatch.setattr(service.batcher._responder, "respond", respond)
    sent: list[bytes] = []

    async def both() -> None:
        done = asyncio.Event()
        requests = Requests(
            service, Sender(service.batcher.lane()), sent.append, lambda: done.set() if len(sent) == 2 else None
        )
        for number in (1, 2):
            requests.take(msgpack.encode(infer(windows[0], number, 60_000.0)))
        await asyncio.wait_for(done.wait(), 30.0)

    with caplog.at_level(logging.CRITICAL, "specact.server"):
        asyncio.run(both())
    replies = [msgpack.decode(payload) for payload in sent]
    assert [(reply["type"], reply["id"]) for reply in replies] == [("error", 1), ("distribution", 2)]
    assert replies[0]["code"] == "internal"


# Stopping.


def test_a_server_that_gives_up_knows_how_many_it_left_unanswered(ball: Bundle) -> None:
    async def stop() -> int:
        service = Service(ball.responder, ServerSettings(drain_s=0.05))
        # The batcher has not been started, so that nothing is ever answered.
        sender, now, window = Sender(service.batcher.lane()), time.monotonic(), ball.observation.zeros()
        for k in range(3):
            service.answer(infer(window, k), now, sender, lambda reply: None)
        await service.drain()
        return service.abandoned

    assert asyncio.run(stop()) == 3
