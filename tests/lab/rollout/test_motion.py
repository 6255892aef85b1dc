"""Jerk and path length of motions whose derivatives are known."""

import numpy as np
import pytest

from specact.lab.rollout.episode import jerk, path_length


def test_the_jerk_of_a_cubic_is_its_third_derivative() -> None:
    """x = 2 t^3, y = -t^3: the third difference of a cubic is exact, (12, -6) per s^3."""
    t = 0.25 * np.arange(9)
    assert jerk(np.stack([2 * t**3, -(t**3)], axis=1), 0.25) == pytest.approx(np.hypot(12.0, 6.0))


def test_constant_acceleration_has_no_jerk() -> None:
    t = 0.5 * np.arange(8)
    assert jerk(np.stack([t**2, 3 * t], axis=1), 0.5) == 0.0


def test_it_is_the_mean_of_norms_and_not_the_norm_of_means() -> None:
    """A motion that shakes to and fro has jerk, although its mean third difference is near nothing."""
    shaking = np.array([[0.0], [1.0], [0.0], [1.0], [0.0], [1.0], [0.0]])
    assert jerk(shaking, 1.0) == 4.0
    assert np.abs(np.diff(shaking, n=3, axis=0).mean()) < 4.0


def test_jerk_goes_with_the_cube_of_the_rate() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 3))
    assert jerk(rows, 0.1) == pytest.approx(1000.0 * jerk(rows, 1.0))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_fewer_than_four_positions_have_no_jerk(rows: int) -> None:
    assert np.isnan(jerk(np.zeros((rows, 2)), 0.1))


def test_path_length() -> None:
    assert path_length(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])) == 10.0
    assert path_length(np.zeros((1, 2))) == path_length(np.zeros((0, 2))) == 0.0
