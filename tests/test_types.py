"""The units of actions: what is clipped, what comes back, and what nobody may order by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.errors import ConfigError
from specact.types import ActionUnits

RANGE = st.tuples(st.floats(-50, 50, width=32), st.floats(0.0625, 50, width=32))


def units(*ranges: tuple[float, float]) -> ActionUnits:
    low = np.array([low for low, _ in ranges], np.float32)
    return ActionUnits.of_range(low, low + np.array([width for _, width in ranges], np.float32))


@given(st.lists(RANGE, min_size=1, max_size=4), st.data())
def test_an_action_of_the_range_comes_back_and_lies_between_minus_one_and_one(
    ranges: list[tuple[float, float]], data: st.DataObject
) -> None:
    mapping = units(*ranges)
    shares = np.array([data.draw(st.floats(0, 1, width=32)) for _ in ranges], np.float32)
    low, high = mapping.centre - mapping.scale, mapping.centre + mapping.scale
    actions = (low + shares * (high - low))[None]
    normalised = mapping.from_environment(actions)
    # Rounding is relative to the largest number in it, which can be the centre.
    slack = 1e-6 * (np.abs(mapping.centre) + mapping.scale)
    assert (np.abs(normalised) <= 1.0 + 4 * slack / mapping.scale).all()
    np.testing.assert_array_less(np.abs(mapping.to_environment(normalised) - actions), 4 * slack[None] + 1e-12)


@given(st.lists(RANGE, min_size=1, max_size=4), st.data())
def test_no_number_leaves_the_range(ranges: list[tuple[float, float]], data: st.DataObject) -> None:
    mapping = units(*ranges)
    wild = np.array([data.draw(st.floats(width=32, allow_nan=False)) for _ in ranges], np.float32)
    action = mapping.to_environment(wild)
    slack = 1e-6 * (np.abs(mapping.centre) + mapping.scale)
    assert (np.abs(action - mapping.centre) <= mapping.scale + slack).all()
    np.testing.assert_array_equal(mapping.to_environment(np.stack([wild] * 3))[1], action)  # one as well as many


def test_what_is_not_a_number_stays_none() -> None:
    """Limiting the range must not hide it: whoever acts on it refuses it."""
    mapping = units((-1.0, 2.0), (0.0, 1.0))
    assert np.isnan(mapping.to_environment(np.array([[np.nan, 0.0]], np.float32))[0]).tolist() == [True, False]
    assert np.isnan(mapping.from_environment(np.array([[0.0, np.nan]], np.float32))[0]).tolist() == [False, True]


def test_a_dimension_that_never_moves_has_a_positive_scale() -> None:
    mapping = units((0.5, 0.0), (0.0, 2.0))
    assert mapping.scale[0] > 0.0
    assert mapping.to_environment(np.array([[1.0, 1.0], [-1.0, 0.0]], np.float32))[:, 0] == pytest.approx(0.5, abs=2e-6)


@pytest.mark.parametrize("bad", [[0.0], [0.0, 0.0, 0.0], [1.1, 4.0], [0.0, np.nan], [np.inf, 4.0], [0.0, 1.9]])
def test_an_action_chosen_by_hand_is_one_of_the_robot(bad: list[float]) -> None:
    mapping = units((-1.0, 2.0), (2.0, 8.0))
    with pytest.raises(ConfigError, match=r"\[-1\.0, 2\.0\].*\[1\.0, 10\.0\]"):
        mapping.normalise(np.array(bad, np.float32))
    for action in ([-1.0, 2.0], [1.0, 10.0], [0.5, 4.0]):
        normalised = mapping.normalise(np.array(action, np.float32))
        assert normalised.dtype == np.float32
        np.testing.assert_allclose(mapping.to_environment(normalised), action, rtol=1e-6)
