"""A real server process, asked over real sockets."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.server.requests import LONG_MS, as_fields, drafted, infer, infer_request, seeing
from websockets.exceptions import InvalidStatus

from specact import Bundle
from specact.families.codes.sampling import verify
from specact.families.codes.values import CodeDistribution, Verdict
from specact.observation import Window
from specact.rng import Role, stream
from specact.wire import json as wire_json
from specact.wire.messages import Reply, Request, read_reply
from specact.wire.sizes import max_message_bytes

if TYPE_CHECKING:
    from tests.server.conftest import Fields, Response, Server, Start, Stream

TOKEN = "correct horse battery staple"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}


def local_verdict(
    bundle: Bundle, request: Request, role: Role = Role.VERIFY, step: int | None = None
) -> tuple[Verdict, NDArray[np.float32]]:
    """What the device would have made of it, had it the target."""
    seed, robot, episode, own_step = request.address
    target = bundle.target.infer(request.window)
    draft = CodeDistribution(request.arrays["draft_probs"], target.offsets, None)
    rng = stream(seed, role, robot=robot, episode=episode, step=own_step if step is None else step)
    verdict = verify(target, draft, request.arrays["codes"], rng)
    return verdict, bundle.tokenizer.decode(verdict.codes, target.offsets)


def assert_same(first: Any, second: Any) -> None:
    assert (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())


def no_traceback(server: Server) -> bool:
    return "Traceback" not in server.log and "Error" not in server.log


# The handshake.


def test_a_device_with_the_same_bundle_is_welcome(server: Server, hello: Fields, ball: Bundle) -> None:
    expected = {"bundle": "ball", "target": ball.manifest.fingerprints["target"],
                "max_message_bytes": max_message_bytes(ball.codec.dialect)}  # fmt: skip
    with server.connect() as robot:
        welcome = robot.ask(hello)
    assert welcome["type"] == "welcome"
    assert welcome.items() >= expected.items()
    posted = server.http("POST", "/v1/hello", hello)
    assert (posted.status, posted.fields) == (200, welcome)


MISFITS: list[tuple[str, Callable[[Fields], Any], str, int, str]] = [
    (
        "tokenizer",
        lambda hello: hello["spec"].update(tokenizer="0" * 16),
        "mismatch",
        409,
        "tokenizer '0000000000000000' / '",
    ),
    ("temperature", lambda hello: hello["spec"].update(temperature=0.5), "mismatch", 409, "temperature 0.5 / 1.0"),
    ("sequential", lambda hello: hello["spec"].update(sequential=True), "mismatch", 409, "sequential True / False"),
    *[
        (name, lambda hello, name=name: hello["spec"].update({name: 99}), "mismatch", 409, f"{name} 99 / ")
        for name in ("observation", "codebooks", "codes", "chunk", "actions")
    ],
    (
        "a longer history",
        lambda hello: hello["spec"]["observation"]["fields"]["state"].update(history=2),
        "mismatch",
        409,
        "differ in observation.fields.state.history 2 / 1;",
    ),
    (
        "no goal",
        lambda hello: hello["spec"]["observation"]["fields"].pop("goal"),
        "mismatch",
        409,
        "differ in observation.fields.goal None / {",
    ),
    ("family", lambda hello: hello.update(family="chunks"), "mismatch", 409, "family 'chunks', the server codes"),
    ("protocol", lambda hello: hello.update(v=1), "unsupported_protocol", 400, "protocol 2, but the message says 1"),
    ("no spec", lambda hello: hello.pop("spec"), "bad_message", 400, "spec"),
    ("a request", lambda hello: hello.update(type="infer"), "bad_message", 400, "type hello"),
]


@pytest.mark.parametrize(
    ("change", "code", "status", "word"), [row[1:] for row in MISFITS], ids=[r[0] for r in MISFITS]
)
def test_a_device_that_does_not_fit_is_told_why(
    change: Callable[[Fields], Any], code: str, status: int, word: str, server: Server, hello: Fields
) -> None:
    misfit = json.loads(json.dumps(hello))
    change(misfit)
    with server.connect() as robot:
        refusal = robot.ask(misfit)
        assert (refusal["type"], refusal["code"]) == ("error", code)
        assert word in refusal["message"]
        assert robot.closed() == 1008
    posted = server.http("POST", "/v1/hello", misfit)
    assert (posted.status, posted.fields["code"]) == (status, code)
    assert word in posted.fields["message"]


def test_a_connection_starts_with_a_hello_and_has_one(server: Server, hello: Fields, windows: list[Window]) -> None:
    with server.connect() as robot:
        assert robot.ask(infer(windows[0]))["code"] == "bad_message"
        assert robot.closed() == 1008
    with server.stream(hello) as robot:
        assert robot.ask(hello)["code"] == "bad_message"
        odd = robot.ask({"v": 2, "type": np.zeros(3), "id": 4})
        assert (odd["id"], odd["code"]) == (4, "bad_message")
        assert robot.ask(infer(windows[0]))["type"] == "distribution"


# Parity.


def over_http(server: Server, request: Request) -> Fields:
    body = wire_json.encode(as_fields(request))
    response = server.http("POST", f"/v1/{request.kind}", body, **{"Content-Type": "application/json"})
    assert response.status == 200
    return wire_json.decode(response.body)


def test_infer_gives_the_local_target_bit_for_bit(
    server: Server, hello: Fields, ball: Bundle, windows: list[Window]
) -> None:
    with server.stream(hello) as robot:
        for identity, window in enumerate(windows):
            request, local = infer_request(window, identity), ball.target.infer(window)
            for answer in (robot.ask(as_fields(request)), over_http(server, request)):
                reply = read_reply(answer, ball.codec.dialect.exchanges["infer"])
                assert isinstance(reply, Reply)
                assert (reply.id, reply.times.batch) == (identity, 1)
                assert_same(reply.arrays["probs"], local.probs)
                assert_same(reply.arrays["offsets"], local.offsets)
                assert 0.0 < reply.times.target_ms <= reply.times.total_ms - reply.times.queue_ms + 1e-6


def test_verify_gives_what_the_device_would_have_drawn_bit_for_bit(
    server: Server, hello: Fields, ball: Bundle, windows: list[Window]
) -> None:
    others: dict[str, int] = {"another step": 0, "another role": 0}
    with server.stream(hello) as robot:
        for step, window in enumerate(windows):
            request = drafted(ball, window, step)
            verdict, chunk = local_verdict(ball, request)
            for answer in (robot.ask(as_fields(request)), over_http(server, request)):
                reply = read_reply(answer, ball.codec.dialect.exchanges["verify"])
                assert isinstance(reply, Reply)
                assert_same(reply.arrays["codes"], verdict.codes)
                assert_same(reply.arrays["accepted"], verdict.accepted)
                assert_same(reply.arrays["rejection"], verdict.rejection)
                assert_same(reply.arrays["chunk"], chunk)
            for name, wrong in (
                ("another step", local_verdict(ball, request, step=step + 1)),
                ("another role", local_verdict(ball, request, role=Role.DRAFT)),
            ):
                others[name] += not np.array_equal(wrong[0].codes, verdict.codes)
    # The wrong variants: with other random numbers some of the codes would be others.
    assert min(others.values()) > 0


def test_replies_do_not_depend_on_who_asked_before(server: Server, hello: Fields, windows: list[Window]) -> None:
    def target(robot: Stream, number: int) -> bytes:
        return bytes(robot.ask(infer(windows[number]))["probs"].tobytes())

    with server.stream(hello) as one, server.stream(hello) as other:
        interleaved = [(target(one, number), target(other, 20 + number)) for number in range(10)]
    with server.stream(hello) as alone:
        assert [target(alone, number) for number in range(10)] == [pair[0] for pair in interleaved]
        assert [target(alone, 20 + number) for number in range(10)] == [pair[1] for pair in interleaved]


# Health, metrics, status.


def test_healthz_and_the_open_addresses(server: Server) -> None:
    assert server.http("GET", "/healthz").fields == {"ready": True, "bundle": "ball"}
    assert server.http("GET", "/").status == 200


def test_metrics_count_what_was_sent(server: Server, hello: Fields, ball: Bundle, windows: list[Window]) -> None:
    name = "specact_requests_total"
    server.until(lambda: server.counts("specact_robots")[()] == 0, "the robots of other tests are gone")
    before, inferred = server.counts(name), server.counts("specact_target_milliseconds_count")[()]
    with server.stream(hello) as robot:
        for window in windows[:5]:
            robot.ask(infer(window))
        for window in windows[:3]:
            robot.ask(as_fields(drafted(ball, window, 1)))
        robot.ask(infer(windows[0], deadline_ms=0.0))
        robot.ask(b"\xc1")
        robot.ask(seeing(infer(windows[0]), state=np.zeros(3)))
        assert server.counts("specact_robots")[()] == 1
        [status] = server.http("GET", "/v1/status").fields["robots"]
        assert (status["name"], status["requests"], status["errors"]) == ("tester", 8, 3)
    server.http("POST", "/v1/infer", seeing(infer(windows[0]), state=[[0.0] * 8], goal=[0.0, 0.0]))
    server.http("POST", "/v1/verify", {"type": "verify", "v": 1})
    server.http("POST", "/v1/hello", {"type": "hello", "v": 1})
    after = server.counts(name)
    more = {labels: count - before.get(labels, 0) for labels, count in after.items()}
    assert {labels: count for labels, count in more.items() if count} == {
        ("infer", "ok"): 6, ("verify", "ok"): 3, ("infer", "expired"): 1, ("other", "bad_message"): 1,
        ("infer", "bad_message"): 1, ("verify", "unsupported_protocol"): 1, ("hello", "unsupported_protocol"): 1,
    }  # fmt: skip
    assert server.counts("specact_target_milliseconds_count")[()] - inferred == 9
    server.until(lambda: server.counts("specact_robots")[()] == 0, "the robot is gone")


# Deadlines and load.


def test_a_deadline_of_0_is_expired_without_computing(server: Server, hello: Fields, windows: list[Window]) -> None:
    inferred = server.counts("specact_batch_size_count")
    with server.stream(hello) as robot:
        for _ in range(20):
            reply = robot.ask(infer(windows[0], identity=5, deadline_ms=0.0))
            assert (reply["type"], reply["code"], reply["id"]) == ("error", "expired", 5)
    posted = server.http("POST", "/v1/infer", json_infer(windows[0], deadline_ms=0))
    assert (posted.status, posted.fields["code"]) == (504, "expired")
    assert server.counts("specact_batch_size_count") == inferred


def json_infer(window: Window, **changed: Any) -> Fields:
    return dict(json.loads(wire_json.encode(infer(window)))) | changed


def test_a_queue_that_is_full_says_so_at_once(launch: Start, hello: Fields, windows: list[Window]) -> None:
    slow = launch("--max-queue", "4", "--max-under-way", "32", "--max-batch", "64", "--max-wait-ms", "3000")
    with slow.stream(hello) as robot:
        # Two of the four that fit have less time than they wait.
        for identity in range(10):
            robot.send(infer(windows[0], identity, deadline_ms=LONG_MS if identity % 2 else 100.0))
        refused = [robot.receive() for _ in range(6)]
        assert {(reply["id"], reply["code"]) for reply in refused} == {
            (number, "overloaded") for number in range(4, 10)
        }
        answered = {reply["id"]: reply for reply in (robot.receive() for _ in range(4))}
    assert {identity: reply.get("code") for identity, reply in answered.items()} == {
        0: "expired", 1: None, 2: "expired", 3: None
    }  # fmt: skip
    assert answered[1]["times"]["batch"] == 2
    assert answered[1]["times"]["queue_ms"] >= 500.0
    assert slow.counts("specact_batch_size_sum") == {(): 4.0}


def test_a_connection_has_so_many_requests_under_way_and_the_rest_wait(
    launch: Start, hello: Fields, windows: list[Window]
) -> None:
    slow = launch("--max-batch", "64", "--max-wait-ms", "300")
    with slow.stream(hello) as robot:
        for identity in range(50):
            robot.send(infer(windows[0], identity))
        most = 0

        def queued() -> int:
            nonlocal most
            most = max(most, int(slow.http("GET", "/v1/status").fields["queued"]))
            return most

        slow.until(lambda: queued() == 4, "4 are queued")
        replies = [robot.receive() for _ in range(50)]
    assert {reply["id"] for reply in replies} == set(range(50))
    assert all(reply["type"] == "distribution" for reply in replies)
    assert most == 4


def test_who_hangs_up_over_http_uses_no_turn(launch: Start, windows: list[Window]) -> None:
    """A batch is begun when four are queued, and has the three that somebody waits for."""
    server = launch("--max-batch", "4", "--max-wait-ms", "60000")
    body = wire_json.encode(infer(windows[0], deadline_ms=60_000.0))
    with server.raw() as leaving:
        leaving.sendall(head("/v1/infer", len(body)) + body)
        server.until(lambda: server.http("GET", "/v1/status").fields["queued"] == 1, "its request is queued")
        leaving.shutdown(socket.SHUT_WR)
        assert everything(leaving) == b""
    # Answered after the server has seen the end of that connection.
    assert server.http("GET", "/healthz").status == 200
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(server.http, "POST", "/v1/infer", json_infer(windows[0], deadline_ms=6e4)) for _ in "abc"]
        assert [answer.result().fields["times"]["batch"] for answer in asked] == [3, 3, 3]
    assert server.counts("specact_requests_total") == {("infer", "ok"): 3.0}
    assert no_traceback(server)


def test_a_robot_is_in_the_first_batch_whatever_its_neighbours_have_sent(
    launch: Start, hello: Fields, windows: list[Window]
) -> None:
    """A batch has room for four of each neighbour and one more, and is not begun before it is full."""
    server = launch("--max-batch", "33", "--max-wait-ms", "60000")
    with ExitStack() as stack:
        neighbours = [stack.enter_context(server.stream(hello)) for _ in range(8)]
        robot = stack.enter_context(server.stream(hello))
        for identity in range(32):
            for neighbour in neighbours:
                neighbour.send(infer(windows[0], identity, deadline_ms=60_000.0))
        server.until(lambda: server.http("GET", "/v1/status").fields["queued"] == 32, "four of each are queued")
        # Until the neighbours have no more: a connection whose requests are under way is not read, nor is its close.
        for batch in range(8):
            reply = robot.ask(infer(windows[0], batch, deadline_ms=60_000.0))
            assert (reply["type"], reply["times"]["batch"]) == ("distribution", 33)
            for neighbour in neighbours:
                assert [neighbour.receive()["id"] for _ in range(4)] == [4 * batch + number for number in range(4)]


def test_one_request_s_fault_is_no_other_s_in_its_batch(
    launch: Start, hello: Fields, ball: Bundle, windows: list[Window]
) -> None:
    slow = launch("--max-batch", "2", "--max-wait-ms", "20000")
    good = drafted(ball, windows[0], 1)
    huge = Window({"state": np.full((1, 8), np.finfo(np.float32).max), "goal": np.full(2, np.finfo(np.float32).max)})
    with slow.stream(hello) as robot:
        robot.send(as_fields(good))
        robot.send(infer(huge, identity=2))
        replies = {reply["id"]: reply for reply in (robot.receive() for _ in range(2))}
    assert replies[1]["times"]["batch"] == 2
    assert replies[1]["codes"].tolist() == local_verdict(ball, good)[0].codes.tolist()
    assert replies[2]["code"] == "bad_message"
    assert "no finite answer" in replies[2]["message"]
    assert slow.log.count("\n") == 1


# Authentication.


@pytest.fixture(scope="module")
def guarded(launch: Start) -> Server:
    return launch(token=TOKEN)


WRONG = {
    "none": {},
    "empty": {"Authorization": ""},
    "without Bearer": {"Authorization": TOKEN},
    "another scheme": {"Authorization": f"Basic {TOKEN}"},
    "first half": {"Authorization": f"Bearer {TOKEN[:-1]}"},
    "longer": {"Authorization": f"Bearer {TOKEN}x"},
    "another": {"Authorization": "Bearer " + "x" * len(TOKEN)},
    "in another header": {"X-Token": TOKEN},
    "not ASCII": {"Authorization": "Bearer \xe9\xff"},
    "foreign origin": {**RIGHT, "Origin": "http://example.org"},
    "no origin": {**RIGHT, "Origin": "null"},
    "broken origin": {**RIGHT, "Origin": "http://["},
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG.keys())
def test_who_does_not_show_the_token_learns_nothing(
    headers: dict[str, str], guarded: Server, hello: Fields, windows: list[Window]
) -> None:
    answers: list[Response] = [
        guarded.http("GET", "/metrics", **headers),
        guarded.http("GET", "/v1/status", **headers),
        guarded.http("POST", "/v1/hello", hello, **headers),
        guarded.http("POST", "/v1/infer", json_infer(windows[0]), **headers),
        guarded.http("POST", "/v1/verify", b"no matter what", **headers),
    ]
    for answer in answers:
        assert (answer.status, answer.fields["code"]) == (401, "unauthorized")
        assert TOKEN not in answer.body.decode()
    before = guarded.counts("specact_requests_total", **RIGHT)["hello", "unauthorized"]
    with pytest.raises(InvalidStatus) as refused, guarded.connect(**headers):
        pass
    assert guarded.counts("specact_requests_total", **RIGHT)["hello", "unauthorized"] == before + 1
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body or b"")["code"] == "unauthorized"


def test_who_shows_the_token_is_served(guarded: Server, hello: Fields, windows: list[Window]) -> None:
    own = {**RIGHT, "Origin": f"http://127.0.0.1:{guarded.port}"}
    for headers in (RIGHT, own, {**RIGHT, "Host": "any.name"}):
        with guarded.stream(hello, **{k: v for k, v in headers.items() if k != "Host"}) as robot:
            assert robot.ask(infer(windows[0]))["type"] == "distribution"
        assert guarded.http("POST", "/v1/infer", json_infer(windows[0]), **headers).status == 200
        assert guarded.http("GET", "/metrics", **headers).status == 200
        assert guarded.http("GET", "/v1/status", **headers).status == 200
    for path in ("/healthz", "/", "/openapi.json"):
        assert guarded.http("GET", path).status == 200
    assert TOKEN not in guarded.http("GET", "/openapi.json").body.decode() + guarded.log
    assert guarded.counts("specact_requests_total", **RIGHT)["hello", "unauthorized"] > 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 401),
        ({"Host": "evil.example:8600", "Origin": "http://evil.example:8600"}, 401),
        ({"Host": ""}, 401),
        ({"Host": "["}, 401),
        ({"Host": "127.0.0.1.evil.example"}, 401),
        ({"Origin": "http://localhost:1"}, 401),
        ({"Host": "localhost:8600"}, 200),
        ({"Host": "192.168.1.5:9000"}, 200),
        ({"Host": "[::1]:8600"}, 200),
    ],
)
def test_without_a_token_no_foreign_page_gets_through(headers: dict[str, str], status: int, server: Server) -> None:
    """A page can reach loopback from its own origin, and by a name of its own that it has pointed there."""
    assert server.http("GET", "/v1/status", **headers).status == status


# Starting.


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--host", "0.0.0.0"], "a token is needed"),
        (["--token-file", "{nothing}"], "cannot read a token"),
        (["--certificate", "{short}", "--key", "{short}"], "for TLS"),
        (["--port", "{busy}"], "Address already in use; choose another port"),
    ],
)
def test_a_server_that_must_not_start_says_why_in_one_sentence(
    options: list[str], word: str, tmp_path: Path, specact_run: Any
) -> None:
    (tmp_path / "short").write_text("short")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        places = {"busy": busy.getsockname()[1], "short": tmp_path / "short", "nothing": tmp_path / "nothing"}
        options = [option.format(**places) for option in options]
        ended = specact_run("serve", "--bundle", "ball", *options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert word in ended.stderr
    assert ended.stderr.startswith("specact: ") and ended.stderr.count("\n") == 1


def test_tls(launch: Start, certificate: Path, hello: Fields, windows: list[Window]) -> None:
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    server = launch("--certificate", str(cert), "--key", str(key), token=TOKEN)
    assert f"on wss://127.0.0.1:{server.port}; status page https://127.0.0.1:{server.port}/" in server.log
    server.tls = ssl.create_default_context(cafile=cert)
    with server.stream(hello, **RIGHT) as robot:
        assert robot.ask(infer(windows[0]))["type"] == "distribution"
    assert server.http("POST", "/v1/infer", json_infer(windows[0]), **RIGHT).status == 200
    assert server.http("GET", "/metrics").status == 401
    # Who does not know the certificate does not talk to it, and it does not talk in the clear.
    server.tls = ssl.create_default_context()
    with pytest.raises(ssl.SSLCertVerificationError), server.connect():
        pass
    with server.raw() as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)
    assert no_traceback(server)


# Stopping.


def test_sigterm_answers_what_is_under_way_and_then_ends(launch: Start, hello: Fields, windows: list[Window]) -> None:
    slow = launch(
        "--max-batch",
        "64",
        "--max-wait-ms",
        "3500",
        "--max-under-way",
        "32",
        before="import specact.server.http as http; http._BODY_TIMEOUT_S = 1; ",
    )
    posted: list[Response] = []
    poster = threading.Thread(target=lambda: posted.append(slow.http("POST", "/v1/infer", json_infer(windows[0]))))
    with slow.stream(hello) as robot, slow.raw() as half:
        # A request that never becomes whole must not keep the server from ending.
        half.sendall(head("/v1/infer", 1000) + b"{")
        for identity in range(20):
            robot.send(infer(windows[identity], identity))
        poster.start()
        slow.until(lambda: slow.http("GET", "/v1/status").fields["queued"] == 21, "all are queued")
        slow.terminate()
        slow.until(lambda: slow.http("GET", "/healthz").status == 503, "it says that it stops")
        late = robot.ask(infer(windows[0], identity=99))
        assert (late["id"], late["code"]) == (99, "shutting_down")
        with pytest.raises(InvalidStatus) as refused, slow.connect():
            pass
        assert refused.value.response.status_code == 503
        assert json.loads(refused.value.response.body or b"")["code"] == "shutting_down"
        assert slow.http("POST", "/v1/infer", json_infer(windows[0])).status == 503
        replies = [robot.receive() for _ in range(20)]
        assert {reply["id"] for reply in replies} == set(range(20))
        assert all(reply["type"] == "distribution" for reply in replies)
        assert robot.closed() == 1012
        poster.join()
        assert [response.status for response in posted] == [200]
        assert slow.wait() == 0
    assert slow.log.splitlines()[1:] == ["stopped; everything under way was answered"]


def test_sigterm_ends_an_idle_server_at_once(launch: Start, hello: Fields) -> None:
    """Nothing is under way, so nothing is waited for: neither what draining may take nor the rest of a request."""
    idle = launch(
        before="import specact.server.serve as serve, specact.server.settings as settings; "
        "serve._CLOSE_TIMEOUT_S = 3600.0; settings.ServerSettings.__post_init__ = "
        "lambda own: object.__setattr__(own, 'drain_s', 3600.0); "
    )
    with idle.stream(hello) as robot, idle.raw() as silent:
        silent.sendall(b"GET / HT")
        idle.terminate()
        assert robot.closed() == 1012
        assert idle.wait() == 0
    assert no_traceback(idle)
    with pytest.raises(ConnectionRefusedError):
        idle.raw()


# Bodies, addresses, frames.


def head(path: str, length: int | None, *lines: str, kind: str = "application/json") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    rest = "".join(f"{line}\r\n" for line in (f"Content-Type: {kind}", size, *lines))
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{rest}\r\n".encode()


def everything(connection: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    received = bytearray()
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


@pytest.mark.parametrize("kind", ["hello", "infer", "verify"])
def test_a_body_that_says_it_is_too_large_is_not_read(kind: str, server: Server) -> None:
    with server.raw() as connection:
        connection.sendall(head(f"/v1/{kind}", 10**12, "Expect: 100-continue"))
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"too_large"' in answer and b"100 Continue" not in answer


def test_a_body_of_the_largest_size_is_read_and_one_byte_more_is_not(server: Server, ball: Bundle) -> None:
    limit = max_message_bytes(ball.codec.dialect)
    for size, status in ((limit, 400), (limit + 1, 413)):
        body = b'{"v":2}' + b" " * (size - 7)
        assert server.http("POST", "/v1/infer", body, **{"Content-Type": "application/json"}).status == status


def test_a_body_in_chunks_is_not_read_on_once_it_is_too_large(server: Server, ball: Bundle) -> None:
    limit = max_message_bytes(ball.codec.dialect)
    with server.raw() as connection:
        connection.sendall(head("/v1/infer", None))
        # It never ends; the answer must come all the same.
        connection.sendall(b"%x\r\n%s\r\n" % (limit + 1, b" " * (limit + 1)))
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower() and b'"code":"too_large"' in answer


@pytest.mark.parametrize("kind", ["text/plain", "", "application/msgpack", "multipart/form-data"])
def test_a_body_of_another_type_is_refused_unread(kind: str, server: Server) -> None:
    with server.raw() as connection:
        connection.sendall(head("/v1/infer", 100, kind=kind))
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the body must be application/json" in answer


def test_a_body_that_breaks_off_leaves_no_trace(server: Server, hello: Fields) -> None:
    for _ in range(5):
        with server.raw() as connection:
            connection.sendall(head("/v1/infer", 100) + b'{"v":2')
    assert server.http("POST", "/v1/hello", hello).status == 200
    assert no_traceback(server)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/nothing", 404), ("GET", "/v1/infer", 405), ("DELETE", "/v1/verify", 405),
     ("POST", "/metrics", 405), ("GET", "/v1/stream", 404), ("GET", "/docs", 404),
     ("GET", "/..%2f..%2fetc/shadow", 404)],
)  # fmt: skip
def test_wrong_addresses_and_methods_are_typed_errors(method: str, path: str, status: int, server: Server) -> None:
    answer = server.http(method, path)
    assert (answer.status, answer.fields["type"], answer.fields["code"]) == (status, "error", "bad_message")
    assert (answer.headers["Allow"] is not None) is (status == 405)


@pytest.mark.parametrize(
    ("path", "body", "code", "word"),
    [
        ("/v1/infer", b"", "bad_message", "not JSON"),
        ("/v1/infer", b"[]", "bad_message", "one JSON object"),
        ("/v1/infer", b"{}", "bad_message", "messages of type infer"),
        ("/v1/infer", b'{"type":"verify"}', "bad_message", "messages of type infer"),
        ("/v1/infer", b'{"type":"infer","v":1,"id":5}', "unsupported_protocol", "protocol 2"),
        ("/v1/verify", b'{"type":"verify","v":2,"id":5}', "bad_message", "deadline_ms"),
    ],
)
def test_bodies_that_are_no_message_are_typed_errors(
    path: str, body: bytes, code: str, word: str, server: Server
) -> None:
    answer = server.http("POST", path, body, **{"Content-Type": "application/json; charset=utf-8"})
    assert (answer.status, answer.fields["code"]) == (400, code)
    assert word in answer.fields["message"]
    assert answer.fields["id"] == (5 if b'"id":5' in body else None)


def test_a_websocket_elsewhere_is_refused(server: Server) -> None:
    for path in ("/v1", "/v1/infer", "/v1/stream/more"):
        with pytest.raises(InvalidStatus) as refused, server.connect(path):
            pass
        assert refused.value.response.status_code == 403


def test_a_frame_that_is_too_large_closes_the_connection(server: Server, hello: Fields, ball: Bundle) -> None:
    limit = max_message_bytes(ball.codec.dialect)
    with server.stream(hello) as robot:
        assert robot.ask(b"\xc1" * limit)["code"] == "bad_message"
        robot.send(b"\xc1" * (limit + 1))
        assert robot.closed() == 1009


def test_text_is_answered_with_an_error(server: Server, hello: Fields, windows: list[Window]) -> None:
    with server.stream(hello) as robot:
        assert "binary frames" in robot.ask('{"v":2}')["message"]
        assert robot.ask(infer(windows[0]))["type"] == "distribution"
    with server.connect() as robot:
        assert "binary frames" in robot.ask("hello")["message"]
        assert robot.closed() == 1008


def test_pings_are_answered(server: Server, hello: Fields) -> None:
    with server.stream(hello) as robot:
        assert robot.connection.ping().wait(30.0)
