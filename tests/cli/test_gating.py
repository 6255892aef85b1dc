"""What ``specact run`` expects of audits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.lab.rollout import chunk_policies

from specact import load_bundle
from specact.cli.gating import audit_estimator, true_skip_of, true_skip_text
from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkPair
from specact.gates.calibration import Calibration, deciding_gate
from specact.gates.controller import RateBudget
from specact.gates.settings import BUNDLE_DEFAULTS, GateChoices
from specact.units import ActionUnits

BEND = "my_gate:Bend"


def chunk_pair(path: Path) -> ChunkPair:
    units = ActionUnits.of_range(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
    small, large = chunk_policies.small, chunk_policies.large
    return ChunkPair("chunks", small, units, large.spec, None, execute=3, fingerprint="weights", path=path)


def test_options_of_a_gate_of_ones_own_are_its_calibrations_or_those_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1] / "thirdparty")
    pair, given = chunk_pair(tmp_path), ("worst=true",)
    held = deciding_gate(pair, BEND, 0.5, RateBudget(0.5), given)
    assert held.settings()["worst"] is True
    settings = GateChoices(gate_options=given).settings(BEND, pair)
    Calibration("weights", 0.5, settings, {}, [], {}, {}).save(tmp_path / "calibration")
    for options in ((), given):
        assert vars(deciding_gate(pair, BEND, 0.5, None, options))["worst"] is True
    with pytest.raises(ConfigError, match=r"was calibrated with the options \{'worst': True\}; leave out"):
        deciding_gate(pair, BEND, 0.5, None, ("worst=false",))
    with pytest.raises(ConfigError, match="--gate-options is for a gate of your own, MODULE:GATE"):
        deciding_gate(pair, "deviation", 0.5, RateBudget(0.5), given)


def test_a_calibration_without_rejections_raises_no_alarm(tmp_path: Path) -> None:
    pair = chunk_pair(tmp_path)
    settings = BUNDLE_DEFAULTS.settings("deviation", pair)
    Calibration("weights", 0.5, settings, {}, [], {"spearman": 0.3}, {}).save(tmp_path / "calibration")
    shadow = audit_estimator(pair, "deviation", 0.5)
    assert shadow.alarm is None
    assert true_skip_text({**true_skip_of(shadow), "mean": 0.5}).endswith(
        "for lack of a calibration that says what to expect"
    )


def test_a_calibration_with_rejections_sets_the_alarm() -> None:
    assert audit_estimator(load_bundle("ball"), "deviation", 0.6).alarm is not None
