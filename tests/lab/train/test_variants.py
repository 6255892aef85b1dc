"""Cheaper networks of a bundle: fewer bits, close to the original; shorter histories; stages."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
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
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.families.codes.pair import load_codes
from specact.families.codes.policy import OnnxPolicy
from specact.lab.tised.drivers import PolicyDriver
from specact.lab.tised.levers import Subject, settings_of
from specact.lab.train.codes import rebuild
from specact.lab.train.export import PARITY
from specact.lab.train.split import cut_points, split_bundle
from specact.lab.train.variants import BundleVariants, folded, prune_history, quantise
from specact.load import load_pair
from specact.observation import ObservationSpec, Window

SHELF = Path(__file__).parents[3] / "pretrained"
PUSHT = load_codes(SHELF / "pusht")
FLOW = load_flow(SHELF / "pusht-flow")


def windows(spec: ObservationSpec, count: int) -> list[Window]:
    rng, text = np.random.default_rng(count), "pick up the puck" if spec.instruction else None

    def some(shape: tuple[int, ...], kind: str) -> np.ndarray:
        if kind == "uint8":
            return rng.integers(0, 256, shape).astype(np.uint8)
        return 0.4 * rng.standard_normal(shape, dtype=np.float32)

    return [Window({n: some(f.window_shape, f.dtype) for n, f in spec.fields.items()}, text) for _ in range(count)]


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


# --- fewer bits ---


def test_folding_changes_the_form_and_not_the_answer() -> None:
    for file, inputs in feeds().items():
        model = folded(file)
        assert not {"Gemm", "Cast"} & {node.op_type for node in model.graph.node}
        np.testing.assert_allclose(run(model, inputs), run(file, inputs), atol=1e-5)


def test_fewer_bits_are_smaller_and_further_away(tmp_path: Path) -> None:
    original, inputs = PUSHT.files["target"], PUSHT.target.inputs.stack(windows(PUSHT.spec.target, 16))
    wanted, layers = run(original, inputs), 4 * 4 + 3  # of a block and a perceptron's two layers; heads and state
    sizes, errors = [], []
    for bits, operator in ((8, "MatMulInteger"), (4, "MatMulNBits")):
        variant = quantise(original, tmp_path / str(bits) / "q.onnx", bits)  # type: ignore[arg-type]
        assert [path.name for path in variant.parent.iterdir()] == ["q.onnx"]
        graph = onnx.load(variant).graph
        assert Counter(node.op_type for node in graph.node)[operator] >= layers
        # ONNX Runtime multiplies unsigned activations with signed weights in 16 bits where there is no VNNI.
        assert TensorProto.INT8 not in {tensor.data_type for tensor in graph.initializer if len(tensor.dims) == 2}
        sizes.append(variant.stat().st_size / original.with_suffix(".safetensors").stat().st_size)
        # Root mean square differences, in units of the original's own root mean square.
        errors.append(float(np.sqrt(np.mean((run(variant, inputs) - wanted) ** 2) / np.mean(wanted**2))))
    assert sizes[0] < 0.6 and sizes[1] < 0.35  # of weights that are stored in 16 bits
    assert 0.0 < errors[0] < 0.05 < errors[1] < 0.3


def test_a_quantised_flow_still_flows(tmp_path: Path) -> None:
    """All three networks in 8 bits: the chunk from the same noise stays within 5 % of the range of actions."""
    variants = BundleVariants(FLOW, tmp_path)
    files = variants.quantised(8)
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
    return {k: prune_history(PUSHT, k, folder / f"{k}.onnx", "draft") for k in (5, 1)}


def test_all_of_the_history_is_the_original(pruned: dict[int, Path]) -> None:
    """Up to rounding: another version of PyTorch may export the same network as other operators."""
    variant = OnnxPolicy(pruned[5], PUSHT.spec, PUSHT.spec.draft)
    for window in windows(PUSHT.spec.draft, 8):
        ours, theirs = variant.infer(window), PUSHT.draft.infer(window)
        np.testing.assert_allclose(ours.probs, theirs.probs, atol=1e-5)
        np.testing.assert_allclose(ours.offsets, theirs.offsets, rtol=1e-4, atol=1e-5)


def test_a_goal_stays_where_it_was(tiny_bundle: Path) -> None:
    """Ahead of the window, whatever its length; the exported original in PyTorch again, without another export."""
    bundle = load_codes(tiny_bundle)
    model, shorter = rebuild(bundle, "target", 2), rebuild(bundle, "target", 1)
    assert torch.equal(shorter.positions, model.positions[:2])
    for window in windows(bundle.spec.target, 3):
        seen = {name: torch.from_numpy(values)[None] for name, values in window.arrays.items()}
        with torch.no_grad():
            whole, first = (
                model.predictions(seen).offsets[0],
                shorter.predictions(seen | {"state": seen["state"][:, :1]}).offsets[0],
            )
        np.testing.assert_allclose(whole[1].numpy(), bundle.target.infer(window).offsets, atol=PARITY)
        torch.testing.assert_close(first[0], whole[0], rtol=0.0, atol=1e-5)


def test_a_shorter_history_is_an_earlier_position_of_the_trained_network(pruned: dict[int, Path]) -> None:
    """Its first position, which never sees what comes later; read at the end it would be another."""
    whole = rebuild(PUSHT, "draft", 5)
    variant = OnnxPolicy(pruned[1], PUSHT.spec, PUSHT.spec.draft.shortened(1))
    for window in windows(PUSHT.spec.draft, 3):
        state = window["state"]
        with torch.no_grad():
            offsets = whole.predictions(
                {"state": torch.from_numpy(np.concatenate([state[-1:], state[:4]]))[None]}
            ).offsets[0]
        shift = variant.infer(Window({"state": state[-1:]})).offsets
        np.testing.assert_allclose(shift, offsets[0].numpy(), atol=1e-4)
        assert np.abs(shift - offsets[4].numpy()).max() > 1e-3


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


@pytest.mark.parametrize(
    ("bundle", "file", "stages"),
    [("pusht-camera", "target.onnx", 10), ("metaworld-draft", "policy.onnx", 4)],
)
def test_any_cut_gives_the_very_bits_of_no_cut(bundle: str, file: str, stages: int, tmp_path: Path) -> None:
    folder = split_bundle(bundle, tmp_path / "split")
    assert folder.spec.stages == stages
    whole = open_session(find_bundle(bundle) / file)
    for count in (1, 3):
        seen = windows(folder.spec.observation, count)
        wanted = whole.run(list(folder.spec.outputs), folder.inputs.stack(seen))
        for cut in range(stages + 1):
            outputs = folder.finish(folder.begin(seen, cut), cut) if 0 < cut < stages else folder.run(seen)
            for ours, theirs in zip(outputs, wanted, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    # The finished part depends on what crosses.
    begun = folder.begin(seen, 1)
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
