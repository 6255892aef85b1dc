"""Quantised variants: the layers a tier says and no others, loaded like the original, close to it, and smaller."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from specact import load_pair
from specact.bundle.network import open_session
from specact.families.chunks.flow import NETWORKS, FlowBundle, load_flow
from specact.families.codes.pair import PARTS
from specact.families.codes.policy import OnnxPolicy
from specact.lab.train.quantise import GROUPS, TIERS, folded, layer_groups, quantise
from specact.observation import Window
from specact.pair import Pair

SHELF = Path(__file__).parents[3] / "pretrained"
Feeds = Mapping[str, Any]
Inputs = dict[str, list[Feeds]]


def windows(bundle: Pair[Any] | FlowBundle, count: int) -> list[Window]:
    seen = bundle.observation if isinstance(bundle, Pair) else bundle.spec.observation
    rng, fields = np.random.default_rng(0), seen.fields

    def normal(shape: tuple[int, ...]) -> np.ndarray:
        return 0.4 * rng.standard_normal(shape, dtype=np.float32)

    return [Window({name: normal(field.window_shape) for name, field in fields.items()}) for _ in range(count)]


@pytest.fixture(scope="module")
def pair() -> tuple[Pair[Any], Inputs]:
    bundle = load_pair(SHELF / "pusht")
    seen = windows(bundle, 16)
    networks = {"draft": bundle.parts.draft, "target": bundle.parts.target}
    return bundle, {role: [each.inputs.stack([window]) for window in seen] for role, each in networks.items()}


@pytest.fixture(scope="module")
def flow() -> tuple[FlowBundle, Inputs]:
    bundle = load_flow(SHELF / "pusht-flow")
    (window,), networks, spec = windows(bundle, 1), bundle.networks, bundle.spec
    chunk = np.random.default_rng(0).standard_normal((1, spec.chunk, spec.actions), dtype=np.float32)
    expert = {"chunk": chunk, "time": np.array([0.25], np.float32), "cache": networks.cache([window])}
    prefix = {"tokens": networks.tokens([window])}
    return bundle, {"encoder": [spec.observation.stack([window])], "prefix": [prefix], "expert": [expert]}


def run(model: onnx.ModelProto | Path, feeds: Feeds) -> np.ndarray:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return np.concatenate([np.ravel(output) for output in session.run(None, dict(feeds))])


# --- which layers ---


def test_folding_changes_the_form_and_not_the_answer(
    pair: tuple[Pair[Any], Inputs], flow: tuple[FlowBundle, Inputs]
) -> None:
    files = {role: pair[0].parts.path / PARTS[role] for role in ("draft", "target")}
    files |= {part: flow[0].path / NETWORKS[part] for part in ("encoder", "prefix", "expert")}
    for part, file in files.items():
        feeds, model = (pair[1] | flow[1])[part][0], folded(file)
        assert not {"Gemm", "Cast"} & {node.op_type for node in model.graph.node}
        np.testing.assert_allclose(run(model, feeds), run(file, feeds), atol=1e-5)


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
    assert [*TIERS] == [f"{name}_dynamic-{group}" for name in ("int8", "int4") for group in GROUPS]
    bits = {"int8_dynamic": 8, "int4": 4}
    widths = [[bits[tier[group]] if group in tier else 32 for group in GROUPS] for tier in TIERS.values()]
    for mild, strong in itertools.pairwise(widths):
        assert sum(a > b for a, b in zip(mild, strong, strict=True)) == 1, "one group a tier"
        assert all(a >= b for a, b in zip(mild, strong, strict=True))


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_quantises_the_layers_it_says_and_no_others(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    bundle, tier = load_pair(tiny_bundle), TIERS[name]
    groups = Counter(layer_groups(folded(tiny_bundle / "target.onnx")).values())
    out = quantise(tiny_bundle / "target.onnx", tmp_path / "new" / "q.onnx", tier)
    kinds = Counter(node.op_type for node in onnx.load(out).graph.node)
    wanted = Counter(dict.fromkeys(("int8_dynamic", "int4"), 0))
    for group, method in tier.items():
        wanted[method] += groups[group]
    assert kinds["MatMulNBits"] == wanted["int4"]
    assert kinds["MatMulInteger"] == wanted["int8_dynamic"]
    assert [path.name for path in out.parent.iterdir()] == ["q.onnx"]
    window = windows(bundle, 1)[0]
    answer, original = (
        OnnxPolicy(out, bundle.parts.spec, bundle.parts.spec.target).infer(window),
        bundle.parts.target.infer(window),
    )
    assert not np.array_equal(answer.offsets, original.offsets)
    np.testing.assert_allclose(answer.probs, original.probs, atol=0.1)


def test_no_product_of_a_tier_saturates_on_any_processor(pair: tuple[Pair[Any], Inputs], tmp_path: Path) -> None:
    """ONNX Runtime multiplies unsigned activations with signed weights in 16 bits where there is no VNNI."""
    out = quantise(pair[0].parts.path / "target.onnx", tmp_path / "q.onnx", TIERS["int8_dynamic-rest"])
    kinds = {tensor.data_type for tensor in onnx.load(out).graph.initializer if len(tensor.dims) == 2}
    assert onnx.TensorProto.UINT8 in kinds and onnx.TensorProto.INT8 not in kinds


# --- what it costs and saves ---


def error_of(original: Path, variant: Path, inputs: Sequence[Feeds]) -> float:
    """Root mean square difference of all outputs, in units of the original's own root mean square."""
    sessions = [open_session(file) for file in (original, variant)]
    answers = [[session.run(None, feeds) for feeds in inputs] for session in sessions]
    wanted, found = (np.concatenate([np.ravel(output) for run in runs for output in run]) for runs in answers)
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


def test_fewer_bits_are_smaller_and_further_away(pair: tuple[Pair[Any], Inputs], tmp_path: Path) -> None:
    bundle, inputs = pair
    original = bundle.parts.path / "target.onnx"
    variants = [quantise(original, tmp_path / name, tier) for name, tier in TIERS.items()]
    sizes = [variant.stat().st_size for variant in variants]
    errors = [error_of(original, variant, inputs["target"]) for variant in variants]
    whole = original.with_suffix(".safetensors").stat().st_size
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] < 0.6 * whole and sizes[7] < 0.35 * whole  # stored in 16 bits
    assert 0.0 < errors[3] < 0.05 < errors[7] < 0.3
    assert errors[0] < errors[3] and errors[4] < errors[7]


def test_a_quantised_flow_still_flows(flow: tuple[FlowBundle, Inputs], tmp_path: Path) -> None:
    """All three networks in 8 bits: the chunk from the same noise stays within 5 % of the range of actions."""
    bundle, _ = flow
    made = {
        part: quantise(bundle.path / NETWORKS[part], tmp_path / NETWORKS[part], TIERS["int8_dynamic-rest"])
        for part in ("encoder", "prefix", "expert")
    }
    window = windows(bundle, 1)[0]
    chunks = [
        load_flow(bundle.path, variants=variants).policy(steps=4).infer(window, np.random.default_rng(0))
        for variants in ({}, made)
    ]
    away = np.abs(chunks[1] - chunks[0]).max() / (bundle.units.high - bundle.units.low).max()
    assert 0.0 < away < 0.05


def test_what_is_not_quantised_stays_exactly_as_it_was(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = load_pair(tiny_bundle)
    out = quantise(tiny_bundle / "target.onnx", tmp_path / "q.onnx", {})
    for window in windows(bundle, 3):
        ours, theirs = (
            OnnxPolicy(out, bundle.parts.spec, bundle.parts.spec.target).infer(window),
            bundle.parts.target.infer(window),
        )
        np.testing.assert_allclose(ours.probs, theirs.probs, atol=1e-6)
        np.testing.assert_allclose(ours.offsets, theirs.offsets, atol=1e-6)
