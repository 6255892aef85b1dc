"""Methods along demonstrations: no simulator, the same observations for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import quiet

from specact import Pair, load_pair
from specact.errors import ConfigError, DataError
from specact.gates.settings import BUNDLE_DEFAULTS, GateSettings
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import generate
from specact.lab.envs.ball import TASK
from specact.lab.evaluation.imitation import OpenLoopJob, run_open_loop
from specact.lab.evaluation.offline import calibrate_offline, evaluate_offline
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.statistics import holm
from specact.pair import PairSource


@pytest.fixture(scope="module")
def ball() -> Pair[Any]:
    return load_pair("ball")


@pytest.fixture(scope="module")
def shown() -> Episodes:
    return generate(TASK, 9, seed=5, noise=0.3).episodes


def test_methods_are_compared_on_the_demonstrations_that_no_gate_was_calibrated_on(
    ball: Pair[Any], shown: Episodes, tmp_path: Path
) -> None:
    methods = ("draft", "target", "random", "adahi")
    with Pool(1) as pool:
        found = evaluate_offline(ball, methods, shown, 0.5, tmp_path / "run", pool, quiet)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written == json.loads(json.dumps(found))
    assert (found["calibrated_on"], found["episodes"]) == (3, 6)
    rows = found["methods"]
    assert list(rows) == list(methods)
    assert rows["draft"]["transmission_rate"] == 0.0 and rows["target"]["transmission_rate"] == 1.0
    # Chance runs at the rate that its rival achieved, up to how often a coin falls on one side.
    assert abs(rows["random"]["transmission_rate"] - rows["adahi"]["transmission_rate"]) < 0.25
    # The draft's error, by the definition: its actions along those six, whatever was calibrated.
    judged = shown.select(np.array([1, 2, 4, 5, 7, 8]))
    alone = run_open_loop(OpenLoopJob(PairSource("ball"), judged, load_method("draft"), GateSettings("never"), 0))
    assert rows["draft"]["error"]["mean"] == pytest.approx(alone.error.mean(), abs=1e-12)
    contrasts = [row["error"] for row in found["contrasts"]]
    assert [row["p_holm"] for row in contrasts] == holm([row["p"] for row in contrasts]) and contrasts


def test_a_calibration_is_checked_on_other_demonstrations(ball: Pair[Any], shown: Episodes) -> None:
    wanted = BUNDLE_DEFAULTS.settings("deviation", ball)
    with Pool(1) as pool:
        made = calibrate_offline(ball, wanted, 0.5, shown, pool, quiet)
    assert made.fingerprint == ball.fingerprint and made.settings.without_threshold() == wanted
    assert made.held_out["episodes"] == 4 and 0.0 < made.held_out["rate"] < 1.0
    checked = run_open_loop(
        OpenLoopJob(PairSource("ball"), shown.select(np.arange(1, 9, 2)), load_method("hybrid"), made.settings, 0)
    )
    assert made.held_out["rate"] == checked.steps["transmitted"].mean()


def made_up(pair: Pair[Any], episodes: int, steps: int) -> Episodes:
    """Random walks within the range of the policy's actions, which it has not seen."""
    rng = np.random.default_rng(0)
    seen = {
        name: rng.normal(size=(episodes * steps, *field.shape)).astype(np.float32)
        for name, field in pair.observation.fields.items()
    }
    actions = rng.uniform(-1.0, 1.0, (episodes * steps, len(pair.units.centre))).astype(np.float32)
    return Episodes(seen, actions, steps * np.arange(1, episodes + 1))


def test_methods_that_decode_otherwise_have_their_own_gates(tmp_path: Path) -> None:
    """As in a simulator: a gate of the memory on a policy that is stored without, and one without a rate."""
    tokens = load_pair("relocate-tokens")
    with Pool(1) as pool:
        found = evaluate_offline(
            tokens, ("ar", "heisd_fixed", "heisd_similar"), made_up(tokens, 6, 9), 0.5, tmp_path / "run", pool, quiet
        )
    rates = {name: row["transmission_rate"] for name, row in found["methods"].items()}
    assert rates["ar"] == 1.0 and rates["heisd_fixed"] == pytest.approx(1.0 / 3.0)
    assert 0.0 < rates["heisd_similar"] < 1.0
    assert found["gates"]["heisd_fixed"]["threshold"] == 0.0  # never calibrated


def test_unchecked_drafts_make_as_many_full_rounds_as_checked_ones(tmp_path: Path) -> None:
    flow = load_pair("ball-chase-flow")
    with Pool(1) as pool:
        found = evaluate_offline(flow, ("unchecked", "flash"), made_up(flow, 6, 40), 0.5, tmp_path / "run", pool, quiet)
    flash, chance = found["methods"]["flash"], found["gates"]["unchecked"]["threshold"]
    assert 0.0 < flash["full"] < 1.0 and flash["transmission_rate"] == 1.0
    assert chance == pytest.approx(flash["full"], abs=0.15)  # the first round of an episode is forced


def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    ball: Pair[Any], shown: Episodes, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with Pool(1) as pool:
        with pytest.raises(ConfigError, match=r"rate must lie strictly between 0 and 1, got 1\.5"):
            evaluate_offline(ball, ("draft",), shown, 1.5, out, pool, quiet)
        with pytest.raises(DataError, match="there are 5 held-out demonstrations; at least 6"):
            evaluate_offline(ball, ("draft",), shown.select(np.arange(5)), 0.5, out, pool, quiet)
        with pytest.raises(DataError, match="at least two demonstrations"):
            calibrate_offline(ball, GateSettings("deviation"), 0.5, shown.select(np.arange(1)), pool, quiet)
        assert not out.exists()
        out.mkdir()
        (out / "summary.json").write_text("{}")
        with pytest.raises(ConfigError, match="holds a finished run"):
            evaluate_offline(ball, ("draft",), shown, 0.5, out, pool, quiet)
