"""The threshold that adapts, and the spacing of compensations."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.errors import ConfigError
from specact.records import read_record
from specact.systems.kerv import AdaptiveThreshold, Spacing, Threshold, typical_change, variability

BINS = st.lists(st.floats(0.0, 100.0), max_size=30)


def trace(settings: Threshold, *seen: float) -> list[float]:
    """The threshold after every step."""
    threshold, found = AdaptiveThreshold(settings), []
    for value in seen:
        threshold.update(value)
        found.append(threshold.r)
    return found


def test_variability_is_the_distance_in_actions() -> None:
    verified, drafted = np.array([10, 200, 255]), np.array([13, 196, 255])
    assert variability(verified, drafted) == pytest.approx(7 * 2 / 255)
    assert variability(verified, verified) == 0.0
    assert variability(verified[:0], drafted[:0]) == 0.0


def test_the_rules_are_their_equations() -> None:
    seen = (0.1, 0.4, 0.2)
    # dK is 0.3, then -0.2; K_S = 0.5.
    first, second = 10.0 * math.exp(-(0.6**3)), 10.0 * math.exp(-(0.4**3))
    assert trace(Threshold(5, 15, "repaired", 0.5, 3.0), *seen) == pytest.approx([5.0, 5.0 + first, 5.0 + second])
    assert trace(Threshold(5, 15, "printed", 0.5, 3.0), *seen) == pytest.approx([5.0, 5.0 + first, 15.0])


@given(BINS)
def test_the_printed_rule_never_falls_and_is_soon_at_its_bound(seen: list[float]) -> None:
    rising = trace(Threshold(5, 15, "printed", 1.0, 2.0), *seen)
    assert rising == sorted(rising)
    # Wherever the variability changes by less than the scale, r grows by more than a third of its range.
    changes = np.abs(np.diff(seen))
    if np.count_nonzero(changes <= 1.0) >= 3:
        assert rising[-1] == 15.0


def test_the_repaired_rule_falls_again() -> None:
    calm, upset = [0.2] * 5, [3.0]
    repaired = trace(Threshold(5, 15, "repaired", 0.5, 2.0), *calm, *upset, *calm)
    assert repaired[4] == 15.0 and repaired[5] < 5.01 and repaired[-1] == 15.0
    assert trace(Threshold(5, 15, "printed", 0.5, 2.0), *calm, *upset, *calm)[4:] == [15.0] * 7
    # What was accepted is far off in every step, and steadily so.
    assert trace(Threshold(5, 15, "repaired", 0.5, 2.0), *[3.0] * 4)[-1] == 15.0


@given(BINS, st.sampled_from(["printed", "repaired"]), st.floats(0.0, 20.0), st.floats(0.0, 20.0))
def test_r_never_leaves_its_bounds(seen: list[float], rule: str, low: float, width: float) -> None:
    values = {"low": low, "high": low + width, "rule": rule, "scale": 0.01, "power": 3.0}
    threshold = AdaptiveThreshold(read_record(values, Threshold, "threshold"))
    assert asdict(threshold.settings) == values
    for value in [0.0, *seen]:
        threshold.update(value)
        assert low <= threshold.r <= low + width and threshold.bins == math.floor(threshold.r)
    threshold.reset()
    assert threshold.r == low


@given(BINS)
def test_a_fixed_threshold_stays(seen: list[float]) -> None:
    for r in (0.0, 9.0):
        assert set(trace(Threshold(r, r), *seen)) <= {r}


def test_an_episode_knows_nothing_of_the_last_one() -> None:
    threshold = AdaptiveThreshold(Threshold(5, 15, "repaired", 0.5, 2.0))
    for value in (0.0, 0.0, 0.0):
        threshold.update(value)
    threshold.reset()
    threshold.update(0.0)
    assert threshold.r == 5.0


def test_the_scale_is_the_median_change_within_episodes() -> None:
    # Changes: 0.1, 0.3, 0 and 0.2; not the 8.6 from one episode to the next.
    episodes = [[0.1, 0.2, 0.5, 0.5], [9.1, 8.9], [3.0]]
    assert typical_change(episodes) == pytest.approx(0.2)
    for nothing in ([], [[0.0, 0.0]]):
        with pytest.raises(ConfigError, match="does not change"):
            typical_change(nothing)


@pytest.mark.parametrize("plain", [0, 1, 4, 7])
def test_there_are_at_least_so_many_plain_steps_between_two_compensations(plain: int) -> None:
    spacing, fired = Spacing(plain), []
    for step in range(60):
        if spacing.armed:
            fired.append(step)
        spacing.update(spacing.armed)
    assert fired == list(range(0, 60, plain + 1))


@given(st.integers(0, 6), st.lists(st.booleans(), max_size=60))
def test_it_waits_for_a_rejection_and_counts_from_the_compensation(plain: int, rejected: list[bool]) -> None:
    spacing, fired = Spacing(plain), [-math.inf]
    for step, one in enumerate(rejected):
        assert spacing.armed == (step - fired[-1] > plain)
        compensated = one and spacing.armed
        if compensated:
            fired.append(step)
        spacing.update(compensated)
    spacing.reset()
    assert spacing.armed


def test_a_spacing_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        Spacing(-1)


@pytest.mark.parametrize(
    "values",
    [{"low": -1.0}, {"low": 16.0}, {"high": math.inf}, {"scale": 0.0}, {"scale": math.nan}, {"power": 0.0},
     {"power": 11.0}, {"rule": "literal"}],
)  # fmt: skip
def test_a_threshold_that_is_none_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Threshold(**values)  # type: ignore[arg-type]
