"""What ``specact run`` expects of audits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.lab.rollout import chunk_policies

from specact import load_bundle
from specact.cli.gating import audit_estimator, in_words, true_skip_of
from specact.families.chunks.pair import ChunkPair
from specact.gates.calibration import Calibration
from specact.gates.settings import BUNDLES_OWN
from specact.units import ActionUnits


def test_a_calibration_without_rejections_raises_no_alarm(tmp_path: Path) -> None:
    units = ActionUnits.of_range(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
    small, large = chunk_policies.small, chunk_policies.large
    pair = ChunkPair("chunks", small, units, large.spec, None, execute=3, fingerprint="weights", path=tmp_path)
    settings = BUNDLES_OWN.settings("deviation", pair)
    Calibration("weights", 0.5, settings, {}, [], {"spearman": 0.3}, {}).save(tmp_path / "calibration")
    shadow = audit_estimator(pair, "deviation", 0.5)
    assert shadow.alarm is None
    assert in_words({**true_skip_of(shadow), "mean": 0.5}).endswith(
        "for lack of a calibration that says what to expect"
    )


def test_a_calibration_with_rejections_sets_the_alarm() -> None:
    assert audit_estimator(load_bundle("ball"), "deviation", 0.6).alarm is not None
