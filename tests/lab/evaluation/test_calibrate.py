"""Gates at a rate: calibration against a gate that shifts its own states, and chance with privileges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from specact import load_pair
from specact.errors import ConfigError
from specact.families.codes.sampling import CodeDistribution, Drafted
from specact.gates import Gate, Random
from specact.gates.audit import expected_true_skip
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.evaluation.calibrate import (
    Threshold,
    calibrate,
    decision_table,
    expected_rate,
    find_threshold,
    fit_rejection,
    fitted_threshold,
    free_probability,
)
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard
from specact.lab.rollout.steps import REASONS
from specact.observation import Window
from specact.pair import PairSource
from specact.types import Decision, Proposal


class ShiftingPool:
    """Stands for rollouts whose scores move with the rate of the gate: 400 inferences an episode, the first forced.

    Scores are normal with mean ``feedback * (rate - 0.5)``, at the rate that is its own consequence.
    """

    def __init__(self, feedback: float) -> None:
        self.feedback = feedback

    def run(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, Any]]:
        for shard in shards:
            rng = np.random.default_rng(shard.episodes[0])
            noise = rng.normal(size=400 * len(shard.episodes))
            mean = 0.0
            for _ in range(200):  # to the fixed point
                rate = float(np.mean(noise + mean > shard.gate.threshold))
                mean += 0.2 * (self.feedback * (rate - 0.5) - mean)
            scores = noise + mean
            forced = np.arange(len(scores)) % 400 == 0
            table = {
                "score": scores,
                "transmitted": forced | (scores > shard.gate.threshold),
                "reason": np.where(forced, REASONS.index("first"), REASONS.index("score")),
                "rejection": 1 / (1 + np.exp(-scores)),
                "rejection_0": 1 / (2 + np.exp(-scores)),
            }
            yield shard, ([], table)


class _Bundle:
    source = PairSource("nowhere")
    fingerprint = "0"
    exchange = load_pair("ball").exchange
    recommended_gates: ClassVar[dict[str, Any]] = {}


@pytest.mark.parametrize("feedback", [-3.0, -1.0, 0.0, 0.8])
@pytest.mark.parametrize("rate", [0.2, 0.6])
def test_the_rate_is_found_through_the_feedback(feedback: float, rate: float) -> None:
    """8,000 inferences a round put the noise of a rate at .006, so .03 is missed by chance less than once in 1e5."""
    pool = cast(Pool, ShiftingPool(feedback))
    gate = gate_settings("adahi", cast(Any, _Bundle))
    made = calibrate(cast(Any, _Bundle), gate, rate, episodes=20, env="ball", pool=pool)
    assert made.held_out["rate"] == pytest.approx(rate, abs=0.03)
    if feedback == -3.0:  # the plain quantile on the target's states misses by far: the first round shows it
        assert abs(made.rounds[0]["rate"] - rate) > 0.03


@pytest.mark.parametrize("gate", ["adahi", "a_new_gate"])
def test_a_gate_needs_no_method_of_its_own_and_has_a_model_of_either_rejection(gate: str) -> None:
    pool = cast(Pool, ShiftingPool(0.0))
    made = calibrate(cast(Any, _Bundle), GateSettings(gate), 0.5, episodes=5, rounds=1, env="ball", pool=pool)
    assert made.settings.name == gate
    every, primary = made.model, made.model["primary"]
    assert (every["steps"], every["scores"]) == (primary["steps"], primary["scores"])
    # Of any code and of the primary one: here at most 1 and at most 1/2.
    assert max(primary["rejections"]) <= 0.5 < max(every["rejections"])


@pytest.mark.parametrize("limit", [None, 2])
def test_the_level_of_an_alarm_is_of_the_steps_that_are_skipped(limit: int | None) -> None:
    """At a limit on skips some steps are forced: the score chooses among fewer. 4,000 values: .02 is four errors."""

    class Scored(Gate):
        def score(self, proposal: Any, rng: np.random.Generator) -> float:
            return float(proposal)

    def roll(settings: GateSettings, number: int) -> dict[str, Any]:
        rng, decisions, scores = np.random.default_rng([number, 7]), list[Decision](), list[float]()
        for _ in range(40):
            gate = Scored(settings.threshold, tie_probability=settings.tie_probability, max_skips=settings.max_skips)
            for _ in range(100):
                scores.append(rng.random())
                decisions.append(gate.decide(cast(Any, scores[-1]), rng))
        return {**decision_table(decisions), "rejection": np.array(scores), "rejection_0": np.array(scores)}

    search = find_threshold(GateSettings("scored", max_skips=limit), 0.4, 4, roll)
    made, skipped = search.calibration(cast(Any, _Bundle), 0.4, 40, {}, ""), ~search.checked["transmitted"]
    kept = float((1.0 - search.checked["rejection"])[skipped].mean())
    level = expected_true_skip(made.model["rejections"], 0.4, made.held_out["free"])
    assert level == pytest.approx(kept, abs=0.02)
    assert limit is None or expected_true_skip(made.model["rejections"], 0.4) > kept + 0.08


@pytest.mark.parametrize("threshold", ["linear", "logarithmic"])
def test_equations_9_and_10_take_one_round_and_a_check(threshold: Threshold) -> None:
    seen = list[int]()
    made = calibrate(
        cast(Any, _Bundle), GateSettings("adahi"), 0.5, episodes=5, env="ball", threshold=threshold,
        pool=cast(Pool, ShiftingPool(0.0)), advance=seen.append,
    )  # fmt: skip
    assert made.rounds == [] and made.made_by["threshold"] == threshold and seen == [5, 10]
    # Here rejection is a function of the score, which a line or a logarithm meets only roughly.
    assert made.held_out["rate"] == pytest.approx(0.5, abs=0.1)
    with pytest.raises(ConfigError, match="rejections of action codes"):
        find_threshold(GateSettings("adahi"), 0.5, 1, lambda gate, number: {"score": np.ones(3)}, threshold)


STEP = Proposal(
    Window({"state": np.zeros((1, 1), np.float32)}),
    np.zeros((1, 1), np.float32),
    Drafted(CodeDistribution(np.ones((1, 1)), np.zeros((1, 1, 1, 1), np.float32)), np.zeros(1, np.int64)),
)


def test_chance_by_hand() -> None:
    assert free_probability(0.37, None, force_first=False, lengths=(5, 9)) == pytest.approx(0.37, abs=1e-5)
    # The first step counts as transmitted. Episodes of 10 inferences: 1 + 9 f = 10 * 0.4.
    assert free_probability(0.4, None, lengths=(10, 10)) == pytest.approx(3 / 9, abs=1e-5)
    # Where force makes more than the rate nothing is left to chance.
    assert free_probability(0.1, 2) == 0.0 and free_probability(1.0, None) == 1.0


@pytest.mark.parametrize(("max_skips", "free"), [(1, 0.1), (2, 0.5), (4, 0.1)])
def test_in_the_long_run_a_transmission_comes_once_in_a_truncated_geometric_time(max_skips: int, free: float) -> None:
    """The mean gap between transmissions is sum_{s=0}^{m} (1 - f)^s."""
    gap = sum((1.0 - free) ** skips for skips in range(max_skips + 1))
    assert expected_rate(free, max_skips, force_first=True, lengths=(20_000,)) == pytest.approx(1 / gap, abs=1e-3)


@pytest.mark.parametrize(("max_skips", "rate"), [(None, 0.3), (2, 0.4), (2, 0.6), (4, 0.25)])
def test_the_gate_achieves_the_rate_it_was_solved_for(max_skips: int | None, rate: float) -> None:
    """8,000 inferences in short episodes; .03 is more than five standard errors."""
    lengths, rng, sent = (12, 20, 8) * 200, np.random.default_rng(0), []
    gate = Random(free_probability(rate, max_skips, lengths=lengths), max_skips=max_skips, force_first=True)
    for length in lengths:
        gate.reset()
        sent += [gate.decide(STEP, rng).transmit for _ in range(length)]
    assert np.mean(sent) == pytest.approx(rate, abs=0.03)
    assert gate.rate < rate


# --- the rejection model ---


def test_a_linear_law_is_recovered() -> None:
    scores = np.linspace(0.0, 2.0, 400)
    model = fit_rejection(scores, 0.1 + 0.3 * scores)
    fit = model.linear
    assert (fit.slope, fit.intercept, fit.r2, model.spearman) == pytest.approx((0.3, 0.1, 1.0, 1.0))
    assert model.steps == 400 and len(model.scores) == len(model.rejections) == len(model.errors) == 20
    assert model.scores[0] == pytest.approx(scores[:20].mean())
    assert model.errors[0] == pytest.approx((0.1 + 0.3 * scores[:20]).std() / np.sqrt(20))


def test_a_logarithmic_law_is_recovered() -> None:
    scores = np.repeat(np.linspace(0.0, 2.0, 20), 10)  # bins of equal scores: no curvature inside them
    model = fit_rejection(scores, 0.8 + 0.2 * np.log(scores + 0.05))
    fit = model.logarithmic
    assert (fit.slope, fit.intercept, fit.shift) == pytest.approx((0.2, 0.8, 0.05), rel=1e-2)
    assert fit.r2 > 0.99999 and model.linear.r2 < 0.9


def test_a_gate_that_asks_at_the_wrong_moments_shows_in_the_sign_and_not_in_r2() -> None:
    scores = np.linspace(0.0, 1.0, 200)
    model = fit_rejection(scores, 1.0 - scores)
    assert (model.linear.slope, model.linear.r2, model.spearman, model.auroc) == pytest.approx((-1.0, 1.0, -1.0, 0.0))
    assert model.logarithmic.slope < 0
    negative = fit_rejection(np.linspace(-3.0, -1.0, 200), scores)
    assert negative.linear.slope == pytest.approx(0.5) and math.isfinite(negative.logarithmic.slope)


# Of rejections over scores, and the scores of these rejections.
LAWS: dict[Threshold, Any] = {
    "linear": (lambda x: 0.1 + 0.2 * x, lambda r: (r - 0.1) / 0.2),
    "logarithmic": (lambda x: 0.5 + 0.1 * np.log(x + 0.3), lambda r: np.exp((r - 0.5) / 0.1) - 0.3),
}


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("rate", [0.2, 0.8])
def test_as_written_the_threshold_is_the_quantile_only_where_rejections_do_not_scatter(
    kind: Threshold, rate: float
) -> None:
    expected = np.repeat(np.linspace(0.4, 0.7, 500), 4)
    scores = LAWS[kind][1](expected)
    assert np.mean(scores > fitted_threshold(scores, expected, rate, kind)) == pytest.approx(rate, abs=0.02)
    # The same expectation, but rejections of other steps with the same score are smaller and larger.
    scattered = expected + np.tile([-1.0, 1.0], 1000) * expected.std()
    missed = np.mean(scores > fitted_threshold(scores, scattered, rate, kind)) - rate
    assert missed == pytest.approx(-0.09 if rate == 0.2 else 0.09, abs=0.02)


@pytest.mark.parametrize("kind", LAWS)
def test_where_equation_9_has_no_threshold_it_is_refused(kind: Threshold) -> None:
    scores = np.linspace(0.5, 2.0, 400)
    often_zero = np.where(np.arange(400) % 2, 2 * LAWS[kind][0](scores), 0.0)
    for rejections, rate, said in (
        (1.0 - LAWS[kind][0](scores), 0.5, "does not increase"), (np.full(400, 0.3), 0.5, "does not increase"),
        (often_zero, 0.6, "always ask"), (often_zero, 0.1, "never ask"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            fitted_threshold(scores, rejections, rate, kind)


@pytest.mark.parametrize("least", [0.0, -3.0])
def test_a_fit_is_inverted_where_scores_are_negative_too(least: float) -> None:
    scores = np.repeat(np.linspace(least, least + 2.0, 20), 10)
    model = fit_rejection(scores, 0.5 + 0.1 * np.log(scores - least + 0.3))
    assert model.logarithmic.r2 > 0.99999
    for fit, x in ((model.linear, scores), (model.logarithmic, np.log(scores + model.logarithmic.shift))):
        inverted = [fit.inverse(rejection) for rejection in fit.slope * x + fit.intercept]
        np.testing.assert_allclose(inverted, scores, atol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_where_nothing_varies_there_is_no_slope_and_no_warning(count: int) -> None:
    same, varied = np.zeros(count), np.linspace(0, 1, count)
    for scores, rejections in ((same, np.full(count, 0.3)), (same, varied), (varied, same)):
        model = fit_rejection(scores, rejections)
        for fit in (model.linear, model.logarithmic):
            assert (fit.slope, fit.r2) == (0.0, 0.0) and fit.intercept == pytest.approx(rejections.mean())
        assert math.isnan(model.spearman)
