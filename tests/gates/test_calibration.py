"""Thresholds that reach a rate exactly, files that fit their weights, and the rejection model."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specact import calibrated_gate, load_pair
from specact.bundle.manifest import fingerprint_of
from specact.errors import BundleError, ConfigError
from specact.families.codes.pair import PARTS
from specact.gates import ActionDeviation
from specact.gates.calibration import (
    Calibration,
    deciding_gate,
    find_calibration,
    read_calibration,
    threshold_for_rate,
)
from specact.gates.controller import RateBudget
from specact.gates.settings import GateChoices, GateSettings
from specact.lab.evaluation.calibrate import CalibrationRun, calibrate
from specact.lab.evaluation.rejection import fit_rejection
from specact.lab.statistics import roc_auc

FEW = st.sampled_from([0.0, 0.25, 0.5, 1.0])  # many ties
SCORES = st.lists(FEW | st.floats(-1e3, 1e3), min_size=1, max_size=60)


def share(scores: NDArray[np.float64], threshold: float, tie: float) -> float:
    """The expected share of the steps that is transmitted."""
    return float(((scores > threshold).sum() + tie * (scores == threshold).sum()) / len(scores))


@given(SCORES, st.floats(0.0, 1.0))
@example([0.0] * 7, 0.3)
@example([0.0, 1.0], 0.5)
@example([1.0, 2.0, 3.0], 0.0)
@example([1.0, 2.0, 3.0], 1.0)
@example([0.1 * k for k in range(10)], 0.7)
@example([5.0], 0.5)
def test_the_rate_is_met_exactly_in_expectation(values: list[float], rate: float) -> None:
    scores = np.array(values)
    threshold, tie = threshold_for_rate(scores, rate)
    assert 0.0 <= tie <= 1.0
    assert threshold in values
    assert share(scores, threshold, tie) == pytest.approx(rate, abs=1e-9)


def test_without_ties_it_is_the_quantile() -> None:
    scores = np.random.default_rng(0).permutation(np.arange(100.0))
    threshold, tie = threshold_for_rate(scores, 0.3)
    assert int((scores > threshold).sum()) + tie == pytest.approx(30)
    assert threshold in (69.0, 70.0)


def test_when_every_step_is_forced_it_says_so() -> None:
    """``specact calibrate --gate-options max_skips=0`` ends here."""
    with pytest.raises(ConfigError):
        threshold_for_rate(np.array([]), 0.5)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, math.nan])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="strictly between 0 and 1"):
        CalibrationRun(rate)


def test_a_rate_that_the_limit_on_skips_does_not_allow_is_refused(tiny_bundle: Path) -> None:
    bundle = load_pair(tiny_bundle)
    gate = GateSettings("deviation", max_skips=2)
    with pytest.raises(ConfigError, match=r"at most 2 skips in a row at least 0\.33 .* max_skips"):
        calibrate(bundle, gate, CalibrationRun(0.3))


# --- files ---


def calibration(fingerprint: str, rate: float = 0.6) -> Calibration:
    settings = GateSettings("deviation", 0.1234567890123456, 0.25, 3, (("reading", "jump"), ("alpha", 0.3)))
    return Calibration(
        fingerprint, rate, settings, {"rate": 0.59, "episodes": 4, "inferences": 200},
        [{"threshold": 0.1, "rate": 0.5}], {"auroc": math.nan}, {"env": "ball", "seed": 0},
    )  # fmt: skip


def test_what_is_saved_is_read_again(bundle_copy: Path, tmp_path: Path) -> None:
    bundle = load_pair(bundle_copy)
    made = calibration(bundle.fingerprint)
    path = made.save(tmp_path / "made" / "here")
    assert path.name == "deviation-0.60.json"
    found = read_calibration(path, bundle)
    assert found.settings == made.settings
    assert (found.rate, found.held_out, found.rounds, found.made_by) == (0.6, made.held_out, made.rounds, made.made_by)
    assert found.model["auroc"] is None  # undefined figures are null in a file


def test_the_stored_calibration_becomes_a_gate(bundle_copy: Path) -> None:
    bundle = load_pair(bundle_copy)
    assert find_calibration(bundle, "deviation", 0.6) is None
    calibration(bundle.fingerprint).save(bundle_copy / "calibration")
    gate = calibrated_gate(bundle, "deviation", 0.6)
    assert isinstance(gate, ActionDeviation)
    wanted = {"threshold": 0.1234567890123456, "tie_probability": 0.25, "max_skips": 3, "reading": "jump", "alpha": 0.3}
    assert wanted.items() <= gate.settings().items()
    assert calibrated_gate(bundle, "deviation", 0.6) is not gate
    with pytest.raises(
        ConfigError, match=r"no calibration of 'deviation' at rate 0\.30; it has deviation-0\.60.*specact calibrate"
    ):
        calibrated_gate(bundle, "deviation", 0.3)
    with pytest.raises(ConfigError, match="no calibration of 'uncertainty'"):
        calibrated_gate(bundle, "uncertainty", 0.6)


@pytest.mark.parametrize("part", ["draft", "target"])
def test_a_calibration_of_other_weights_is_refused(bundle_copy: Path, part: str) -> None:
    calibration(load_pair(bundle_copy).fingerprint).save(bundle_copy / "calibration")
    file = bundle_copy / PARTS[part]
    model = onnx.load(file)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.raw_data = bytes([weight.raw_data[0] ^ 1]) + weight.raw_data[1:]
    onnx.save(model, file)
    manifest = json.loads((bundle_copy / "manifest.json").read_text())
    manifest["fingerprints"][part] = fingerprint_of(file)
    (bundle_copy / "manifest.json").write_text(json.dumps(manifest))
    other = load_pair(bundle_copy)
    with pytest.raises(
        BundleError, match=r"was made for weights \w{16}, but the bundle .* calibrate again with: specact"
    ):
        calibrated_gate(other, "deviation", 0.6)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"5",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"settings": {"options": [1]}}',
        b'{"settings": {"options": [["a"]]}}',
    ],
)
def test_a_damaged_calibration_is_a_sentence(tiny_bundle: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "deviation-0.60.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"is not a calibration .*make it again with: specact calibrate"):
        read_calibration(path, load_pair(tiny_bundle))


@pytest.mark.parametrize(
    "changes", [{"threshold": "x"}, {"threshold": 10**400}, {"threshold": None}, {"options": [["colour", 1]]}]
)
def test_a_calibration_with_values_of_other_types_is_a_sentence(bundle_copy: Path, changes: dict[str, Any]) -> None:
    bundle = load_pair(bundle_copy)
    path = calibration(bundle.fingerprint).save(bundle_copy / "calibration")
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"settings": raw["settings"] | changes}))
    with pytest.raises(BundleError, match=r"deviation-0\.60\.json is not a calibration .*make it again"):
        calibrated_gate(bundle, "deviation", 0.6)
    path.write_text(json.dumps(raw | {"model": None}))
    with pytest.raises(BundleError, match="is not a calibration"):
        calibrated_gate(bundle, "deviation", 0.6)


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": None},
        {"rate": "0.60"},
        {"rate": 10**400},
        {"settings": None},
        {"settings": 5},
        {"settings": {"name": None, "options": []}},
        {"settings": {"name": 5, "options": []}},
    ],
    ids=lambda changes: f"{changes!r:.30}",
)
def test_a_calibration_whose_name_cannot_be_checked_is_a_sentence(bundle_copy: Path, changes: dict[str, Any]) -> None:
    """Its gate and rate are compared with the file's name; they may be of any type."""
    bundle = load_pair(bundle_copy)
    path = calibration(bundle.fingerprint).save(bundle_copy / "calibration")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(BundleError, match=r"deviation-0\.60\.json is not a calibration .*make it again"):
        calibrated_gate(bundle, "deviation", 0.6)


# --- the rejection model ---


def test_a_linear_law_is_recovered() -> None:
    scores = np.linspace(0.0, 2.0, 400)
    model = fit_rejection(scores, 0.1 + 0.3 * scores)
    assert model.linear.slope == pytest.approx(0.3)
    assert model.linear.intercept == pytest.approx(0.1)
    assert model.linear.r2 == pytest.approx(1.0)
    assert model.spearman == pytest.approx(1.0)
    assert model.steps == 400
    assert len(model.scores) == len(model.rejections) == len(model.errors) == 20
    assert model.scores[0] == pytest.approx(scores[:20].mean())
    assert model.errors[0] == pytest.approx((0.1 + 0.3 * scores[:20]).std() / np.sqrt(20))


def test_a_logarithmic_law_is_recovered() -> None:
    scores = np.repeat(np.linspace(0.0, 2.0, 20), 10)  # bins of equal scores: no curvature inside them
    model = fit_rejection(scores, 0.8 + 0.2 * np.log(scores + 0.05))
    assert model.logarithmic.slope == pytest.approx(0.2, rel=1e-3)
    assert model.logarithmic.intercept == pytest.approx(0.8, rel=1e-3)
    assert model.logarithmic.shift == pytest.approx(0.05, rel=1e-2)
    assert model.logarithmic.r2 > 0.99999
    assert model.linear.r2 < 0.9


def test_a_gate_that_asks_at_the_wrong_moments_shows_in_the_sign_and_not_in_r2() -> None:
    scores = np.linspace(0.0, 1.0, 200)
    model = fit_rejection(scores, 1.0 - scores)
    assert model.linear.slope == pytest.approx(-1.0)
    assert model.linear.r2 == pytest.approx(1.0)
    assert model.logarithmic.slope < 0
    assert model.spearman == pytest.approx(-1.0)
    assert model.auroc == pytest.approx(0.0)


def test_noise_explains_nothing() -> None:
    rng = np.random.default_rng(0)
    model = fit_rejection(rng.random(20_000), rng.random(20_000))
    # Over 20 bins R2 of no relation has mean 1/19; above 0.5 with probability 5e-4, and the seed is fixed.
    assert model.linear.r2 < 0.5
    assert abs(model.spearman) < 5 / np.sqrt(20_000)
    assert model.auroc == pytest.approx(0.5, abs=5 * np.sqrt(1 / (12 * 10_000)) * np.sqrt(2))


@given(st.lists(st.tuples(FEW, st.booleans()), min_size=2, max_size=30))
def test_auroc_against_all_pairs(rows: list[tuple[float, bool]]) -> None:
    scores, positive = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    wins = [float(a > b) + 0.5 * float(a == b) for a in scores[positive] for b in scores[~positive]]
    found = roc_auc(scores, positive)
    if not wins:
        assert found is None
    else:
        assert found == pytest.approx(np.mean(wins))


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_where_nothing_varies_there_is_no_slope_and_no_warning(count: int) -> None:
    for scores, rejections in (
        (np.zeros(count), np.full(count, 0.3)),
        (np.zeros(count), np.linspace(0, 1, count)),
        (np.linspace(0, 1, count), np.zeros(count)),
    ):
        model = fit_rejection(scores, rejections)
        for fit in (model.linear, model.logarithmic):
            assert fit.slope == 0.0
            assert fit.r2 == 0.0
            assert fit.intercept == pytest.approx(rejections.mean())
        assert math.isnan(model.spearman)


def test_negative_scores_are_fitted_too() -> None:
    model = fit_rejection(np.linspace(-3.0, -1.0, 200), np.linspace(0.0, 1.0, 200))
    assert model.linear.slope == pytest.approx(0.5)
    assert np.isfinite([model.logarithmic.slope, model.logarithmic.intercept, model.logarithmic.shift]).all()


def test_options_of_a_gate_of_ones_own_are_its_calibrations_or_those_given(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1] / "thirdparty")
    pair, given, bend = load_pair(bundle_copy), ("worst=true",), "my_gate:Bend"
    assert deciding_gate(pair, bend, 0.5, RateBudget(0.5), given).settings()["worst"] is True
    settings = GateChoices(gate_options=given).settings(bend, pair)
    Calibration(pair.fingerprint, 0.5, settings, {}, [], {}, {}).save(bundle_copy / "calibration")
    for options in ((), given):
        assert vars(deciding_gate(pair, bend, 0.5, None, options))["worst"] is True
    with pytest.raises(ConfigError, match="'worst': True"):
        deciding_gate(pair, bend, 0.5, None, ("worst=false",))
    with pytest.raises(ConfigError, match="'worst'"):
        deciding_gate(pair, "deviation", 0.5, RateBudget(0.5), given)
