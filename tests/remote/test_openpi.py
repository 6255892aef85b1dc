"""A target on a server of openpi's protocol: ours, openpi's own, and one that misbehaves."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import random
import runpy
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.children import wait_for
from tests.remote.conftest import PATIENT_MS, Peer, listening
from tests.remote.test_parity import SERVED, flow_pair

import specact
from specact import Pair
from specact.errors import BundleError, ConfigError, RemoteError
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.families.chunks.openpi import openpi_endpoint, openpi_source
from specact.families.chunks.pair import ChunkParts
from specact.families.chunks.sources import chunk_policy
from specact.lab.rollout.processes import ServerProcess, serving
from specact.load import load_policy
from specact.observation import Field, Window
from specact.remote.client import Client, ClientSettings
from specact.remote.openpi import Key, OpenpiEndpoint
from specact.remote.target import RemoteTarget
from specact.rng import StepAddress
from specact.types import ActionUnits, Miss
from specact.wire import openpi

pytestmark = pytest.mark.usefixtures("nothing_left")
QUICK = ClientSettings(first_delay_s=0.01, longest_delay_s=0.05, silence_s=0.3)


@pytest.fixture(scope="module")
def flow() -> FlowBundle:
    return load_flow(SERVED)


@pytest.fixture(scope="module")
def chunk_server() -> Iterator[ServerProcess]:
    """One request per inference: a remote chunk is the local one to its last bit."""
    with serving(SERVED, "--max-batch", "1") as process:
        yield process


def endpoint(pair: Pair[Any], port: int, more: str = "") -> OpenpiEndpoint:
    return openpi_endpoint(f"openpi:ws://127.0.0.1:{port}{more}", None, None, pair.exchange.contract)


# ---- our own server -------------------------------------------------------------------------------------------------


def test_more_steps_than_pings_are_allowed(flow: FlowBundle, chunk_server: ServerProcess) -> None:
    with specact.connect(f"openpi:ws://127.0.0.1:{chunk_server.port}", deadline_ms=PATIENT_MS) as policy:
        state = np.zeros(12)
        for _ in range(450):
            policy({"state": state})
        assert not policy.inpaints
        assert policy.client.counts["connections"] == 1


def test_a_pair_with_another_policy_is_refused(flow: FlowBundle, chunk_server: ServerProcess) -> None:
    pair = flow_pair(flow)
    other = pair.composed(target_spec=msgspec.structs.replace(flow.spec, chunk=flow.spec.chunk + 1))
    with (
        Client(endpoint(other, chunk_server.port), other.exchange.contract) as client,
        pytest.raises(RemoteError, match="differ in action_horizon 16 / 17"),
    ):
        client.connect(0.5)


# ---- somebody else's server -----------------------------------------------------------------------------------------

DESCRIPTION = """
chunk = 3
actions = 2
rate_hz = 20.0
low = [-500.0, -500.0]
high = [500.0, 500.0]
[observation.state]
shape = [2]
"""
RANGE = ActionUnits.of_range(np.full(2, -500, np.float32), np.full(2, 500, np.float32))


def answer_to(number: float) -> np.ndarray:
    """The chunk for the state that begins with this number: no other state has it."""
    return np.array([[number, 1.0], [number, 2.0], [number, 3.0]])


def honest(seen: dict[str, Any]) -> dict[str, Any]:
    return {"actions": answer_to(seen["observation/state"][0]), "server_timing": {"infer_ms": 0.5}}


Behave = Callable[[Peer, dict[str, Any], int], None]


def answering(peer: Peer, seen: dict[str, Any], number: int) -> None:
    peer.say(openpi.encode(honest(seen)))


class Foreign:
    """A server of openpi's protocol.

    Attributes:
        behave: told of each observation, and of its number.
        metadata: said first.
        seen: every observation.
        peers: every connection.
    """

    def __init__(self) -> None:
        self.behave: Behave = answering
        self.metadata: bytes | str | None = openpi.encode({"reset_pose": [0.0, 1.0]})
        self.seen: list[dict[str, Any]] = []
        self.peers: list[Peer] = []
        self.released = threading.Event()

    def serve(self, side: socket.socket) -> None:
        self.peers.append(Peer(side, self.metadata))
        for message in self.peers[-1].messages():
            self.seen.append(openpi.decode(message))
            self.behave(self.peers[-1], self.seen[-1], len(self.seen))


@contextmanager
def foreign() -> Iterator[tuple[Foreign, int]]:
    there = Foreign()
    with listening(there.serve) as port:
        try:
            yield there, port
        finally:
            there.released.set()


@chunk_policy(observation={"state": (2,)}, chunk=3, actions=2, rate_hz=20.0, low=[-500, -500], high=[500, 500])
def draft(seen: Any) -> Any:
    return np.zeros((len(seen["state"]), 3, 2))


def foreign_pair(accept_within: float = 0.0) -> Pair[Any]:
    return ChunkParts("foreign", draft, RANGE, draft.spec, None, 1, accept_within).pair()


@contextmanager
def asking(port: int, deadline_ms: float, settings: ClientSettings = QUICK) -> Iterator[tuple[Client, Any]]:
    """A client, and what asks it about a step: the chunk or the cause of the miss."""
    pair = foreign_pair()
    with Client(endpoint(pair, port), pair.exchange.contract, settings=settings) as client:
        client.connect(10.0)
        target = RemoteTarget(client, pair.exchange, deadline_ms)

        def ask(number: float) -> Any:
            seen = Window({"state": np.array([[number, 0.0]], np.float32)})
            found = target.submit(seen, StepAddress(0, 0, 0, int(number))).result()
            return found.cause if isinstance(found, Miss) else found.value

        yield client, ask


def good(found: Any, number: float) -> bool:
    return isinstance(found, np.ndarray) and bool((found == answer_to(number)).all())


def until_good(ask: Any, first: int = 100) -> None:
    """Asks with one number after the other until there is an answer again, which has to be the right one."""
    numbers = iter(range(first, first + 400))

    def asked() -> bool:
        number = next(numbers)
        found = ask(number)
        assert isinstance(found, str) or good(found, number), f"another step's answer at {number}"
        return not isinstance(found, str)

    wait_for(asked)


def saying(actions: Any, **fields: Any) -> Callable[[Any], bytes]:
    return lambda seen: openpi.encode({"actions": actions, **fields})


WRONG: dict[str, tuple[Callable[[dict[str, Any]], bytes | str], str]] = {
    "text": (lambda seen: "Traceback (most recent call last): \x1b[31m boom", "refused"),
    "not finite": (saying(np.full((3, 2), np.nan)), "invalid"),
    "too large": (saying(np.full((3, 2), 1e300)), "invalid"),
    "too short": (saying(np.zeros((2, 2))), "invalid"), "one more axis": (saying(np.zeros((1, 3, 2))), "invalid"),
    "no array": (saying([[0.0, 1.0]] * 3), "invalid"), "flags": (saying(np.zeros((3, 2), bool)), "invalid"),
    "an object": (saying({"nd": True, "type": "|O", "data": b"."}), "invalid"),
    "nothing": (lambda seen: openpi.encode({}), "invalid"), "another message": (lambda seen: b"\xc1", "invalid"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reply_is_a_miss_and_the_next_step_is_answered_whatever_its_time(wrong: str) -> None:
    reply, cause = WRONG[wrong]
    times: list[Any] = [None, 3, {}, {"infer_ms": "x"}, {"infer_ms": float("nan")}, {"infer_ms": -1}, {"infer_ms": [1]}]

    def behave(peer: Peer, seen: dict[str, Any], number: int) -> None:
        right = openpi.encode({**honest(seen), "server_timing": times[number % len(times)]})
        peer.say(reply(seen) if number % 2 else right)

    with foreign() as (there, port), asking(port, PATIENT_MS) as (client, ask):
        there.behave = behave
        for number in range(1, 15):
            found = ask(number)
            assert isinstance(found, str) and found == cause if number % 2 else good(found, number)
        assert client.counts["connections"] == 1 and client.counts["sent"] == 14


def test_a_late_reply_is_discarded_and_counted() -> None:
    def behave(peer: Peer, seen: dict[str, Any], number: int) -> None:
        if number == 2:
            assert there.released.wait(60)
        peer.say(openpi.encode(honest(seen)))

    with (
        foreign() as (there, port),
        asking(port, 150.0, msgspec.structs.replace(QUICK, silence_s=60.0)) as (client, ask),
    ):
        there.behave = behave
        wait_for(lambda: good(ask(1), 1))
        assert ask(20) == "deadline"
        # Nothing more is sent while a reply is outstanding.
        assert ask(30) == "deadline" and len(there.seen) == 2 + client.counts["late"]
        there.released.set()
        until_good(ask)
        assert client.counts["late"] >= 1 and client.counts["connections"] == 1


def test_a_lost_reply_costs_the_connection() -> None:
    def behave(peer: Peer, seen: dict[str, Any], number: int) -> None:
        if number != 2:
            peer.say(openpi.encode(honest(seen)))

    with foreign() as (there, port), asking(port, 100.0) as (client, ask):
        there.behave = behave
        wait_for(lambda: good(ask(1), 1) and len(there.seen) == 1)
        assert ask(20) == "deadline"
        until_good(ask)
        assert client.counts["connections"] == 2


def test_a_reply_that_comes_again_while_the_next_request_is_on_its_way() -> None:
    def behave(peer: Peer, seen: dict[str, Any], number: int) -> None:
        answering(peer, seen, number)
        if len(there.peers) == 1:
            # The next request has arrived, and is not read yet.
            select.select([peer.side], [], [], 60)
            answering(peer, seen, number)

    with foreign() as (there, port), asking(port, PATIENT_MS) as (client, ask):
        there.behave = behave
        assert good(ask(1), 1)
        found = ask(2)
        assert isinstance(found, str) and found == "disconnected"
        assert client.problem is None or "answers no request" in client.problem
        wait_for(lambda: client.counts["connections"] == 2)
        assert all(good(ask(number), number) for number in range(3, 9))


def late(peer: Peer, seen: dict[str, Any], number: int) -> None:
    time.sleep(0.25 + 0.005 * (number % 30))
    answering(peer, seen, number)


def twice(peer: Peer, seen: dict[str, Any], number: int) -> None:
    answering(peer, seen, number)
    answering(peer, seen, number)


def failing(peer: Peer, seen: dict[str, Any], number: int) -> None:
    peer.say("Traceback")
    peer.raw(b"\x88\x02\x03\xf3")


BEHAVIOURS: list[Behave] = [
    *[answering] * 4, twice, late, failing, lambda peer, seen, number: None,
    lambda peer, seen, number: peer.say("no"), lambda peer, seen, number: peer.raw(b"\x88\x02\x03\xf3"),
    lambda peer, seen, number: peer.say(openpi.encode({"actions": answer_to(np.inf)})),
    lambda peer, seen, number: peer.side.shutdown(socket.SHUT_RDWR),
]  # fmt: skip


def test_whatever_it_does_no_step_gets_the_answer_of_another() -> None:
    rng, settings = random.Random(0), msgspec.structs.replace(QUICK, silence_s=0.15)
    with foreign() as (there, port), asking(port, 200.0, settings) as (client, ask):
        there.behave = lambda peer, seen, number: rng.choice(BEHAVIOURS)(peer, seen, number)
        causes = Counter[str]()
        for number in range(120):
            answer = ask(number)
            assert isinstance(answer, str) or good(answer, number), f"another step's answer at {number}"
            causes[answer if isinstance(answer, str) else "answered"] += 1
            wait_for(lambda: client.problem is None)
        assert causes["answered"] and len(causes) > 2
        there.behave = answering
        until_good(ask, 300)


# ---- what a server says first ---------------------------------------------------------------------------------------


METADATA: dict[str, bytes | str | None] = {
    "the model": "the model is not loaded\x1b[31m", "not a msgpack message": b"\xc1", "one map": b"\x01",
    "metadata in time": None, "exceeds limit": b"\x81\xa1a\xc6\x00\x20\x00\x00" + bytes(1 << 21),
}  # fmt: skip


@pytest.mark.parametrize("why", METADATA)
def test_a_server_that_does_not_speak_the_protocol(why: str) -> None:
    pair = foreign_pair()
    settings = msgspec.structs.replace(QUICK, connect_timeout_s=0.5)
    with foreign() as (there, port):
        there.metadata = METADATA[why]
        client = Client(endpoint(pair, port), pair.exchange.contract, settings=settings)
        with client, pytest.raises(RemoteError, match=why) as refused:
            client.connect(2.0)
        assert "\x1b" not in str(refused.value)


def test_metadata_of_others_means_what_they_like_and_says_no_policy() -> None:
    pair = foreign_pair()
    with foreign() as (there, port):
        there.metadata = openpi.encode({"observation": 1, "action_horizon": 50, "bundle": ["x"], "a": np.zeros(3)})
        with Client(endpoint(pair, port), pair.exchange.contract) as client:
            assert client.connect(10.0).bundle == "openpi"
        with pytest.raises(BundleError, match="TOML"):
            openpi_source(f"openpi:ws://127.0.0.1:{port}")


# ---- names, and what a description says -----------------------------------------------------------------------------

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

    def behave(peer: Peer, seen: dict[str, Any], number: int) -> None:
        peer.say(openpi.encode({"actions": answer_to(seen["observation/state"][1, 0])}))

    with foreign() as (there, port):
        there.behave = behave
        found = openpi_source(f"openpi:ws://127.0.0.1:{port}/some/where#{tmp_path / 'robot.toml'}")
        assert found.spec.observation["image.front"] == Field((4, 6, 3), "uint8", 1)
        assert found.endpoint.keys["image.front"] == Key("observation/image", channels_first=True)
        monkeypatch.chdir(tmp_path)
        with closing_clients() as clients:
            loaded = load_policy(f"openpi:ws://127.0.0.1:{port}/some/where#robot.toml")
            assert loaded.units is not None and (loaded.name, loaded.fingerprint) == ("127.0.0.1", "")
            front = np.arange(72, dtype=np.uint8).reshape(1, 4, 6, 3)
            arrays: dict[str, np.ndarray] = {
                "state": np.array([[1, 2], [600, 4]], np.float32),
                "gripper": np.array([[0.5]], np.float32),
                "image.front": front,
                "image.wrist": np.zeros((2, 3, 3), np.uint8),
            }
            chunk = loaded.policy.infer(Window(arrays, "fold it"), np.random.default_rng(0))
            assert len(clients) == 1
        # What is beyond the range is not executed.
        np.testing.assert_array_equal(chunk, [[500, 1], [500, 2], [500, 3]])
        seen = there.seen[-1]
        assert {name: np.shape(value) for name, value in seen.items()} == {
            "observation/state": (2, 2), "observation/gripper": (1,), "observation/image": (3, 4, 6),
            "observation/image/wrist": (2, 3, 3), "prompt": (), "endpoint": (),
        }  # fmt: skip
        np.testing.assert_array_equal(seen["observation/image"], np.moveaxis(front[0], -1, 0))
        assert (seen["prompt"], seen["endpoint"]) == ("fold it", "infer")
        assert {(peer.path, peer.headers.get("Authorization")) for peer in there.peers} == {
            ("/some/where", None), ("/some/where", "Api-Key correct horse battery staple"),
        }  # fmt: skip


@contextmanager
def closing_clients() -> Iterator[list[Client]]:
    """Policies that were loaded keep their connection as long as the process; here no longer than a test."""
    made, init = list[Client](), Client.__init__

    def noting(client: Client, *args: Any, **kwargs: Any) -> None:
        init(client, *args, **kwargs)
        made.append(client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "__init__", noting)
        try:
            yield made
        finally:
            for client in made:
                client.close()


ADDRESSES = ("", "127.0.0.1:8000", "http://127.0.0.1:8000", "ws://", "ws://a:b", "ws://a:8000?x=1", "ws://me@a:8000",
             "ws://a:70000", "ws://a b:8000")  # fmt: skip
DESCRIPTIONS = {
    DESCRIPTION.replace("chunk = 3", "chunk = 4"): "chunk", DESCRIPTION.replace("low", "lowest"): "lowest",
    DESCRIPTION + "channels_first = true\n": "uint8", "": "chunk", DESCRIPTION.replace("[2]", "[0]"): "shape",
}  # fmt: skip


def test_addresses_and_descriptions_that_cannot_be_used_and_a_pair_of_codes_are_refused(tmp_path: Path) -> None:
    contract, file = foreign_pair().exchange.contract, tmp_path / "robot.toml"
    for address in ADDRESSES:
        with pytest.raises(ConfigError):
            openpi_endpoint(f"openpi:{address}", None, None, contract)
    source = f"openpi:ws://127.0.0.1:1#{file}"
    file.write_text(DESCRIPTION)
    endpoint = openpi_endpoint(source, None, None, contract)
    with pytest.raises(ConfigError, match="JPEG"):
        Client(endpoint, contract, jpeg_quality=90)
    with pytest.raises(ConfigError, match="codes"):
        openpi_endpoint(source, None, None, specact.load_pair("ball").exchange.contract)
    for text, name in DESCRIPTIONS.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=name):
            openpi_endpoint(source, None, None, contract)


# ---- openpi's own server --------------------------------------------------------------------------------------------


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
            if number == 13:
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
        with asking(port, PATIENT_MS) as (client, ask):
            for number in (1, 2):
                assert good(ask(number), number)
            # It says why and hangs up.
            assert ask(13) == "refused"
            wait_for(lambda: client.counts["connections"] == 2)
            assert good(ask(14), 14)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
