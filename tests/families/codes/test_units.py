"""A bundle whose normalisation would turn valid answers into actions that are not finite is not loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specact import load_bundle
from specact.errors import BundleError
from specact.families.chunks.bundle import load_flow
from specact.families.codes.bundle import find_bundle
from specact.runtime.manifest import fingerprint_of

Tensors = dict[str, np.ndarray]
BEYOND = 3e38


def rewritten(folder: Path, name: str, part: str, file: str, change: Callable[[Tensors], Any]) -> Path:
    """A copy of a bundle with other numbers, and the fingerprint they have: it is consistent in itself."""
    copy = Path(shutil.copytree(find_bundle(name), folder / name))
    tensors = load_file(copy / file)
    change(tensors)
    save_file(tensors, copy / file)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["fingerprints"][part] = fingerprint_of(copy / file)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def put(name: str, value: float) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors[name].__setitem__(-1, value)


def both(centre: float, scale: float) -> Callable[[Tensors], Any]:
    return lambda tensors: (put("centre", centre)(tensors), put("scale", scale)(tensors))


UNUSABLE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "centre that is NaN": (put("centre", np.nan), "must be finite"),
    "centre that is infinite": (put("centre", -np.inf), "must be finite"),
    "scale that is NaN": (put("scale", np.nan), "must be finite"),
    "scale that is infinite": (put("scale", np.inf), "must be finite"),
    "scale of zero": (put("scale", 0.0), "every scale positive"),
    "scale below zero": (put("scale", -1.0), "every scale positive"),
    "sum beyond float32": (both(-BEYOND, BEYOND), "must be finite"),
    "no centre": (lambda tensors: tensors.pop("centre"), "holds no centre of 2 actions"),
    "a scale of one action": (lambda tensors: tensors.update(scale=np.ones(1, np.float32)), "holds no scale"),
    "a centre in double precision": (lambda tensors: tensors.update(centre=np.zeros(2)), "holds no centre"),
}


@pytest.mark.parametrize(
    ("change", "why"), [*UNUSABLE.values(), (put("table", np.nan), "table with NaN")], ids=[*UNUSABLE, "table"]
)
def test_a_pair_is_refused(tmp_path: Path, change: Callable[[Tensors], Any], why: str) -> None:
    copy = rewritten(tmp_path, "ball", "tokenizer", "tokenizer.safetensors", change)
    with pytest.raises(BundleError, match=why) as caught:
        load_bundle(copy)
    assert str(copy / "tokenizer.safetensors") in str(caught.value)


FLOW = {**UNUSABLE, "low": (put("low", np.nan), "range of actions"), "crossed": (put("low", 2.0), "range of actions")}


@pytest.mark.parametrize("case", [name for name in FLOW if name not in ("no centre", "a scale of one action")])
def test_a_flow_is_refused(tmp_path: Path, case: str) -> None:
    change, why = FLOW[case]
    copy = rewritten(tmp_path, "ball-chase-flow", "normalisation", "normalisation.safetensors", change)
    with pytest.raises(BundleError, match=why):
        load_flow(copy)


def test_the_same_numbers_are_taken(tmp_path: Path) -> None:
    load_bundle(rewritten(tmp_path, "ball", "tokenizer", "tokenizer.safetensors", lambda tensors: None))
