"""Audits: a fair sample of what is skipped, an interval and an alarm that may be looked at all the time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from tests.gates.steps import ERROR_RATE, RNG, STEP, binomial_bounds, record

from specact import load_pair
from specact.gates import Never, Random
from specact.gates.audit import AuditEstimator, DriftAlarm, RunningMean, expected_true_skip
from specact.types import Decision

AUDIT = Decision(True, 0.0, 1.0, "audit")


def test_an_audit_rate_is_a_share_of_what_would_be_skipped_and_changes_no_other_step() -> None:
    n, rate = 20_000, 0.1
    plain, audited = Random(0.4), Random(0.4)
    audited.audit_rate = rate
    pairs = [(plain.decide(STEP, RNG(t)), audited.decide(STEP, RNG(t))) for t in range(n)]
    skipped = [after for before, after in pairs if not before.transmit]
    audits = [decision for decision in skipped if decision.transmit]
    assert all(before == after for before, after in pairs if before.transmit)
    assert {decision.reason for decision in audits} == {"audit"}
    low, high = binomial_bounds(len(skipped), rate)
    assert low <= len(audits) <= high


def test_an_audit_ends_a_run_of_skips() -> None:
    gate = Never()
    gate.max_skips, gate.audit_rate = 10, 0.3
    decisions = [gate.decide(STEP, RNG(t)) for t in range(5000)]
    forced = [t for t, decision in enumerate(decisions) if decision.reason == "max_skips"]
    assert forced == [
        t for t in range(10, 5000) if not any(decision.transmit for decision in decisions[t - 10 : t])
    ]  # fmt: skip
    assert 0 < len(forced) < sum(decision.reason == "audit" for decision in decisions)


def test_misses_give_no_value_and_are_counted() -> None:
    audits = AuditEstimator()
    for decision, rejected in (
        (AUDIT, 0.25),
        (AUDIT, None),
        (Decision(True, 2.0, 1.0, "score"), 1.0),
        (Decision(False, 0.0, 1.0, "score"), None),
    ):
        assert not audits.take(record(decision, rejected=rejected))
    estimate = audits.estimate()
    assert (estimate.mean, estimate.count, audits.missed) == (0.75, 1, 1)
    audits = AuditEstimator(DriftAlarm(0.9, run_length=100.0))  # told once
    told = [audits.take(record(AUDIT, rejected=1.0)) for _ in range(5000)]
    assert sum(told) == 1 and audits.alarm is not None and audits.alarm.raised


def drifting(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Values, and their means, each of which depends on the value before."""
    values, means = np.zeros(n), np.zeros(n)
    for t in range(n):
        means[t] = 0.35 + 0.3 * (values[t - 1] if t else 0.5) + 0.2 * math.sin(t / 50.0)
        values[t] = rng.random() < means[t]
    return values, means


@pytest.mark.parametrize("draw", [lambda rng, n: (rng.random(n) < 0.02, np.full(n, 0.02)), drifting])
def test_the_interval_holds_at_all_times_at_once(draw: Callable[..., tuple[np.ndarray, np.ndarray]]) -> None:
    lives, n, error = 150, 500, 0.1
    missed = naive = 0
    for life in range(lives):
        values, means = draw(RNG(life), n)
        running, truth = RunningMean(error), np.cumsum(means) / np.arange(1, n + 1)
        out = False
        for value, mean in zip(values, truth, strict=True):
            running.take(float(value))
            estimate = running.estimate()
            out |= not estimate.low <= mean <= estimate.high
        missed += out
        so_far, count = np.cumsum(values) / np.arange(1, n + 1), np.arange(1, n + 1)
        half = stats.norm.isf(error / 2) * np.sqrt(so_far * (1.0 - so_far) / count)
        naive += bool((np.abs(so_far - truth) > half)[30:].any())
    limit = float(stats.binom.isf(ERROR_RATE, lives, error))
    assert missed <= limit
    # An interval for one look at a fixed n, looked at after each value.
    assert naive > limit


@pytest.mark.parametrize("level", [0.0, 0.2, 0.5, 0.97, 1.0])
def test_no_bet_is_better_than_fair(level: float) -> None:
    # After one value the evidence of each bet is its payment: enumerated over two-point laws with a mean in the
    # interval, its expectation is at most 1, and exactly 1 at the end that it bets against.
    best = np.zeros(12)
    for low, high in itertools.product(np.linspace(0.0, 1.0, 11), repeat=2):
        for mean in np.linspace(max(0.0, level - 0.05), min(1.0, level + 0.05), 11):
            if not low < mean < high:
                continue
            share = (mean - low) / (high - low)
            paid = []
            for value in (low, high):
                alarm = DriftAlarm(level)
                alarm.take(float(value))
                paid.append(alarm._evidence.copy())
            assert (np.array(paid) >= 0.0).all()
            best = np.maximum(best, (1.0 - share) * paid[0] + share * paid[1])
    assert best.max() <= 1.0 + 1e-12
    reached = [level + 0.05 < 1.0] * 6 + [level - 0.05 > 0.0] * 6
    np.testing.assert_allclose(best[reached], 1.0, atol=1e-12)


@pytest.mark.parametrize("mean", [0.35, 0.45])
def test_false_alarms_are_as_rare_as_promised(mean: float) -> None:
    lives, n, run_length = 250, 300, 1000.0
    false = 0
    for life in range(lives):
        alarm = DriftAlarm(0.4, run_length=run_length)
        for value in RNG(life).random(n) < mean:
            alarm.take(float(value))
        false += alarm.raised
    assert false <= stats.binom.isf(ERROR_RATE, lives, n / run_length)


@pytest.mark.parametrize(("after", "within"), [(0.1, 100), (0.2, 220), (0.6, 220), (0.9, 50)])
def test_a_drift_is_seen_soon(after: float, within: int) -> None:
    delays = []
    for life in range(40):
        rng = RNG(life)
        alarm = DriftAlarm(0.4)
        for value in rng.random(200) < 0.4:
            alarm.take(float(value))
        delays.append(next(t for t in range(1, 5000) if alarm.take(float(rng.random() < after))))
    assert np.mean(delays) < within


@pytest.mark.parametrize(
    ("rate", "wanted"), [(0.5, 0.85), (0.0, 0.75), (0.75, 0.9), (0.375, 1.0 - (0.1 + 0.2 + 0.15) / 2.5)]
)
def test_the_expected_level_is_the_mean_over_the_lowest_scores(rate: float, wanted: float) -> None:
    assert expected_true_skip([0.1, 0.2, 0.3, 0.4], rate) == pytest.approx(wanted, abs=1e-12)


def test_a_level_close_to_what_is_measured() -> None:
    from specact.gates.calibration import find_calibration

    calibration = find_calibration(load_pair("ball"), "adahi", 0.6)
    assert calibration is not None
    # docs/results/adahi.md: the true skip ratio of ADAHI on ball.
    assert expected_true_skip(calibration.model["rejections"], 0.6) == pytest.approx(0.39, abs=0.02)
