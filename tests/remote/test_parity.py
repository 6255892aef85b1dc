"""A target on a server does what the same target does in this process, bit for bit."""

from __future__ import annotations

import dataclasses
import math
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.children import wait_for
from tests.remote.conftest import PATIENT_MS, QUICK, at, refusal, timeouts
from tests.robot.test_chunks import Timed
from tests.served import certify

import specact
from specact import Pair, SpeculativePolicy, calibrated_gate, load_pair
from specact.errors import BundleError, ConfigError, MissError, ObservationError, RemoteError
from specact.execution.player import LateVerdicts
from specact.execution.schedule import Execution, inpainting_of
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.families.chunks.pair import ChunkParts, PairSpec
from specact.families.chunks.policy import Chunk, Inpainting, spec_of
from specact.families.chunks.remote import target_endpoint
from specact.gates import ActionDeviation, Always, Gate
from specact.lab.rollout.processes import ServerProcess, serving
from specact.observation import ObservationHistory, Window
from specact.pair import LocalTarget, Pending
from specact.remote import Client, RemoteTarget, remote_verifier
from specact.rng import Role, StepAddress, stream
from specact.robot.chunks import ChunkRunner, ChunkSource, LocalSource
from specact.systems.corrector import CorrectorParts, CorrectorSpec, Staleness
from specact.types import ActionUnits, Miss, StepRecord, VirtualClock

pytestmark = pytest.mark.usefixtures("nothing_left")
SERVED, TOKEN = "ball-chase-flow", "open-sesame-0123456789"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("ball", "--max-batch", "1") as process:
        yield process


@pytest.fixture(scope="module")
def flow() -> FlowBundle:
    return load_flow(SERVED)


@pytest.fixture(scope="module")
def flow_server() -> Iterator[ServerProcess]:
    with serving(SERVED, "--max-batch", "1", environment={"SPECACT_TOKEN": TOKEN}) as process:
        yield process


def flow_pair(flow: FlowBundle) -> Pair[Any]:
    """A hasty draft, the same flow in a single step, beside the target that the server has."""
    units = ActionUnits.of_range(flow.units.low, flow.units.high)
    target = flow.policy()
    return ChunkParts("hasty", flow.policy(steps=1), units, PairSpec(flow.spec, 4, 0.3), lambda: target).pair()


def walk(policy: SpeculativePolicy, pair: Any, steps: int = 200) -> tuple[list[StepRecord], np.ndarray]:
    """Records and actions of a walk through the observations, in episodes of 50 steps."""
    rng, records, actions = np.random.default_rng(4), [], []
    fields = pair.observation.fields
    seen = {name: np.zeros(field.shape) for name, field in fields.items()}
    for step in range(steps):
        if step % 50 == 0:
            policy.reset(step // 50)
        seen = {name: np.clip(array + 0.05 * rng.standard_normal(array.shape), -0.8, 0.8) for name, array in
                seen.items()}  # fmt: skip
        due = policy.wants_inference
        actions.append(policy.act(seen))
        if due:
            assert policy.record is not None
            records.append(policy.record)
    return records, np.stack(actions)


def assert_same(first: tuple[list[StepRecord], np.ndarray], second: tuple[list[StepRecord], np.ndarray]) -> None:
    np.testing.assert_array_equal(first[1], second[1])
    for ours, theirs in zip(first[0], second[0], strict=True):
        assert (ours.address, ours.decision, ours.miss) == (theirs.address, theirs.decision, None)
        assert ours.origins.tolist() == theirs.origins.tolist()


@pytest.mark.parametrize("sampling", ["device", "server"])
@pytest.mark.parametrize("gate", ["always", "adahi"])
def test_codes(ball: Pair[Any], server: ServerProcess, sampling: Any, gate: str) -> None:
    make: Callable[[], Gate] = Always if gate == "always" else lambda: calibrated_gate(ball, "adahi", 0.6)
    local = walk(SpeculativePolicy(ball, make(), seed=5, robot=1), ball)
    with Client(at(server.port), ball.exchange.contract) as client:
        client.connect(60.0)
        verifier = remote_verifier(client, ball, PATIENT_MS, sampling)
        remote = walk(SpeculativePolicy(ball, make(), verifier=verifier, seed=5, robot=1), ball)
        sent = sum(record.decision.transmit for record in remote[0])
        assert client.counts["requests"] == sent and 0 < sent <= len(remote[0])
    assert_same(remote, local)


@pytest.mark.parametrize("protocol", ["specact", "openpi"])
@pytest.mark.parametrize("gate", [Always, lambda: ActionDeviation(0.05)], ids=["always", "adahi"])
def test_chunks(flow: FlowBundle, flow_server: ServerProcess, gate: Callable[[], Gate], protocol: str) -> None:
    pair = flow_pair(flow)
    local = walk(SpeculativePolicy(pair, gate(), seed=3, robot=1), pair)
    # The device needs no target.
    device = pair.composed(load_target=None)
    url = f"ws://127.0.0.1:{flow_server.port}"
    endpoint = target_endpoint(url if protocol == "specact" else f"openpi:{url}", TOKEN, None, device.exchange.contract)
    with Client(endpoint, device.exchange.contract) as client:
        assert client.connect(60.0).target == flow.fingerprint
        with pytest.raises(ConfigError, match="sampling"):
            remote_verifier(client, pair, PATIENT_MS, "server")
        verifier = remote_verifier(client, device, PATIENT_MS)
        assert_same(walk(SpeculativePolicy(device, gate(), verifier=verifier, seed=3, robot=1), pair), local)


class Held:
    """A target whose replies are looked at three control steps after they were asked for, whenever they come."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def submit(self, window: Window, address: StepAddress) -> Pending[Any]:
        request = self.target.submit(window, address)
        return Pending(request.result, lambda: self.policy.address.step > address.step + 2)

    def policy_of(self, pair: Pair[Any]) -> SpeculativePolicy:
        self.policy = SpeculativePolicy(
            pair, Staleness(0.5), verifier=pair.verifier(self), verdicts=LateVerdicts(math.inf), seed=3, robot=1
        )
        return self.policy


def test_a_corrector_whose_chunks_come_late(flow: FlowBundle, flow_server: ServerProcess) -> None:
    low, high = tuple(flow.units.low.tolist()), tuple(flow.units.high.tolist())
    spec = CorrectorSpec(flow.fingerprint, flow.spec, flow.spec.observation, low, high, ((0.1, 0.2),) * flow.spec.chunk)
    network: Any = SimpleNamespace(run=lambda window, rest, index: (window["state"][-1, :2] - rest[0], rest[1]))
    pair = CorrectorParts("corrected", network, spec, flow.policy).pair()
    local = walk(Held(LocalTarget(pair.target())).policy_of(pair), pair)
    assert 10 < sum(record.decision.transmit for record in local[0]) < 100
    device = pair.composed(load_target=None)
    endpoint = target_endpoint(f"ws://127.0.0.1:{flow_server.port}", TOKEN, None, device.exchange.contract)
    with Client(endpoint, device.exchange.contract) as client:
        client.connect(60.0)
        target: Any = RemoteTarget(client, device.exchange, PATIENT_MS)
        assert_same(walk(Held(target).policy_of(device), pair), local)


def test_a_reconnection_in_between_changes_nothing_and_another_target_is_not_listened_to(ball: Pair[Any]) -> None:
    local = walk(SpeculativePolicy(ball, Always(), seed=5), ball, 100)
    with (
        serving("ball", "--max-batch", "1") as first,
        timeouts(**QUICK),
        Client(at(first.port), ball.exchange.contract) as client,
    ):
        client.connect(60.0)
        policy = SpeculativePolicy(ball, Always(), verifier=remote_verifier(client, ball, PATIENT_MS), seed=5)
        assert_same(walk(policy, ball, 100), local)
        first.kill()
        with serving(SERVED, "--port", str(first.port)):
            wait_for(lambda: client.problem is not None and "codes" in client.problem)
            assert {record.miss for record in walk(policy, ball, 20)[0]} == {"disconnected"}
        with serving("ball", "--max-batch", "1", "--port", str(first.port)):
            wait_for(lambda: client.counts["connections"] == 2)
            assert_same(walk(policy, ball, 100), local)


def test_camera_frames_raw_or_as_jpeg() -> None:
    pytest.importorskip("PIL")
    pair = load_pair("pusht-camera")
    assert pair.path is not None
    window = pair.observation.zeros()
    rng = np.random.default_rng(0)
    for name in pair.parts.spec.target.images:
        window.arrays[name][:] = rng.integers(0, 200, window.arrays[name].shape[-1])
    target = pair.parts.target.infer(pair.parts.spec.target.select(window))
    with serving(Path(pair.path), "--max-batch", "1") as server:
        for quality, exact in ((None, True), (95, False)):
            with Client(at(server.port), pair.exchange.contract, jpeg_quality=quality) as client:
                client.connect(60.0)
                remote = RemoteTarget(client, pair.exchange, PATIENT_MS)
                answer = remote.submit(window, StepAddress(0, 0, 0, 0)).result()
                assert np.array_equal(answer.value.probs, target.probs) or not exact  # type: ignore[union-attr]
                np.testing.assert_allclose(answer.value.probs, target.probs, atol=0.2)  # type: ignore[union-attr]


def seen(step: int) -> dict[str, np.ndarray]:
    return {"state": np.full(12, 0.01 * step)}


def test_a_policy_by_its_address_is_the_policy(flow: FlowBundle, flow_server: ServerProcess) -> None:
    local = flow.policy()
    history = ObservationHistory(local.spec.observation)
    with specact.connect(f"ws://127.0.0.1:{flow_server.port}", token=TOKEN, deadline_ms=PATIENT_MS, seed=7) as policy:
        assert policy.spec == local.spec and policy.inpaints and policy.units is not None
        for edge, limit in ((-1.0, flow.units.low), (1.0, flow.units.high)):
            np.testing.assert_allclose(policy.units.centre + edge * policy.units.scale, limit, atol=1e-6)
        policy.observe(seen(9))
        history.push(seen(9))
        for step in range(3):
            window = history.push(seen(step))
            expected = local.infer(window, stream(7, Role.VERIFY, robot=0, episode=0, step=step))
            np.testing.assert_array_equal(policy(seen(step)), expected)
        assert policy.counts == {"steps": 3, "transmitted": 3, "missed": 0}
        policy.reset(episode=1)
        history.reset()
        window = history.push(seen(0))
        np.testing.assert_array_equal(policy(seen(0)), local.infer(window, stream(7, Role.VERIFY, robot=0, episode=1)))
        old = np.random.default_rng(0).uniform(-1, 1, (9, local.spec.actions)).astype(np.float32)
        inpainting = inpainting_of(old, 3, local.spec.chunk)
        continued = local.infer(window, stream(1, Role.VERIFY, robot=2, episode=3, step=4), inpainting)
        np.testing.assert_array_equal(policy.ask(window, StepAddress(1, 2, 3, 4), inpainting), continued)
        with pytest.raises(ObservationError, match="state"):
            policy({"pose": np.zeros(12)})


class Told:
    """A source that keeps how many actions under way it was told of."""

    def __init__(self, source: ChunkSource) -> None:
        self.spec, self.inpaints, self._source = source.spec, source.inpaints, source
        self.committed: list[int] = []

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        self.committed.append(0 if inpainting is None else len(inpainting.committed))
        return self._source.ask(window, address, inpainting)


def test_real_time_chunking_over_sockets_is_that_of_the_virtual_link(
    flow: FlowBundle, flow_server: ServerProcess, tiny_rtc: Path
) -> None:
    """By guidance, and of a policy trained for delays: the same actions, to the bit."""
    execution = Execution("rtc", 6, 4)

    def played(source: ChunkSource) -> tuple[list[NDArray[np.float32]], list[int]]:
        clock, told, sent = VirtualClock(), Told(source), []
        runner = ChunkRunner(Timed(told, clock, 0.14), execution, period_s=0.05, clock=clock, seed=3)
        for step in range(40):
            sent.append(runner.act(seen(step)))
            clock.sleep(0.05)
        return [action for action in sent if action is not None], told.committed

    with serving(str(tiny_rtc), "--max-batch", "1", environment={"SPECACT_TOKEN": TOKEN}) as process:
        for bundle, port in ((flow, flow_server.port), (load_flow(tiny_rtc), process.port)):
            with specact.connect(f"ws://127.0.0.1:{port}", token=TOKEN, deadline_ms=PATIENT_MS) as policy:
                (here, committed), remote = played(LocalSource(bundle.policy())), played(policy)
            np.testing.assert_array_equal(here, remote[0])
            assert committed == remote[1] and max(committed) == 3 and len(here) > 30


@pytest.mark.parametrize("wrong", [{"low": [0, 0]}, {"high": [1]}, {"low": [2, 2]}, {"low": "x"}, {"high": [1e300, 1]}])
def test_a_range_that_a_server_cannot_mean_is_refused(wrong: dict[str, Any], flow: FlowBundle) -> None:
    stated = flow.spec.describe() | {"low": [0.0, 0.0], "high": [1.0, 1.0]}
    assert spec_of(stated)[0] == flow.spec
    broken = flow.spec.describe() | wrong if wrong == {"low": [0, 0]} else stated | wrong
    with pytest.raises(BundleError, match="server"):
        spec_of(broken)


def test_what_cannot_be_connected_is_an_error_that_says_why(flow_server: ServerProcess, server: ServerProcess) -> None:
    url = f"ws://127.0.0.1:{flow_server.port}"
    with pytest.raises(RemoteError, match="token"):
        specact.connect(url, token="wrong" + TOKEN)
    with pytest.raises(ConfigError, match="deadline"):
        specact.connect(url, token=TOKEN, deadline_ms=0.0)
    with pytest.raises(ConfigError, match="codes"):
        specact.connect(f"ws://127.0.0.1:{server.port}")
    with pytest.raises(RemoteError, match="127"):
        specact.connect("ws://127.0.0.1:9", timeout=1.0)
    with specact.connect(url, token=TOKEN, deadline_ms=1e-3) as policy, pytest.raises(MissError) as caught:
        policy(seen(0))
    assert caught.value.cause in ("deadline", "expired", "disconnected")


def test_a_policy_that_does_not_inpaint_and_one_that_goes_away() -> None:
    with serving("ball#target") as process:
        policy = specact.connect(f"ws://127.0.0.1:{process.port}", deadline_ms=PATIENT_MS)
        assert not policy.inpaints
        assert policy({"state": np.zeros(8), "goal": np.zeros(2)}).shape == (5, 2)
    with policy, pytest.raises(MissError) as caught:
        policy({"state": np.zeros(8), "goal": np.zeros(2)})
    assert caught.value.cause == "disconnected"


def test_over_tls_with_a_token(ball: Pair[Any], tmp_path: Path) -> None:
    certify(tmp_path)
    files = ("--certificate", str(tmp_path / "cert.pem"), "--key", str(tmp_path / "key.pem"), "--max-batch", "1")
    local = walk(SpeculativePolicy(ball, Always(), seed=5), ball, 50)
    trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    with serving("ball", *files, environment={"SPECACT_TOKEN": TOKEN}) as server:
        guarded = dataclasses.replace(at(server.port), scheme="wss", token=TOKEN, tls=trusted)
        with Client(guarded, ball.exchange.contract) as client:
            client.connect(60.0)
            verifier = remote_verifier(client, ball, PATIENT_MS)
            assert_same(walk(SpeculativePolicy(ball, Always(), verifier=verifier, seed=5), ball, 50), local)
        for wrong, word in (
            (dataclasses.replace(guarded, token="x" * 20), "token"),
            (dataclasses.replace(guarded, tls=None), "certificate"),
            (dataclasses.replace(guarded, host="localhost"), "certificate"),
            (at(server.port), "wss"),
        ):
            with Client(wrong, ball.exchange.contract) as client:
                assert word in refusal(client)
