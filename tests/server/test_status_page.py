"""The status page as a person meets it: a real server, real robots, a real browser."""

import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from websockets.sync.client import ClientConnection, connect

from specact import SpeculativePolicy, load_bundle
from specact.gates.baseline import Always
from specact.remote.channel import Endpoint
from specact.remote.line import Line
from specact.remote.target import RemoteTarget
from specact.server import app
from specact.server.telemetry import Telemetry
from specact.verifiers import SpeculativeVerifier
from specact.wire.reply import ServerTimes

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = Path(app.__file__).with_name("status.html").as_uri()
TOKEN = "a token/with+odd=characters"
HOSTILE = "<img src=x onerror=alert(1)>"
REQUESTS, P99 = 2, 9  # columns of the robots' table

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome")


def until(condition: Callable[[], object], what: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Waits for what other processes bring about."""
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        meanwhile()
        time.sleep(0.02)


def stop(process: subprocess.Popen[Any]) -> None:
    """Ends a process of ours and everything it holds."""
    process.terminate()
    try:
        process.wait(15.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Browser:
    """A headless Chromium with one page, driven over its DevTools protocol.

    Attributes:
        complaints: errors and warnings on the console.
        requests: addresses of everything the page asked for.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._last, self._session = connection, 0, {}
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command; what happens until it is there is noted."""
        self._last += 1
        self._connection.send(json.dumps({"id": self._last, "method": method, "params": parameters, **self._session}))
        while (reply := json.loads(self._connection.recv(timeout=30.0))).get("id") != self._last:
            self._note(reply.get("method"), reply.get("params", {}))
        assert "error" not in reply, reply
        return reply["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def open(self, url: str, width: int = 1200) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 700
        )
        self.call("Page.navigate", url=url)

    def pretend(self, status: dict[str, Any]) -> None:
        """Opens the page without a server: this is what it hears."""
        answer = f"window.fetch = async () => new Response({json.dumps(json.dumps(status))})"
        script = self.call("Page.addScriptToEvaluateOnNewDocument", source=answer)
        self.open(PAGE, width=390)
        until(lambda: self.text("#age"), "numbers are shown")
        self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])

    def text(self, selector: str) -> str:
        """What a person reads there: nothing of what is hidden."""
        found = f"document.querySelector({json.dumps(selector)})"
        return str(self.evaluate(f"{found}?.checkVisibility() ? {found}.innerText : ''"))

    def shows(self, text: str) -> bool:
        return text in self.text("body")

    def column(self, number: int) -> list[str]:
        """One column of the robots' table."""
        rows = "[...document.querySelector('#robots').tBodies[0].rows]"
        return list(self.evaluate(f"{rows}.map((row) => row.cells[{number}].innerText)"))

    def sort(self, number: int) -> list[str]:
        """The column after a click on its head."""
        self.evaluate(f"document.querySelectorAll('#robots thead button')[{number}].click()")
        return self.column(number)

    def enter(self, token: str) -> None:
        self.evaluate(f"document.querySelector('#token').value = {json.dumps(token)}")
        self.evaluate("document.querySelector('#ask button').click()")

    def _note(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Network.webSocketCreated":
            self.requests.append(told["url"])
        elif (
            event == "Runtime.exceptionThrown"
            or (event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"))
            or (event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"))
        ):
            self.complaints.append(str(told))


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """A browser of our own: an empty profile, and nothing that it asks for on its own account."""
    assert CHROMIUM is not None
    without = ("gpu", "quic", "background-networking", "component-update", "sync", "extensions", "dev-shm-usage")
    flags = [f"--disable-{what}" for what in without]
    flags += ["--headless", "--no-sandbox", "--no-first-run", "--no-proxy-server", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [CHROMIUM, *flags, f"--user-data-dir={profile}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        announced = profile / "DevToolsActivePort"
        until(lambda: announced.exists() and "/" in announced.read_text(), "the browser starts")
        port, path = announced.read_text().split()
        # A socket of our own, so that no proxy of the environment comes in between.
        own = socket.create_connection(("127.0.0.1", int(port)), 10.0)
        # It is read only where a command waits for its result, so neither pings nor the queue may end it before.
        patience: dict[str, Any] = {"max_size": None, "max_queue": None, "ping_interval": None, "compression": None}
        with connect(f"ws://127.0.0.1:{port}{path}", sock=own, **patience) as connection:
            yield Browser(connection)
    finally:
        stop(process)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with running_browser(tmp_path / "profile") as running:
        yield running


class Server:
    """A server in a process of its own.

    Attributes:
        url: of its status page.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, port: int) -> None:
        words = [*command, "serve", "--bundle", "ball", "--port", str(port)]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
        until(lambda: "status page" in log.read_text() or self.process.poll() is not None, "the server starts")
        said = log.read_text()
        found = re.search(r"serving ball on (ws://\S+:\d+); status page (http://\S+/)", said)
        assert found is not None, said
        self.address, self.url = found.groups()


Serve = Callable[..., Server]


@pytest.fixture
def serve(command: list[str], environment: dict[str, str], tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; they end with the test."""
    with ExitStack() as running:

        def start(token: str = "", port: int = 0) -> Server:
            server = Server(command, {**environment, "SPECACT_TOKEN": token}, tmp_path / "server.log", port)
            running.callback(stop, server.process)
            return server

        yield start


@contextmanager
def robot(server: Server, name: str) -> Iterator[Callable[[], object]]:
    """A robot that asks the server in every step; yields what makes it step."""
    bundle = load_bundle("ball")
    with Line(Endpoint.parse(server.address), bundle, name) as line:
        line.connect(20.0)
        target = RemoteTarget(line, bundle.spec, deadline_ms=5000.0)
        policy = SpeculativePolicy(bundle, Always(), verifier=SpeculativeVerifier(target, bundle.tokenizer))
        line.report = policy.counts
        yield lambda: policy.act({"state": np.zeros(8, np.float32), "goal": np.zeros(2, np.float32)})


def test_it_shows_the_server_and_its_robots(serve: Serve, browser: Browser) -> None:
    server = serve()
    with robot(server, "ball-07") as calm, robot(server, HOSTILE) as hostile:

        def work() -> None:
            calm(), calm(), hostile()

        browser.open(server.url)
        until(lambda: browser.shows("Ready requests are answered"), "the server is ready", work)
        assert browser.text("h1") == "ball"
        assert sorted(browser.column(0)) == sorted(["ball-07", HOSTILE])
        assert browser.evaluate("document.querySelectorAll('main img').length") == 0
        seen = browser.sort(REQUESTS)
        until(lambda: browser.column(REQUESTS) != seen, "requests are counted", work)
        until(lambda: "L" in browser.evaluate("document.querySelector('#rates path.first').outerHTML"), "a line", work)
        until(lambda: browser.column(0) == ["ball-07", HOSTILE], "who asks most comes first", work)
        until(lambda: re.search(r"ok\s+[1-9]\d*\s+100.0 %", browser.text("#outcomes")), "answers are counted", work)
        until(lambda: re.search(r"total(\s+\d+\.\d+){3}", browser.text("#stages")), "stages are timed", work)
        until(lambda: all(re.match(r"\d+\.\d+", cell) for cell in browser.column(P99)), "robots are timed", work)
        assert browser.shows("100.0 %"), "every step was transmitted"
    until(lambda: browser.shows("No robot is connected"), "they have hung up")
    assert browser.complaints == []
    assert {urlsplit(request).netloc for request in browser.requests} == {urlsplit(server.url).netloc}


def test_it_asks_for_the_token(serve: Serve, browser: Browser) -> None:
    server = serve(token=TOKEN)
    browser.open(server.url)
    until(lambda: browser.shows("Token needed"), "the token is asked for")
    assert browser.shows("Token of this server")
    assert browser.text("main") == ""
    browser.enter("not the token, but long enough")
    until(lambda: browser.shows("Wrong token"), "it is refused")
    asked = len(browser.requests)
    browser.enter(TOKEN)
    until(lambda: browser.shows("Ready"), "it is accepted")
    assert "/v1/status" in browser.requests[asked]
    assert not browser.shows("Token")
    assert browser.evaluate("document.querySelector('#token').value") == ""
    assert browser.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
    browser.open(server.url)
    until(lambda: browser.shows("Ready"), "the tab remembers it")
    assert not any("odd" in request for request in browser.requests)


@pytest.mark.parametrize("fragment", [quote(TOKEN, safe=""), quote(TOKEN, safe="+/=")])
def test_a_token_in_the_address_is_used_and_removed(serve: Serve, browser: Browser, fragment: str) -> None:
    server = serve(token=TOKEN)
    browser.open(f"{server.url}#token={fragment}")
    until(lambda: browser.shows("Ready"), "it is accepted")
    assert browser.evaluate("location.href") == server.url
    assert browser.complaints == []


def test_it_says_when_the_server_is_gone_and_when_it_is_back(serve: Serve, browser: Browser) -> None:
    server = serve()
    browser.open(server.url)
    until(lambda: browser.shows("Ready"), "the server is ready")
    assert browser.text("#age").startswith("live")
    server.process.send_signal(signal.SIGTERM)
    until(lambda: browser.shows("Unreachable"), "it says so")
    until(lambda: re.match(r"last numbers \d+ s old, from \d\d:\d\d:\d\d", browser.text("#age")), "how old they are")
    assert browser.text("h1") == "ball"
    assert browser.shows("Answers per second"), "the last numbers stay"
    server.process.wait(15.0)
    serve(port=urlsplit(server.url).port)
    until(lambda: browser.shows("Ready"), "the page comes back by itself")
    assert browser.text("#age").startswith("live")


def test_it_shows_a_server_nobody_has_asked_yet(browser: Browser) -> None:
    browser.pretend(Telemetry("ball").status(queued=0, ready=False))
    assert browser.shows("Not ready")
    assert browser.shows("No robot is connected")
    assert browser.shows("no request yet")
    assert browser.complaints == []


def test_it_holds_256_robots_on_a_phone(browser: Browser) -> None:
    telemetry = Telemetry("a-bundle-with-a-name-that-is-longer-than-the-screen-of-a-phone-is-wide")
    keys = [telemetry.connected(f"robot-{number}") for number in range(255)]
    keys.append(telemetry.connected("W" * 64))
    for place, key in enumerate(keys[10:]):
        telemetry.answered("infer", ServerTimes(0.1, 0.5, 1.0 + place, 1), telemetry.robots[key])
    telemetry.refused("infer", "expired", telemetry.robots[keys[0]])
    browser.pretend(telemetry.status(queued=3, ready=True))
    assert browser.shows("Robots (256)")
    assert browser.shows("the deadline passed in the queue")
    assert browser.column(0)[:3] == ["robot-0", "robot-1", "robot-2"], "numbers count as numbers"
    for _ in range(2):
        tails = browser.sort(P99)
        assert tails[-10:] == ["\u2013"] * 10, "who has no value comes last, in both directions"
    assert tails[0] == "1.00"
    assert browser.sort(P99)[0] == "246"
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.complaints == []
