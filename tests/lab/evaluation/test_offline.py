"""Methods along demonstrations: no simulator, the same observations for all, errors in the units it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import quiet

from specact.errors import ConfigError, DataError
from specact.families.codes.sampling import sample_codes
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import generate, read_demonstrations, split_demonstrations
from specact.lab.envs import load_task
from specact.lab.evaluation.offline import calibrate_offline, demonstrations_of, evaluate_offline, run_open_loop
from specact.lab.rollout.methods import Method, composed, load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.statistics import holm
from specact.lab.train.dataset import prepare
from specact.lab.train.recipe import CodesRecipe, load_recipe
from specact.load import load_pair
from specact.observation import Window
from specact.pair import Pair
from specact.rng import Role, stream
from specact.systems.tokens import DECODINGS

NEVER = GateSettings("never")


@pytest.fixture(scope="module")
def shown() -> Episodes:
    return generate(load_task("ball"), 9, seed=5, noise=0.3)


@pytest.fixture
def kept_back(tiny_bundle: Path) -> Episodes:
    return split_demonstrations(demonstrations_of(load_pair(tiny_bundle)), None)[1]


def test_methods_are_compared_on_the_demonstrations_that_no_gate_was_calibrated_on(
    ball: Pair[Any], shown: Episodes, tmp_path: Path
) -> None:
    methods = ("draft", "target", "random", "adahi")
    summary = evaluate_offline(ball, methods, shown, 0.5, tmp_path / "run", Pool(1), quiet)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert (summary["calibrated_on"], summary["episodes"]) == (3, 6)
    rows = summary["methods"]
    assert list(rows) == list(methods)
    assert rows["draft"]["sent"] == 0.0 and rows["target"]["sent"] == 1.0
    # Chance runs at the rate that its rival achieved, up to how often a coin falls on one side.
    assert abs(rows["random"]["sent"] - rows["adahi"]["sent"]) < 0.25
    # The draft's error, by the definition: its actions along those six, whatever was calibrated.
    judged = shown.select(np.array([1, 2, 4, 5, 7, 8]))
    alone = run_open_loop(ball, load_method("draft"), NEVER, judged, Pool(1), 0)
    assert rows["draft"]["error"]["mean"] == pytest.approx(alone.error.mean(), abs=1e-12)
    contrasts = [row["error"] for row in summary["contrasts"]]
    assert [row["p_holm"] for row in contrasts] == holm([row["p"] for row in contrasts]) and contrasts


def test_a_calibration_is_checked_on_other_demonstrations(ball: Pair[Any], shown: Episodes) -> None:
    wanted = gate_settings("adahi", ball)
    made = calibrate_offline(ball, wanted, 0.5, shown, Pool(1), quiet)
    assert made.fingerprint == ball.fingerprint and made.settings.without_threshold() == wanted
    checked = run_open_loop(ball, load_method("hybrid"), made.settings, shown.select(np.arange(1, 9, 2)), Pool(1), 0)
    assert (made.held_out["episodes"], made.held_out["rate"]) == (4, checked.steps["transmitted"].mean())


@pytest.mark.parametrize(
    ("name", "methods", "steps"),
    [
        ("relocate-tokens", ("ar", "heisd_fixed_no_switch", composed("similar", DECODINGS["heisd_similar"])), 9),
        ("ball-chase-flow", ("unchecked", "flash"), 40),
    ],
)
def test_methods_that_decode_otherwise_have_their_own_gates(
    tmp_path: Path, name: str, methods: tuple[str | Method, ...], steps: int
) -> None:
    """On random walks: a gate of the memory, one without a rate, and unchecked drafts with as many full rounds."""
    pair, rng = load_pair(name), np.random.default_rng(0)
    seen = {
        name: rng.normal(size=(6 * steps, *field.shape)).astype(np.float32)
        for name, field in pair.observation.fields.items()
    }
    actions = rng.uniform(-1.0, 1.0, (6 * steps, len(pair.units.centre))).astype(np.float32)
    walks = Episodes(seen, actions, steps * np.arange(1, 7))
    summary = evaluate_offline(pair, methods, walks, 0.5, tmp_path / "run", Pool(1), quiet)
    rows, gates = summary["methods"], summary["gates"]
    if "ar" in methods:
        assert rows["ar"]["sent"] == 1.0
        assert rows["heisd_fixed_no_switch"]["sent"] == pytest.approx(1.0 / 3.0)
        assert 0.0 < rows["similar"]["sent"] < 1.0
        assert gates["heisd_fixed_no_switch"]["threshold"] == 0.0  # never calibrated
    else:
        assert 0.0 < rows["flash"]["full"] < 1.0 and rows["flash"]["sent"] == 1.0
        # The first round of an episode is forced.
        assert gates["unchecked"]["threshold"] == pytest.approx(rows["flash"]["full"], abs=0.15)


def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    ball: Pair[Any], shown: Episodes, tmp_path: Path
) -> None:
    out, pool = tmp_path / "run", Pool(1)
    with pytest.raises(ConfigError, match=r"rate.*1\.5"):
        evaluate_offline(ball, ("draft",), shown, 1.5, out, pool, quiet)
    for rate in (60.0, np.nan):  # a share, no percentage
        with pytest.raises(ConfigError, match="rate"):
            calibrate_offline(ball, GateSettings("adahi"), rate, shown, pool, quiet)
    with pytest.raises(DataError, match="5"):
        evaluate_offline(ball, ("draft",), shown.select(np.arange(5)), 0.5, out, pool, quiet)
    with pytest.raises(DataError, match="two"):
        calibrate_offline(ball, GateSettings("adahi"), 0.5, shown.select(np.arange(1)), pool, quiet)
    assert not out.exists()
    out.mkdir()
    (out / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="run"):
        evaluate_offline(ball, ("draft",), shown, 0.5, out, pool, quiet)
    with pytest.raises(ConfigError, match="--data"):
        split_demonstrations(demonstrations_of(load_pair("kitchen")), None)


def test_the_demonstrations_are_those_that_training_kept_back(kept_back: Episodes, tiny_recipe: Path) -> None:
    recipe = load_recipe(tiny_recipe, CodesRecipe)
    episodes = prepare(read_demonstrations(recipe, []), recipe).held_out.episodes
    assert np.array_equal(kept_back.observation["state"], episodes.observation["state"])
    assert np.array_equal(kept_back.action, episodes.action)


def test_the_error_is_the_squared_distance_summed_over_dimensions(tiny_bundle: Path, kept_back: Episodes) -> None:
    """The tiny pair infers at every step and windows hold two observations: the draft's error, computed by hand."""
    pair = load_pair(tiny_bundle)
    summary = run_open_loop(pair, load_method("draft"), NEVER, kept_back, Pool(1), 3).summary
    state, goal = (np.asarray(kept_back.observation[name]) for name in ("state", "goal"))
    tokenizer, expected = pair.parts.tokenizer, []
    for number, span in enumerate(kept_back.slices()):
        errors = []
        for step, t in enumerate(range(span.start, span.stop)):
            draft = pair.parts.draft.infer(Window({"state": state[[max(t - 1, span.start), t]], "goal": goal[t]}))
            codes = sample_codes(draft, stream(3, Role.DRAFT, episode=number, step=step))
            action = tokenizer.to_environment(tokenizer.decode(codes, draft.offsets)[0])
            errors.append(np.square((action - kept_back.action[t]) / tokenizer.scale).sum())
        expected.append(np.mean(errors))
    assert summary["mean"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert summary["low"] <= summary["mean"] <= summary["high"] and summary["episodes"] == len(kept_back)
