"""A headless Chromium that tests read pages with, as a person would."""

from __future__ import annotations

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

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page, driven over the browser's DevTools protocol.

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
        while (reply := json.loads(self._connection.recv(timeout=120.0))).get("id") != self._last:
            self._note(reply.get("method"), reply.get("params", {}))
        assert "error" not in reply, reply
        return reply["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def open(self, page: Path | str, width: int = 1200) -> None:
        """Opens a file or an address and waits until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 700
        )
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        self.until("document.readyState === 'complete' && document.querySelector('h1')")

    def until(self, expression: str) -> None:
        """Waits until an expression is true."""
        until(lambda: self.evaluate(f"Boolean({expression})"), expression)

    def text(self, selector: str) -> str:
        """What a person reads there: nothing of what is hidden."""
        found = f"document.querySelector({json.dumps(selector)})"
        return str(self.evaluate(f"{found}?.checkVisibility() ? {found}.innerText : ''"))

    def shows(self, text: str) -> bool:
        return text in self.text("body")

    def count(self, selector: str) -> int:
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

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
    """A browser of our own: an empty profile, and nothing that it asks for on its own account.

    The test is skipped where there is no Chromium.
    """
    if _CHROMIUM is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome")
    without = ("gpu", "quic", "background-networking", "component-update", "sync", "extensions", "dev-shm-usage")
    flags = [f"--disable-{what}" for what in without]
    flags += ["--headless", "--no-sandbox", "--no-first-run", "--no-proxy-server", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [_CHROMIUM, *flags, f"--user-data-dir={profile}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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


def until(condition: Callable[[], object], what: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Waits for what other processes bring about."""
    end = time.monotonic() + 120.0
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
