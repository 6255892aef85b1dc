"""Cheaper networks of a bundle: made once, kept, and run where a sweep wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.families.codes.bundle import load_bundle
from specact.lab.tised.drivers import CodesDriver, driver_of
from specact.lab.tised.levers import settings_of
from specact.lab.tised.settings import Subject
from specact.lab.tised.windows import typical_windows
from specact.lab.train.variants import BundleVariants
from specact.observation import Window

BALL = load_bundle("ball")


def test_static_tiers_see_the_policy_at_work_and_are_made_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def windows() -> Sequence[Window]:
        asked.append(1)
        return typical_windows(driver_of(BALL), "ball", BALL.spec.execute, count=20)

    variants = BundleVariants(BALL, tmp_path, windows)
    subject = Subject(BALL, BALL.spec.execute, variants)
    dynamic = settings_of("quantisation", subject, (1.0,))
    assert not asked, "scales that come with the activations need no observations"
    static = settings_of("static_quantisation", subject, (1.0, 2.0))
    assert asked == [1]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.onnx")}
    assert len(files) == 3
    settings_of("static_quantisation", subject, (1.0, 2.0))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.onnx")} == files
    seen, rng = typical_windows(driver_of(BALL), "ball", BALL.spec.execute, count=1)[0], np.random.default_rng
    original, *others = [setting.driver for setting in (*static, dynamic[1])]
    assert isinstance(original, CodesDriver) and original.file is None
    for driver in others:
        assert isinstance(driver, CodesDriver) and driver.file is not None
        chunk = driver.build().infer(seen, rng(0))
        assert chunk.shape == (BALL.spec.chunk, BALL.spec.actions) and np.isfinite(chunk).all()


def test_typical_windows_are_those_of_an_episode() -> None:
    windows = typical_windows(driver_of(BALL), "ball", BALL.spec.execute, count=30)
    states = np.stack([window["state"][-1] for window in windows])
    assert len(states) == 30
    # A ball that rolls: no two are alike, and one after the other they are near.
    assert len(np.unique(states, axis=0)) == 30
    steps = np.linalg.norm(np.diff(states[:5, :2], axis=0), axis=1)
    assert (steps > 0.0).all() and (steps < 0.5).all()
    assert [window["state"].tobytes() for window in windows] == [
        window["state"].tobytes() for window in typical_windows(driver_of(BALL), "ball", BALL.spec.execute, count=30)
    ]


def test_a_window_that_is_cut_is_made_of_the_pair_it_is_named_after(tmp_path: Path) -> None:
    pusht = load_bundle(Path(__file__).parents[3] / "pretrained" / "pusht")
    variants = BundleVariants(pusht, tmp_path, list)
    settings = settings_of("window", Subject(pusht, pusht.spec.execute, variants), (2.0,))
    drivers = [setting.driver for setting in settings]
    assert [driver.window for driver in drivers if isinstance(driver, CodesDriver)] == [None, 2]
    assert isinstance(drivers[1], CodesDriver) and drivers[1].build().spec.observation.history == 2
    with pytest.raises(ConfigError, match="1 to 5 observations"):
        settings_of("window", Subject(pusht, pusht.spec.execute, variants), (6.0,))
