"""RoboECC: the choice of a cut against brute force, stages and their wire format, and a target on device and server."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.served import served

from specact import Pair, load_pair
from specact.bundle.bundle import find_bundle
from specact.errors import BundleError, ConfigError, RemoteError, WireError
from specact.families.codes.sampling import CodeDistribution
from specact.families.tokens.policy import GREEDY, load_tokens
from specact.lab.rollout.processes import ServerProcess, serving
from specact.lab.train.split import split_bundle, split_tokens
from specact.load import load_exchange
from specact.observation import Window
from specact.pair import Answer, LocalTarget, Pending
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.rng import StepAddress
from specact.systems.flash import Round, RoundRequest
from specact.systems.flow import FlowParts
from specact.systems.roboecc import (
    Accounting,
    RoboeccRule,
    SmallestTotal,
    SplitTarget,
    StageCosts,
    adjusted_cut,
    best_cut,
    measure_costs,
    placed_target,
    total_s,
    within,
)
from specact.systems.staged import (
    PRECISIONS,
    Precision,
    SplitExchange,
    StagedFolder,
    TokenStages,
    Written,
    kind_at,
    load_staged,
    load_stages,
    pack,
    reader_of,
    split_contract,
    unpack,
)
from specact.types import Miss, OffloadTimes, Outcome
from specact.wire.exchange import Request


def random_costs(rng: np.random.Generator) -> StageCosts:
    """A chain of 2 to 9 stages with small whole numbers, so that there are ties."""
    count = int(rng.integers(2, 10))
    server, device, load = (rng.integers(0, 4, count).astype(float) for _ in range(3))
    crossing = np.concatenate([[0.0], rng.integers(1, 4, count)])
    return StageCosts(server, device, crossing, float(rng.integers(0, 4)), load)


def brute_total(costs: StageCosts, bandwidth: float, latency: float, accounting: str) -> list[float]:
    """T(k), term by term."""
    totals: list[float] = []
    for cut in range(costs.stages + 1):
        spent = float(sum(costs.server_s[:cut]) + sum(costs.device_s[cut:]))
        if accounting == "printed" and 0 < cut < costs.stages:
            spent += latency + costs.cut_bytes[cut] / bandwidth
        if accounting == "faithful" and cut > 0:
            spent += latency + (costs.observation_bytes + costs.cut_bytes[cut]) / bandwidth
        totals.append(spent)
    return totals


@pytest.mark.parametrize("accounting", ["faithful", "printed"])
def test_the_planner_equals_brute_force_on_random_chains(accounting: Accounting) -> None:
    rng = np.random.default_rng(1)
    tied = 0
    for _ in range(500):
        costs, bandwidth, latency = random_costs(rng), 2.0 ** rng.integers(-2, 3), float(rng.integers(0, 3))
        total = total_s(costs, bandwidth, latency, accounting)
        wanted = brute_total(costs, bandwidth, latency, accounting)
        np.testing.assert_array_equal(total, wanted)
        load = np.concatenate([[0.0], np.cumsum(costs.load)])
        budget = float(rng.choice(load))
        order = sorted((wanted[cut], load[cut], cut) for cut in range(costs.stages + 1) if load[cut] <= budget)
        assert best_cut(total, costs.loads, range(costs.stages + 1), budget) == order[0][2]
        tied += len(order) > 1 and order[0][0] == order[1][0]
    assert tied > 20  # ties were among them


def test_the_published_rule_takes_the_largest_activation_as_the_bandwidth_rises_and_the_smallest_as_it_falls() -> None:
    sizes = np.array([0.0, 8.0, 2.0, 8.0, 2.0, 1.0])
    pool = [1, 2, 3, 4]
    assert adjusted_cut(2, 1.5, -1.0, 1.0, pool, sizes) == 1  # of 1 and 3, as near, the earlier
    assert adjusted_cut(4, 1.5, -1.0, 1.0, pool, sizes) == 3
    assert adjusted_cut(1, -1.5, -1.0, 1.0, pool, sizes) == 2
    assert adjusted_cut(3, -1.5, -1.0, 1.0, pool, sizes) == 2
    assert adjusted_cut(4, -1.5, -1.0, 1.0, pool, sizes) == 4
    for change in (-1.0, 0.0, 1.0):
        assert adjusted_cut(3, change, -1.0, 1.0, pool, sizes) == 3


def seen(*bandwidths: float) -> list[tuple[float, float]]:
    return [(bandwidth, 1.0) for bandwidth in bandwidths]


def test_the_published_rule_ignores_the_total_and_the_smallest_total_does_not() -> None:
    # The largest activation is at the first cut, before the work that the device does slowly.
    costs = StageCosts(
        np.array([0.1, 0.1, 0.1]), np.array([0.1, 5.0, 0.1]), np.array([0.0, 9.0, 1.0, 1.0]), 1.0, np.ones(3)
    )
    rule, past = RoboeccRule(costs, [1, 2], lambda past: 100.0), seen(5.0, 6.0, 5.0, 6.0)
    first = rule(0, past)
    assert first == 2  # the planner's
    risen, total = rule(first, past), total_s(costs, 100.0)
    assert risen == 1 and total[1] > 10 * total[2]
    assert SmallestTotal(costs, [1, 2], lambda past: 100.0)(1, past) == 2
    # The rule itself: no change, no switch.
    calm = RoboeccRule(costs, [1, 2])
    assert [calm(2, past) for _ in range(3)] == [2, 2, 2]


def test_the_smallest_total_asks_first_and_looks_again_at_cut_0() -> None:
    costs = StageCosts(np.array([0.1, 0.1]), np.array([1.0, 1.0]), np.array([0.0, 1.0, 1.0]), 1.0, np.full(2, 0.5))
    chooser, slow = SmallestTotal(costs, range(3), look_every=3), seen(1e-3)
    assert chooser(0, []) == 2
    assert [chooser(0, slow) for _ in range(8)] == [0, 0, 0, 2, 0, 0, 0, 2]
    assert chooser(0, seen(1e3)) == 2
    assert SmallestTotal(costs, range(3), look_every=0)(0, slow) == 0
    assert SmallestTotal(costs, range(3), budget=0.5)(0, seen(1e3)) == 1
    assert SmallestTotal(costs, [0])(0, []) == 0


def test_cuts_that_are_none_or_cost_too_much_are_refused() -> None:
    loads = np.array([0.0, 0.5, 1.0])
    with pytest.raises(ConfigError, match="cuts lie between 0 and 2, got"):
        within([3], loads, 1.0)
    with pytest.raises(ConfigError, match=r"no cut of .* is within the server's load of 0[.]4; the least is 0[.]5"):
        within([1, 2], loads, 0.4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> StagedFolder:
    return split_bundle("ball", tmp_path_factory.mktemp("split") / "ball")


def window_of(folder: StagedFolder, rng: np.random.Generator) -> Window:
    fields = folder.spec.observation.fields
    return Window({name: rng.normal(size=field.window_shape).astype(np.float32) for name, field in fields.items()})


def test_each_precision_errs_by_its_bound_at_most() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 100.0):
        sent = (scale * rng.normal(size=(4, 9))).astype(np.float32)
        copies = {name: unpack(pack(sent, name), (4, 9))[0] for name in PRECISIONS}
        np.testing.assert_array_equal(copies["float32"], sent)
        off = {name: np.abs(copies[name].astype(np.float64) - sent) for name in PRECISIONS}
        assert (off["float16"] <= np.maximum(2.0**-11 * np.abs(sent), 3e-8)).all() and off["float16"].any()
        # One half of a level, and the rounding to float32 behind it.
        level = float(sent.max() - sent.min()) / 255.0
        assert off["uint8"].max() <= 0.5 * level + 2.0**-22 * np.abs(sent).max()
        assert off["uint8"].max() > 0.4 * level


def test_a_constant_activation_survives_and_what_no_number_can_hold_is_refused(folder: StagedFolder) -> None:
    constant = np.full((2, 3), -0.7, np.float32)
    np.testing.assert_array_equal(unpack(pack(constant, "uint8"), (2, 3))[0], constant)
    flat = np.ones(folder.spec.activations[0], np.float32)
    for precision in PRECISIONS:
        layout = folder.spec.reply(1, precision)
        layout.unpack(layout.pack(pack(flat, precision)))
        for wrong in (np.nan, np.inf, 7e4 if precision == "float16" else -np.inf):
            sent = flat.copy()
            sent[-1, ..., -1] = wrong
            with pytest.raises(WireError, match="finite"):
                layout.unpack(layout.pack(pack(sent, precision)))
    layout = folder.spec.reply(1, "uint8")
    with pytest.raises(WireError, match="span"):
        layout.unpack(layout.pack(layout.example() | {"span": np.array([-1.0], np.float32)}))


def test_the_server_answers_a_batch_of_a_cut_as_it_answers_each(folder: StagedFolder) -> None:
    """An observation without a finite answer is refused alone."""
    exchange, rng, stages = load_exchange(str(folder.path)), np.random.default_rng(1), folder.spec.stages
    for kind in {kind_at(folder.spec, cut, precision) for cut in (1, 4, stages) for precision in PRECISIONS}:
        windows = [window_of(folder, rng) for _ in range(3)]
        huge = Window({name: np.full_like(array, 3e38) for name, array in windows[0].arrays.items()})
        requests = [Request(seen, StepAddress(0, 0, 0, number)) for number, seen in enumerate((*windows, huge))]
        *replies, refused = served(exchange, kind, requests)
        assert isinstance(refused, WireError)
        for request, together in zip(requests[:-1], replies, strict=True):
            (alone,) = served(exchange, kind, [request])
            assert not isinstance(together, WireError) and not isinstance(alone, WireError)
            for name, array in together.items():
                # In a batch the last bits differ, and with them a level of uint8 or a bit of float16.
                off = np.abs(array.astype(float) - alone[name].astype(float)).max()
                assert off <= (1.0 if array.dtype == np.uint8 else 5e-3)


def test_kinds_and_bytes_of_a_cut(folder: StagedFolder) -> None:
    spec, numbers = folder.spec, math.prod(folder.spec.activations[0])
    assert kind_at(spec, spec.stages, "uint8") == "infer"
    wanted = {"float16": 2 * numbers, "uint8": numbers + 8, "float32": 4 * numbers}
    assert {name: spec.reply_bytes(1, name) for name in PRECISIONS} == wanted
    assert spec.reply_bytes(0, "float16") == 0
    assert spec.reply_bytes(spec.stages, "float16") == 4 * sum(map(math.prod, spec.outputs.values()))
    for cut, precision in ((0, "float16"), (spec.stages + 1, "float16"), (1, "float8")):
        with pytest.raises(ConfigError, match="a server runs 1 to 8 stages"):
            kind_at(spec, cut, precision)  # type: ignore[arg-type]


def test_damaged_stages_are_refused(folder: StagedFolder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder.path, tmp_path / "copy"))
    (copy / "stage-03.onnx").write_bytes((copy / "stage-02.onnx").read_bytes())
    with pytest.raises(BundleError, match=r"stage-03[.]onnx has fingerprint"):
        load_staged(copy)
    manifest = json.loads((folder.path / "manifest.json").read_text())
    wrong = json.loads(json.dumps(manifest))
    wrong["spec"]["activations"][0] = [2, 64]
    shutil.copytree(folder.path, copy, dirs_exist_ok=True)
    (copy / "manifest.json").write_text(json.dumps(wrong))
    with pytest.raises(BundleError, match=r"stage-00[.]onnx.* split the bundle again"):
        load_staged(copy)
    with pytest.raises(BundleError, match="this needs a target in stages"):
        load_staged(find_bundle("ball"))


PATIENT_MS = 20_000.0


@pytest.fixture(scope="module")
def bundle() -> Pair[Any]:
    return load_pair("ball")


@pytest.fixture(scope="module")
def client(folder: StagedFolder) -> Iterator[Client]:
    with serving(folder.path) as server, connected(server, folder) as client:
        yield client


def connected(server: ServerProcess, folder: StagedFolder) -> Client:
    client = Client(Endpoint("ws", "127.0.0.1", server.port), split_contract(folder.spec, folder.fingerprint))
    client.connect(20.0)
    return client


def windows_of(bundle: Pair[Any], count: int) -> list[Window]:
    rng = np.random.default_rng(count)
    fields = bundle.parts.spec.target.fields
    return [
        Window({name: rng.uniform(-1, 1, field.window_shape).astype(np.float32) for name, field in fields.items()})
        for _ in range(count)
    ]


def answers(target: SplitTarget[Any], windows: list[Window]) -> list[CodeDistribution]:
    outcomes = [target.submit(window, StepAddress(0, 0, 0, i)).result() for i, window in enumerate(windows)]
    assert not any(isinstance(outcome, Miss) for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes if isinstance(outcome, Answer)]


def test_every_cut_gives_the_bits_of_the_local_target_in_float32_and_a_little_else_in_fewer(
    bundle: Pair[Any], folder: StagedFolder, client: Client
) -> None:
    windows = windows_of(bundle, 5)
    wanted = [bundle.parts.target.infer(window) for window in windows]
    worst: dict[Precision, float] = {}
    for precision in PRECISIONS:
        errors = []
        for cut in range(folder.spec.stages + 1):
            target = placed_target(bundle, folder, client, PATIENT_MS, cut=cut, precision=precision)
            replies = answers(target, windows)
            errors.append(max(float(np.abs(a.offsets - b.offsets).max()) for a, b in zip(replies, wanted, strict=True)))
            assert target.counts == {f"cut {cut}": 5, "switches": 0}
            if precision == "float32":
                np.testing.assert_array_equal([reply.probs for reply in replies], [reply.probs for reply in wanted])
        assert errors[0] == errors[-1] == 0.0
        worst[precision] = max(errors)
    # The offsets are of the order of one.
    assert worst["float32"] == 0.0 < worst["float16"] < 0.01
    assert worst["float16"] < worst["uint8"] < 0.3
    with pytest.raises(ConfigError, match="can be cut from 0 to 8, not at 9"):
        placed_target(bundle, folder, client, PATIENT_MS, cut=9)


def test_the_cut_of_an_inference_under_way_does_not_change(
    bundle: Pair[Any], folder: StagedFolder, client: Client
) -> None:
    cuts, (window, successor) = iter((2, 5)), windows_of(bundle, 2)
    target = SplitTarget(
        folder, reader_of(bundle, folder), client, lambda *_: next(cuts), PATIENT_MS, precision="float32"
    )
    address = StepAddress(0, 0, 0, 0)
    first, second = target.submit(window, address), target.submit(successor, address.following)
    under_way, following = first.result(), second.result()
    for answer, seen in ((under_way, window), (following, successor)):
        assert isinstance(answer, Answer)
        np.testing.assert_array_equal(answer.value.probs, bundle.parts.target.infer(seen).probs)
    assert (target.counts["cut 2"], target.counts["cut 5"], target.cut) == (1, 1, 5)


def test_costs_are_measured_on_both_sides(bundle: Pair[Any], folder: StagedFolder, client: Client) -> None:
    costs, seen = measure_costs(folder, client, windows_of(bundle, 3))
    assert costs.stages == folder.spec.stages and len(seen) > 0
    assert costs.server_s.sum() > 0.0 and costs.device_s.sum() > 0.0
    assert costs.loads[-1] == pytest.approx(1.0) and costs.observation_bytes == bundle.parts.spec.target.nbytes
    chosen = placed_target(bundle, folder, client, PATIENT_MS)
    answers(chosen, windows_of(bundle, 3))
    assert sum(chosen.counts.values()) - chosen.counts["switches"] == 3
    late = placed_target(bundle, folder, client, 1e-3, cut=2)
    assert isinstance(late.submit(windows_of(bundle, 1)[0], StepAddress(0, 0, 0, 0)).result(), Miss)
    assert late.device_s == 0.0


def test_a_device_with_other_stages_is_refused(bundle: Pair[Any], folder: StagedFolder) -> None:
    for pair in ("pusht-flow", "relocate-tokens"):
        with pytest.raises(BundleError, match="split that one: specact split"):
            reader_of(load_pair(pair), folder)
    with pytest.raises(ConfigError, match="a flow policy"):
        reader_of(replace(bundle, parts=None), folder)
    with serving(folder.path) as server:
        endpoint, others = Endpoint("ws", "127.0.0.1", server.port), split_contract(folder.spec, "0" * 16)
        with Client(endpoint, others) as client, pytest.raises(RemoteError, match="deploy the same"):
            client.connect(3.0)


class Served:
    """A client whose server is in this process; everything is bytes in between."""

    def __init__(self, stages: TokenStages) -> None:
        self._exchange = SplitExchange(stages)

    def request(self, kind: str, request: Request, deadline_ms: float) -> Pending[Any]:
        (reply,) = served(self._exchange, kind, [request])
        return Pending(lambda: (reply, OffloadTimes(network=0.01)))


@pytest.mark.parametrize("name", ["kitchen-tokens", "relocate-tokens"])
def test_a_chunk_has_the_same_tokens_wherever_it_is_prefilled_and_its_cache_crosses_once(name: str) -> None:
    bundle = load_tokens(name)
    stages, rng = TokenStages(bundle), np.random.default_rng(0)
    fields = bundle.spec.observation.fields.items()
    windows = [
        Window({name: rng.uniform(-1, 1, field.window_shape).astype(np.float32) for name, field in fields})
        for _ in range(3)
    ]
    wanted = [bundle.policy().decode([window])[0].tokens for window in windows]
    assert len({tuple(tokens) for tokens in wanted}) > 1
    for cut in range(4):
        client: Any = Served(stages)
        target = SplitTarget[Any](
            stages, lambda outputs, *_: outputs[0][0], client, lambda *_, cut=cut: cut, PATIENT_MS, precision="float32"
        )
        chunks = [target.submit(window, StepAddress(0, 0, 0, number)).result() for number, window in enumerate(windows)]
        for answer, tokens in zip(chunks, wanted, strict=True):
            assert isinstance(answer, Answer)
            np.testing.assert_array_equal(answer.value, tokens)
    cache, network = stages.begin(windows[:2], 2), bundle.networks
    # Keys and values of every layer, and what the first token is chosen from.
    layers, _, heads, slots, size = network.cache(1).entries.shape[1:]
    numbers = layers * 2 * heads * (slots - network.length) * size + 256 + network.width
    assert stages.spec.reply_bytes(2, "float16") == 2 * numbers == 2 * cache.shape[1]
    # The first token of another observation's cache, with this one's keys and values, is no chunk of either.
    mixed = np.concatenate([cache[:1, : -network.width - 256], cache[1:, -network.width - 256 :]], axis=1)
    assert not any(np.array_equal(stages.finish(mixed, 2)[0][0], tokens) for tokens in wanted[:2])


def test_a_token_policy_in_stages_plays_the_chunks_of_the_whole_one(tmp_path: Path) -> None:
    pair, rng, made = (
        load_pair("kitchen-tokens"),
        np.random.default_rng(0),
        split_tokens("kitchen-tokens", tmp_path / "f"),
    )
    fields = pair.observation.fields.items()
    windows = [
        Window({name: rng.uniform(-1, 1, field.window_shape).astype(np.float32) for name, field in fields})
        for _ in range(2)
    ]
    proposals, address = [pair.drafter().propose(window, rng) for window in windows], StepAddress(0, 0, 0, 0)
    wanted = [pair.verifier(LocalTarget(pair.target())).submit(proposal, address).result() for proposal in proposals]
    stages = load_stages(tmp_path / "f")
    assert isinstance(stages, TokenStages) and stages.spec == made.spec
    contract = split_contract(stages.spec, stages.fingerprint)
    with (
        serving(tmp_path / "f") as server,
        Client(Endpoint("ws", "127.0.0.1", server.port), contract) as client,
    ):
        client.connect(3.0)
        for cut in range(4):
            placed = placed_target(pair, stages, client, PATIENT_MS, cut=cut, precision="float32")
            for proposal, whole in zip(proposals, wanted, strict=True):
                outcome = pair.verifier(placed).submit(proposal, address).result()
                assert isinstance(outcome, Outcome) and isinstance(whole, Outcome)
                np.testing.assert_array_equal(outcome.actions, whole.actions)
                np.testing.assert_array_equal(outcome.origins, whole.origins)
    with pytest.raises(ConfigError, match="--decoding"):
        reader_of(load_pair("kitchen-tokens", decoding="specvla"), stages)
    with pytest.raises(BundleError, match="specact split"):
        reader_of(load_pair("relocate-tokens"), stages)


def test_tokens_that_are_not_finite_or_in_range_are_no_chunk() -> None:
    decoded = Written.of(np.array([3.0, np.nan], np.float32)).decode([GREEDY])[0]
    assert not decoded.finite and Written.of(np.array([3.0, 0.0], np.float32)).decoded.finite
    layout = TokenStages(load_tokens("kitchen-tokens")).spec.reply(3, "float32")
    with pytest.raises(WireError, match="0 to 255"):
        layout.unpack(bytearray(np.full(layout.size, 256.0, np.float32).tobytes()))


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> StagedFolder:
    return split_bundle("pusht-flow", tmp_path_factory.mktemp("split") / "flow")


def flow_rounds(target: Any, count: int = 4) -> list[Round]:
    rng = np.random.default_rng(3)
    rounds = []
    for number in range(count):
        window = Window({"state": rng.uniform(-1, 1, (2, 26)).astype(np.float32)})
        answer = target.submit(window, StepAddress(0, 0, 0, number)).result()
        assert isinstance(answer, Answer)
        rounds += [answer.value.round(RoundRequest(full)) for full in (True, False)]
    return rounds


def test_a_flow_draws_the_same_chunks_wherever_its_prefix_is_computed(flow: StagedFolder) -> None:
    """Full rounds and FLASH's checks; the device draws the chunks from the prefix's cache."""
    pair = load_pair("pusht-flow", decoding="flash")
    assert isinstance(pair.parts, FlowParts) and flow.spec.stages > 2
    local = flow_rounds(LocalTarget(pair.target()))
    with serving(flow.path) as server, connected(server, flow) as client:
        by_cut = [
            flow_rounds(placed_target(pair, flow, client, PATIENT_MS, cut=cut, precision="float32"))
            for cut in range(flow.spec.stages + 1)
        ]
    for rounds in by_cut:
        for verdict, first, expected in zip(rounds, by_cut[0], local, strict=True):
            np.testing.assert_array_equal(verdict.chunk, first.chunk)
            # In one network operators may be fused that lie in two networks otherwise.
            np.testing.assert_allclose(verdict.chunk, expected.chunk, rtol=1e-3, atol=1e-2)
            assert (verdict.checked, verdict.full) == (first.checked, first.full)
    assert any(verdict.checked for verdict in local)
