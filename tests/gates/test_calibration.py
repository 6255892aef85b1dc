"""Gates by name with their parameters, thresholds that reach a rate exactly, and files that fit their weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specact import calibrated_gate, load_pair
from specact.errors import BundleError, ConfigError
from specact.gates import ActionDeviation, Gate
from specact.gates.calibration import (
    Calibration,
    RateCheck,
    deciding_gate,
    find_calibration,
    read_calibration,
    threshold_for_rate,
)
from specact.gates.controller import RateBudget
from specact.gates.settings import (
    CALIBRATED,
    GATES,
    GateSettings,
    check_options,
    gate_settings,
    load_gate,
    table_entries,
)
from specact.lab.evaluation.calibrate import calibrate
from specact.lab.rollout.methods import load_method
from specact.types import Decision

BEND = "my_gate:Bend"


@pytest.fixture(autouse=True)
def beside_the_third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1] / "thirdparty")


# ---- names and parameters -------------------------------------------------------------------------------------------


class Strict(Gate):
    """Takes no limits."""

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)

    def score(self, proposal: Any, rng: Any) -> float:
        return 0.0


class Choosy(Gate):
    """Has options of every kind."""

    def __init__(
        self, threshold: float, *, window: int = 2, scale: float = 1.0, kind: Literal["a", "b"] = "a", name: str = "",
        **limits: Any,
    ) -> None:  # fmt: skip
        super().__init__(threshold, **limits)
        self.options = (window, scale, kind, name)

    def score(self, proposal: Any, rng: Any) -> float:
        return 0.0


STRICT, CHOOSY = f"{__name__}:Strict", f"{__name__}:Choosy"


def test_every_built_in_name_leads_to_a_gate() -> None:
    assert {name for name in GATES if load_gate(name).calibrated} == set(CALIBRATED)


@pytest.mark.parametrize(
    ("name", "said"),
    [("adahii", "did you mean 'adahi'"), ("my_gate:Gate", "score"), ("my_sim:TASK", "my_sim")],
)
def test_what_is_no_gate_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_gate(name)


def test_parameters_have_the_types_of_the_constructor() -> None:
    ball, words = load_pair("ball"), ("window=5", "scale=2", "kind=b", "name=7", "max_skips=3")
    settings = gate_settings(CHOOSY, ball, words)
    assert settings == GateSettings(
        CHOOSY, max_skips=3, options=(("window", 5), ("scale", 2.0), ("kind", "b"), ("name", "7"))
    )
    gate = settings.build(ball)
    assert (vars(gate)["options"], gate.max_skips) == ((5, 2.0, "b", "7"), 3)
    words = ("alpha=0.25", "adahi.max_skips=7", "uncertainty.kind=entropy", "perturbations=3", "window=5")
    deviation, uncertainty = (gate_settings(gate, ball, words) for gate in ("adahi", "uncertainty"))
    assert dict(deviation.options)["alpha"] == 0.25 and deviation.max_skips == 7
    assert dict(uncertainty.options) == {"kind": "entropy", "perturbations": 3} and uncertainty.max_skips is None
    check_options(words[:4], ["adahi", "uncertainty"])
    with pytest.raises(ConfigError, match="kind"):
        check_options(words, ["adahi"])


@pytest.mark.parametrize(
    ("gate", "option", "said"),
    [
        (CHOOSY, "windw=5", "windw"),
        (CHOOSY, "threshold=5", "threshold"),
        (CHOOSY, "max_skips=many", "unlimited"),
        (CHOOSY, "window=five", "five"),
        (CHOOSY, "window=true", "window"),
        (CHOOSY, "kind=c", "'c'"),
        (CHOOSY, "window", "'window'"),
        (STRICT, "window=5", "window"),
        ("adahi", "alpha=2.0", "alpha"),
        ("adahi", "adahi.alfa=0.2", "alfa"),
        ("uncertainty", "uncertainty.kind=doubt", "doubt"),
    ],
)
def test_parameters_that_a_gate_does_not_have_are_refused(gate: str, option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gate_settings(gate, load_pair("ball"), (option,))


def test_the_table_of_a_recipe_names_gates_and_their_parameters() -> None:
    assert table_entries({"reading": "jump", "learned_max_skips": 4}) == [
        ("adahi.reading", "jump"), ("learned.max_skips", 4), ("learned_action.max_skips", 4),
    ]  # fmt: skip
    for table in ({"readin": "jump"}, {"reading": "jumps"}, {"alpha": 2.0}, {"max_skips": "many"}):
        with pytest.raises(ConfigError, match=r"reading|alpha|many"):
            table_entries(table)


def test_a_gate_that_does_not_take_its_limits_is_told_what_it_has_to_take() -> None:
    with pytest.raises(ConfigError, match=r"TypeError.*\*\*limits"):
        GateSettings(STRICT).build(load_pair("ball"))


def test_a_gate_of_ones_own_is_a_method() -> None:
    method = load_method(BEND)
    assert method.gate == BEND and method.verifier == "speculative" and "change direction" in method.about
    assert load_method("random").gate == "random" and load_method("similarity").gate == "similarity"
    with pytest.raises(ConfigError, match="'never'"):
        load_method("never")


# ---- thresholds -----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(-1e3, 1e3), min_size=1, max_size=60),
       st.floats(0.0, 1.0))  # fmt: skip
@example([0.0] * 7, 0.3)
@example([0.0, 1.0], 0.5)
@example([1.0, 2.0, 3.0], 0.0)
@example([1.0, 2.0, 3.0], 1.0)
@example([0.1 * k for k in range(10)], 0.7)
@example([5.0], 0.5)
def test_the_rate_is_met_exactly_in_expectation(values: list[float], rate: float) -> None:
    scores = np.array(values)
    threshold, tie = threshold_for_rate(scores, rate)
    assert 0.0 <= tie <= 1.0 and threshold in values
    share = ((scores > threshold).sum() + tie * (scores == threshold).sum()) / len(scores)
    assert share == pytest.approx(rate, abs=1e-9)


def test_rates_that_cannot_be_had_are_refused(tiny_bundle: Path) -> None:
    with pytest.raises(ConfigError, match="max_skips"):  # every step is forced
        threshold_for_rate(np.array([]), 0.5)
    with pytest.raises(ConfigError, match=r"2 skips.* 0\.33 .* max_skips"):
        calibrate(load_pair(tiny_bundle), GateSettings("adahi", max_skips=2), 0.3)
    for rate in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ConfigError, match="rate"):
            calibrate(load_pair("ball"), "adahi", rate)


def told_after(rate: float, wanted: float, count: int, reason: str = "score") -> int | None:
    """How many decisions at a rate it takes until a check of the wanted one tells that it is missed."""
    check, rng = RateCheck("adahi", wanted, None), np.random.default_rng(0)
    for number in range(1, count + 1):
        if check.take(Decision(bool(rng.random() < rate), 0.0, 0.0, reason)):
            assert f"--hold {wanted:g}" in check.warning and "'adahi'" in check.warning
            assert not any(check.take(Decision(True, 0.0, 0.0, reason)) for _ in range(100))
            return number
    return None


def test_a_missed_rate_is_told_once_and_the_sooner_the_further_it_is_off() -> None:
    assert told_after(0.4, 0.4, 5000) is None and told_after(0.38, 0.4, 5000) is None
    far, near = told_after(0.08, 0.4, 5000), told_after(0.42, 0.5, 5000)
    assert far is not None and near is not None and 10 < far < 100 < near
    # Audits are asked beside the gate.
    assert told_after(1.0, 0.03, 1000, "audit") is None and told_after(1.0, 0.03, 1000) is not None


def test_a_calibration_that_missed_its_own_rate_is_told_before_the_robot_moves() -> None:
    for achieved, missed in ((0.42, True), (0.48, False)):
        made = replace(calibration("0"), held_out={"rate": achieved})
        assert ("--hold 0.5" in RateCheck("adahi", 0.5, made).warning) == missed


# ---- files ----------------------------------------------------------------------------------------------------------


def calibration(fingerprint: str, gate: str = "adahi", *options: tuple[str, Any]) -> Calibration:
    settings = GateSettings(gate, 0.1234567890123456, 0.25, 3, options)
    return Calibration(
        fingerprint, 0.6, settings, {"rate": 0.59, "episodes": 4, "inferences": 200},
        [{"threshold": 0.1, "rate": 0.5}], {"auroc": math.nan}, {"env": "ball", "seed": 0},
    )  # fmt: skip


def test_what_is_saved_is_read_again_and_becomes_a_gate(bundle_copy: Path) -> None:
    bundle, folder = load_pair(bundle_copy), bundle_copy / "calibration"
    assert find_calibration(bundle, "adahi", 0.6) is None
    made = calibration(bundle.fingerprint, "adahi", ("reading", "jump"), ("alpha", 0.3))
    assert made.save(folder).name == "adahi-0.60.json"
    copy = read_calibration(folder / "adahi-0.60.json", bundle)
    assert (copy.settings, copy.rate, copy.held_out) == (made.settings, 0.6, made.held_out)
    assert (copy.rounds, copy.made_by) == (made.rounds, made.made_by)
    assert copy.model["auroc"] is None  # undefined figures are null in a file
    gate = calibrated_gate(bundle, "adahi", 0.6)
    assert isinstance(gate, ActionDeviation) and calibrated_gate(bundle, "adahi", 0.6) is not gate
    wanted = {"threshold": 0.1234567890123456, "tie_probability": 0.25, "max_skips": 3, "reading": "jump", "alpha": 0.3}
    assert wanted.items() <= vars(gate).items()
    for name, rate in (("adahi", 0.3), ("uncertainty", 0.6)):
        with pytest.raises(ConfigError, match=rf"'{name}' at rate {rate:.2f}.* adahi-0\.60.*specact calibrate"):
            calibrated_gate(bundle, name, rate)
    for name, told in (("always", r"'always' needs no calibration"), ("adahii", "'adahi'")):
        with pytest.raises(ConfigError, match=told):
            calibrated_gate(bundle, name, 0.6)
    # The colon of a gate of one's own is none of a file's name.
    assert calibration(bundle.fingerprint, BEND).save(folder).name == "my_gate.Bend-0.60.json"
    assert calibrated_gate(bundle, BEND, 0.6).max_skips == 3


def test_a_calibration_of_an_earlier_version_is_read_under_its_name_of_today(bundle_copy: Path) -> None:
    bundle, folder = load_pair(bundle_copy), bundle_copy / "calibration"
    file = calibration(bundle.fingerprint).save(folder)
    threshold = calibrated_gate(bundle, "adahi", 0.6).threshold
    text = file.read_text().replace('"name": "adahi"', '"name": "deviation"')
    file.rename(folder / "deviation-0.60.json").write_text(text)
    assert calibrated_gate(bundle, "adahi", 0.6).threshold == threshold
    with pytest.raises(ConfigError, match="'deviation' is now called adahi"):
        gate_settings("deviation", bundle)


def test_a_calibration_of_other_weights_is_refused(bundle_copy: Path) -> None:
    calibration("0123456789abcdef").save(bundle_copy / "calibration")
    with pytest.raises(BundleError, match=r"made for weights 0123456789abcdef.*specact calibrate"):
        calibrated_gate(load_pair(bundle_copy), "adahi", 0.6)


@pytest.mark.parametrize("content", [b"", b"5", b"{}", b"[" * 100_000])
def test_a_file_that_is_no_calibration_is_refused(tiny_bundle: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "adahi-0.60.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"adahi-0\.60\.json.*specact calibrate"):
        read_calibration(path, load_pair(tiny_bundle))


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": "0.60"},
        {"model": None},
        {"settings": {"name": 5}},
        {"settings": {"threshold": 10**400}},
        {"settings": {"options": [["colour", 1]]}},
        {"settings": {"options": [["a"]]}},
        # A bundle cannot run code: the gate that is imported is the one that the user asked for.
        {"settings": {"name": BEND}},
        {"settings": {"name": "uncertainty"}},
    ],
    ids=lambda changes: f"{changes!r:.40}",
)
def test_values_that_do_not_fit_are_refused(bundle_copy: Path, changes: dict[str, Any]) -> None:
    bundle = load_pair(bundle_copy)
    path = calibration(bundle.fingerprint).save(bundle_copy / "calibration")
    raw = json.loads(path.read_text())
    if isinstance(changes.get("settings"), dict):
        changes = {"settings": raw["settings"] | changes["settings"]}
    path.write_text(json.dumps(raw | changes))
    with pytest.raises(BundleError, match=r"adahi-0\.60\.json.*specact calibrate"):
        calibrated_gate(bundle, "adahi", 0.6)


def test_the_parameters_are_those_of_the_calibration_or_the_given_ones(bundle_copy: Path) -> None:
    pair, worst = load_pair(bundle_copy), ("worst=true",)
    settings = gate_settings(BEND, pair, worst)
    Calibration(pair.fingerprint, 0.5, settings, {}, [], {}, {}).save(bundle_copy / "calibration")
    for options in ((), worst):
        assert vars(deciding_gate(pair, BEND, 0.5, None, options))["worst"] is True
    with pytest.raises(ConfigError, match="'worst': True"):
        deciding_gate(pair, BEND, 0.5, None, ("worst=false",))
    with pytest.raises(ConfigError, match="'worst'"):
        deciding_gate(pair, "adahi", 0.5, RateBudget(0.5), worst)
    with pytest.raises(ConfigError, match="random"):
        deciding_gate(pair, "random", 0.5, RateBudget(0.5))
    assert vars(deciding_gate(pair, "random", 0.5, None))["rate"] == 0.5
