"""Predicting cells that were not run: exact where quality and staleness are separable, and visibly not where not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.errors import ConfigError
from specact.lab.tised.prediction import (
    fit_response,
    isotonic,
    log_odds,
    predict_success,
    prediction_error,
    success_rate,
)
from specact.types import Floats

STALENESS = np.array([0.0, 0.1, 0.2, 0.4, 0.8, 1.2])
QUALITY = np.array([2.5, 2.0, 1.0, -0.5])
MANY = 1_000_000  # trials: rates without noise


def cost(s: Floats) -> Floats:
    """Rises, is level, rises again: neither linear nor logistic."""
    return np.asarray(3.0 * np.minimum(s, 0.3) + 4.0 * np.maximum(0.0, s - 0.6))


def test_separable_success_is_predicted_exactly() -> None:
    """From 4 + 5 cells the other 15."""
    truth = success_rate(QUALITY[:, None], cost(STALENESS))
    trials = np.full((4, 6), MANY)
    response = fit_response(STALENESS, MANY * truth[0], trials[0])
    found = predict_success(MANY * truth[:, :1], MANY, 0.0, response, STALENESS)
    assert prediction_error(found, MANY * truth, trials).worst < 1e-5
    assert found.covered.all() and found.covered.shape == (4, 6)
    # Quality may have been measured under delay, if it is known which.
    late = predict_success(MANY * truth[:, 2:3], MANY, STALENESS[2], response, STALENESS)
    np.testing.assert_allclose(late.rate, truth, atol=1e-5)
    # A prediction that forgets staleness is far off, and the error says so.
    naive = predict_success(MANY * truth[:, :1], MANY, 0.0, response, 0.0 * STALENESS)
    assert prediction_error(naive, MANY * truth, trials).mean_absolute > 0.15


def test_where_quality_and_staleness_are_not_separable_the_error_shows_it() -> None:
    """Here bad policies do not mind staleness, which the log odds of the best one cannot know."""
    truth = success_rate(QUALITY[:, None], cost(STALENESS) * np.array([1.0, 0.7, 0.3, 0.0])[:, None])
    trials = np.full((4, 6), 200)
    response = fit_response(STALENESS, 200 * truth[0], trials[0])
    found = predict_success(200 * truth[1:, :1], 200, 0.0, response, STALENESS[1:])
    error = prediction_error(found, 200 * truth[1:, 1:], trials[1:, 1:])
    assert error.mean_absolute > 0.1 and error.mean_absolute > 2 * error.noise
    assert error.chi2 > 5.0


def test_with_200_trials_the_error_is_that_of_counting() -> None:
    """In separable worlds chi2, and the error over its noise, are about 1 on average.

    10,000 worlds gave 0.97 and 0.94 with standard deviations of 0.87 and 0.38; the bounds leave 300 of them seven
    standard errors.
    """
    rng = np.random.default_rng(0)
    truth, trials = success_rate(QUALITY[:, None], cost(STALENESS)), np.full((4, 6), 200)
    errors = []
    for _ in range(300):
        seen = rng.binomial(200, truth)
        response = fit_response(STALENESS, seen[0], trials[0])
        found = predict_success(seen[1:, :1], 200, 0.0, response, STALENESS[1:])
        errors.append(prediction_error(found, seen[1:, 1:], trials[1:, 1:]))
    assert 0.6 < np.mean([error.chi2 for error in errors]) < 1.35
    assert np.mean([error.mean_absolute / error.noise for error in errors]) == pytest.approx(0.94, abs=0.15)


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 9)), min_size=1, max_size=9).map(
        lambda rows: np.array(rows).T
    )
)
def test_isotonic_regression_is_its_minimax_formula(rows: Floats) -> None:
    """max over i <= k of min over j >= k of the weighted mean of i..j."""
    values, weights = rows
    size = len(values)

    def mean(i: int, j: int) -> float:
        return float(np.average(values[i : j + 1], weights=weights[i : j + 1]))

    expected = [max(min(mean(i, j) for j in range(k, size)) for i in range(k + 1)) for k in range(size)]
    assert isotonic(values, weights) == pytest.approx(expected, abs=1e-9)


def test_the_response_pools_what_contradicts_it() -> None:
    """Success that rises with staleness is noise: the cells are counted together."""
    response = fit_response([0.0, 1.0, 2.0], [90, 60, 70], [100, 100, 100])
    assert response.cost[1] == response.cost[2]
    assert response.cost[1] == pytest.approx(float(log_odds(90, 100) - log_odds(65, 100)))
    assert response(0.5) == pytest.approx(response.cost[1] / 2)
    assert response(9.0) == response.cost[2]
    assert response.variance[0] == 0.0 and (response.variance[1:] > 0.0).all()
    assert predict_success(50, 100, 0.0, response, [0.0, 2.0, 2.1]).covered.tolist() == [True, True, False]
    fresher = predict_success(50, 100, 0.0, fit_response([1.0, 2.0], [9, 8], [10, 10]), [0.9, 1.0])
    assert fresher.covered.tolist() == [False, True]


def test_the_same_staleness_is_counted_together_and_order_does_not_matter() -> None:
    one = fit_response([1.0, 0.0, 1.0], [40, 90, 60], [100, 100, 100])
    other = fit_response([0.0, 1.0], [90, 100], [100, 200])
    assert one.staleness.tolist() == other.staleness.tolist()
    assert one.cost.tolist() == other.cost.tolist()


def test_log_odds_are_finite_at_the_ends() -> None:
    assert np.isfinite(log_odds([0, 10], [10, 10])).all()
    assert success_rate(log_odds(700_000, MANY), 0.0) == pytest.approx(0.7, abs=1e-6)
    assert success_rate(np.array([-1000.0, 1000.0]), 0.0).tolist() == [0.0, 1.0]


def test_too_little_to_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="two or more different"):
        fit_response([1.0, 1.0], [1, 2], [3, 3])
    with pytest.raises(ConfigError, match="shapes"):
        fit_response([1.0, 2.0], [1, 2, 3], [3, 3])
    with pytest.raises(ConfigError, match="hold out"):
        prediction_error(predict_success([], [], 0.0, fit_response([0, 1], [2, 1], [3, 3]), []), [], [])
