"""A real server process, and its clients: nothing waits without a bound."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from specact import Bundle, load_bundle
from specact.observation import Window
from specact.wire import msgpack
from specact.wire.handshake import Hello, hello_fields

Fields = dict[str, Any]
PATIENCE = 120.0  # seconds before a test gives up; a server starts in a tenth of it on a slow machine


@dataclass
class Response:
    """An HTTP response, read whole."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def fields(self) -> Fields:
        return dict(json.loads(self.body))


class Stream:
    """A robot's WebSocket.

    Attributes:
        connection: itself.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, fields: Fields | bytes | str) -> None:
        """A message, or a frame that need not be one; a str goes as text."""
        self.connection.send(msgpack.encode(fields) if isinstance(fields, dict) else fields)

    def receive(self) -> Fields:
        payload = self.connection.recv(timeout=PATIENCE)
        assert isinstance(payload, bytes)
        return msgpack.decode(payload)

    def ask(self, fields: Fields | bytes | str) -> Fields:
        """Sends a message and waits for the next."""
        self.send(fields)
        return self.receive()

    def closed(self) -> int:
        """The code with which the server closes; no message comes before."""
        with pytest.raises(ConnectionClosed) as closing:
            self.connection.recv(timeout=PATIENCE)
        assert closing.value.rcvd is not None
        return closing.value.rcvd.code


class Server:
    """``specact serve`` in a process of its own.

    Attributes:
        port: where it listens.
        process: itself.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, options: tuple[str, ...]) -> None:
        self._log = log
        served = () if "--policy" in options else ("--bundle", "ball")
        words = [*command, "serve", *served, "--port", "0", *options]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
        self.tls: ssl.SSLContext | None = None
        until(lambda: "status page" in self.log or self.process.poll() is not None, "the server starts")
        found = re.search(r"^serving [\w-]+ on wss?://127\.0\.0\.1:(\d+); status page ", self.log, re.MULTILINE)
        assert found, self.log
        self.port = int(found[1])

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        return self._log.read_text(errors="replace")

    @property
    def memory_kb(self) -> int:
        """Its resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[1])  # type: ignore[index]

    def http(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        """One request on a connection of its own; a mapping is sent as JSON."""
        if isinstance(body, dict):
            body, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        kind = http.client.HTTPConnection if self.tls is None else http.client.HTTPSConnection
        options: dict[str, Any] = {} if self.tls is None else {"context": self.tls}
        connection = kind("127.0.0.1", self.port, timeout=PATIENCE, **options)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Response(response.status, response.headers, response.read())
        finally:
            connection.close()

    def raw(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    @contextmanager
    def connect(self, path: str = "/v1/stream", **headers: str) -> Iterator[Stream]:
        """A WebSocket before its hello."""
        scheme = "ws" if self.tls is None else "wss"
        options: dict[str, Any] = {"compression": None, "max_size": None, "ssl": self.tls, "proxy": None}
        # Its own pings draw random numbers in a thread, which Hypothesis takes for those of a strategy.
        options["ping_interval"] = None
        with connect(
            f"{scheme}://127.0.0.1:{self.port}{path}",
            additional_headers=headers,
            open_timeout=PATIENCE,
            **options,
        ) as connection:
            yield Stream(connection)

    @contextmanager
    def stream(self, hello: Fields, **headers: str) -> Iterator[Stream]:
        """A WebSocket that was welcomed."""
        with self.connect(**headers) as robot:
            assert robot.ask(hello)["type"] == "welcome"
            yield robot

    def counts(self, name: str, **headers: str) -> dict[tuple[str, ...], float]:
        """A metric's samples by their labels' values."""
        text = self.http("GET", "/metrics", **headers).body.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == name}

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for what it brings about."""
        until(condition, what)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Its exit status, once it ends by itself."""
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        """Ends it for good."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def until(condition: Callable[[], object], what: str) -> None:
    """Waits for what another process brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.01)


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def launch(
    command: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Starts servers that live as long as the module's tests; ``before`` is Python that runs first in their process."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as running:

        def start(*options: str, token: str = "", before: str = "") -> Server:
            log = folder / f"{len(list(folder.iterdir()))}.log"
            words = [*command[:-1], before + command[-1]]
            server = Server(words, {**environment, "SPECACT_TOKEN": token}, log, options)
            running.callback(server.end)
            return server

        yield start


@pytest.fixture(scope="module")
def server(launch: Start) -> Server:
    """One with every setting as it is."""
    return launch()


@pytest.fixture(scope="session")
def certify() -> Callable[[Path], None]:
    """Makes ``cert.pem`` and ``key.pem`` for 127.0.0.1 in a folder, others each time."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl to make a certificate")
    return _make_certificate


@pytest.fixture(scope="module")
def certificate(certify: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``cert.pem`` and ``key.pem``."""
    folder = tmp_path_factory.mktemp("tls")
    certify(folder)
    return folder


def _make_certificate(folder: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=robot server", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip


@pytest.fixture(scope="session")
def ball() -> Bundle:
    return load_bundle("ball")


@pytest.fixture(scope="session")
def hello(ball: Bundle) -> Fields:
    """What a device with this bundle says."""
    return hello_fields(Hello("tester", "codes", ball.codec.dialect.agreed))


@pytest.fixture(scope="session")
def windows(ball: Bundle) -> list[Window]:
    """Observations that differ."""
    rng = np.random.default_rng(0)
    return [
        Window(
            {
                name: rng.normal(size=ball.spec.target[name].window_shape).astype(np.float32)
                for name in ("state", "goal")
            }
        )
        for _ in range(40)
    ]
