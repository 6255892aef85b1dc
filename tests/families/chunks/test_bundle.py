"""A flow bundle loads where everything in it belongs together, and is refused with a sentence where it does not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from specact import load_bundle
from specact.errors import BundleError, ConfigError
from specact.families.chunks.bundle import FLOW_PARTS, NETWORKS, load_flow
from specact.families.chunks.policy import ChunkSpec
from specact.files import write_json
from specact.observation import vectors
from specact.runtime.manifest import fingerprint_of, kind_of

Damage = Callable[[Path], Any]


@pytest.fixture
def flow_copy(tiny_flow: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_flow, tmp_path / "copy"))


def rewrite(bundle: Path, **changes: Any) -> None:
    """Changes the manifest; a value of None removes the key."""
    file = bundle / "manifest.json"
    manifest = json.loads(file.read_text()) | changes
    write_json(file, {key: value for key, value in manifest.items() if value is not None})


def vouch(bundle: Path) -> None:
    """Makes the manifest's fingerprints those of the files as they are."""
    rewrite(bundle, fingerprints={part: fingerprint_of(bundle / file) for part, file in FLOW_PARTS.items()})


def cut_and_vouch(name: str) -> Damage:
    def damage(bundle: Path) -> None:
        (bundle / name).write_bytes((bundle / name).read_bytes()[:-100])
        vouch(bundle)

    return damage


def remove(name: str) -> Damage:
    return lambda bundle: (bundle / name).unlink()


def edit_spec(**changes: Any) -> Damage:
    def damage(bundle: Path) -> None:
        rewrite(bundle, spec=json.loads((bundle / "manifest.json").read_text())["spec"] | changes)

    return damage


def other_units(bundle: Path) -> None:
    file = bundle / "normalisation.safetensors"
    save_file({name: np.zeros(3, np.float32) for name in load_file(file)}, file)
    vouch(bundle)


def swap(bundle: Path) -> None:
    shutil.copy(bundle / "expert.onnx", bundle / "guide.onnx")
    vouch(bundle)


REFUSED: dict[str, tuple[Damage, str]] = {
    **{f"no {file}": (remove(file), rf"has no {re.escape(file)}; copy the whole") for file in FLOW_PARTS.values()},
    "no manifest": (lambda b: (b / "manifest.json").unlink(), r"is not a bundle: it has no manifest\.json; name"),
    "another expert": (
        lambda b: (b / "expert.onnx").write_bytes(b"other"),
        r"expert\.onnx has fingerprint \w+.*the expert is damaged or belongs to another bundle",
    ),
    "expert cut short, fingerprint adapted": (cut_and_vouch("expert.onnx"), r"expert\.onnx is not a readable ONNX"),
    "units cut short, fingerprint adapted": (
        cut_and_vouch("normalisation.safetensors"), r"normalisation\.safetensors is damaged.*copy the bundle again"),
    "units of another robot": (other_units, r"does not hold centre, scale, low, high of 2 actions"),
    "another format": (lambda b: rewrite(b, format=99), r"has format 99, this version .* reads 1; export it again"),
    "another kind": (lambda b: rewrite(b, kind="tree"), r"of a kind that this version does not know, 'tree'"),
    "no kind": (lambda b: rewrite(b, kind=None), r"is a pair of draft and target, .* needs a flow policy"),
    "no spec": (lambda b: rewrite(b, spec=None), r"manifest\.json lacks spec; copy the bundle again"),
    "spec of another version": (edit_spec(colour=3), r"no usable spec.*export the bundle again"),
    "no rate": (edit_spec(rate_hz=0.0), r"rate_hz must be positive and finite, but its manifest says"),
    "another window": (edit_spec(window=3), r"encoder\.onnx takes .* do not match"),
    "a goal less": (edit_spec(goal=0), r"encoder\.onnx takes .* do not match"),
    "another chunk": (edit_spec(chunk=5), r"expert\.onnx takes .* do not match"),
    "a guide that guides not": (swap, r"guide\.onnx takes .* do not match"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bundle_that_does_not_fit_is_refused_with_a_sentence(flow_copy: Path, case: str) -> None:
    damage, sentence = REFUSED[case]
    damage(flow_copy)
    with pytest.raises(BundleError, match=sentence) as caught:
        load_flow(flow_copy)
    assert "\n" not in str(caught.value)


def test_pairs_and_flows_are_not_taken_for_each_other(tiny_bundle: Path, tiny_flow: Path) -> None:
    assert (kind_of(tiny_bundle), kind_of(tiny_flow)) == ("pair", "flow")
    with pytest.raises(BundleError, match=r"is a flow policy, which load_flow reads; this needs a pair"):
        load_bundle(tiny_flow)
    with pytest.raises(BundleError, match=r"is a pair of draft and target, which load_bundle reads; this needs"):
        load_flow(tiny_bundle)


def test_what_is_loaded(tiny_flow: Path) -> None:
    bundle = load_flow(tiny_flow)
    assert (bundle.name, bundle.env, bundle.path) == ("tiny-flow", "ball", tiny_flow)
    assert bundle.spec == ChunkSpec(vectors(2, goal=2, state=8), chunk=6, actions=2, rate_hz=20.0)
    assert len(bundle.fingerprint) == 16
    assert bundle.manifest["recipe"]["bundle"] == "tiny-flow"
    assert bundle.manifest["training"]["flow"]["step"] == 100
    assert sorted(path.name for path in tiny_flow.iterdir()) == sorted([*FLOW_PARTS.values(), "manifest.json"])


def test_another_network_is_another_bundle(flow_copy: Path, tiny_flow: Path) -> None:
    for part, file in NETWORKS.items():
        before = (flow_copy / file).read_bytes()
        model = onnx.load(flow_copy / file)
        model.doc_string += "x"
        onnx.save(model, flow_copy / file)
        vouch(flow_copy)
        assert load_flow(flow_copy).fingerprint != load_flow(tiny_flow).fingerprint, part
        (flow_copy / file).write_bytes(before)


def test_a_variant_stands_in_for_a_network(tiny_flow: Path, tmp_path: Path) -> None:
    model = onnx.load(tiny_flow / "expert.onnx")
    model.graph.node.append(onnx.helper.make_node("Neg", ["forward"], ["velocity"]))
    for node in model.graph.node[:-1]:
        node.output[:] = ["forward" if name == "velocity" else name for name in node.output]
    onnx.save(model, tmp_path / "backwards.onnx")
    own, other = load_flow(tiny_flow), load_flow(tiny_flow, variants={"expert": tmp_path / "backwards.onnx"})
    chunk, time = np.zeros((1, 6, 2), np.float32), np.array([0.5], np.float32)
    cache = np.zeros((1, 2, 2, 2, 3, 8), np.float32)
    np.testing.assert_array_equal(
        other.networks.velocity(chunk, time, cache), -own.networks.velocity(chunk, time, cache)
    )
    with pytest.raises(BundleError, match=r"encoder\.onnx takes .* do not match"):
        load_flow(tiny_flow, variants={"expert": tiny_flow / "encoder.onnx"})
    with pytest.raises(ConfigError, match=r"unknown network of a flow policy 'exprt'; did you mean 'expert'\?"):
        load_flow(tiny_flow, variants={"exprt": tmp_path / "backwards.onnx"})


def test_an_unknown_execution_provider(tiny_flow: Path) -> None:
    with pytest.raises(ConfigError, match="'NoSuchProvider' is not part of this ONNX Runtime"):
        load_flow(tiny_flow, provider="NoSuchProvider")
