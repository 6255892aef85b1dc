"""The status page as a person meets it: a real server, real robots, a real browser."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TOKEN = "a token+with/odd=characters"
EVIL = "<img src=x onerror=alert(1)>"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome")

Serve = Callable[..., "Server"]


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Waits for something that other processes bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


class Browser:
    """A headless Chromium with one page, driven over its DevTools protocol.

    Attributes:
        complaints: what the page or the browser wrote to the console as an error or a warning.
        requests: addresses of everything the page asked for.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._last, self._session = socket, 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Sends a command and takes in what happens until its result is there."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while (reply := json.loads(self._socket.recv(timeout=30.0))).get("id") != self._last:
            self._note(reply.get("method"), reply.get("params", {}))
        assert "error" not in reply, reply
        return reply["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, on the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def text(self, selector: str) -> str:
        """What a person reads there: nothing of what is hidden."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def column(self, number: int) -> list[str]:
        """The robots' table, one column, top to bottom."""
        return list(self.evaluate(f"[...document.querySelector('#robots').tBodies[0].rows].map(r => r.cells[{number}].innerText)"))

    def enter(self, token: str) -> None:
        self.evaluate(f"document.querySelector('#token').value = {json.dumps(token)}")
        self.evaluate("document.querySelector('#ask button').click()")

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(parameters["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(parameters["entry"]))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with running_browser(tmp_path / "profile") as browser:
        yield browser


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """A browser of our own: an empty profile, and nothing it asks for on its own account."""
    assert CHROMIUM is not None
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync", "extensions", "dev-shm-usage")
    flags = [f"--disable-{what}" for what in quiet]
    flags += ["--headless", "--no-sandbox", "--no-first-run", "--no-proxy-server", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [CHROMIUM, *flags, f"--user-data-dir={profile}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        announced = profile / "DevToolsActivePort"
        until(lambda: announced.exists() and announced.read_text().count("\n"), "the browser starts")
        port, path = announced.read_text().split()
        # A socket of our own, so that no proxy of the environment comes in between.
        raw = socket.create_connection(("127.0.0.1", int(port)), 10.0)
        options: dict[str, Any] = {"max_size": None, "max_queue": None, "ping_interval": None, "compression": None}
        with connect(f"ws://127.0.0.1:{port}{path}", sock=raw, **options) as connection:
            yield Browser(connection)
    finally:
        stop(process)
