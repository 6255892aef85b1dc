"""What export writes: the trained weights in half precision, once, and no trace of paths."""

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file

from specact import load_pair
from specact.bundle.manifest import fingerprint_of
from specact.families.codes.pair import load_codes
from specact.lab.train import export, loop
from specact.lab.train.codes import export_policy, rebuild
from specact.lab.train.export import stored_weights


def test_weights_are_those_that_were_trained_stored_once_and_in_half_precision(
    tiny_run: Path, tiny_bundle: Path
) -> None:
    file = tiny_bundle / "target.safetensors"
    stored, (trained, _) = load_file(file), loop.read_tensors(tiny_run / "target.safetensors")
    assert stored.keys() == trained.keys()
    for name, values in stored_weights(file).items():
        statistics = name.endswith(("_mean", "_std"))
        assert torch.equal(values, trained[name] if statistics else trained[name].half().float()), name
    halves = sum(values.nbytes for values in stored.values() if values.dtype == np.float16)
    assert halves > 0.9 * (file.stat().st_size - 8192)
    within = [tensor for tensor in graph_of(tiny_bundle).initializer if tensor.data_location != TensorProto.EXTERNAL]
    assert max(math.prod(tensor.dims) for tensor in within) < 64, "larger ones are in the file"
    manifest = load_pair(tiny_bundle).parts.manifest
    assert set(manifest.files) == {file.name for file in tiny_bundle.iterdir() if file.suffix != ".json"}
    assert manifest.parameters["target"] == sum(
        v.numel() for k, v in trained.items() if not k.endswith(("_mean", "_std"))
    )


def graph_of(bundle: Path) -> onnx.GraphProto:
    return onnx.load(bundle / "target.onnx", load_external_data=False).graph


def test_other_weights_are_another_network(tiny_bundle: Path, tmp_path: Path) -> None:
    """The fingerprint of a part covers what it reads in other files."""
    model = rebuild(load_codes(tiny_bundle), "target", 2)
    export_policy(model, tmp_path / "target.onnx", half=True)
    assert fingerprint_of(tmp_path / "target.onnx") == fingerprint_of(tiny_bundle / "target.onnx")
    with torch.no_grad():
        model.positions.add_(1.0)
    export_policy(model, tmp_path / "target.onnx", half=True)
    assert fingerprint_of(tmp_path / "target.onnx") != fingerprint_of(tiny_bundle / "target.onnx")


def test_weights_that_half_precision_does_not_hold_stay_as_they_are() -> None:
    exact, odd = np.arange(64, dtype=np.float32), np.full(64, 0.1, np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["exact", "odd"], ["y"])],
        "g",
        [],
        [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, [64])],
        [numpy_helper.from_array(exact, "exact"), numpy_helper.from_array(odd, "odd")],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    export.store_as_half(proto)
    assert {t.name: t.data_type for t in proto.graph.initializer} == {
        "exact.half": TensorProto.FLOAT16,
        "odd": TensorProto.FLOAT,
    }
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {})[0], exact + odd)


def test_an_exported_policy_holds_no_path_of_the_machine_it_was_made_on(tiny_bundle: Path) -> None:
    """Else the fingerprint of the same weights depends on where the checkout lies."""
    source = str(Path(export.__file__).parents[2]).encode()
    for part in ("draft.onnx", "target.onnx"):
        assert source not in (tiny_bundle / part).read_bytes()


def test_every_part_may_be_read_by_those_who_may_read_the_manifest(tiny_bundle: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in tiny_bundle.iterdir()}
    assert set(modes.values()) == {modes["manifest.json"]}
