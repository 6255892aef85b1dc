"""Bundles of every family: they load, and are refused where a spec, a network or numbers do not belong together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import MANIFEST, fingerprint_of
from specact.errors import BundleError
from specact.families.chunks.flow import load_flow
from specact.families.chunks.sources import load_regression
from specact.families.codes.pair import load_codes
from specact.families.tokens.policy import load_tokens
from specact.load import load_exchange

LOADERS: dict[str, Callable[[Path], Any]] = {
    "ball": load_codes, "ball-chase-flow": load_flow, "metaworld-draft": load_regression,
    "kitchen-tokens": load_tokens,
}  # fmt: skip
FLOWS = [name for name in LOADERS if name != "ball"]
UNITS = {"ball": "tokenizer"} | dict.fromkeys(FLOWS, "normalisation")
pytestmark = pytest.mark.usefixtures("known_networks")


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a packaged bundle, to be changed."""
    ignore = shutil.ignore_patterns("calibration", "gate.onnx", "flash", "drafters")
    return Path(shutil.copytree(find_bundle(request.param), tmp_path / request.param, ignore=ignore))


def rewrite(path: Path, **changes: Any) -> None:
    """Changes the manifest, and makes its fingerprints those of the files: it is consistent in itself."""
    values = json.loads((path / MANIFEST).read_text()) | changes
    for part in values["fingerprints"]:
        file = path / f"{part}.onnx"
        values["fingerprints"][part] = fingerprint_of(file if file.exists() else file.with_suffix(".safetensors"))
    values["files"] = {file: fingerprint_of(path / file) for file in values.get("files", ())}
    (path / MANIFEST).write_text(json.dumps(values))


def spec_of(path: Path) -> Any:
    return json.loads((path / MANIFEST).read_text())["spec"]


@pytest.mark.parametrize("copy", LOADERS, indirect=True)
def test_an_undamaged_copy_loads_as_the_same_bundle(copy: Path) -> None:
    load, original = LOADERS[copy.name], find_bundle(copy.name)
    assert load(copy).fingerprint == load(original).fingerprint
    assert (load(copy).name, load(copy).spec) == (copy.name, load(original).spec)
    for file in copy.glob("*.onnx"):
        # Another comment is another network.
        model = onnx.load(file)
        model.doc_string += "x"
        onnx.save(model, file)
        rewrite(copy)
        changed = load(copy)
        assert changed.fingerprint != load(original).fingerprint
        target = changed.manifest.fingerprints["target"] if copy.name == "ball" else changed.fingerprint
        assert load_exchange(str(copy)).contract.fingerprint == target


SPEC = [
    *((name, field, wrong) for name in LOADERS for field in ("chunk", "actions") for wrong in (0, 1 << 70, "2", 1.5)),
    *((name, "rate_hz", wrong) for name in LOADERS for wrong in (0.0, "20", float("nan"), float("inf"), 1e-300)),
    *((name, "colour", 3) for name in LOADERS),
    *(("ball", "codebooks", wrong) for wrong in (0, 1 << 14)), *(("ball", "codes", wrong) for wrong in (0, True)),
    *(("ball", "execute", wrong) for wrong in (0, 9)), *(("ball", "temperature", wrong) for wrong in (0.0, -1.0)),
    ("ball", "overlap", "sum"), ("ball", "sequential", 1),
]  # fmt: skip


@pytest.mark.parametrize(("copy", "field", "wrong"), SPEC, indirect=["copy"])
def test_a_spec_is_refused_by_its_field(copy: Path, field: str, wrong: Any) -> None:
    rewrite(copy, spec=spec_of(copy) | {field: wrong})
    with pytest.raises(BundleError, match=field) as raised:
        LOADERS[copy.name](copy)
    assert str(copy) in str(raised.value)


@pytest.mark.parametrize(
    ("copy", "changes", "named"),
    [
        ("ball", {"codes": 4}, "table"), ("ball", {"chunk": 6}, "table"),
        ("ball", {"sequential": True}, r"(draft|target)\.onnx"),
        ("ball-chase-flow", {"chunk": 5}, r"expert\.onnx"), ("metaworld-draft", {"chunk": 5}, r"policy\.onnx"),
        ("kitchen-tokens", {"chunk": 5}, r"decoder\.onnx"), ("kitchen-tokens", {"actions": 5}, r"decoder\.onnx"),
    ],
    indirect=["copy"],
)  # fmt: skip
def test_networks_of_another_spec_are_refused(copy: Path, changes: Any, named: str) -> None:
    rewrite(copy, spec=spec_of(copy) | changes)
    with pytest.raises(BundleError, match=named):
        LOADERS[copy.name](copy)


@pytest.mark.parametrize("copy", LOADERS, indirect=True)
@pytest.mark.parametrize("change", [{"history": 3}, {"history": "2"}, {"history": 1 << 70}, {"shape": [3]}, None])
def test_another_observation_is_refused(copy: Path, change: Any) -> None:
    spec = spec_of(copy)
    fields = spec.get("draft", spec.get("observation"))["fields"]
    fields.pop("state") if change is None else fields["state"].update(change)
    rewrite(copy, spec=spec)
    with pytest.raises(BundleError):
        LOADERS[copy.name](copy)


@pytest.mark.parametrize("copy", ["ball-chase-flow"], indirect=True)
@pytest.mark.parametrize(("file", "instead"), [("guide", "expert"), ("expert", "guide"), ("prefix", "encoder")])
def test_networks_in_place_of_others_are_refused(copy: Path, file: str, instead: str) -> None:
    shutil.copy(copy / f"{instead}.onnx", copy / f"{file}.onnx")
    rewrite(copy)
    with pytest.raises(BundleError, match=rf"{file}\.onnx"):
        load_flow(copy)


@pytest.mark.parametrize("copy", LOADERS, indirect=True)
@pytest.mark.parametrize(
    ("centre", "scale"), [(0.0, 0.0), (0.0, -1.0), (-3e38, 3e38), (np.nan, 1.0), (0.0, np.inf)], ids=str
)
def test_units_that_are_not_finite_are_refused(copy: Path, centre: float, scale: float) -> None:
    file = copy / f"{UNITS[copy.name]}.safetensors"
    tensors = load_file(file)
    tensors["centre"][-1], tensors["scale"][-1] = centre, scale
    save_file(tensors, file)
    rewrite(copy)
    with pytest.raises(BundleError, match=rf"{file.name}.*(centre|scale)"):
        LOADERS[copy.name](copy)


@pytest.mark.parametrize("copy", FLOWS, indirect=True)
def test_a_range_the_wrong_way_round_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "normalisation.safetensors")
    save_file(tensors | {"low": tensors["high"], "high": tensors["low"]}, copy / "normalisation.safetensors")
    rewrite(copy)
    with pytest.raises(BundleError, match=r"normalisation\.safetensors.*low"):
        LOADERS[copy.name](copy)


def test_a_variant_stands_in_for_a_network(tmp_path: Path) -> None:
    path = find_bundle("ball-chase-flow")
    model = onnx.load(path / "expert.onnx")
    for node in model.graph.node:
        node.output[:] = ["forward" if name == "velocity" else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Neg", ["forward"], ["velocity"]))
    onnx.save(model, tmp_path / "backwards.onnx")
    original, variant = load_flow(path), load_flow(path, variants={"expert": tmp_path / "backwards.onnx"})
    cache = original.networks.cache([original.spec.observation.zeros()])
    chunk, time = np.zeros((1, original.spec.chunk, original.spec.actions), np.float32), np.array([0.5], np.float32)
    forward, backward = (bundle.networks.velocity(chunk, time, cache) for bundle in (original, variant))
    np.testing.assert_array_equal(forward, -backward)
    with pytest.raises(BundleError, match=r"encoder\.onnx"):
        load_flow(path, variants={"expert": path / "encoder.onnx"})
