"""What export writes: policies that answer like the trained networks, weights in half precision, no trace of paths."""

import copy
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file

from specact import load_pair
from specact.bundle.manifest import fingerprint_of
from specact.lab.data.generate import demonstrations
from specact.lab.envs import load_task
from specact.lab.train import export, loop
from specact.lab.train.codes import LastPosition, example_inputs, export_policy, shapes_of, specs_of
from specact.lab.train.dataset import prepare
from specact.lab.train.export import PARITY, stored_weights
from specact.lab.train.recipe import CodesRecipe, load_recipe
from specact.lab.train.vqbet import VQBeT
from specact.observation import Window


@pytest.fixture(scope="module")
def networks(tiny_run: Path, tiny_recipe: Path) -> dict[str, VQBeT]:
    """The trained networks, their weights rounded to half precision as the export says it does."""
    recipe = load_recipe(tiny_recipe, CodesRecipe)
    assert recipe.precision == "float16" and recipe.env is not None
    task = load_task(recipe.env)
    shown = demonstrations(task, (), recipe.generate_episodes, recipe.generate_noise, recipe.seed)
    data = prepare(shown, recipe)
    made, specs = {}, specs_of(recipe, shown)
    for role in ("draft", "target"):
        model = VQBeT(shapes_of(data, recipe, specs[role]), recipe.policies[role], data.statistics)
        weights, _ = loop.read_tensors(tiny_run / f"{role}.safetensors")
        buffers = ("state_mean", "state_std", "goal_mean", "goal_std")
        model.load_state_dict({k: v if k in buffers else v.half().float() for k, v in weights.items()})
        made[role] = model.eval()
    return made


def some_windows(model: VQBeT, count: int) -> tuple[list[Window], dict[str, torch.Tensor]]:
    seen = example_inputs(model, count)
    assert set(seen) == {"state", "goal"}
    return [Window({name: values[row].numpy() for name, values in seen.items()}) for row in range(count)], seen


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("count", [1, 7])
def test_onnx_runtime_answers_like_pytorch(
    tiny_bundle: Path, networks: dict[str, VQBeT], role: str, count: int
) -> None:
    bundle, model = load_pair(tiny_bundle), networks[role]
    windows, seen = some_windows(model, count)
    with torch.no_grad():
        logits, offsets = LastPosition(model)(seen)
    answers = getattr(bundle.parts, role).infer_batch(windows)
    assert len(answers) == count
    for answer, row, offset in zip(answers, logits, offsets, strict=True):
        np.testing.assert_allclose(answer.probs, row.double().softmax(-1).numpy(), atol=PARITY)
        np.testing.assert_allclose(answer.probs.sum(-1), 1.0, rtol=1e-12)
        np.testing.assert_allclose(answer.offsets, offset.numpy(), atol=PARITY)
    assert bundle.parts.manifest.parity[role] < PARITY
    assert bundle.parts.manifest.parameters[role] == sum(p.numel() for p in model.parameters())


def test_weights_are_stored_once_and_in_half_precision(tiny_bundle: Path, networks: dict[str, VQBeT]) -> None:
    file = tiny_bundle / "target.safetensors"
    stored, model = load_file(file), networks["target"].state_dict()
    for name, values in stored_weights(file).items():
        assert torch.equal(values, model[name]), name
    halves = sum(values.nbytes for values in stored.values() if values.dtype == np.float16)
    assert halves > 0.9 * (file.stat().st_size - 8192)
    within = [tensor for tensor in graph_of(tiny_bundle).initializer if tensor.data_location != TensorProto.EXTERNAL]
    assert max(math.prod(tensor.dims) for tensor in within) < 64, "larger ones are in the file"
    manifest = load_pair(tiny_bundle).parts.manifest
    assert set(manifest.files) == {file.name for file in tiny_bundle.iterdir() if file.suffix != ".json"}


def graph_of(bundle: Path) -> onnx.GraphProto:
    return onnx.load(bundle / "target.onnx", load_external_data=False).graph


def test_other_weights_are_another_network(tiny_bundle: Path, networks: dict[str, VQBeT], tmp_path: Path) -> None:
    """The fingerprint of a part covers what it reads in other files."""
    model, before = networks["target"], copy.deepcopy(networks["target"].state_dict())
    export_policy(model, tmp_path / "target.onnx", half=True)
    assert fingerprint_of(tmp_path / "target.onnx") == fingerprint_of(tiny_bundle / "target.onnx")
    with torch.no_grad():
        model.positions.add_(1.0)
    export_policy(model, tmp_path / "target.onnx", half=True)
    assert fingerprint_of(tmp_path / "target.onnx") != fingerprint_of(tiny_bundle / "target.onnx")
    model.load_state_dict(before)


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
