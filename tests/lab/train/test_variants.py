"""Cheaper networks of a bundle: made once, kept, and run where a sweep wants them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specact.errors import ConfigError
from specact.families.codes.pair import CodeParts, load_codes
from specact.families.codes.policy import OnnxPolicy
from specact.files import write_json
from specact.lab.tised.drivers import PolicyDriver
from specact.lab.tised.levers import Subject, settings_of
from specact.lab.train.export import PARITY
from specact.lab.train.rebuild import Role, rebuild
from specact.lab.train.variants import BundleVariants, prune_history
from specact.load import load_pair
from specact.observation import ObservationSpec, Window

PUSHT = Path(__file__).parents[3] / "pretrained" / "pusht"


@pytest.fixture(scope="module")
def pusht() -> CodeParts:
    return load_codes(PUSHT)


def some_windows(bundle: CodeParts, count: int = 8) -> list[Window]:
    rng, fields = np.random.default_rng(0), bundle.spec.observation.fields
    return [
        Window(
            {name: 0.4 * rng.standard_normal(field.window_shape, dtype=np.float32) for name, field in fields.items()}
        )
        for _ in range(count)
    ]


def shorter_spec(bundle: CodeParts, role: Role, window: int) -> ObservationSpec:
    whole = getattr(bundle.spec, role)
    return ObservationSpec({name: replace(field, history=window) for name, field in whole.fields.items()})


@pytest.fixture(scope="module")
def pruned(pusht: CodeParts, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The draft with more and less history; the target would only take longer to export."""
    folder = tmp_path_factory.mktemp("pruned")
    return {k: prune_history(pusht, k, folder / f"{k}.onnx", "draft") for k in (5, 3, 1)}


def assert_same(variant: OnnxPolicy, original: OnnxPolicy, bundle: CodeParts) -> None:
    """Up to rounding: another version of PyTorch may export the same network as other operators."""
    for window in some_windows(bundle):
        ours, theirs = variant.infer(window), original.infer(window)
        np.testing.assert_allclose(ours.probs, theirs.probs, atol=1e-5)
        np.testing.assert_allclose(ours.offsets, theirs.offsets, rtol=1e-4, atol=1e-5)


def test_all_of_the_history_is_the_original(pusht: CodeParts, pruned: dict[int, Path], tmp_path: Path) -> None:
    assert_same(OnnxPolicy(pruned[5], pusht.spec, pusht.spec.draft), pusht.draft, pusht)
    whole = prune_history(pusht, 5, tmp_path / "5.onnx")
    assert_same(OnnxPolicy(whole, pusht.spec, pusht.spec.target), pusht.target, pusht)


def test_a_goal_stays_where_it_was(tiny_bundle: Path) -> None:
    """Ahead of the window, whatever its length; the exported original in PyTorch again, without another export."""
    bundle = load_codes(tiny_bundle)
    model = rebuild(bundle, "target", 2)
    shorter = rebuild(bundle, "target", 1)
    assert torch.equal(shorter.positions, model.positions[:2])
    for window in some_windows(bundle, 3):
        seen = {name: torch.from_numpy(values)[None] for name, values in window.arrays.items()}
        with torch.no_grad():
            whole, first = model(seen).offsets[0], shorter(seen | {"state": seen["state"][:, :1]}).offsets[0]
        np.testing.assert_allclose(whole[1].numpy(), bundle.target.infer(window).offsets, atol=PARITY)
        torch.testing.assert_close(first[0], whole[0], rtol=0.0, atol=1e-5)


def test_a_shorter_history_is_an_earlier_position_of_the_trained_network(
    pusht: CodeParts, pruned: dict[int, Path]
) -> None:
    """Position k - 1 of the whole network, which never sees what comes later; read at the end it would be another."""
    whole = rebuild(pusht, "draft", 5)
    for k in (1, 3):
        variant = OnnxPolicy(pruned[k], pusht.spec, shorter_spec(pusht, "draft", k))
        for window in some_windows(pusht, 3):
            state = window["state"]
            shown = torch.from_numpy(np.concatenate([state[-k:], state[: 5 - k]]))[None]
            with torch.no_grad():
                offsets = whole({"state": shown}).offsets[0]
            found = variant.infer(Window({"state": state[-k:]})).offsets
            np.testing.assert_allclose(found, offsets[k - 1].numpy(), atol=1e-4)
            assert np.abs(found - offsets[4].numpy()).max() > 1e-3


def test_what_cannot_be_had_is_refused(tiny_bundle: Path, pusht: CodeParts, tmp_path: Path) -> None:
    for k in (0, 6):
        with pytest.raises(ConfigError, match=f"'pusht' supports 1 to 5 observations, got {k}"):
            prune_history(pusht, k, tmp_path / "k.onnx")
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["policies"]
    write_json(copy / "manifest.json", manifest)
    with pytest.raises(ConfigError, match="does not say how its target was made"):
        prune_history(load_codes(copy), 1, tmp_path / "k.onnx")


def test_quantised_networks_are_made_once_and_run(tmp_path: Path) -> None:
    ball = load_pair("ball")
    variants = BundleVariants(ball, tmp_path)
    settings = settings_of("quantisation", Subject(ball, ball.execute, variants), (1.0, 8.0))
    assert not list(tmp_path.iterdir()), "nothing is written before all settings are checked"
    variants.make()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.onnx")}
    assert len(files) == 2
    variants.make()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.onnx")} == files
    drivers: list[Any] = [setting.driver for setting in settings]
    assert [len(driver.files) for driver in drivers] == [0, 1, 1]
    for driver in drivers:
        chunk = driver.build().infer(driver.observation.zeros(), np.random.default_rng(0))
        assert chunk.shape == (ball.parts.spec.chunk, ball.parts.spec.actions) and np.isfinite(chunk).all()


def test_a_window_that_is_cut_is_made_of_the_pair_it_is_named_after(tmp_path: Path) -> None:
    pusht = load_pair(PUSHT)
    variants = BundleVariants(pusht, tmp_path)
    settings = settings_of("window", Subject(pusht, pusht.execute, variants), (2.0,))
    variants.make()
    drivers = [setting.driver for setting in settings]
    assert [driver.window for driver in drivers if isinstance(driver, PolicyDriver)] == [None, 2]
    assert isinstance(drivers[1], PolicyDriver) and drivers[1].build().spec.observation.history == 2
    with pytest.raises(ConfigError, match="1 to 5 observations"):
        settings_of("window", Subject(pusht, pusht.execute, variants), (6.0,))
