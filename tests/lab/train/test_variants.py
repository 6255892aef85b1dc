"""Cheaper networks of a bundle: fewer bits, close to the original; shorter histories; stages."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from specact.bundle.bundle import find_bundle
from specact.bundle.network import open_session
from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import NETWORKS, FlowBundle, load_flow
from specact.families.codes.pair import PARTS, CodeParts, load_codes
from specact.families.codes.policy import OnnxPolicy
from specact.lab.tised.drivers import PolicyDriver
from specact.lab.tised.levers import Subject, settings_of
from specact.lab.train.codes import Role, rebuild
from specact.lab.train.export import PARITY
from specact.lab.train.split import cut_points, split_bundle, stages_of
from specact.lab.train.variants import (
    GROUPS,
    TIERS,
    BundleVariants,
    folded,
    layer_groups,
    prune_history,
    quantise,
)
from specact.load import load_pair
from specact.observation import ObservationSpec, Window
from specact.systems.staged import StagedFolder

SHELF = Path(__file__).parents[3] / "pretrained"
PUSHT = load_codes(SHELF / "pusht")
FLOW = load_flow(SHELF / "pusht-flow")


def windows(spec: ObservationSpec, count: int) -> list[Window]:
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> np.ndarray:
        return 0.4 * rng.standard_normal(shape, dtype=np.float32)

    return [Window({name: normal(f.window_shape) for name, f in spec.fields.items()}) for _ in range(count)]


def run(model: onnx.ModelProto | Path, feeds: Mapping[str, Any]) -> np.ndarray:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return np.concatenate([np.ravel(output) for output in session.run(None, dict(feeds))])


def feeds() -> dict[Path, Mapping[str, Any]]:
    """Inputs of networks."""
    networks, window = FLOW.networks, windows(FLOW.spec.observation, 1)
    chunk = np.random.default_rng(0).standard_normal((1, FLOW.spec.chunk, FLOW.spec.actions), dtype=np.float32)
    given = {
        "encoder": FLOW.spec.observation.stack(window), "prefix": {"tokens": networks.tokens(window)},
        "expert": {"chunk": chunk, "time": np.array([0.5], np.float32), "cache": networks.cache(window)},
    }  # fmt: skip
    target = PUSHT.target.inputs.stack(windows(PUSHT.spec.target, 1))
    return {FLOW.files[part]: inputs for part, inputs in given.items()} | {PUSHT.files["target"]: target}


# --- which layers ---


def test_folding_changes_the_form_and_not_the_answer() -> None:
    for file, inputs in feeds().items():
        model = folded(file)
        assert not {"Gemm", "Cast"} & {node.op_type for node in model.graph.node}
        np.testing.assert_allclose(run(model, inputs), run(file, inputs), atol=1e-5)


@pytest.mark.parametrize(("role", "layers", "heads"), [("target", 2, 4), ("draft", 1, 2)])
def test_the_layers_of_a_pair(tiny_bundle: Path, role: str, layers: int, heads: int) -> None:
    """Per block qkv and projection, and two of the perceptron; heads with a hidden layer or without; state and goal."""
    groups = Counter(layer_groups(folded(tiny_bundle / PARTS[role])).values())
    assert groups == {"attention": 2 * layers, "mlps": 2 * layers, "heads": heads, "rest": 2}


def test_the_layers_of_a_flow(tiny_flow: Path) -> None:
    """Two layers. Of the prefix the last one gives keys and values only; time enters the expert in every layer."""
    groups = {part: Counter(layer_groups(folded(tiny_flow / NETWORKS[part])).values()) for part in NETWORKS}
    assert groups["encoder"] == {"rest": 4}
    assert groups["prefix"] == {"attention": 4, "mlps": 2}
    assert groups["expert"] == {"attention": 4, "mlps": 4, "heads": 1, "rest": 5}


def test_tiers_go_from_mild_to_strong() -> None:
    bits = {"int8_dynamic": 8, "int4": 4}
    widths = [[bits.get(tier.get(group, ""), 32) for group in GROUPS] for tier in TIERS.values()]
    assert len(widths) == 8
    for mild, strong in itertools.pairwise(widths):
        assert sum(a > b for a, b in zip(mild, strong, strict=True)) == 1, "one group a tier"
        assert all(a >= b for a, b in zip(mild, strong, strict=True))


@pytest.mark.parametrize("name", ["int8_dynamic-mlps", "int8_dynamic-rest", "int4_dynamic-heads", "int4_dynamic-rest"])
def test_a_tier_quantises_the_layers_it_says_and_no_others(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    bundle, tier = load_codes(tiny_bundle), TIERS[name]
    groups = Counter(layer_groups(folded(tiny_bundle / "target.onnx")).values())
    model = onnx.load(quantise(tiny_bundle / "target.onnx", tmp_path / "new" / "q.onnx", tier))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["q.onnx"]
    kinds, wanted = Counter(node.op_type for node in model.graph.node), Counter[str]()
    for group, method in tier.items():
        wanted[method] += groups[group]
    assert (kinds["MatMulNBits"], kinds["MatMulInteger"]) == (wanted["int4"], wanted["int8_dynamic"])
    # ONNX Runtime multiplies unsigned activations with signed weights in 16 bits where there is no VNNI.
    assert onnx.TensorProto.INT8 not in {
        tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2
    }
    window = windows(bundle.spec.target, 1)[0]
    variant = OnnxPolicy(tmp_path / "new" / "q.onnx", bundle.spec, bundle.spec.target)
    answer, original = variant.infer(window), bundle.target.infer(window)
    assert not np.array_equal(answer.offsets, original.offsets)
    np.testing.assert_allclose(answer.probs, original.probs, atol=0.1)


def test_fewer_bits_are_smaller_and_further_away(tmp_path: Path) -> None:
    original, inputs = PUSHT.files["target"], PUSHT.target.inputs.stack(windows(PUSHT.spec.target, 16))
    variants = [quantise(original, tmp_path / name, tier) for name, tier in TIERS.items()]
    wanted = run(original, inputs)
    sizes = [variant.stat().st_size for variant in variants]
    # Root mean square differences, in units of the original's own root mean square.
    errors = [float(np.sqrt(np.mean((run(each, inputs) - wanted) ** 2) / np.mean(wanted**2))) for each in variants]
    whole = original.with_suffix(".safetensors").stat().st_size
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] < 0.6 * whole and sizes[7] < 0.35 * whole  # stored in 16 bits
    assert 0.0 < errors[3] < 0.05 < errors[7] < 0.3
    assert errors[0] < errors[3] and errors[4] < errors[7]


def test_a_quantised_flow_still_flows(tmp_path: Path) -> None:
    """All three networks in 8 bits: the chunk from the same noise stays within 5 % of the range of actions."""
    variants = BundleVariants(FLOW, tmp_path)
    files = variants.quantised(variants.tiers[3])
    assert set(files) == {"encoder", "prefix", "expert"} and not list(tmp_path.iterdir()), "not made yet"
    variants.make()
    window = windows(FLOW.spec.observation, 1)[0]

    def chunk(bundle: FlowBundle) -> np.ndarray:
        return bundle.policy(steps=4).infer(window, np.random.default_rng(0))

    away = np.abs(chunk(load_flow(FLOW.path, variants=files)) - chunk(FLOW)).max()
    assert 0.0 < away / (FLOW.units.high - FLOW.units.low).max() < 0.05
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.onnx")}
    variants.make()
    assert {path: path.stat().st_mtime_ns for path in made} == made, "made once"


# --- fewer observations ---


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The draft with more and less history; the target would only take longer to export."""
    folder = tmp_path_factory.mktemp("pruned")
    return {k: prune_history(PUSHT, k, folder / f"{k}.onnx", "draft") for k in (5, 3, 1)}


def assert_same(variant: OnnxPolicy, original: OnnxPolicy) -> None:
    """Up to rounding: another version of PyTorch may export the same network as other operators."""
    for window in windows(original.observation, 8):
        ours, theirs = variant.infer(window), original.infer(window)
        np.testing.assert_allclose(ours.probs, theirs.probs, atol=1e-5)
        np.testing.assert_allclose(ours.offsets, theirs.offsets, rtol=1e-4, atol=1e-5)


def shorter_spec(bundle: CodeParts, role: Role, window: int) -> ObservationSpec:
    whole = getattr(bundle.spec, role)
    return ObservationSpec({name: replace(field, history=window) for name, field in whole.fields.items()})


def test_all_of_the_history_is_the_original(pruned: dict[int, Path]) -> None:
    assert_same(OnnxPolicy(pruned[5], PUSHT.spec, PUSHT.spec.draft), PUSHT.draft)


def test_a_goal_stays_where_it_was(tiny_bundle: Path) -> None:
    """Ahead of the window, whatever its length; the exported original in PyTorch again, without another export."""
    bundle = load_codes(tiny_bundle)
    model, shorter = rebuild(bundle, "target", 2), rebuild(bundle, "target", 1)
    assert torch.equal(shorter.positions, model.positions[:2])
    for window in windows(bundle.spec.target, 3):
        seen = {name: torch.from_numpy(values)[None] for name, values in window.arrays.items()}
        with torch.no_grad():
            whole, first = model(seen).offsets[0], shorter(seen | {"state": seen["state"][:, :1]}).offsets[0]
        np.testing.assert_allclose(whole[1].numpy(), bundle.target.infer(window).offsets, atol=PARITY)
        torch.testing.assert_close(first[0], whole[0], rtol=0.0, atol=1e-5)


def test_a_shorter_history_is_an_earlier_position_of_the_trained_network(pruned: dict[int, Path]) -> None:
    """Position k - 1 of the whole network, which never sees what comes later; read at the end it would be another."""
    whole = rebuild(PUSHT, "draft", 5)
    for k in (1, 3):
        variant = OnnxPolicy(pruned[k], PUSHT.spec, shorter_spec(PUSHT, "draft", k))
        for window in windows(PUSHT.spec.draft, 3):
            state = window["state"]
            shown = torch.from_numpy(np.concatenate([state[-k:], state[: 5 - k]]))[None]
            with torch.no_grad():
                offsets = whole({"state": shown}).offsets[0]
            found = variant.infer(Window({"state": state[-k:]})).offsets
            np.testing.assert_allclose(found, offsets[k - 1].numpy(), atol=1e-4)
            assert np.abs(found - offsets[4].numpy()).max() > 1e-3


def test_a_window_that_is_cut_is_made_of_the_pair_it_is_named_after(tmp_path: Path) -> None:
    pusht = load_pair(SHELF / "pusht")
    variants = BundleVariants(pusht, tmp_path)
    settings = settings_of("window", Subject(pusht, pusht.execute, variants), (2.0,))
    variants.make()
    drivers = [setting.driver for setting in settings]
    assert [driver.window for driver in drivers if isinstance(driver, PolicyDriver)] == [None, 2]
    assert isinstance(drivers[1], PolicyDriver) and drivers[1].build().spec.observation.history == 2
    for k in (0, 6):
        with pytest.raises(ConfigError, match=f"'pusht' supports 1 to 5 observations, got {k}"):
            prune_history(PUSHT, k, tmp_path / "k.onnx")
        with pytest.raises(ConfigError, match="1 to 5 observations"):
            settings_of("window", Subject(pusht, pusht.execute, variants), (float(k),))


# --- stages: any cut computes what the network computes ---


def windows_of(folder: StagedFolder, count: int) -> list[Window]:
    rng, spec = np.random.default_rng(count), folder.spec.observation
    return [
        Window(
            {
                name: rng.integers(0, 256, field.window_shape).astype(np.uint8)
                if field.is_image
                else rng.normal(size=field.window_shape).astype(np.float32)
                for name, field in spec.fields.items()
            },
            "pick up the puck" if spec.instruction else None,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("bundle", "file", "stages"),
    [("ball", "target.onnx", 8), ("pusht-camera", "target.onnx", 10), ("metaworld-draft", "policy.onnx", 4)],
)
def test_any_cut_gives_the_very_bits_of_no_cut(bundle: str, file: str, stages: int, tmp_path: Path) -> None:
    folder = split_bundle(bundle, tmp_path / "split")
    assert folder.spec.stages == stages
    whole = open_session(find_bundle(bundle) / file)
    for count in (1, 3):
        windows = windows_of(folder, count)
        wanted = whole.run(list(folder.spec.outputs), folder.inputs.stack(windows))
        for cut in range(stages + 1):
            found = folder.finish(folder.begin(windows, cut), cut) if 0 < cut < stages else folder.run(windows)
            for ours, theirs in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    # The finished part depends on what crosses.
    begun = folder.begin(windows, 1)
    assert not np.array_equal(folder.finish(begun + 1.0, 1)[0], wanted[0])


def chain(skip: bool = False) -> onnx.ModelProto:
    """``x -> A x -> relu -> B -> + -> C``, where with ``skip`` the input is added behind B."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.normal(size=(4, 4)).astype(np.float32), name) for name in "ABC"]
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "B"], ["b"]),
        helper.make_node("Add", ["b", "x" if skip else "r"], ["s"]),
        helper.make_node("MatMul", ["s", "C"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_cuts_are_where_everything_passes_and_work_lies_on_both_sides() -> None:
    # Behind A the relu costs nothing; b is passed by r.
    assert cut_points(chain()) == {"r": (4,), "s": (4,)}
    # The input is read behind B: only its sum with it is a cut.
    assert cut_points(chain(skip=True)) == {"s": (4,)}


def test_stages_at_a_tensor_that_others_pass_are_no_network() -> None:
    wrong = {"a": (4,)}
    with pytest.raises(onnx.checker.ValidationError):
        stages_of(chain(skip=True), wrong)
    assert len(stages_of(chain(), wrong)) == 2  # here nothing passes it


def test_stages_of_a_chain_compute_it() -> None:
    model = chain()
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    value, name = x, "x"
    for stage in stages_of(model, cut_points(model)):
        session = onnxruntime.InferenceSession(stage.SerializeToString())
        assert [entry.name for entry in session.get_inputs()] == [name]
        (value,), name = session.run(None, {name: value}), session.get_outputs()[0].name
    np.testing.assert_array_equal(value, wanted)


def test_refusals_say_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="of the kind 'tokens'; the target of a pair of action codes, a policy by"):
        split_bundle("relocate-tokens", tmp_path / "tokens")
    with pytest.raises(ConfigError, match="exists already"):
        split_bundle("ball", tmp_path)
    device = Path(shutil.copytree(find_bundle("ball"), tmp_path / "device"))
    (device / "target.onnx").unlink()
    manifest = json.loads((device / "manifest.json").read_text())
    (device / "manifest.json").write_text(json.dumps(manifest | {"left_out": ["target"]}))
    with pytest.raises(BundleError, match="without its target"):
        split_bundle(device, tmp_path / "none")
    assert not (tmp_path / "none").exists()
