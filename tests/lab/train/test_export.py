"""What export writes: the trained weights in half precision, once, and no trace of paths."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file

from specact import load_pair
from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import fingerprint_of
from specact.cli.bundles import Export
from specact.errors import ConfigError
from specact.families.chunks.flow import load_flow
from specact.families.codes.pair import load_codes
from specact.lab.train import export, loop
from specact.lab.train.codes import export_policy, rebuild
from specact.lab.train.export import stored_weights
from specact.lab.train.freqcache import add_refresh
from specact.lab.train.recipe import ChunkRecipe, EncoderRecipe, plain
from specact.observation import Field, ObservationSpec
from specact.systems.freqcache import FREQCACHE, Patches, load_refresh


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
    export_policy(model, tmp_path / "target.onnx")
    assert fingerprint_of(tmp_path / "target.onnx") == fingerprint_of(tiny_bundle / "target.onnx")
    with torch.no_grad():
        model.positions.add_(1.0)
    export_policy(model, tmp_path / "target.onnx")
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


# --- the refresh of a flow policy's prefix, made from the bundle that it was exported to ---


def test_it_is_made_by_the_command_and_found_beside_its_target(tmp_path: Path) -> None:
    bare = shutil.copytree(
        find_bundle("metaworld-flow"), tmp_path / "bare", ignore=shutil.ignore_patterns(FREQCACHE, "flash")
    )
    Export(Path(bare), tmp_path / "copy", refresh=True).run()
    target = load_flow(tmp_path / "copy")
    made = load_refresh(target.path / FREQCACHE, target)
    assert made.spec.cameras == {"image.corner2": Patches(10, 4, 4), "image.gripper": Patches(26, 4, 4)}
    rng = np.random.default_rng(1)
    old, new = (rng.standard_normal((1, 43, 192)).astype(np.float32) for _ in range(2))
    for count in (1, 20, 43):
        places = rng.permutation(43)[:count]
        mixed, sources = old.copy(), np.arange(43)
        mixed[:, places], sources[places] = new[:, places], -1
        cache = made.refreshed(new, sources, target.networks.cache([], old))
        # Before any attention a token does not see the others, so that it is as in the prefix of what is mixed.
        np.testing.assert_allclose(cache[:, 0], target.networks.cache([], mixed)[:, 0], atol=1e-5)


def test_patches_of_no_whole_pixels_are_not_reused() -> None:
    recipe = ChunkRecipe(
        kind="flow", bundle="b", env="ball", generate_episodes=1,
        encoder=EncoderRecipe(tokens="patches", channels=(4, 4), pixels=24),
    )  # fmt: skip
    spec = ObservationSpec({"image": Field((32, 32, 3), "uint8", 1)})
    target: Any = SimpleNamespace(
        name="dots", spec=SimpleNamespace(observation=spec), manifest=SimpleNamespace(recipe=plain(recipe), words=None)
    )
    with pytest.raises(ConfigError, match="32 x 32 pixels in 3 x 3 patches, which are no whole pixels"):
        add_refresh(target)


def test_a_policy_without_patches_has_nothing_to_reuse(tiny_flow: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'encoder\.tokens = "patches"'):
        add_refresh(load_flow(tiny_flow))
    assert not (tiny_flow / FREQCACHE).exists()
    for source, said in ((tiny_flow, "patches"), (Path("ball"), "--refresh")):
        with pytest.raises(ConfigError, match=said):
            Export(source, tmp_path / "copy", refresh=True).run()
        assert not list(tmp_path.iterdir()), "a failure leaves nothing"
