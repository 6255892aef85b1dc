"""Who is let in: tokens, origins, certificates; what is written about it; and what cannot start."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.children import wait_for
from tests.served import certify
from tests.serving import Doubling, Here, Process, bearer, state

from specact import Pair
from specact.errors import ConfigError, WireError
from specact.server import Address, Service
from specact.server.access import Access, read_tokens
from specact.server.serve import bind
from specact.server.telemetry import AccessLog

LEFT, RIGHT, COMMON, NEW = "left-robots-token", "right-robots-token", "a-token-for-everybody", "a-new-robots-token"


def write(file: Path, **tokens: str) -> None:
    file.write_text("# robots\n\n" + "".join(f"{name}\t{token}\n" for name, token in tokens.items()))


def events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


WRONG_FILES = [
    f"left {LEFT} more", LEFT, "left short", "left " + "\N{LOCK}" * 16, f"{'x' * 65} {LEFT}", f"\x1b[2J {LEFT}",
    f"other {NEW}\nother {LEFT}", f"other {LEFT}\nleft {LEFT}", "# nobody\n", "\xff",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_file_that_is_wrong_is_refused_and_no_token_is_shown(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(text, encoding="latin-1" if text == "\xff" else "utf-8")
    with pytest.raises(ConfigError, match=f"line {len(text.splitlines())}" if LEFT in text else "token") as refused:
        read_tokens(tmp_path / "tokens")
    assert LEFT not in str(refused.value)


def test_who_it_is_by_the_token(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    with pytest.raises(ConfigError, match="tokens"):
        read_tokens(tokens)
    tokens.write_bytes(b"\xef\xbb\xbf" + f"left {LEFT}\r\n".encode())  # as some editors write it
    assert read_tokens(tokens) == {"left": LEFT}
    write(tokens, left=LEFT, right=RIGHT)
    access = Access(COMMON, Address(tokens=tokens))
    callers = [access.caller({"authorization": f"Bearer {token}"}) for token in (LEFT, RIGHT, COMMON)]
    assert [caller.name for caller in callers] == ["left", "right", None] and COMMON not in repr(callers)
    assert access.caller({"authorization": f"Api-Key {LEFT}"}).name == "left"
    for header in ("", LEFT, f"Bearer {NEW}", f"bearer {LEFT}", "Bearer \udcff"):
        with pytest.raises(WireError) as refused:
            access.caller({"authorization": header})
        assert refused.value.code == "unauthorized"
    write(tokens, left=LEFT, other=RIGHT)
    access.reload()
    assert [access.is_valid(caller) for caller in callers] == [True, False, True]
    write(tokens, left=COMMON)
    with pytest.raises(ConfigError, match="tokens"):
        access.reload()
    assert access.caller({"authorization": f"Bearer {RIGHT}"}).name == "other"


def test_a_refusal_keeps_nothing_in_memory() -> None:
    access, depths = Access(COMMON, Address()), set[int]()
    for _ in range(3):
        with pytest.raises(WireError) as refused:
            access.caller({})
        depths.add(len(refused.traceback))
    assert len(depths) == 1


def test_on_loopback_no_token_is_needed_and_a_server_that_others_can_reach_needs_one() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert Access(None, Address(host=host)).caller({"host": "127.0.0.1:8600"}).name is None
    for host in ("0.0.0.0", "::", "192.168.1.5", "robots.example", ""):
        with pytest.raises(ConfigError, match="token"):
            Access(None, Address(host=host))


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}])
def test_a_page_of_another_site_is_not_let_in(headers: dict[str, str], doubling: Here) -> None:
    assert doubling.http("/v1/status", **headers)[0] == 401
    if "Origin" in headers:
        with doubling.connect(**headers) as robot:
            assert robot.receive().code == "unauthorized" and robot.end() == 1008
    assert doubling.http("/v1/status", Origin=f"http://127.0.0.1:{doubling.port}")[0] == 200


@pytest.mark.parametrize("shown", [{}, bearer(NEW), {"Authorization": COMMON}], ids=str)
def test_who_does_not_show_the_token_learns_nothing(shown: dict[str, str]) -> None:
    with Here(Doubling(), COMMON) as server:
        for path in ("/v1/status", "/metrics"):
            status, _, body = server.http(path, **shown)
            assert status == 401 and COMMON.encode() not in body and b"doubling" not in body
        with server.connect(**shown) as robot:
            assert robot.receive().code == "unauthorized" and robot.end() == 1008
        assert server.http("/healthz")[0] == server.http("/")[0] == server.http("/metrics", **bearer(COMMON))[0] == 200
        with server.robot(**bearer(COMMON)) as robot:
            robot.ask(1, state(1.0))


def test_a_token_that_is_gone_ends_its_connection_and_the_log_says_who_came(tmp_path: Path, ball: Pair[Any]) -> None:
    tokens, log = tmp_path / "tokens", tmp_path / "log"
    write(tokens, left=LEFT, right=RIGHT)
    options = ["--tokens", str(tokens), "--access-log", str(log)]
    with Process(ball.exchange.contract, "ball", *options, token=COMMON) as server, ExitStack() as stack:

        def names() -> list[str]:
            return sorted(row["name"] for row in server.status(**bearer(COMMON))["robots"])

        left, right, common = (stack.enter_context(server.robot(**bearer(token))) for token in (LEFT, RIGHT, COMMON))
        wait_for(lambda: names() == ["left", "right", "tester"], "the page names them")
        write(tokens, left=LEFT, new=NEW)
        server.signal(signal.SIGHUP)
        assert right.receive().code == "unauthorized" and right.end() == 1008
        with server.connect(**bearer(RIGHT)) as refused:
            assert refused.receive().code == "unauthorized"
        with server.robot(**bearer(NEW)):
            wait_for(lambda: names() == ["left", "new", "tester"], "the page names it")
        # A file that cannot be read changes nothing.
        tokens.write_text("left")
        server.signal(signal.SIGHUP)
        for robot in (left, common):
            robot.ask(1, ball.parts.spec.target.zeros())
    told = [(event["event"], event.get("robot"), event.get("code")) for event in events(log)]
    assert told[:3] == [("connected", "left", None), ("connected", "right", None), ("connected", "tester", None)]
    assert told.count(("disconnected", "right", None)) == 1 and ("refused", None, "unauthorized") in told
    assert all(event["peer"].startswith("127.0.0.1:") and event["time"] for event in events(log))
    for token in (LEFT, RIGHT, NEW, COMMON):
        assert token not in log.read_text() + server.output


def test_a_flood_of_refusals_is_counted_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("specact.server.telemetry.time.monotonic", lambda: now)
    log = AccessLog(tmp_path / "log")
    for _ in range(1000):
        log.write_refusal("hello", "unauthorized", "1.1.1.1:1", "no token\nat all\N{SNOWMAN}")
    log.write_refusal("hello", "mismatch", "1.1.1.1:1", "x" * 1000)
    now = 101.0
    log.write_refusal("hello", "mismatch", "1.1.1.1:1", "again")
    log.close()
    written = events(tmp_path / "log")
    codes = [event["code"] for event in written]
    assert codes.count("unauthorized") == 21 and codes[-3:] == ["mismatch", "unauthorized", "mismatch"]
    assert written[-2]["more"] == 980 and written[0]["why"] == "no token\nat all\N{SNOWMAN}"
    assert max(len(event.get("why", "")) for event in written) == 200
    with pytest.raises(ConfigError, match=str(tmp_path)):
        AccessLog(tmp_path)


def test_the_log_may_be_moved_away(tmp_path: Path) -> None:
    log, old = tmp_path / "log", tmp_path / "old"
    with Here(Doubling(), access_log=log) as server:
        with server.robot() as robot:
            robot.ask(1, state(1.0))
            robot.send(2, state(1.0), deadline_ms=0.0)
            robot.receive()
            log.rename(old)
        wait_for(lambda: log.exists() and events(log), "it is gone")
    assert [event["event"] for event in events(old)] == ["connected", "refused"]
    [gone] = events(log)
    assert (gone["event"], gone["requests"], gone["errors"]) == ("disconnected", 1, 1) and gone["seconds"] >= 0.0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without room")
def test_a_full_disk_costs_lines_of_the_log_and_not_robots(caplog: pytest.LogCaptureFixture) -> None:
    with Here(Doubling(), access_log=Path("/dev/full")) as server:
        for _ in range(3):
            with server.robot() as robot:
                robot.ask(1, state(1.0))
    assert caplog.text.count("/dev/full lacks lines") == 1


def test_a_certificate_is_used_and_read_again(tmp_path: Path, ball: Pair[Any]) -> None:
    certify(tmp_path)
    files = ["--certificate", str(tmp_path / "cert.pem"), "--key", str(tmp_path / "key.pem")]
    with Process(ball.exchange.contract, "ball", *files) as server:
        server.tls = first = ssl.create_default_context(cafile=tmp_path / "cert.pem")

        def shows(context: ssl.SSLContext) -> bool:
            server.tls = context
            try:
                return server.http("/healthz")[0] == 200
            except ssl.SSLCertVerificationError:
                return False

        with server.robot() as robot, server.side() as plain:
            certify(tmp_path)
            second = ssl.create_default_context(cafile=tmp_path / "cert.pem")
            server.signal(signal.SIGHUP)
            wait_for(lambda: shows(second), "the new certificate is shown")
            # A certificate that is none changes nothing, and who speaks plainly is not answered.
            (tmp_path / "key.pem").write_text("none")
            server.signal(signal.SIGHUP)
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.recv(1000)
            robot.ask(1, ball.parts.spec.target.zeros())
            assert shows(second) and not shows(first)
        assert server.stop() == 0
        assert "stays in use" in server.output and "Traceback" not in server.output


def test_a_port_that_is_taken_is_said_and_every_address_of_ipv6_is_every_one_of_ipv4_too(doubling: Here) -> None:
    with pytest.raises(ConfigError, match=str(doubling.port)):
        bind(Service(Doubling(), address=Address(port=doubling.port)))
    if socket.has_dualstack_ipv6():
        with bind(Service(Doubling(), address=Address(host="::", port=0), token=COMMON)) as listener:
            socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()
