"""Small runs of the ball pair, a report on them, and a browser to read it with."""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from specact.evaluation.evaluation import Evaluation
from specact.evaluation.run import evaluate
from specact.report.report import Written, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVERY = ("draft", "target", "hybrid", "random", "adahi", "oracle")
RUNS = {
    "table": Evaluation("ball", None, EVERY, episodes=6, seed=1, calibration_episodes=2),
    "rate-0.3": Evaluation("ball", None, ("random", "adahi"), episodes=4, seed=1, rate=0.3, calibration_episodes=2),
    "realtime": Evaluation("ball", None, ("draft", "hybrid", "adahi"), episodes=1, link="loopback", realtime=True),
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder with a run per entry of :data:`RUNS`. Read only: copy before damaging it."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent  # the folder that all processes of one test run share
    folder = shared / "report-runs"
    with (shared / "report-runs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, what in RUNS.items():
            if not (folder / name / "summary.json").exists():
                evaluate(what, folder / name, lambda *_: None, workers=1, command=f"specact eval {name}")
    return folder


@pytest.fixture(scope="session")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A report on :func:`runs` without films."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    return write_report([runs], out, out.parent / "files", lambda *_: None, films=False)


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

    def open(self, page: Path, width: int = 1200) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 700
        )
        self.call("Page.navigate", url=page.as_uri())
        self.until("document.readyState === 'complete' && document.querySelector('h1')")

    def until(self, expression: str) -> None:
        """Waits until an expression is true."""
        _until(lambda: bool(self.evaluate(f"Boolean({expression})")), expression)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def _note(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif (
            event == "Runtime.exceptionThrown"
            or (event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"))
            or (event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"))
        ):
            self.complaints.append(str(told))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser of our own: an empty profile, and nothing that it asks for on its own account."""
    if CHROMIUM is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome")
    profile = tmp_path / "profile"
    without = ("gpu", "quic", "background-networking", "component-update", "sync", "extensions", "dev-shm-usage")
    flags = [f"--disable-{what}" for what in without]
    flags += ["--headless", "--no-sandbox", "--no-first-run", "--no-proxy-server", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [CHROMIUM, *flags, f"--user-data-dir={profile}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        announced = profile / "DevToolsActivePort"
        _until(lambda: announced.exists() and "/" in announced.read_text(), "the browser starts")
        port, path = announced.read_text().split()
        # A socket of our own, so that no proxy of the environment comes in between.
        own = socket.create_connection(("127.0.0.1", int(port)), 10.0)
        patience: dict[str, Any] = {"max_size": None, "max_queue": None, "ping_interval": None, "compression": None}
        with connect(f"ws://127.0.0.1:{port}{path}", sock=own, **patience) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.02)
