"""Tokens with names, the access log, and what changes on SIGHUP; on a real server."""

from __future__ import annotations

import json
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.server.requests import infer
from websockets.exceptions import InvalidStatus

from specact.errors import ConfigError
from specact.observation import Window
from specact.server.access import Access, read_tokens
from specact.server.access_log import _MAX_REFUSALS_PER_S, AccessLog

if TYPE_CHECKING:
    from tests.server.conftest import Fields, Server, Start

LEFT, RIGHT, NEW, COMMON = "left-arm-0123456789", "right-arm-0123456789", "new-arm-0123456789", "common-0123456789"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def write(file: Path, **tokens: str) -> None:
    file.write_text("# robots\n\n" + "".join(f"{name}\t{token}\n" for name, token in tokens.items()))


def names(server: Server, token: str) -> list[str]:
    return sorted(row["name"] for row in server.http("GET", "/v1/status", **bearer(token)).fields["robots"])


def events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# The file.


def test_a_file_of_names_and_tokens(tmp_path: Path) -> None:
    write(tmp_path / "tokens", left=LEFT, right=RIGHT)
    assert read_tokens(tmp_path / "tokens") == {"left": LEFT, "right": RIGHT}
    # As some editors write it.
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + f"left {LEFT}\r\n".encode())
    assert read_tokens(tmp_path / "marked") == {"left": LEFT}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"left {LEFT} more", "line 1: a line must hold a name and its token"),
        (f"\n{LEFT}", "line 2: a line must hold a name and its token"),
        ("left short", "line 1: a token needs at least 16 characters, this one has 5"),
        ("left " + "\N{LOCK}" * 16, "line 1: a token must be one line of printable ASCII"),
        (f"{'x' * 65} {LEFT}", "line 1: a name must have at most 64 printable characters"),
        (f"left {LEFT}\nleft {RIGHT}", "line 2: the name left occurs twice"),
        (f"left {LEFT}\nright {LEFT}", "line 2: the token of right is already used by another robot"),
        ("# nobody\n", "holds 0 tokens; it needs between 1 and"),
        ("\xff", "cannot read tokens"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_no_token_is_shown(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(text, encoding="latin-1" if text == "\xff" else "utf-8")
    with pytest.raises(ConfigError, match=word) as refused:
        read_tokens(tmp_path / "tokens")
    assert LEFT not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot read tokens"):
        read_tokens(tmp_path / "nothing")


def test_who_it_is_by_the_token(tmp_path: Path) -> None:
    write(tmp_path / "tokens", left=LEFT, right=RIGHT)
    access = Access(COMMON, tmp_path / "tokens")
    found = [access.caller({"authorization": f"Bearer {token}"}) for token in (LEFT, RIGHT, COMMON, NEW)]
    assert [caller and caller.name for caller in found] == ["left", "right", None, None]
    assert found[2] is not None and found[3] is None
    write(tmp_path / "tokens", left=LEFT, other=RIGHT)
    access.reload()
    assert [caller is not None and access.is_valid(caller) for caller in found] == [True, False, True, False]
    write(tmp_path / "tokens", left=COMMON)
    with pytest.raises(ConfigError, match="assigns the shared token to one robot"):
        access.reload()
    assert access.names == {"left", "other"}


# The log.


def test_a_flood_of_refusals_is_counted_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("specact.server.access_log.time.monotonic", lambda: now)
    log = AccessLog(tmp_path / "log", steps=False)
    for _ in range(1000):
        log.write_refusal("hello", "unauthorized", "1.1.1.1:1", "no token\nat all\N{SNOWMAN}")
    log.write_refusal("hello", "mismatch", "1.1.1.1:1", "x" * 1000)
    now = 101.0
    log.write_refusal("hello", "mismatch", "1.1.1.1:1", "again")
    log.close()
    written = events(tmp_path / "log")
    assert [event["code"] for event in written] == ["unauthorized"] * _MAX_REFUSALS_PER_S + [
        "mismatch", "unauthorized", "mismatch",
    ]  # fmt: skip
    assert written[-2]["more"] == 1000 - _MAX_REFUSALS_PER_S
    assert written[0]["why"] == "no token\nat all\N{SNOWMAN}" and len(written[_MAX_REFUSALS_PER_S]["why"]) == 200
    with pytest.raises(ConfigError, match="cannot write the access log"):
        AccessLog(tmp_path, steps=False)


# A server.


def test_names_are_those_of_the_tokens_and_a_token_that_is_gone_ends_its_stream(
    launch: Start, hello: Fields, windows: list[Window], tmp_path: Path
) -> None:
    tokens, log = tmp_path / "tokens", tmp_path / "log"
    write(tokens, left=LEFT, right=RIGHT)
    server = launch("--tokens", str(tokens), "--access-log", str(log), token=COMMON)
    question = infer(windows[0])
    with (
        server.stream(hello, **bearer(LEFT)) as left,
        server.stream(hello, **bearer(RIGHT)) as right,
        server.stream(hello, **bearer(COMMON)) as any_robot,
    ):
        server.until(lambda: names(server, RIGHT) == ["left", "right", "tester"], "the page names them")
        write(tokens, left=LEFT, new=NEW)
        server.process.send_signal(signal.SIGHUP)
        told = right.receive()
        assert (told["type"], told["code"], told["id"]) == ("error", "unauthorized", None)
        assert right.closed() == 1008
        for robot in (left, any_robot):
            assert robot.ask(question)["type"] == "distribution"
        with pytest.raises(InvalidStatus), server.connect(**bearer(RIGHT)):
            pass
        assert server.http("POST", "/v1/hello", hello, **bearer(RIGHT)).status == 401
        with server.stream(hello, **bearer(NEW)):
            server.until(lambda: names(server, NEW) == ["left", "new", "tester"], "the page names them")
        # A file that cannot be read changes nothing, and is told of.
        tokens.write_text("left")
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: "what was read before stays valid" in server.log, "the file is read again")
        assert left.ask(question)["type"] == "distribution"
        assert server.http("POST", "/v1/hello", hello, **bearer(NEW)).status == 200
    server.until(lambda: names(server, LEFT) == [], "all are gone")
    told_of = [(event["event"], event.get("robot"), event.get("code")) for event in events(log)]
    assert told_of[:3] == [("connected", "left", None), ("connected", "right", None), ("connected", "tester", None)]
    assert told_of.count(("disconnected", "right", None)) == 1
    assert told_of.count(("refused", None, "unauthorized")) == 2
    assert all(event["peer"].startswith("127.0.0.1:") and event["time"] for event in events(log))
    assert not any(event["event"] == "step" for event in events(log))
    text = log.read_text() + server.log
    assert not any(token in text for token in (LEFT, RIGHT, NEW, COMMON))
    server.terminate()
    assert server.wait() == 0


def test_the_log_has_steps_where_asked_and_may_be_moved_away(
    launch: Start, hello: Fields, windows: list[Window], tmp_path: Path
) -> None:
    log, old = tmp_path / "log", tmp_path / "old"
    server = launch("--access-log", str(log), "--log-steps")
    question = infer(windows[0])
    with server.stream(hello) as robot:
        robot.ask(question)
        robot.ask(b"\xc1")
        log.rename(old)
        server.process.send_signal(signal.SIGHUP)
        server.until(log.exists, "the file is opened anew")
        robot.ask(question)
    server.until(lambda: [event["event"] for event in events(log)[-1:]] == ["disconnected"], "it is gone")
    assert [event["event"] for event in events(old)] == ["connected", "step", "refused"]
    [step, gone] = events(log)
    assert (step["event"], step["what"], step["robot"], step["batch"]) == ("step", "infer", "tester", 1)
    assert 0.0 <= step["queue_ms"] <= step["total_ms"]
    assert (gone["requests"], gone["errors"]) == (2, 1) and gone["seconds"] >= 0.0


def test_a_certificate_is_read_again(
    launch: Start, hello: Fields, windows: list[Window], certify: Callable[[Path], None], tmp_path: Path
) -> None:
    certify(tmp_path)
    server = launch("--certificate", str(tmp_path / "cert.pem"), "--key", str(tmp_path / "key.pem"))
    server.tls = first = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    server.until(lambda: server.http("GET", "/healthz").status == 200, "it answers")
    with server.stream(hello) as robot:
        certify(tmp_path)
        second = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        server.process.send_signal(signal.SIGHUP)

        def shows(context: ssl.SSLContext) -> bool:
            server.tls = context
            try:
                return server.http("GET", "/healthz").status == 200
            except ssl.SSLCertVerificationError:
                return False

        server.until(lambda: shows(second), "the new certificate is shown")
        assert not shows(first)
        # Who is connected stays so; a certificate that is none changes nothing.
        assert robot.ask(infer(windows[0]))["type"] == "distribution"
        (tmp_path / "key.pem").write_text("none")
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: "the certificate of before stays in use" in server.log, "it is told of")
        assert shows(second)
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--tokens", "{none}"], "cannot read tokens"),
        (["--host", "0.0.0.0", "--tokens", "{none}"], "cannot read tokens"),
        (["--access-log", "{folder}"], "cannot write the access log"),
        (["--log-steps"], "needs an access_log"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_sentence(
    options: list[str], word: str, tmp_path: Path, specact_run: Any
) -> None:
    options = [option.format(none=tmp_path / "none", folder=tmp_path) for option in options]
    ended = specact_run("serve", "--bundle", "ball", "--port", "0", *options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert word in ended.stderr and ended.stderr.count("\n") == 1
