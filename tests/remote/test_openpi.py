"""A target on a server of openpi's protocol: ours, openpi's own, and one that misbehaves."""

from __future__ import annotations

import asyncio
import importlib
import os
import runpy
import select
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.children import wait_for
from tests.remote.conftest import (
    CONTRACT,
    PATIENT_MS,
    FakeServer,
    Peer,
    Question,
    answer_to,
    asking,
    honest,
    listening,
    misbehaving,
    refusal,
)
from tests.remote.test_parity import SERVED, flow_pair

import specact
from specact.errors import BundleError, ConfigError, MissError
from specact.families.chunks.flow import load_flow
from specact.families.chunks.remote import RemotePolicy, openpi_source, target_endpoint
from specact.lab.rollout.processes import serving
from specact.load import load_policy
from specact.observation import Field, Window
from specact.remote.client import Client
from specact.remote.openpi import Key
from specact.wire import openpi

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_more_steps_than_pings_are_allowed_and_a_pair_with_another_policy_is_refused() -> None:
    flow = load_flow(SERVED)
    with serving(SERVED, "--max-batch", "1") as server:
        url = f"openpi:ws://127.0.0.1:{server.port}"
        with specact.connect(url, deadline_ms=PATIENT_MS) as policy:
            for _ in range(450):
                policy({"state": np.zeros(12)})
            assert not policy.inpaints and policy.client.counts["connections"] == 1
        longer = msgspec.structs.replace(flow.spec, chunk=flow.spec.chunk + 1)
        pair = flow_pair(flow)
        spec = msgspec.structs.replace(pair.parts.spec, target=longer)
        contract = pair.composed(spec=spec).exchange.contract
        with Client(target_endpoint(url, None, None, contract), contract) as client:
            assert "differ in action_horizon 16 / 17" in refusal(client)


DESCRIPTION = """
chunk = 3
actions = 2
rate_hz = 20.0
low = [-500.0, -500.0]
high = [500.0, 500.0]
[observation.state]
shape = [2]
"""


@pytest.mark.parametrize("repeat", ["while the next request is on its way", "as its reply"])
def test_a_reply_that_comes_again_is_no_reply_to_the_next_request(repeat: str) -> None:
    def behave(server: FakeServer, peer: Peer, question: Question) -> None:
        told = server.questions[0] if repeat == "as its reply" and len(server.questions) == 2 else question
        peer.say(server.reply(told, server_timing={"infer_ms": 1.5}))
        if repeat != "as its reply" and len(server.peers) == 1:
            # The next request has arrived, and is not read yet.
            select.select([peer.side], [], [], 60)
            honest(server, peer, question)

    with misbehaving("openpi") as (server, port), asking("openpi", port) as device:
        server.behave = behave
        assert device.asks(2) == [None, "disconnected"]
        wait_for(lambda: device.client.counts["connections"] == 2)
        assert device.asks(6) == [None] * 6


def test_metadata_of_others_means_what_they_like_and_says_no_policy() -> None:
    with misbehaving("openpi") as (server, port):
        server.greeting = openpi.encode({"observation": 1, "action_horizon": 50, "bundle": ["x"], "a": np.zeros(3)})
        with asking("openpi", port) as device:
            assert device.client.connect(10.0).bundle == "openpi"
        with pytest.raises(BundleError, match="TOML"):
            openpi_source(f"openpi:ws://127.0.0.1:{port}", None, None, 10.0)


CAMERAS = """
chunk = 3
actions = 2
rate_hz = 20.0
instruction = true
endpoint = true
low = [-500.0, -500.0]
high = [500.0, 500.0]
[observation.state]
shape = [2]
history = 2
input = "observation/state"
[observation.gripper]
shape = [1]
[observation."image.front"]
shape = [4, 6, 3]
dtype = "uint8"
input = "observation/image"
channels_first = true
[observation."image.wrist"]
shape = [2, 3, 3]
dtype = "uint8"
history = 0
"""


def test_a_described_policy_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "robot.toml").write_text(CAMERAS)
    monkeypatch.setenv("SPECACT_TOKEN", "correct horse battery staple")

    seen: dict[str, Any] = {}
    peers: list[Peer] = []

    def serve(side: socket.socket) -> None:
        peers.append(Peer(side, openpi.encode({})))
        for message in peers[-1].messages():
            seen.update(openpi.decode(message))
            peers[-1].say(openpi.encode({"actions": answer_to(seen["observation/state"][1, 0])}))

    with listening(serve) as port:
        source = f"openpi:ws://127.0.0.1:{port}/some/where#{tmp_path / 'robot.toml'}"
        address, spec, _ = openpi_source(source, None, None, 1.0)
        assert spec.observation["image.front"] == Field((4, 6, 3), "uint8", 1)
        assert address.keys["image.front"] == Key("observation/image", channels_first=True)
        monkeypatch.chdir(tmp_path)
        loaded = load_policy(f"openpi:ws://127.0.0.1:{port}/some/where#robot.toml")
        assert loaded.units is not None and (loaded.name, loaded.fingerprint) == ("openpi", "")
        front = np.arange(72, dtype=np.uint8).reshape(1, 4, 6, 3)
        arrays: dict[str, np.ndarray] = {
            "state": np.array([[1, 2], [600, 4]], np.float32), "gripper": np.array([[0.5]], np.float32),
            "image.front": front, "image.wrist": np.zeros((2, 3, 3), np.uint8),
        }  # fmt: skip
        assert isinstance(loaded.policy, RemotePolicy)
        with loaded.policy as policy:
            chunk = policy.infer(Window(arrays, "fold it"), np.random.default_rng(0))
        assert len(peers) == 1
        # What is beyond the range is not executed.
        np.testing.assert_array_equal(chunk, [[500, 1], [500, 2], [500, 3]])
        assert {name: np.shape(value) for name, value in seen.items()} == {
            "observation/state": (2, 2), "observation/gripper": (1,), "observation/image": (3, 4, 6),
            "observation/image/wrist": (2, 3, 3), "prompt": (), "endpoint": (),
        }  # fmt: skip
        np.testing.assert_array_equal(seen["observation/image"], np.moveaxis(front[0], -1, 0))
        assert (seen["prompt"], seen["endpoint"]) == ("fold it", "infer")
        assert {(peer.path, peer.headers.get("Authorization")) for peer in peers} == {
            ("/some/where", "Api-Key correct horse battery staple"),
        }  # fmt: skip


ADDRESSES = ("", "127.0.0.1:8000", "http://127.0.0.1:8000", "ws://", "ws://a:b", "ws://a:8000?x=1", "ws://me@a:8000",
             "ws://a:70000", "ws://a b:8000")  # fmt: skip
DESCRIPTIONS = {
    DESCRIPTION.replace("chunk = 3", "chunk = 4"): "chunk", DESCRIPTION.replace("low", "lowest"): "lowest",
    DESCRIPTION + "channels_first = true\n": "uint8", "": "chunk", DESCRIPTION.replace("[2]", "[0]"): "shape",
}  # fmt: skip


def test_addresses_and_descriptions_that_cannot_be_used_and_a_pair_of_codes_are_refused(tmp_path: Path) -> None:
    contract, file = CONTRACT, tmp_path / "robot.toml"
    for address in ADDRESSES:
        with pytest.raises(ConfigError):
            target_endpoint(f"openpi:{address}", None, None, contract)
    source = f"openpi:ws://127.0.0.1:1#{file}"
    file.write_text(DESCRIPTION)
    target_endpoint(source, None, None, contract)
    with pytest.raises(ConfigError, match="codes"):
        target_endpoint(source, None, None, specact.load_pair("ball").exchange.contract)
    for text, name in DESCRIPTIONS.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=name):
            target_endpoint(source, None, None, contract)


def test_what_a_server_says_of_its_error_reaches_the_one_who_asks(tmp_path: Path) -> None:
    (tmp_path / "robot.toml").write_text(DESCRIPTION)
    trace = 'Traceback:\n  File "p.py"\nValueError: no camera\x1b\n'
    with misbehaving("openpi") as (server, port):
        server.behave = lambda server, peer, question: peer.say(trace)
        with specact.connect(f"openpi:ws://127.0.0.1:{port}#{tmp_path / 'robot.toml'}") as policy:
            assert policy.client.failure is None
            with pytest.raises(MissError, match=r"\(refused: ValueError: no camera\?\)"):
                policy({"state": np.zeros(2)})


def openpis_server() -> Any:
    """openpi's server class, where it is importable, or in the checkout that SPECACT_OPENPI names."""
    pytest.importorskip("openpi_client", reason="needs openpi-client (see the Makefile)")
    name = "openpi.serving.websocket_policy_server"
    if (checkout := os.environ.get("SPECACT_OPENPI")) is None:
        pytest.importorskip(name, reason="needs openpi, or a checkout of it in SPECACT_OPENPI")
        return importlib.import_module(name).WebsocketPolicyServer
    path = Path(checkout) / "src" / Path(*name.split(".")).with_suffix(".py")
    return runpy.run_path(str(path))["WebsocketPolicyServer"]


def test_openpis_own_server() -> None:
    class Policy:
        def infer(self, seen: dict[str, Any]) -> dict[str, Any]:
            number = seen["observation/state"][0]
            if number == 3:
                raise ValueError("boom")
            return {"actions": answer_to(number)}

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = openpis_server()(Policy(), host="127.0.0.1", port=port, metadata={"name": "pi0"})
    loop = asyncio.new_event_loop()
    task = loop.create_task(server.run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        with asking("openpi", port) as device:
            # It says why and hangs up.
            assert device.asks(3) == [None, None, "refused"]
            wait_for(lambda: device.client.counts["connections"] == 2)
            assert device.ask() is None
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
