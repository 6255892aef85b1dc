"""The check of drafted chunks: exact where the flow is known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specact.errors import ConfigError
from specact.systems.flash import Check, accepted_length, deviations, first_switch, implied, judge, noised

LEVELS = np.array([0.05, 0.1, 0.4, 1.0], np.float32)
NOWHERE = np.zeros(0, np.float32)


def chunks(seed: int, count: int = 6, width: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    drafted, clean, noise = (rng.standard_normal((count, width)).astype(np.float32) for _ in range(3))
    return drafted, clean, noise


def estimates(drafted: np.ndarray, clean: np.ndarray, noise: np.ndarray, expert: str) -> np.ndarray:
    x = noised(drafted, noise, LEVELS)
    # Both of a flow with a single clean chunk: the straight path's velocity, and the ideal denoiser's.
    velocity = np.broadcast_to(clean - noise, x.shape) if expert == "constant" else (clean - x) / LEVELS[:, None, None]
    return implied(x, velocity, LEVELS)


def rms(difference: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.square(difference).mean(-1)))


@pytest.mark.parametrize("seed", range(5))
def test_a_constant_velocity_scales_the_true_error_by_the_share_of_noise(seed: int) -> None:
    drafted, clean, noise = chunks(seed)
    found = deviations(drafted, estimates(drafted, clean, noise, "constant"))
    np.testing.assert_allclose(found, LEVELS[:, None] * rms(drafted - clean), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_an_ideal_denoiser_gives_the_true_error_whatever_the_noise(seed: int) -> None:
    drafted, clean, noise = chunks(seed)
    found = deviations(drafted, estimates(drafted, clean, noise, "denoiser"))
    np.testing.assert_allclose(found, np.broadcast_to(rms(drafted - clean), found.shape), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("expert", ["constant", "denoiser"])
def test_a_draft_without_error_is_accepted_whole(expert: str) -> None:
    _, clean, noise = chunks(7)
    assert accepted_length(deviations(clean, estimates(clean, clean, noise, expert)), 1e-4) == len(clean)


def test_a_constant_velocity_accepts_any_draft_at_little_noise() -> None:
    """Why the slope has to be measured: an error of a standard deviation passes the published check."""
    _, clean, noise = chunks(3)
    drafted = clean + np.float32(1.2)
    found = deviations(drafted, estimates(drafted, clean, noise, "constant"))
    assert accepted_length(found[:2], 0.15) == len(drafted)
    assert accepted_length(found, 0.15) == 0


bounded = st.integers(0, 2**32 - 1)


@given(seed=bounded, low=st.floats(0, 2), more=st.floats(0, 2))
@settings(deadline=None, max_examples=100)
def test_accepted_length_grows_with_delta_and_not_with_another_share(seed: int, low: float, more: float) -> None:
    deviation = np.random.default_rng(seed).exponential(size=(4, 8)).astype(np.float32)
    assert accepted_length(deviation, low) <= accepted_length(deviation, low + more)
    assert accepted_length(deviation, low) <= accepted_length(deviation[:3], low)
    # As it is written in the paper.
    each = [int(np.cumprod(row <= low).sum()) for row in deviation]
    assert accepted_length(deviation, low) == (min(each) if low > 0.0 else 0)


def test_delta_zero_and_what_is_no_number_accept_nothing() -> None:
    assert accepted_length(np.zeros((2, 5), np.float32), 0.0) == 0
    assert accepted_length(np.array([[0.0, np.nan, 0.0]], np.float32), 1.0) == 1


def test_a_gripper_is_no_part_of_the_distance_unless_there_is_nothing_else() -> None:
    drafted = np.zeros((2, 3), np.float32)
    estimate = np.array([[[3.0, 4.0, 100.0]] * 2], np.float32)
    np.testing.assert_allclose(deviations(drafted, estimate, (2,)), np.sqrt(12.5), rtol=1e-6)
    np.testing.assert_allclose(deviations(drafted[:, 2:], estimate[..., 2:], (0,)), 100.0)


def test_switches_of_a_gripper_are_counted_from_what_is_held() -> None:
    closed = np.array([[False], [False], [True]])
    assert first_switch(closed, np.array([False])) == 2
    assert first_switch(closed, np.array([True])) == 0
    assert first_switch(closed, None) == 2
    assert first_switch(closed[:2], None) == 2


def guarded(drafted_gripper: list[float], estimated: list[float], *, guards: bool = True) -> tuple[int, bool]:
    drafted = np.array([[0.0, value] for value in drafted_gripper], np.float32)
    estimate = np.array([[[0.0, value] for value in estimated]], np.float32)
    found = judge(Check((0.1,), 1.0, guards), drafted, estimate, (1,), np.zeros(1, np.float32), np.array([False]))
    return found.accepted, found.switches


def test_guards() -> None:
    still, opening = [-1.0] * 4, [-1.0, -1.0, 1.0, 1.0]
    assert guarded(still, still) == (4, False)
    # Before: the flow wants to move the gripper, and the draft does not know.
    assert guarded(still, opening) == (0, True)
    # After: the draft wants to move it, and the flow does not.
    assert guarded(opening, still) == (2, True)
    assert guarded(opening, opening, guards=False) == (4, False)


def test_without_grippers_there_is_nothing_to_guard() -> None:
    drafted = np.ones((3, 2), np.float32)
    assert judge(Check(), drafted, drafted[None], (), NOWHERE, None).accepted == 3


@pytest.mark.parametrize("wrong", [{"levels": ()}, {"levels": (0.0,)}, {"levels": (1.1,)}, {"within": -0.1}])
def test_a_check_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Check(**wrong)  # type: ignore[arg-type]
