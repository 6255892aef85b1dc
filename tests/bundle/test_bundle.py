"""Bundles: which folders are refused, which parts may lie beside them, and copies for other machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.bundle.graphs import doubling, endless, huge

from specact.bundle.bundle import (
    HEAD,
    Bundle,
    check_scale,
    copy_bundle,
    find_bundle,
    give_head,
    open_bundle,
)
from specact.bundle.manifest import MANIFEST, fingerprint_of, joint_fingerprint, read_manifest, write_manifest
from specact.errors import BundleError, ConfigError, SpecactError
from specact.records import Record, Size

PARTS = {"target": "target.onnx", "table": "table.safetensors"}
Damage = Callable[[Path], Any]


class Spec(Record, frozen=True):
    """Of the bundles here."""

    actions: Size = 2


def make(path: Path, scale: float = 1.0) -> Path:
    path.mkdir()
    doubling(path / PARTS["target"])
    save_file({"scale": np.full(2, scale, np.float32)}, path / PARTS["table"])
    write_manifest(path, {"name": path.name, "env": ""}, Spec(), PARTS)
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make(tmp_path / "some")


def load(path: Path) -> Bundle[Spec]:
    return open_bundle(path, "pair", Spec, PARTS)


def rewrite(path: Path, **changes: Any) -> None:
    """Changes the manifest; a value of None removes the entry."""
    values = json.loads((path / MANIFEST).read_text()) | changes
    (path / MANIFEST).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def vouch(path: Path) -> None:
    """Makes the manifest's fingerprints those of the files as they are, as a hostile one would."""
    rewrite(path, fingerprints={part: fingerprint_of(path / file) for part, file in PARTS.items()})


def test_a_bundle_is_what_its_manifest_says(bundle: Path) -> None:
    result = load(bundle)
    assert (result.name, result.env, result.spec, result.path) == ("some", "", Spec(), bundle)
    assert result.files == {part: bundle / file for part, file in PARTS.items()}
    assert result.fingerprint == joint_fingerprint(*(fingerprint_of(file) for file in result.files.values()))
    assert result.manifest.values()["name"] == "some" and "recipe" not in result.manifest.values()
    (scale,) = result.tensors("table", {"scale": (np.float32, ("any",))}).values()
    assert scale.tolist() == [1.0, 1.0]


def changed(**changes: Any) -> Damage:
    return lambda path: rewrite(path, **changes)


def vouched(harm: Callable[[Path], Path]) -> Damage:
    def damage(path: Path) -> None:
        harm(path / PARTS["target"])
        vouch(path)

    return damage


def truncated(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-20])
    return file


def replaced(name: str, make: Callable[[Path], Any] = lambda path: None) -> Damage:
    """Something else in place of a file, or nothing."""

    def damage(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return damage


def sparse(file: Path) -> None:
    """A file of 4 TiB that takes no room on the disk."""
    with file.open("wb") as opened:
        opened.truncate(1 << 42)


REFUSED: dict[str, tuple[Damage, str]] = {
    **{f"no {file}": (replaced(file), file) for file in (MANIFEST, *PARTS.values())},
    **{f"{file} of 4 TiB": (replaced(file, sparse), file) for file in (MANIFEST, *PARTS.values())},
    "a network truncated": (lambda path: truncated(path / "target.onnx"), "target.onnx"),
    "a table truncated": (lambda path: truncated(path / "table.safetensors"), "table.safetensors"),
    "truncated and vouched for": (vouched(truncated), "target.onnx"),
    "a network of any size": (vouched(huge), "target.onnx"),
    "a folder for a part": (replaced("target.onnx", Path.mkdir), "target.onnx"),
    "a device for a manifest": (replaced(MANIFEST, lambda file: file.symlink_to("/dev/zero")), MANIFEST),
    "a part that cannot be read": (
        replaced("target.onnx", lambda file: file.symlink_to("/proc/self/mem")),
        "target.onnx",
    ),
    "a head of another bundle": (lambda path: doubling(path / HEAD), HEAD),
    "no JSON": (lambda path: truncated(path / MANIFEST), MANIFEST),
    "no object": (lambda path: (path / MANIFEST).write_text("5"), MANIFEST),
    "another format": (changed(format=99), "format 99"),
    "another kind": (changed(kind="flow"), "a flow policy"),
    "an unknown kind": (changed(kind="pear"), "pear"),
    **{f"no {key}": (changed(**{key: None}), key) for key in ("name", "env", "spec", "fingerprints")},
    "no fingerprint": (changed(fingerprints={"table": "0"}), "target"),
    "a name elsewhere": (changed(name="../../elsewhere"), "name"),
    "an unknown part left out": (changed(left_out=["table"]), "left_out"),
    "an unknown entry in the spec": (changed(spec={"actions": 2, "colour": 3}), "colour"),
    "a number out of range": (changed(spec={"actions": 1 << 70}), "actions"),
    "shared with nobody": (changed(shared={"target": "absent"}), "absent"),
    "a part elsewhere": (changed(fingerprints={"../target": "0", "table": "0"}), "target"),
    "shared outside": (changed(shared={"target": "../some"}), "shared"),
    "a file that the table misses": (changed(files={"table.safetensors": "0"}), "target.onnx"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bundle_that_does_not_fit_is_refused(bundle: Path, case: str) -> None:
    damage, named = REFUSED[case]
    damage(bundle)
    with pytest.raises(BundleError, match=named) as raised:
        load(bundle)
    assert str(bundle) in str(raised.value) and "\n" not in str(raised.value)


def test_an_unknown_network_is_tried_before_it_is_loaded(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    monkeypatch.setattr("specact.bundle.bundle.vet", lambda networks: tried.extend(networks))
    doubling(tmp_path / "head.onnx")
    give_head(bundle, tmp_path / "head.onnx", parameters=7)
    assert load(bundle).manifest.parameters == {"head": 7}
    assert tried == [bundle / PARTS["target"], bundle / HEAD]
    open_bundle("ball", "pair", dict, {"target": "target.onnx"})
    assert len(tried) == 2  # those that come with the package are known


def share(path: Path) -> Path:
    """A bundle that shares the target of another beside it."""
    variant = make(path.parent / "variant", scale=2.0)
    (variant / PARTS["target"]).unlink()
    rewrite(variant, shared={"target": path.name})
    return variant


def test_a_part_may_lie_in_a_bundle_beside(bundle: Path) -> None:
    variant = load(share(bundle))
    assert variant.files == {"target": bundle / PARTS["target"], "table": variant.path / PARTS["table"]}
    assert variant.fingerprint != load(bundle).fingerprint


@pytest.mark.parametrize("changes", [{"fingerprints": {"target": "0", "table": "0"}}, {"left_out": ["target"]}])
def test_a_shared_part_has_to_be_the_same(bundle: Path, changes: dict[str, Any]) -> None:
    variant = share(bundle)
    rewrite(bundle, **changes)
    with pytest.raises(BundleError, match="target"):
        load(variant)


@pytest.mark.parametrize("device", [False, True])
def test_a_copy_is_whole(bundle: Path, tmp_path: Path, device: bool) -> None:
    variant, out = share(bundle), tmp_path / "far" / "copy"
    (variant / "calibration").mkdir()
    copy_bundle(variant, out, device=device, ignore=["calibration"])
    copied = load(out)
    assert copied.fingerprint == load(variant).fingerprint
    assert (out / PARTS["target"]).exists() == ("target" in copied.files) == (not device)
    assert not (out / "calibration").exists()
    assert copied.manifest.shared == {} and copied.manifest.left_out == (("target",) if device else ())


def test_a_copy_takes_nothing_from_elsewhere(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of this computer")
    for target in (tmp_path / "secret", tmp_path, Path("/dev/zero")):
        (bundle / "notes").symlink_to(target)
        with pytest.raises(BundleError, match="notes"):
            copy_bundle(bundle, tmp_path / "copy")
        (bundle / "notes").unlink()
    (bundle / "notes").symlink_to(MANIFEST)
    copy_bundle(bundle, tmp_path / "copy")


def test_weights_in_a_file_of_their_own(bundle: Path, tmp_path: Path) -> None:
    save_file({"w": np.zeros(2, np.float32)}, bundle / "target.safetensors")
    files = {file: fingerprint_of(bundle / file) for file in ("target.onnx", "target.safetensors", "table.safetensors")}
    rewrite(bundle, files=files, fingerprints={"target": "graph-and-weights", "table": files["table.safetensors"]})
    assert load(bundle).fingerprint == joint_fingerprint("graph-and-weights", files["table.safetensors"])
    variant = make(bundle.parent / "variant")
    (variant / "target.onnx").unlink()
    fingerprints = json.loads((variant / MANIFEST).read_text())["fingerprints"] | {"target": "graph-and-weights"}
    rewrite(variant, shared={"target": "some"}, fingerprints=fingerprints)
    assert load(variant).files["target"] == bundle / "target.onnx"
    copy_bundle(bundle, tmp_path / "device", device=True)
    assert [file.name for file in (tmp_path / "device").iterdir() if file.stem == "target"] == []
    (bundle / "target.safetensors").write_bytes(b"other weights")
    for path in (bundle, variant):
        with pytest.raises(BundleError, match=r"target\.safetensors"):
            load(path)


def test_bundles_by_name_and_by_path(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_bundle(bundle) == bundle
    monkeypatch.chdir(bundle.parent)
    (bundle.parent / "ball").mkdir()
    assert read_manifest(find_bundle("ball")).name == "ball"
    with pytest.raises(ConfigError, match=r"'bal'.*'ball'"):
        find_bundle("bal")
    with pytest.raises(ConfigError, match=r"no folder runs/bundles/ball"):
        find_bundle("runs/bundles/ball")
    with pytest.raises(SpecactError, match=MANIFEST):
        load(bundle.parent)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("other", np.ones(2, np.float32)), ("scale", np.ones(3, np.float32)), ("scale", np.ones((2, 1), np.float32)),
        ("scale", np.ones(2, np.int64)), ("scale", np.ones(2)), ("scale", np.array([np.nan, 1.0], np.float32)),
        ("scale", np.array([1.0, np.inf], np.float32)), ("scale", np.ones(0, np.float32)),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(bundle: Path, name: str, array: Any) -> None:
    loaded = load(bundle)
    save_file({name: array}, loaded.files["table"])
    with pytest.raises(BundleError, match=r"table\.safetensors.*scale"):
        loaded.tensors("table", {"scale": (np.float32, (2,) if array.size else ("any",))})
    loaded.files["table"].write_bytes(b"damaged")
    with pytest.raises(BundleError, match=r"table\.safetensors"):
        loaded.tensors("table", {})


@pytest.mark.parametrize(("centre", "scale"), [(0.0, 0.0), (0.0, -1.0), (3e38, 3e38), (-3e38, 3e38)])
def test_a_scale_by_which_actions_would_overflow_is_refused(centre: float, scale: float) -> None:
    with pytest.raises(BundleError, match="scale"):
        check_scale(Path("file"), np.full(2, centre, np.float32), np.full(2, scale, np.float32))
    check_scale(Path("file"), np.full(2, 1e38, np.float32), np.full(2, 1e38, np.float32))


def test_networks_that_this_package_writes_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specact.bundle.vetting.subprocess.run", None)
    path = make(tmp_path / "own")
    endless(path / PARTS["target"])
    write_manifest(path, {"name": "own", "env": ""}, Spec(), PARTS)
    assert load(path).files
