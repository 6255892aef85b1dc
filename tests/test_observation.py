"""The device's observation window."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from specact.errors import ObservationError
from specact.families.codes.spec import PolicySpec
from specact.observation import ObservationWindow

PLAIN = PolicySpec(
    window=4,
    state=2,
    goal=0,
    image=None,
    codebooks=2,
    codes=4,
    chunk=1,
    actions=2,
    execute=1,
    overlap="drop",
    temperature=1.0,
    rate_hz=10.0,
)
FULL = dataclasses.replace(PLAIN, window=3, goal=3, image=(2, 5))


def observation(i: int) -> dict[str, Any]:
    return {
        "state": np.array([i, -i], np.float64),
        "goal": np.array([i, 0.5, 2.0], np.float32),
        "image": np.full((2, 5, 3), i, np.uint8),
    }


def test_repeats_the_first_observation_then_moves_on_oldest_first() -> None:
    window = ObservationWindow(PLAIN)
    seen = [window.push(np.array([i, 10 * i])).state[:, 0].tolist() for i in range(1, 7)]
    assert seen == [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


def test_window_of_one_is_the_newest_observation() -> None:
    window = ObservationWindow(dataclasses.replace(PLAIN, window=1))
    assert [window.push(np.array([i, i])).state.tolist() for i in (1, 2)] == [[[1, 1]], [[2, 2]]]


def test_fields_have_the_promised_shapes_and_types() -> None:
    found = ObservationWindow(FULL).push(observation(1))
    assert found.state.shape == (3, 2) and found.state.dtype == np.float32
    assert found.goal is not None and found.goal.tolist() == [1.0, 0.5, 2.0] and found.goal.dtype == np.float32
    assert found.image is not None and found.image.shape == (3, 2, 5, 3) and found.image.dtype == np.uint8
    plain = ObservationWindow(PLAIN).push(observation(1))  # goal and image are there, but not wanted
    assert plain.goal is None and plain.image is None


def test_images_move_with_the_states_and_only_the_newest_goal_counts() -> None:
    window = ObservationWindow(FULL)
    for i in range(1, 6):
        found = window.push(observation(i))
    assert found.image is not None and found.goal is not None
    assert found.image[:, 0, 0, 0].tolist() == [3, 4, 5] == found.state[:, 0].tolist()
    assert found.goal[0] == 5


def test_reset_forgets() -> None:
    window = ObservationWindow(FULL)
    window.push(observation(1))
    window.reset()
    found = window.push(observation(7))
    assert found.image is not None
    assert found.state[:, 0].tolist() == [7, 7, 7] == found.image[:, 1, 1, 1].tolist()


def test_earlier_windows_stay_as_they_were() -> None:
    window = ObservationWindow(FULL)
    first = window.push(observation(1))
    window.push(observation(2))
    assert first.image is not None
    assert first.state[:, 0].tolist() == [1, 1, 1] == first.image[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    "field",
    [
        "state",
        "image",
        pytest.param(
            "goal",
        ),
    ],
)
def test_what_the_caller_does_with_its_arrays_later_changes_no_window(field: str) -> None:
    # Environments reuse their buffers.
    given = observation(1) | {"state": np.array([1, -1], np.float32)}
    found = ObservationWindow(FULL).push(given)
    before = getattr(found, field).copy()
    given[field][:] = 9
    np.testing.assert_array_equal(getattr(found, field), before)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"state": np.array([np.nan, 1.0])}, r"state is NaN or infinite at \[0\]"),
    ({"state": np.array([0.0, np.inf])}, r"state is NaN or infinite at \[1\]"),
    ({"goal": np.array([0.0, 0.0, -np.inf])}, r"goal is NaN or infinite at \[2\]"),
    ({"state": np.zeros(3)}, r"state has shape \(3,\), this policy needs \(2,\)"),
    ({"state": np.zeros((1, 2))}, r"state has shape \(1, 2\), this policy needs \(2,\)"),
    ({"goal": np.zeros(2)}, r"goal has shape \(2,\), this policy needs \(3,\)"),
    ({"state": 1.0}, r"state has shape \(\), this policy needs \(2,\)"),
    ({"state": ["left", "right"]}, "state is not an array of numbers"),
    ({"state": [[1.0], [1.0, 2.0]]}, "state is not an array of numbers"),
    ({"state": {"x": 1.0}}, "state is not an array of numbers"),
    ({"state": [10**400, 0]}, "state is not an array of numbers: int too large"),
    ({"goal": np.array([10**400, 0, 0], object)}, "goal is not an array of numbers: int too large"),
    ({"state": ["0.1", "0.2"]}, "state is not an array of numbers: it holds <U3"),
    ({"state": np.array(["0.1", 0.2], object)}, "state is not an array of numbers: it holds text"),
    ({"state": np.array(["2020-01-01", "2020-01-02"], "M8[D]")}, "state is not an array of numbers: it holds datetime"),
    ({"state": np.zeros(2, complex)}, "state is not an array of numbers: it holds complex128"),
    ({"state": None}, "state"),
    ({"image": None}, r"image must be uint8 \(2, 5, 3\)"),
    ({"image": np.zeros((2, 5, 3), np.float32)}, r"image must be uint8 \(2, 5, 3\), got float32"),
    ({"image": np.zeros((3, 2, 5), np.uint8)}, r"image must be uint8 \(2, 5, 3\), got uint8 \(3, 2, 5\)"),
]


def refuses_and_stays(bad: Any, message: str) -> None:
    """The error is raised, and the window goes on as if the bad observation had never come."""
    window, twin = ObservationWindow(FULL), ObservationWindow(FULL)
    for i in (1, 2):
        window.push(observation(i))
        twin.push(observation(i))
    with pytest.raises(ObservationError, match=message):
        window.push(bad)
    after, wanted = window.push(observation(3)), twin.push(observation(3))
    np.testing.assert_array_equal(after.state, wanted.state)
    assert after.image is not None and wanted.image is not None
    np.testing.assert_array_equal(after.image, wanted.image)


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_field_is_refused_and_leaves_the_window_unchanged(change: dict[str, Any], message: str) -> None:
    refuses_and_stays(observation(9) | change, message)


@pytest.mark.parametrize("missing", ["state", "goal", "image"])
def test_a_missing_field_is_refused_and_leaves_the_window_unchanged(missing: str) -> None:
    refuses_and_stays({name: value for name, value in observation(9).items() if name != missing}, missing)


def test_a_bare_state_is_refused_where_more_is_needed() -> None:
    refuses_and_stays(np.zeros(2), r"no 'goal'; this policy needs goal \[3\]")


def test_a_refused_first_observation_leaves_the_window_empty() -> None:
    window = ObservationWindow(PLAIN)
    with pytest.raises(ObservationError, match="NaN"):
        window.push(np.array([np.nan, 0.0]))
    assert window.push(np.array([5.0, 6.0])).state[:, 0].tolist() == [5, 5, 5, 5]


def test_a_ragged_image_is_refused_like_any_other() -> None:
    refuses_and_stays(observation(9) | {"image": [[1, 2], [3]]}, "image")
