"""A target on device and server, over real sockets: the same answers wherever its stages run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specact import Pair, SpeculativePolicy, calibrated_gate, load_pair
from specact.errors import BundleError, ConfigError, RemoteError
from specact.execution.verdicts import LateVerdicts
from specact.families.codes.pair import CodeVerifier, executed_codes, take_target
from specact.families.codes.sampling import CodeDistribution
from specact.gates import Always
from specact.lab.processes import ServerProcess, serving
from specact.lab.train.split import split_bundle
from specact.observation import Window
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.rng import StepAddress
from specact.systems.flash import FlashParts, Round, RoundRequest
from specact.systems.roboecc import (
    PRECISIONS,
    Bandwidths,
    Precision,
    SplitTarget,
    StagedFolder,
    StaticCut,
    measure_costs,
    placed_target,
    reader_of,
    split_contract,
)
from specact.types import Miss
from specact.verification import Answer, LocalTarget

PATIENT_MS = 20_000.0


@pytest.fixture(scope="module")
def bundle() -> Pair[Any]:
    return load_pair("ball")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> StagedFolder:
    return split_bundle("ball", tmp_path_factory.mktemp("split") / "ball")


@pytest.fixture(scope="module")
def client(folder: StagedFolder) -> Iterator[Client]:
    with serving(folder.path) as server, connected(server, folder) as client:
        yield client


def connected(server: ServerProcess, folder: StagedFolder) -> Client:
    client = Client(Endpoint("ws", "127.0.0.1", server.port), split_contract(folder.spec, folder.fingerprint))
    client.connect(20.0)
    return client


class Around:
    """Every cut in turn."""

    def __init__(self, cuts: range) -> None:
        self._cuts = itertools.cycle(cuts)

    def choose(self, current: int, seen: Bandwidths) -> int:
        return next(self._cuts)


def windows_of(bundle: Pair[Any], count: int) -> list[Window]:
    rng = np.random.default_rng(count)
    fields = bundle.parts.spec.target.fields
    return [
        Window({name: rng.uniform(-1, 1, field.window_shape).astype(np.float32) for name, field in fields.items()})
        for _ in range(count)
    ]


def answers(target: SplitTarget[Any], windows: list[Window]) -> list[CodeDistribution]:
    found = [target.submit(window, StepAddress(0, 0, 0, i)).result() for i, window in enumerate(windows)]
    assert not any(isinstance(one, Miss) for one in found), found
    return [one.value for one in found if isinstance(one, Answer)]


def test_every_cut_gives_the_very_bits_of_the_local_target_in_float32(
    bundle: Pair[Any], folder: StagedFolder, client: Client
) -> None:
    windows = windows_of(bundle, 5)
    for cut in range(folder.spec.stages + 1):
        target = placed_target(bundle, folder, client, PATIENT_MS, cut=cut, precision="float32")
        for window, found in zip(windows, answers(target, windows), strict=True):
            wanted = bundle.parts.target.infer(window)
            np.testing.assert_array_equal(found.probs, wanted.probs)
            np.testing.assert_array_equal(found.offsets, wanted.offsets)
        assert target.counts == {f"cut {cut}": 5, "switches": 0}


def test_fewer_bits_change_answers_a_little_and_never_at_the_ends(
    bundle: Pair[Any], folder: StagedFolder, client: Client
) -> None:
    windows = windows_of(bundle, 20)
    wanted = np.array([bundle.parts.target.infer(window).offsets for window in windows])
    worst: dict[Precision, float] = {}
    for precision in PRECISIONS:
        errors = []
        for cut in range(folder.spec.stages + 1):
            target = placed_target(bundle, folder, client, PATIENT_MS, cut=cut, precision=precision)
            found = np.array([answer.offsets for answer in answers(target, windows)])
            errors.append(float(np.abs(found - wanted).max()))
        assert errors[0] == errors[-1] == 0.0
        worst[precision] = max(errors)
    # The offsets are of the order of one.
    assert worst["float32"] == 0.0 < worst["float16"] < 0.01
    assert worst["float16"] < worst["uint8"] < 0.3


@pytest.mark.parametrize("method", ["adahi", "hybrid", "target"])
def test_any_method_acts_as_with_a_local_target_while_the_cut_wanders(
    bundle: Pair[Any], folder: StagedFolder, client: Client, method: str
) -> None:
    def policy(target: Any) -> SpeculativePolicy:
        gate = calibrated_gate(bundle, "deviation", rate=0.6) if method == "adahi" else Always()
        verifier = (
            CodeVerifier(target, bundle.parts.tokenizer, take_target) if method == "target" else bundle.verifier(target)
        )
        return SpeculativePolicy(bundle, gate, verifier=verifier, seed=4)

    chooser = Around(range(folder.spec.stages + 1))
    placed = SplitTarget(folder, reader_of(bundle, folder), client, chooser, PATIENT_MS, precision="float32")
    policies = [policy(placed), policy(LocalTarget(bundle.target()))]
    rng = np.random.default_rng(5)
    for _ in range(150):
        seen = {"state": rng.uniform(-1, 1, 8), "goal": rng.uniform(-1, 1, 2)}
        first, second = (one.act(seen) for one in policies)
        np.testing.assert_array_equal(first, second)
        records = [one.record for one in policies]
        assert records[0] is not None and records[1] is not None and records[0].miss is None
        if records[0].outcome is not None:
            np.testing.assert_array_equal(executed_codes(records[0]), executed_codes(records[1]))
    cuts = {name for name in placed.counts if name.startswith("cut")}
    assert len(cuts) == folder.spec.stages + 1 and placed.counts["switches"] > 10


def test_the_cut_of_an_inference_under_way_does_not_change(
    bundle: Pair[Any], folder: StagedFolder, client: Client
) -> None:
    fixed, (window, other) = StaticCut(2), windows_of(bundle, 2)
    target = SplitTarget(folder, reader_of(bundle, folder), client, fixed, PATIENT_MS, precision="float32")
    address = StepAddress(0, 0, 0, 0)
    first = target.submit(window, address)
    fixed.cut = 5
    under_way = first.result()
    following = target.submit(other, address.following).result()
    for found, seen in ((under_way, window), (following, other)):
        assert isinstance(found, Answer)
        np.testing.assert_array_equal(found.value.probs, bundle.parts.target.infer(seen).probs)
    assert target.counts == {"cut 2": 1, "cut 5": 1, "switches": 1}


def test_late_verdicts_come_from_split_targets_as_well(bundle: Pair[Any], folder: StagedFolder, client: Client) -> None:
    target = placed_target(bundle, folder, client, PATIENT_MS, cut=3)
    policy = SpeculativePolicy(bundle, Always(), verifier=bundle.verifier(target), verdicts=LateVerdicts(np.inf))
    for _ in range(50 * bundle.execute):
        policy.act({"state": np.zeros(8), "goal": np.zeros(2)})
    assert policy.counts["transmitted"] > 0 and target.counts["cut 3"] <= policy.counts["transmitted"]


def test_costs_are_measured_on_both_sides(bundle: Pair[Any], folder: StagedFolder, client: Client) -> None:
    costs, seen = measure_costs(folder, client, windows_of(bundle, 3))
    assert costs.stages == folder.spec.stages and len(seen) > 0
    assert costs.server_s.sum() > 0.0 and costs.device_s.sum() > 0.0
    assert costs.loads[-1] == pytest.approx(1.0) and costs.observation_bytes == bundle.parts.spec.target.nbytes
    chosen = placed_target(bundle, folder, client, PATIENT_MS)
    answers(chosen, windows_of(bundle, 3))
    assert sum(chosen.counts.values()) - chosen.counts["switches"] == 3


def test_a_device_with_other_stages_is_refused(bundle: Pair[Any], folder: StagedFolder, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="split that one: specact split"):
        reader_of(bundle, split_bundle("pusht", tmp_path / "pusht"))
    with serving(folder.path) as server:
        endpoint = Endpoint("ws", "127.0.0.1", server.port)
        for dialect in (split_contract(folder.spec, "0" * 16), bundle.exchange.contract):
            with Client(endpoint, dialect) as client, pytest.raises(RemoteError, match="deploy the same"):
                client.connect(3.0)


@pytest.mark.parametrize("lie", ["size", "precision", "finite", "outputs", "nothing"])
def test_an_answer_of_another_shape_precision_or_cut_is_not_sent(
    bundle: Pair[Any], folder: StagedFolder, lie: str
) -> None:
    told = {"STAGES": str(folder.path), "LIE": lie, "PYTHONPATH": ""}
    arguments = ["serve", "--policy", "tests.systems.lying:exchange", "--port", "0"]
    told["PYTHONPATH"] = f"{Path(__file__).parents[2] / 'src'}:{Path(__file__).parents[2]}"
    with ServerProcess(arguments, told) as server, connected(server, folder) as client:
        target = placed_target(bundle, folder, client, PATIENT_MS, cut=1, precision="float32")
        found = target.submit(windows_of(bundle, 1)[0], StepAddress(0, 0, 0, 0)).result()
        assert isinstance(found, Miss) and found.cause == "refused"


def test_a_missed_deadline_tells_that_the_link_carries_less(bundle: Pair[Any], folder: StagedFolder) -> None:
    with serving(folder.path) as server, connected(server, folder) as client:
        target = placed_target(bundle, folder, client, 1e-3, cut=2)
        assert isinstance(target.submit(windows_of(bundle, 1)[0], StepAddress(0, 0, 0, 0)).result(), Miss)
        assert target.last is not None and target.last.missed


def test_refusals_say_what_is_allowed(bundle: Pair[Any], folder: StagedFolder, client: Client) -> None:
    window, address = windows_of(bundle, 1)[0], StepAddress(0, 0, 0, 0)
    with pytest.raises(ConfigError, match="can be cut from 0 to 8, not at 9"):
        placed_target(bundle, folder, client, PATIENT_MS, cut=9)
    reader = reader_of(bundle, folder)
    with pytest.raises(ConfigError, match="needs a server"):
        SplitTarget(folder, reader, None, StaticCut(1), PATIENT_MS).submit(window, address)
    with pytest.raises(ConfigError, match="a cut lies between 0 and 8"):
        SplitTarget(folder, reader, client, StaticCut(9), PATIENT_MS).submit(window, address)
    with pytest.raises(ConfigError, match="unknown precision"):
        SplitTarget(folder, reader, client, StaticCut(1), PATIENT_MS, precision="float8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one window"):
        measure_costs(folder, client, [])
    alone = SplitTarget(folder, reader, None, StaticCut(0), PATIENT_MS)
    assert isinstance(alone.submit(window, address).result(), Answer)


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> StagedFolder:
    return split_bundle("pusht-flow", tmp_path_factory.mktemp("split") / "flow")


def flow_rounds(target: Any, pair: Pair[Any], count: int = 8) -> list[Round]:
    rng = np.random.default_rng(3)
    rounds = []
    for number in range(count):
        window = Window({"state": rng.uniform(0, 300, (2, 26)).astype(np.float32)})
        found = target.submit(window, StepAddress(0, 0, 0, number)).result()
        assert isinstance(found, Answer)
        rounds += [found.value.round(RoundRequest(full)) for full in (True, False)]
    return rounds


def test_a_flow_draws_the_same_chunks_wherever_its_prefix_is_computed(flow: StagedFolder) -> None:
    """Full rounds and FLASH's checks; the device draws the chunks from the prefix's cache."""
    pair = load_pair("pusht-flow", decoding="flash")
    assert isinstance(pair.parts, FlashParts) and flow.spec.stages > 2
    local = flow_rounds(LocalTarget(pair.target()), pair)
    with serving(flow.path) as server, connected(server, flow) as client:
        by_cut = [
            flow_rounds(placed_target(pair, flow, client, PATIENT_MS, cut=cut, precision="float32"), pair)
            for cut in range(flow.spec.stages + 1)
        ]
    for rounds in by_cut:
        for found, first, own in zip(rounds, by_cut[0], local, strict=True):
            np.testing.assert_array_equal(found.chunk, first.chunk)
            # In one network operators may be fused that lie in two networks otherwise.
            np.testing.assert_allclose(found.chunk, own.chunk, rtol=1e-3, atol=1e-2)
            assert (found.checked, found.full) == (first.checked, first.full)
    assert any(found.checked for found in local)


def test_stages_of_another_flow_and_other_families_are_refused(flow: StagedFolder, folder: StagedFolder) -> None:
    with pytest.raises(BundleError, match="has the stages of a network"):
        reader_of(load_pair("ball-chase-flow"), flow)
    with pytest.raises(BundleError, match="has the stages of a network"):
        reader_of(load_pair("pusht-flow"), folder)
    with pytest.raises(ConfigError, match="choose a pair of action codes or a flow policy"):
        reader_of(load_pair("relocate-tokens"), flow)
