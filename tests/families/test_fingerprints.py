"""The fingerprint of a target: on a server and on a device the same, of its weights, whatever drafts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import specact
from specact.bundle.bundle import copy_bundle, find_bundle
from specact.bundle.manifest import LEFT_OUT, MANIFEST
from specact.families.chunks.pair import PairSettings
from specact.families.chunks.sources import Inputs, try_out
from specact.lab.train.split import split_bundle
from specact.load import load_exchange, load_pair, load_policy, make_pair


@specact.chunk_policy(
    observation={"state": (2,)}, chunk=4, actions=2, rate_hz=10.0, low=[-1.0, -1.0], high=[1.0, 1.0]
)  # fmt: skip
def still(inputs: Inputs) -> Any:
    return np.zeros((len(inputs["state"]), 4, 2))


STILL = f"{__name__}:still"
pytestmark = pytest.mark.usefixtures("known_networks")


def graph(folder: Path, weight: float, outside: str = "") -> str:
    """A description of an ONNX file whose chunks are the state times a weight, which may be in a file of its own."""
    tensor = numpy_helper.from_array(np.full((4, 2), weight, np.float32), "weight")
    seen, chunk = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", steps, 2])
        for name, steps in (("state", 1), ("chunk", 4))
    )
    body = helper.make_graph([helper.make_node("Mul", ["state", "weight"], ["chunk"])], "g", [seen], [chunk], [tensor])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    folder.mkdir(exist_ok=True)
    onnx.save(
        model, folder / "policy.onnx", save_as_external_data=bool(outside), location=outside or None, size_threshold=0
    )
    (folder / "policy.toml").write_text(
        'onnx = "policy.onnx"\nchunk = 4\nactions = 2\nrate_hz = 10.0\nlow = [-1.0, -1.0]\nhigh = [1.0, 1.0]\n'
        "[observation.state]\nshape = [2]\n"
    )
    return str(folder / "policy.toml")


@pytest.mark.parametrize("name", ["ball", "pusht-flow", "relocate-tokens"])
def test_server_and_device_know_the_same_and_a_draft_changes_nothing(name: str, tmp_path: Path) -> None:
    """Also a device whose copy was exported without its target."""
    expected, path = load_exchange(name).contract.fingerprint, find_bundle(name)
    kind = json.loads((path / MANIFEST).read_text()).get("kind", "pair")
    copy_bundle(path, tmp_path / "device", device=kind in LEFT_OUT)
    exchange = load_pair(tmp_path / "device").exchange
    assert exchange.contract.fingerprint == expected != ""
    if kind != "pair":
        drafted = load_pair(tmp_path / "device", draft=name)
        assert drafted.exchange.contract.fingerprint == expected and drafted.fingerprint != load_pair(name).fingerprint


def test_a_pair_of_chunk_policies_knows_its_target_whoever_serves_it(tmp_path: Path) -> None:
    described = graph(tmp_path / "own", 0.5)
    sources = [("ball#draft", "ball#target"), ("pusht-flow", "pusht-flow"), (described, described)]
    for number, (draft, target) in enumerate(sources):
        folder, named = tmp_path / f"pair-{number}", target if target == described else None
        pair = make_pair(folder, draft, target, PairSettings(execute=2))
        assert pair.exchange.contract.fingerprint == load_exchange(target).contract.fingerprint != ""
        served = load_exchange(str(folder), target=named)
        assert served.contract.fingerprint == pair.exchange.contract.fingerprint != pair.fingerprint


def test_a_function_has_none(tmp_path: Path) -> None:
    assert load_exchange(STILL).contract.fingerprint == ""
    assert make_pair(tmp_path / "pair", STILL, STILL).exchange.contract.fingerprint == ""


def test_an_onnx_file_is_known_by_its_weights_wherever_they_are(tmp_path: Path) -> None:
    prints = set()
    for outside in ("", "policy.onnx.data", "numbers"):
        for weight in (0.5, 0.25):
            source = graph(tmp_path / f"{outside}-{weight}", weight, outside)
            (tmp_path / f"{outside}-{weight}" / "notes.txt").write_text(str(weight))
            try_out(load_policy(source))
            first = load_exchange(source).contract.fingerprint
            (tmp_path / f"{outside}-{weight}" / "notes.txt").unlink()
            assert load_exchange(source).contract.fingerprint == first
            prints.add(first)
    assert "" not in prints and len(prints) == 6


def test_stages_of_another_network_are_another_target(tmp_path: Path) -> None:
    stages = (load_exchange(str(split_bundle(name, tmp_path / name).path)) for name in ("ball", "pusht"))
    prints = {exchange.contract.fingerprint for exchange in stages}
    assert "" not in prints and len(prints) == 2
