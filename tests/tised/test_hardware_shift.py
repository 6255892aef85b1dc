"""How hardware moves the optimum of overlap: the local tilt one way, and the global optimum possibly the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.tised.hardware_shift import (
    alpha_tilt,
    dynamic_alpha_tilt,
    fastest_overlaps,
    is_saturated,
    overlap_slope,
    overlap_tilt,
)
from specact.tised.timing import chunk_s, task_s

DEPTHS = np.arange(11)
CHUNKS = 1.0 + 0.01 * DEPTHS  # the worked example, with n = 10


def test_the_worked_example() -> None:
    """N = 1 + .01 m, n = 10: the optimum is m = rho, so slower hardware wants *more* overlap."""
    found = fastest_overlaps(CHUNKS, [1, 2, 3, 5], 10)
    assert [spot.where for spot in found] == [1.0, 2.0, 3.0, 5.0]
    assert all(spot.others == () for spot in found)


def test_and_the_local_slope_tilts_the_other_way_all_the_same() -> None:
    slopes = np.stack([overlap_slope(CHUNKS, rho, 10) for rho in (3, 4, 5)])
    unsaturated = slopes[:, :3]  # m + 1 <= 3
    assert (np.diff(unsaturated, axis=0) > 0.0).all()
    np.testing.assert_allclose(np.diff(unsaturated, axis=0), 0.01, atol=1e-12)


def test_a_steep_price_makes_slower_mean_shallower() -> None:
    """Where overlap is dear enough the local tilt decides, and the optimum moves the way of (24)."""
    steep = np.array([1.0, 1.07, 1.16, 1.28, 1.5])
    found = [spot.where for spot in fastest_overlaps(steep, [2, 4, 8, 20], 10)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


def test_both_branches() -> None:
    n, rho = 10, 4.0
    slope = overlap_slope(CHUNKS, rho, n)
    steps = np.diff(CHUNKS)
    np.testing.assert_allclose(slope[:4], steps[:4] * (rho + n - DEPTHS[:4] - 1) - CHUNKS[:4])
    np.testing.assert_allclose(slope[4:], n * steps[4:])
    assert is_saturated(rho, DEPTHS).tolist() == [False] * 4 + [True] * 7
    # On the saturated branch hardware has no say.
    np.testing.assert_array_equal(overlap_slope(CHUNKS, 3.0, n)[4:], slope[4:])


chunk_counts = st.lists(st.integers(1, 500), min_size=2, max_size=11)


@given(chunks=chunk_counts, rho=st.integers(0, 60).map(lambda k: k / 4))
def test_the_tilt_is_the_derivative_of_the_slope(chunks: list[int], rho: float) -> None:
    """Task time is linear in rho between two whole numbers, so a difference over 1/4 is the derivative, exactly."""
    n = len(chunks)
    change = (overlap_slope(chunks, rho + 0.25, n) - overlap_slope(chunks, rho, n)) / 0.25
    assert change.tolist() == overlap_tilt(chunks, rho).tolist()


@given(chunks=chunk_counts, rho=st.integers(0, 15))
def test_the_slope_is_the_difference_of_task_times(chunks: list[int], rho: int) -> None:
    n = len(chunks)
    times = task_s(chunks, chunk_s(rho, 1, n, overlap=np.arange(n)))
    assert overlap_slope(chunks, rho, n).tolist() == np.diff(times).tolist()


@given(chunks=chunk_counts, rho=st.integers(0, 15))
def test_the_unsaturated_tilt_has_the_sign_of_what_overlap_costs(chunks: list[int], rho: int) -> None:
    tilt, unsaturated = overlap_tilt(chunks, rho), np.arange(1, len(chunks)) <= rho
    assert tilt[unsaturated].tolist() == np.diff(chunks)[unsaturated].tolist()
    assert (tilt[~unsaturated] <= 0.0).all()


def test_static_lightweighting_tilts_by_the_elasticity_of_chunks() -> None:
    """T / T_act = N(a) (a rho + n); for N = 10 + 2 / a, N + a N' = 10: slower hardware wants smaller alpha."""
    alpha = np.array([0.2, 0.5, 1.0])
    assert alpha_tilt(alpha, 10 + 2 / alpha, -2 / alpha**2) == pytest.approx([10.0, 10.0, 10.0])
    # Where N falls faster than 1 / alpha it is the other way.
    assert (alpha_tilt(alpha, alpha**-2, -2 * alpha**-3) < 0).all()


def test_dynamic_lightweighting_tilts_toward_smaller_alpha() -> None:
    assert dynamic_alpha_tilt(-0.2, 0.5, 0.1) == pytest.approx(-0.01)
    assert dynamic_alpha_tilt(-0.2, 0.0, 0.1) == 0.0
