"""Cheaper networks of a bundle: made once, kept, and run where a sweep wants them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specact.errors import ConfigError
from specact.execution.strategy import Execution
from specact.families.codes.pair import CodeParts, load_codes
from specact.families.codes.policy import OnnxPolicy
from specact.files import write_json
from specact.lab.tised.drivers import PolicyDriver
from specact.lab.tised.levers import Subject, settings_of, typical_windows
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


BALL = load_pair("ball")
TARGET = PolicyDriver(str(BALL.path), Execution("synchronous", BALL.parts.spec.execute), "target")


def test_static_tiers_see_the_policy_at_work_and_are_made_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def windows() -> Sequence[Window]:
        asked.append(1)
        return typical_windows(TARGET, "ball", BALL.parts.spec.execute, count=20)

    variants = BundleVariants(BALL, tmp_path, windows)
    subject = Subject(BALL, BALL.parts.spec.execute, variants)
    dynamic = settings_of("quantisation", subject, (1.0,))
    assert not list(tmp_path.iterdir()), "nothing is written before all settings are checked"
    variants.make()
    assert not asked, "scales that come with the activations need no observations"
    static = settings_of("static_quantisation", subject, (1.0, 2.0))
    variants.make()
    assert asked == [1]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.onnx")}
    assert len(files) == 3
    settings_of("static_quantisation", subject, (1.0, 2.0))
    variants.make()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.onnx")} == files
    seen, rng = typical_windows(TARGET, "ball", BALL.parts.spec.execute, count=1)[0], np.random.default_rng
    original, *others = [setting.driver for setting in (*static, dynamic[1])]
    assert isinstance(original, PolicyDriver) and not original.files
    for driver in others:
        assert isinstance(driver, PolicyDriver) and driver.files
        chunk = driver.build().infer(seen, rng(0))
        assert chunk.shape == (BALL.parts.spec.chunk, BALL.parts.spec.actions) and np.isfinite(chunk).all()


def test_a_window_that_is_cut_is_made_of_the_pair_it_is_named_after(tmp_path: Path) -> None:
    pusht = load_pair(PUSHT)
    variants = BundleVariants(pusht, tmp_path, list)
    settings = settings_of("window", Subject(pusht, pusht.execute, variants), (2.0,))
    variants.make()
    drivers = [setting.driver for setting in settings]
    assert [driver.window for driver in drivers if isinstance(driver, PolicyDriver)] == [None, 2]
    assert isinstance(drivers[1], PolicyDriver) and drivers[1].build().spec.observation.history == 2
    with pytest.raises(ConfigError, match="1 to 5 observations"):
        settings_of("window", Subject(pusht, pusht.execute, variants), (6.0,))
