"""The rejection model recovers the laws it is fitted to, and says nothing where nothing varies."""

import math

import numpy as np
import pytest

from specact.lab.evaluation.calibrate import fit_rejection


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


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_where_nothing_varies_there_is_no_slope_and_no_warning(count: int) -> None:
    same, varied = np.zeros(count), np.linspace(0, 1, count)
    for scores, rejections in ((same, np.full(count, 0.3)), (same, varied), (varied, same)):
        model = fit_rejection(scores, rejections)
        for fit in (model.linear, model.logarithmic):
            assert (fit.slope, fit.r2) == (0.0, 0.0) and fit.intercept == pytest.approx(rejections.mean())
        assert math.isnan(model.spearman)
