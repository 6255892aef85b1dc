"""Gates by name: the built-in ones, and one's own as ``MODULE:GATE``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest

from specact import calibrated_gate, load_pair
from specact.errors import BundleError, ConfigError
from specact.gates import Gate
from specact.gates.calibration import Calibration, find_calibration
from specact.gates.settings import CALIBRATED, GATES, GateChoices, GateSettings, check_options, load_gate
from specact.lab.rollout.methods import METHODS, load_method

THIRD_PARTY = Path(__file__).parents[1] / "thirdparty"
BEND = "my_gate:Bend"


@pytest.fixture(autouse=True)
def beside_the_third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(THIRD_PARTY)


class Strict(Gate):
    """Takes no limits."""

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)

    def score(self, proposal: Any, rng: Any) -> float:
        return 0.0


def test_every_built_in_name_leads_to_a_gate() -> None:
    assert all(issubclass(load_gate(name), Gate) for name in GATES)
    assert {name for name in GATES if load_gate(name).calibrated} == set(CALIBRATED)


def test_a_gate_of_ones_own_is_made_with_threshold_and_limits() -> None:
    ball = load_pair("ball")
    settings = GateChoices(max_skips=3).settings(BEND, ball)
    assert settings == GateSettings(BEND, max_skips=3) and load_gate(BEND).calibrated
    gate = GateSettings(BEND, 0.25, 0.5, 3).build(ball)
    assert type(gate).__name__ == "Bend"
    assert (gate.threshold, gate.tie_probability, gate.max_skips) == (0.25, 0.5, 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deviatoin", "unknown gate 'deviatoin'; did you mean 'deviation'? Known: always, deviation, "),
        ("deviatoin", "verify_skip; or MODULE:NAME for one of your own"),
        (
            "my_gate:Gate",
            "'my_gate:Gate' is <class 'specact.gates.gate.Gate'>. It must be a subclass of specact.gates.",
        ),
        ("my_sim:TASK", "It must be a subclass of specact.gates.Gate that implements score; my_sim has none"),
    ],
)
def test_what_is_no_gate_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_gate(name)
    assert said in str(raised.value)


def test_a_gate_that_does_not_take_its_limits_is_told_what_it_has_to_take() -> None:
    own = f"{__name__}:Strict"
    with pytest.raises(ConfigError, match=r"cannot be created: TypeError.*takes threshold and \*\*limits"):
        GateSettings(own).build(load_pair("ball"))


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


CHOOSY = f"{__name__}:Choosy"


def test_options_of_a_gate_of_ones_own_have_the_types_of_its_constructor() -> None:
    ball = load_pair("ball")
    given = ("window=5", "scale=2", "kind=b", "name=7")
    settings = GateChoices(gate_options=given).settings(CHOOSY, ball)
    assert settings.options == (("window", 5), ("scale", 2.0), ("kind", "b"), ("name", "7"))
    assert vars(settings.build(ball))["options"] == (5, 2.0, "b", "7")
    # Nothing of it is for the gates that come with the package.
    assert GateChoices(gate_options=given).settings("deviation", ball) == GateChoices().settings("deviation", ball)


@pytest.mark.parametrize(
    ("gate", "option", "said"),
    [
        (CHOOSY, "windw=5", "windw"),
        (CHOOSY, "threshold=5", "threshold"),
        (CHOOSY, "max_skips=many", "many"),
        (CHOOSY, "window=five", "five"),
        (CHOOSY, "window=true", "window"),
        (CHOOSY, "kind=c", "'c'"),
        (CHOOSY, "window", "'window'"),
        (f"{__name__}:Strict", "window=5", "window"),
        ("deviation", "alpha=2.0", "alpha"),
        ("deviation", "deviation.alfa=0.2", "alfa"),
        ("uncertainty", "uncertainty.kind=doubt", "doubt"),
    ],
)
def test_options_that_a_gate_does_not_have_are_refused(gate: str, option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GateChoices(gate_options=(option,)).settings(gate, load_pair("ball"))


def test_options_of_built_in_gates_are_those_of_their_constructors() -> None:
    ball = load_pair("ball")
    words = ("alpha=0.25", "deviation.max_skips=7", "uncertainty.kind=entropy", "perturbations=3")
    deviation, uncertainty = (
        GateChoices(gate_options=words).settings(gate, ball) for gate in ("deviation", "uncertainty")
    )
    assert dict(deviation.options)["alpha"] == 0.25 and deviation.max_skips == 7
    assert dict(uncertainty.options) == {"kind": "entropy", "perturbations": 3} and uncertainty.max_skips is None
    check_options(words, ["deviation", "uncertainty"])
    with pytest.raises(ConfigError, match="kind"):
        check_options(words, ["deviation"])


def test_a_gate_of_ones_own_is_a_method() -> None:
    method = load_method(BEND)
    assert method.gate == BEND and method.verifier == "speculative"
    assert method.about == "verified where a gate asks for it: Queries the target where the actions change direction."
    assert load_method("deviation").gate == "deviation" and "deviation" not in METHODS
    with pytest.raises(ConfigError, match="unknown method 'never'"):
        load_method("never")


def test_its_calibration_is_kept_in_the_bundle_without_a_colon(tmp_path: Path) -> None:
    bundle = load_pair(shutil.copytree(load_pair("ball").parts.path, tmp_path / "ball"))
    made = Calibration(bundle.fingerprint, 0.6, GateSettings(BEND, 0.25), {}, [], {}, {})
    assert made.save(bundle.parts.path / "calibration").name == "my_gate.Bend-0.60.json"
    assert calibrated_gate(bundle, BEND, 0.6).threshold == 0.25


@pytest.mark.parametrize("changed", [{"name": BEND}, {"name": "uncertainty"}])
def test_a_calibration_cannot_name_another_gate_than_its_file(tmp_path: Path, changed: dict[str, Any]) -> None:
    """A bundle cannot run code: the gate that is imported is the one that the user asked for."""
    bundle = load_pair(shutil.copytree(load_pair("ball").parts.path, tmp_path / "ball"))
    file = bundle.parts.path / "calibration" / "deviation-0.60.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"settings": stored["settings"] | changed}))
    with pytest.raises(BundleError, match=f"is a calibration of the gate '{changed['name']}' at rate 0.6"):
        find_calibration(bundle, "deviation", 0.6)
