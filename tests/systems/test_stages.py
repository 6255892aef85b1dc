"""Activations on the wire: how far fewer bits are off, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.served import served

from specact.bundle.bundle import find_bundle
from specact.errors import BundleError, ConfigError, WireError
from specact.lab.train.split import split_bundle
from specact.load import load_exchange
from specact.observation import Window
from specact.rng import StepAddress
from specact.systems.roboecc import (
    PRECISIONS,
    SplitExchange,
    StagedFolder,
    kind_at,
    load_staged,
    pack,
    split_contract,
    unpack,
)
from specact.wire.arrays import Arrays
from specact.wire.exchange import Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> StagedFolder:
    return split_bundle("ball", tmp_path_factory.mktemp("split") / "ball")


def window_of(folder: StagedFolder, rng: np.random.Generator) -> Window:
    fields = folder.spec.observation.fields
    return Window({name: rng.normal(size=field.window_shape).astype(np.float32) for name, field in fields.items()})


def test_each_precision_errs_by_its_bound_at_most() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 100.0):
        sent = (scale * rng.normal(size=(4, 9))).astype(np.float32)
        found = {name: unpack(pack(sent, name), (4, 9))[0] for name in PRECISIONS}
        np.testing.assert_array_equal(found["float32"], sent)
        off = {name: np.abs(found[name].astype(np.float64) - sent) for name in PRECISIONS}
        assert (off["float16"] <= np.maximum(2.0**-11 * np.abs(sent), 3e-8)).all() and off["float16"].any()
        # One half of a level, and the rounding to float32 behind it.
        level = float(sent.max() - sent.min()) / 255.0
        assert off["uint8"].max() <= 0.5 * level + 2.0**-22 * np.abs(sent).max()
        assert off["uint8"].max() > 0.4 * level


def test_a_constant_activation_survives_and_what_no_number_can_hold_is_refused() -> None:
    constant = np.full((2, 3), -0.7, np.float32)
    np.testing.assert_array_equal(unpack(pack(constant, "uint8"), (2, 3))[0], constant)
    with pytest.raises(WireError, match="ask for float32"):
        pack(np.array([7e4], np.float32), "float16")
    for precision in PRECISIONS:
        with pytest.raises(WireError, match="no finite activation"):
            pack(np.array([1.0, np.nan], np.float32), precision)
    backwards: Arrays = {"activation": np.zeros(2, np.uint8), "range": np.array([1.0, 0.0], np.float32)}
    with pytest.raises(WireError, match="must not go down"):
        unpack(backwards, (2,))


def test_a_reply_of_another_precision_or_shape_is_refused(folder: StagedFolder) -> None:
    size, layout = (
        math.prod(folder.spec.activations[0]),
        split_contract(folder.spec, folder.fingerprint).kinds["cut-1-float16"].reply,
    )
    layout.unpack(layout.pack({"activation": np.zeros(size, np.float16)}))
    for wrong in (np.zeros(size + 1, np.float16), np.zeros(size, np.float32), np.full(size, np.inf, np.float16)):
        with pytest.raises(WireError, match="activation"):
            layout.unpack(bytearray(wrong.tobytes()))


def test_the_server_answers_a_batch_of_a_cut_as_it_answers_each(folder: StagedFolder) -> None:
    exchange = load_exchange(str(folder.path))
    assert isinstance(exchange, SplitExchange)
    rng, stages = np.random.default_rng(1), folder.spec.stages
    for kind in {kind_at(folder.spec, cut, precision) for cut in (1, 4, stages) for precision in PRECISIONS}:
        requests = [Request(window_of(folder, rng), StepAddress(0, 0, 0, number)) for number in range(4)]
        for request, together in zip(requests, served(exchange, kind, requests), strict=True):
            (alone,) = served(exchange, kind, [request])
            assert not isinstance(together, WireError) and not isinstance(alone, WireError)
            for name, array in together.items():
                # In a batch the last bits differ, and with them a level of uint8 or a bit of float16.
                off = np.abs(array.astype(float) - alone[name].astype(float)).max()
                assert off <= (1.0 if array.dtype == np.uint8 else 5e-3)


def test_an_observation_without_a_finite_answer_is_refused_alone(folder: StagedFolder) -> None:
    exchange = SplitExchange(folder)
    sound = window_of(folder, np.random.default_rng(2))
    huge = Window({name: np.full_like(array, 3e38) for name, array in sound.arrays.items()})
    for kind in ("infer", "cut-1-float32", "cut-1-float16"):
        requests = [Request(window, StepAddress(0, 0, 0, step)) for step, window in enumerate((sound, huge))]
        first, second = served(exchange, kind, requests)
        assert not isinstance(first, WireError) and isinstance(second, WireError)


def test_kinds_and_bytes_of_a_cut(folder: StagedFolder) -> None:
    spec = folder.spec
    assert kind_at(spec, spec.stages, "uint8") == "infer"
    assert [spec.reply_bytes(1, name) for name in PRECISIONS] == [
        2 * math.prod(spec.activations[0]),
        math.prod(spec.activations[0]) + 8,
        4 * math.prod(spec.activations[0]),
    ]
    assert spec.reply_bytes(0, "float16") == 0
    outputs = sum(4 * int(np.prod(shape)) for shape in spec.outputs.values())
    assert spec.reply_bytes(spec.stages, "float16") == outputs
    for cut in (0, spec.stages + 1):
        with pytest.raises(BundleError, match="a server runs 1 to 8 stages"):
            kind_at(spec, cut, "float16")
    with pytest.raises(ConfigError, match="unknown precision"):
        kind_at(spec, 1, "float8")  # type: ignore[arg-type]


def test_damaged_stages_are_refused(folder: StagedFolder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder.path, tmp_path / "copy"))
    (copy / "stage-03.onnx").write_bytes((copy / "stage-02.onnx").read_bytes())
    with pytest.raises(BundleError, match=r"stage-03[.]onnx has fingerprint"):
        load_staged(copy)
    manifest = json.loads((folder.path / "manifest.json").read_text())
    wrong = json.loads(json.dumps(manifest))
    wrong["spec"]["activations"][0] = [2, 64]
    shutil.copytree(folder.path, copy, dirs_exist_ok=True)
    (copy / "manifest.json").write_text(json.dumps(wrong))
    with pytest.raises(BundleError, match=r"stage-00[.]onnx.* split the bundle again"):
        load_staged(copy)
    wrong_specs: list[dict[str, Any]] = [
        {"activations": []}, {"activations": [["a"]]}, {"outputs": 3}, {"made_of": "tokens"}, {"more": 1},
    ]  # fmt: skip
    for broken in wrong_specs:
        (copy / "manifest.json").write_text(json.dumps(manifest | {"spec": manifest["spec"] | broken}))
        with pytest.raises(BundleError, match=next(iter(broken))):
            load_staged(copy)
    with pytest.raises(BundleError, match="this needs a target in stages"):
        load_staged(find_bundle("ball"))
