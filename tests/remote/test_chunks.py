"""A chunk policy as the target on a real server: what it answers, and a robot driven by a pair of chunk policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from specact import SpeculativePolicy, load_bundle
from specact.errors import ConfigError
from specact.families.chunks.bundle import FlowBundle, load_flow
from specact.families.chunks.pair import ChunkPair
from specact.families.chunks.wire import spec_of
from specact.gates import ActionDeviation, Always, Gate, Never
from specact.lab.processes import ServerProcess, serving
from specact.observation import Window, vectors
from specact.remote.client import Client, ClientSettings
from specact.remote.probe import probe
from specact.remote.target import RemoteTarget, remote_verifier
from specact.remote.transport import Endpoint
from specact.remote.websocket import WebSocketTransport
from specact.rng import Role, StepAddress, stream
from specact.types import Origin, StepRecord
from specact.units import ActionUnits
from specact.verification import Answer, LocalTarget, Verifier
from specact.wire.handshake import Hello, hello_fields, read_welcome
from specact.wire.messages import Reply, Request, read_reply, request_fields
from specact.wire.sizes import max_message_bytes

pytestmark = pytest.mark.usefixtures("nothing_left")
PATIENT_MS = 20_000.0
SERVED = "ball-chase-flow"
WaitFor = Callable[..., float]


@pytest.fixture(scope="module")
def flow() -> FlowBundle:
    return load_flow(SERVED)


@pytest.fixture(scope="module")
def chunk_server() -> Iterator[ServerProcess]:
    """One request per inference: a remote chunk is the local one to its last bit."""
    with serving(SERVED, "--max-batch", "1") as process:
        yield process


def pair_of(flow: FlowBundle, accept_within: float, execute: int = 4) -> ChunkPair:
    """A hasty draft, the same flow in a single step, beside the target that the server has."""
    units = ActionUnits.of_range(flow.units.low, flow.units.high)
    target = flow.policy()
    return ChunkPair("hasty", flow.policy(steps=1), units, flow.spec, lambda: target, execute, accept_within)


def window(flow: FlowBundle, seed: int) -> Window:
    rng = np.random.default_rng(seed)
    seen = flow.spec.observation
    return Window(
        {name: rng.uniform(-0.5, 0.5, field.window_shape).astype(np.float32) for name, field in seen.fields.items()}
    )


def local_chunk(flow: FlowBundle, seen: Window, address: StepAddress) -> np.ndarray:
    """What the target says, drawn from this address's own stream."""
    seed, robot, episode, step = address
    rng = stream(seed, Role.VERIFY, robot=robot, episode=episode, step=step)
    return flow.policy().infer(seen, rng)


def at(child: ServerProcess, scheme: str = "ws") -> Endpoint:
    return Endpoint(scheme, "127.0.0.1", child.port)


# ---- its answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_chunk_from_the_server_is_the_local_one_bit_for_bit(
    flow: FlowBundle, chunk_server: ServerProcess, scheme: str
) -> None:
    pair = pair_of(flow, 0.0)
    with Client(at(chunk_server, scheme), pair.codec.dialect) as client:
        welcome = client.connect(10.0)
        assert (welcome.bundle, welcome.family, spec_of(welcome.spec)) == (SERVED, "chunks", flow.spec)
        target = RemoteTarget(client, pair.codec, PATIENT_MS)
        here = LocalTarget(pair.target)
        others = 0
        for step in range(20):
            seen, address = window(flow, step % 7), StepAddress(5, 2, 1, step)
            answer = target.submit(seen, address).result()
            assert isinstance(answer, Answer)
            np.testing.assert_array_equal(answer.value, local_chunk(flow, seen, address))
            again = here.submit(seen, address).result()
            assert isinstance(again, Answer)
            np.testing.assert_array_equal(answer.value, again.value)
            # The wrong variant: the same window at another step is another chunk.
            others += not np.array_equal(answer.value, local_chunk(flow, seen, address._replace(step=step + 1)))
        assert others == 20
        # Asked once more, in another order, it says the same.
        for step in (7, 3, 11):
            seen, address = window(flow, step % 7), StepAddress(5, 2, 1, step)
            answer = target.submit(seen, address).result()
            assert isinstance(answer, Answer)
            np.testing.assert_array_equal(answer.value, local_chunk(flow, seen, address))


def test_in_a_batch_each_chunk_is_drawn_from_its_own_request_s_stream(flow: FlowBundle) -> None:
    """In a batch the last bits may differ; another row's noise would differ in the first."""
    codec = pair_of(flow, 0.0).codec
    dialect = codec.dialect
    with serving(SERVED, "--max-batch", "4", "--max-wait-ms", "20000") as child:
        transport = WebSocketTransport(at(child), 10.0, max_message_bytes(dialect))
        try:
            transport.send("hello", transport.encode(hello_fields(Hello("arm", dialect.family, dialect.agreed))), 10.0)
            assert transport.receive(10.0) is not None
            for batch in range(3):
                requests = [
                    Request("infer", identity, PATIENT_MS, window(flow, 0), StepAddress(9, identity, batch, 3))
                    for identity in range(4 * batch, 4 * batch + 4)
                ]
                for request in requests:
                    fields = request_fields(request, dialect.observation)
                    transport.send("infer", transport.encode(fields), 10.0)
                chunks = {}
                for _ in requests:
                    payload = transport.receive(30.0)
                    assert payload is not None
                    reply = read_reply(transport.decode(payload), dialect.exchanges["infer"])
                    assert isinstance(reply, Reply) and reply.times.batch == 4
                    chunks[reply.id] = codec.read(reply.arrays)
                for request in requests:
                    alone = local_chunk(flow, request.window, request.address)
                    np.testing.assert_allclose(chunks[request.id], alone, atol=1e-3)
                # One window, four addresses: four chunks, further apart than rounding.
                ones = list(chunks.values())
                assert all(np.abs(one - ones[0]).max() > 2e-3 for one in ones[1:])
        finally:
            transport.close()


def test_a_server_of_chunks_verifies_nothing(flow: FlowBundle, chunk_server: ServerProcess) -> None:
    pair = pair_of(flow, 0.3)
    with Client(at(chunk_server), pair.codec.dialect) as client:
        client.connect(10.0)
        with pytest.raises(ConfigError, match=r"cannot verify for the family 'chunks'.*choose sampling on the device"):
            remote_verifier(client, pair, PATIENT_MS, "server")
        measured = probe(client, 3, 0.0)
        assert measured.lost == 0 and (measured.target_ms > 0.0).all()


# ---- a robot --------------------------------------------------------------------------------------------------------


def drive(policy: SpeculativePolicy, flow: FlowBundle, steps: int = 60) -> tuple[list[StepRecord], np.ndarray]:
    """The records and actions of a walk through the state space, in two episodes."""
    rng = np.random.default_rng(4)
    fields = flow.spec.observation.fields
    walk = np.zeros(sum(field.shape[0] for field in fields.values()))
    records: list[StepRecord] = []
    actions = []
    for step in range(steps):
        if step % 30 == 0:
            policy.reset(step // 30)
        walk = np.clip(walk + 0.05 * rng.standard_normal(len(walk)), -0.8, 0.8)
        parts = np.split(walk, np.cumsum([field.shape[0] for field in fields.values()])[:-1])
        due = policy.wants_inference
        actions.append(policy.act(dict(zip(fields, parts, strict=True))))
        if due:
            assert policy.record is not None
            records.append(policy.record)
    return records, np.stack(actions)


GATES: dict[str, Callable[[], Gate]] = {"always": Always, "deviation": lambda: ActionDeviation(0.05)}


@pytest.mark.parametrize("scheme", ["ws", "http"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("accept_within", [0.0, 0.3])
def test_a_robot_with_a_remote_target_does_what_it_does_with_a_local_one(
    flow: FlowBundle, chunk_server: ServerProcess, scheme: str, gate: str, accept_within: float
) -> None:
    pair = pair_of(flow, accept_within)
    records, actions = drive(SpeculativePolicy(pair, GATES[gate](), seed=3, robot=1), flow)
    with Client(at(chunk_server, scheme), pair.codec.dialect) as client:
        client.connect(10.0)
        # The device needs no target.
        device = dataclasses.replace(pair, load_target=None)
        verifier = remote_verifier(client, device, PATIENT_MS)
        policy = SpeculativePolicy(device, GATES[gate](), verifier=verifier, seed=3, robot=1)
        remote_records, remote_actions = drive(policy, flow)
    np.testing.assert_array_equal(remote_actions, actions)
    assert [record.miss for record in remote_records] == [None] * len(records)
    for ours, theirs in zip(remote_records, records, strict=True):
        assert ours.address == theirs.address and ours.decision == theirs.decision
        assert ours.origins.tolist() == theirs.origins.tolist()
        assert (ours.outcome is None) == (theirs.outcome is None)
    sent = sum(record.decision.transmit for record in records)
    assert 0 < sent <= len(records) and client.counts["sent"] == sent
    if gate == "always":
        assert sent == len(records)
        origins = np.concatenate([record.origins for record in records])
        # With a threshold some drafted actions are kept and some replaced; without one none is kept.
        assert (Origin.ACCEPTED in origins) == (accept_within > 0.0) and Origin.REPLACED in origins
        assert policy.counts["accepted"] == int((origins == Origin.ACCEPTED).sum())
        assert policy.counts["verified"] == len(origins)


def test_without_a_server_the_draft_is_executed_and_the_steps_are_missed(flow: FlowBundle) -> None:
    pair = dataclasses.replace(pair_of(flow, 0.3), load_target=None)
    _, drafted = drive(SpeculativePolicy(pair, Never(), verifier=_nobody(pair), seed=3), flow)
    with Client(Endpoint("ws", "127.0.0.1", 1), pair.codec.dialect) as client:
        policy = SpeculativePolicy(pair, Always(), verifier=remote_verifier(client, pair, 20.0), seed=3)
        records, actions = drive(policy, flow)
    np.testing.assert_array_equal(actions, drafted)
    assert {record.miss for record in records} == {"disconnected"}
    assert all((record.origins == Origin.FALLBACK).all() for record in records)


def _nobody(pair: ChunkPair) -> Verifier:
    """A verifier that is never asked."""

    class Nobody:
        def submit(self, seen: Any, address: StepAddress) -> Any:
            raise AssertionError

    return pair.verifier(Nobody())


# ---- who is served something else -----------------------------------------------------------------------------------


def test_a_device_of_another_family_or_another_spec_is_refused_and_told_why(
    flow: FlowBundle, chunk_server: ServerProcess, refusal: Callable[[Client], str]
) -> None:
    said = pair_of(flow, 0.0).codec.dialect
    longer = {**said.agreed, "chunk": flow.spec.chunk + 1}
    seen = {**said.agreed, "observation": vectors(1, state=3).describe()}
    for dialect, why in (
        (load_bundle("ball").codec.dialect, "of the family 'codes', the server chunks"),
        (dataclasses.replace(said, agreed=longer), f"differ in chunk {flow.spec.chunk + 1} / {flow.spec.chunk};"),
        (dataclasses.replace(said, agreed=seen), "differ in observation.fields.state.shape [3] / [12]"),
    ):
        with Client(at(chunk_server), dialect) as client:
            assert why in refusal(client)


def test_a_server_that_comes_back_with_something_else_is_not_listened_to(flow: FlowBundle, wait_for: WaitFor) -> None:
    pair = pair_of(flow, 0.0)
    settings = ClientSettings(first_delay_s=0.02, longest_delay_s=0.2)
    with serving(SERVED) as first, Client(at(first), pair.codec.dialect, settings=settings) as client:
        client.connect(10.0)
        policy = SpeculativePolicy(pair, Always(), verifier=remote_verifier(client, pair, PATIENT_MS), seed=3)
        records, _ = drive(policy, flow, 8)
        assert all(record.outcome is not None for record in records)
        port = first.port
        first.kill()
        with serving("ball", "--port", str(port)) as other:
            wait_for(lambda: client.problem is not None and "family 'chunks', the server codes" in client.problem)
            assert client.counts["connections"] == 1
            records, _ = drive(policy, flow, 8)
            assert {record.miss for record in records} == {"disconnected"}
            other.kill()
        with serving(SERVED, "--port", str(port)):
            wait_for(lambda: client.problem is None and client.counts["connections"] == 2)
            records, _ = drive(policy, flow, 8)
            assert all(record.outcome is not None for record in records)


def test_a_device_that_expects_nothing_is_told_what_is_served(flow: FlowBundle, chunk_server: ServerProcess) -> None:
    transport = WebSocketTransport(at(chunk_server), 10.0, 1 << 16)
    try:
        transport.send("hello", transport.encode(hello_fields(Hello("curious", None, {}))), 10.0)
        payload = transport.receive(10.0)
        assert payload is not None
        welcome = read_welcome(transport.decode(payload))
    finally:
        transport.close()
    assert welcome.family == "chunks" and spec_of(welcome.spec) == flow.spec
    assert welcome.target == flow.fingerprint and len(welcome.target) == 16
