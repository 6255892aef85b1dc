"""Networks in stages: any cut computes what the network computes, and what is no cut is not taken for one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from specact.bundle.bundle import find_bundle
from specact.bundle.network import open_session
from specact.errors import BundleError, ConfigError
from specact.lab.train.split import CutPoint, cut_points, split_bundle, stages_of
from specact.observation import Window
from specact.systems.staged import StagedFolder


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
    assert [cut.name for cut in cut_points(chain())] == ["r", "s"]
    # The input is read behind B: only its sum with it is a cut.
    assert [cut.name for cut in cut_points(chain(skip=True))] == ["s"]


def test_stages_at_a_tensor_that_others_pass_are_no_network() -> None:
    wrong = CutPoint("a", (4,), 1)
    with pytest.raises(onnx.checker.ValidationError):
        stages_of(chain(skip=True), [wrong])
    assert len(stages_of(chain(), [wrong])) == 2  # here nothing passes it


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
