"""Intervals and paired tests, against formulas and enumerations."""

import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from specact.lab.rollout.statistics import (
    bootstrap_interval,
    contrast,
    holm,
    mean_interval,
    roc_auc,
    roc_auc_interval,
    seeds_interval,
    wilson,
)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (57, 100), (999, 1000), (0, 1)])
def test_wilson_is_its_closed_form(k: int, n: int) -> None:
    z, p = 1.959963984540054, k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    interval = wilson(k, n)
    assert interval.mean == p
    assert interval.low == pytest.approx(max(0.0, centre - half), abs=1e-9)
    assert interval.high == pytest.approx(min(1.0, centre + half), abs=1e-9)


def test_the_interval_of_a_mean_is_students() -> None:
    values = np.random.default_rng(0).normal(2.0, 3.0, 17)
    interval = mean_interval(values)
    half = float(special.stdtrit(16, 0.975)) * values.std(ddof=1) / math.sqrt(17)
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half)
    assert interval.high == pytest.approx(values.mean() + half)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5]])
def test_the_interval_of_what_does_not_vary_is_a_point(values: list[float]) -> None:
    interval = mean_interval(np.array(values))
    assert (interval.mean, interval.low, interval.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 0), (7, 2), (4, 4), (2, 9)])
def test_mcnemar_is_the_binomial_over_all_outcomes_of_the_discordant_pairs(gained: int, lost: int) -> None:
    first = np.array([1.0] * gained + [0.0] * lost + [1.0] * 3 + [0.0] * 4)
    second = np.array([0.0] * gained + [1.0] * lost + [1.0] * 3 + [0.0] * 4)
    comparison = contrast(first, second)
    pairs = gained + lost
    observed = abs(gained - lost)
    extreme = sum(abs(2 * sum(flips) - pairs) >= observed for flips in itertools.product((0, 1), repeat=pairs))
    assert comparison.test == "exact McNemar"
    assert comparison.p == pytest.approx(extreme / 2**pairs)
    assert comparison.difference.mean == pytest.approx((gained - lost) / (pairs + 7))


def test_the_permutation_p_is_that_of_all_sign_flips() -> None:
    first = np.array([0.3, 0.9, 0.45, 0.7, 0.81, 0.2, 0.66, 0.5])
    second = np.array([0.1, 0.5, 0.5, 0.35, 0.6, 0.25, 0.3, 0.2])
    away = first - second
    means = [abs(np.dot(signs, away)) for signs in itertools.product((-1, 1), repeat=8)]
    exact = float(np.mean(np.array(means) >= abs(away.sum()) - 1e-12))
    comparison = contrast(first, second)
    assert comparison.test == "sign-flip permutation"
    # 10,000 permutations: five standard deviations; wrong with probability 6e-7 if the seed were free.
    assert comparison.p == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / 10_000) + 1e-4)


def test_the_bootstrap_interval_is_about_students_where_both_hold() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.normal(1.0, 1.0, 200), rng.normal(0.5, 1.0, 200)
    interval, student = contrast(first, second).difference, mean_interval(first - second)
    assert interval.low < interval.mean < interval.high
    width = student.high - student.low
    assert interval.low == pytest.approx(student.low, abs=0.1 * width)
    assert interval.high == pytest.approx(student.high, abs=0.1 * width)


def test_an_interval_over_seeds_is_as_wide_as_they_differ() -> None:
    unlike = [np.ones(60), np.zeros(60), np.ones(60)]
    interval, pooled = seeds_interval(unlike), bootstrap_interval(np.concatenate(unlike))
    assert interval.mean == pooled.mean == pytest.approx(2 / 3)
    assert (interval.low, interval.high) == (0.0, 1.0) and pooled.high - pooled.low < 0.2
    alone = (np.arange(60) % 3 == 0).astype(float)
    whole = bootstrap_interval(alone)
    for copies in (1, 3):
        same = seeds_interval([alone] * copies)
        assert (same.low, same.high) == pytest.approx((whole.low, whole.high), abs=0.04), "no more than one says"


def test_pairing_counts() -> None:
    """The same differences hidden under a large variance between episodes are found all the same."""
    rng = np.random.default_rng(4)
    base = rng.normal(0.0, 100.0, 30)
    better = base + rng.normal(0.5, 0.1, 30)
    assert contrast(better, base).p < 1e-3 and contrast(base, better).p < 1e-3
    assert contrast(base, better).difference.high < 0.0 < contrast(better, base).difference.low
    assert contrast(base, base).p == 1.0
    assert contrast(base + 0.25, base) == contrast(base + 0.25, base)


def test_holm_by_hand() -> None:
    """Sorted .005 .01 .03 .04, times 4 3 2 1: .02 .03 .06 .04, of which the last may not be below the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_holm_is_its_closed_test() -> None:
    """A hypothesis is rejected if Bonferroni rejects every intersection that it is part of; all of them, tried."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        p = (rng.random(4) ** 3).tolist()
        expected = [
            max(
                min(1.0, size * min(p[i] for i in group))
                for size in range(1, 5)
                for group in itertools.combinations(range(4), size)
                if member in group
            )
            for member in range(4)
        ]
        assert holm(p) == pytest.approx(expected)


@given(st.lists(st.floats(0.0, 1.0), max_size=12), st.randoms())
def test_holm_keeps_the_order_never_lowers_and_does_not_depend_on_places(p: list[float], random: Random) -> None:
    adjusted_p = holm(p)
    for raw, adjusted in zip(p, adjusted_p, strict=True):
        assert raw <= adjusted <= min(1.0, len(p) * raw)
    for (left, first), (right, second) in itertools.combinations(zip(p, adjusted_p, strict=True), 2):
        assert first <= second if left <= right else first >= second
    places = list(range(len(p)))
    random.shuffle(places)
    assert holm([p[i] for i in places]) == [adjusted_p[i] for i in places]


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_holm_refuses_what_is_no_probability(p: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        holm([0.5, p])


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(4)
    scores, positive = rng.integers(0, 6, 60).astype(np.float64), rng.random(60) < 0.4
    above = np.sign(scores[positive][:, None] - scores[~positive])
    assert roc_auc(scores, positive) == pytest.approx(float((above + 1.0).mean() / 2.0))
    assert roc_auc(np.arange(5.0), np.arange(5) >= 3) == 1.0
    assert roc_auc(np.arange(5.0), np.arange(5) < 3) == 0.0
    assert roc_auc(np.ones(5), np.arange(5) < 3) == 0.5
    assert roc_auc(scores, np.ones(60, np.bool_)) is None and roc_auc(scores, np.zeros(60, np.bool_)) is None


def test_an_area_under_the_curve_is_as_certain_as_its_episodes_are_many() -> None:
    """Twenty rows of one episode that are alike say as much as one of them."""
    rng = np.random.default_rng(0)
    positive = rng.uniform(size=400) < 0.5
    scores = positive + rng.normal(0.0, 2.0, 400)
    alone = roc_auc_interval(scores, positive, np.arange(400))
    together = roc_auc_interval(np.repeat(scores[:20], 20), np.repeat(positive[:20], 20), np.repeat(np.arange(20), 20))
    assert alone is not None and together is not None
    assert alone.low < roc_auc(scores, positive) == alone.mean < alone.high  # type: ignore[operator]
    assert together.high - together.low > 2.0 * (alone.high - alone.low)
    assert roc_auc_interval(scores, np.ones(400, np.bool_), np.arange(400)) is None
