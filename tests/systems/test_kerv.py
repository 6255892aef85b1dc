"""KERV: filters that extrapolate executed actions, and the tolerance that adapts."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.errors import ConfigError
from specact.records import read_record
from specact.systems.kerv import AdaptiveTolerance, Kalman, Rule, typical_change, variability


def textbook(q: float, r: float, history: np.ndarray, *, halved: bool = False) -> float:
    """One dimension: the state after a measurement, in matrices, begun with a vast covariance; the next action.

    Args:
        q, r, history: as of the filter.
        halved: a wrong variant, whose noise enters the velocity alone.
    """
    step = np.array([[1.0, 1.0], [0.0, 1.0]])
    noise = q * (np.array([[0.0, 0.0], [0.0, 1.0]]) if halved else np.array([[0.25, 0.5], [0.5, 1.0]]))
    looks = np.array([[1.0, 0.0]])
    state, spread = np.zeros((2, 1)), 1e9 * r * np.eye(2)
    for value in history:
        gain = spread @ looks.T @ np.linalg.inv(looks @ spread @ looks.T + r)
        state = state + gain @ (np.array([[value]]) - looks @ state)
        rest = np.eye(2) - gain @ looks
        spread = rest @ spread @ rest.T + r * gain @ gain.T
        state, spread = step @ state, step @ spread @ step.T + noise
    return float(state[0, 0])


def test_every_dimension_is_the_textbook_filter() -> None:
    q, r = (1e-4, 0.02, 1e-3), (2e-3, 1e-3, 0.05)
    history = np.random.default_rng(0).uniform(-0.3, 0.3, (12, 3))
    prediction = Kalman("velocity", q, r).predict(history, 1)[0]
    for dimension in range(3):
        expected = textbook(q[dimension], r[dimension], history[:, dimension])
        assert prediction[dimension] == pytest.approx(expected, abs=1e-6)
        wrong = textbook(q[dimension], r[dimension], history[:, dimension], halved=True)
        assert prediction[dimension] != pytest.approx(wrong, abs=1e-6)


def test_constant_velocity_is_predicted_exactly() -> None:
    line = np.array([-0.3, 0.1]) + np.arange(12)[:, None] * np.array([0.05, -0.02])
    model = Kalman("velocity", (1e-4, 1e-4), (1e-9, 1e-9))
    np.testing.assert_allclose(model.predict(line[:8], 4), line[8:], atol=1e-5)


@pytest.mark.parametrize("motion", ["velocity", "walk"])
def test_one_action_is_repeated_and_nothing_leaves_the_range(motion: str) -> None:
    model = read_record({"motion": motion, "q": [0.01], "r": [0.01]}, Kalman, "filter")
    assert model.predict(np.array([[0.25]]), 3) == pytest.approx(0.25)
    rising = model.predict(np.linspace(0.0, 0.9, 10)[:, None], 20)
    assert rising.dtype == np.float32 and rising.shape == (20, 1) and rising.max() <= 1.0
    assert (rising[-1] == 1.0) == (motion == "velocity")


def test_the_random_walk_of_the_released_code_repeats_the_last_action() -> None:
    # p = q + p r / (p + r), gain = p / (p + r).
    spread = (1.0 + np.sqrt(1.0 + 4e-3)) / 2.0
    gain = spread / (spread + 1e-3)
    assert gain == pytest.approx(0.999, abs=1e-5)
    prediction = Kalman("walk", (1.0,), (1e-3,)).predict(np.r_[np.zeros(40), 0.5][:, None], 1)
    assert prediction[0, 0] == pytest.approx(0.5 * gain, abs=1e-7)


def test_a_gripper_is_copied_and_never_extrapolated() -> None:
    history = np.stack([np.linspace(0.0, 0.5, 5), np.array([-1.0, -1.0, -1.0, -1.0, 0.9])], axis=1)
    copied, free = (Kalman("velocity", (0.1, 0.1), (1e-3, 1e-3), which).predict(history, 3) for which in ((1,), ()))
    assert copied[:, 1].tolist() == [pytest.approx(0.9)] * 3 and free[:, 1].tolist() == [1.0] * 3
    np.testing.assert_array_equal(copied[:, 0], free[:, 0])


@pytest.mark.parametrize(("motion", "q", "r"), [("velocity", 4e-4, 2e-3), ("walk", 1e-3, 4e-3)])
def test_a_fit_finds_the_variances_that_made_the_actions(motion: str, q: float, r: float) -> None:
    rng = np.random.default_rng(5)
    episodes = []
    for length in (150, 90, 220, 200, 3) * 6:
        pushes = rng.normal(0.0, np.sqrt(q), length)
        if motion == "velocity":
            speed = np.cumsum(pushes)
            states = np.cumsum(np.r_[0.0, speed[:-1]] + 0.5 * pushes)
        else:
            states = np.cumsum(pushes)
        measured = states + rng.normal(0.0, np.sqrt(r), length)
        episodes.append(np.stack([measured, np.full(length, 0.5)], axis=1))
    model = Kalman.fit(episodes, motion="velocity" if motion == "velocity" else "walk", copied=(1,))
    # About 4,000 measurements: the standard error of either logarithm is below 0.1.
    assert abs(np.log(model.q[0] / q)) < 0.4 and abs(np.log(model.r[0] / r)) < 0.4
    # A dimension that never changes has a filter, too.
    assert model.predict(np.full((4, 2), 0.5), 1) == pytest.approx(0.5, abs=1e-6)
    assert read_record(asdict(model), Kalman, "filter") == model


def test_what_is_unknown_at_the_start_of_short_episodes_does_not_count() -> None:
    rng = np.random.default_rng(8)
    states = np.cumsum(rng.normal(0.0, 0.1, (4000, 3, 1)), axis=1)
    model = Kalman.fit(list(states + rng.normal(0.0, 0.1, states.shape)), motion="walk")
    # Were the first of three measurements counted, both would be too small by a third: 0.4 in the logarithm. The
    # standard errors of both are below 0.1.
    assert abs(np.log(model.r[0] / 0.01)) < 0.2 and abs(np.log(model.q[0] / 0.01)) < 0.3


def test_a_fit_reads_every_episode_by_itself() -> None:
    rng = np.random.default_rng(6)
    episodes = [np.cumsum(rng.normal(0.0, 0.01, (60, 1)), axis=0) + offset for offset in (-0.8, 0.8) * 5]
    apart, joined = Kalman.fit(episodes, motion="walk"), Kalman.fit([np.concatenate(episodes)], motion="walk")
    assert apart.q[0] == pytest.approx(1e-4, rel=0.25)
    assert joined.q[0] > 10.0 * apart.q[0]


def test_settings_that_are_none_are_refused_and_their_extremes_give_finite_actions() -> None:
    none: tuple[tuple[Any, ...], ...] = (
        ("jump", (1.0,), (1.0,)), ("walk", (-1.0,), (1.0,)), ("walk", (1.0,), (0.0,)), ("walk", (np.inf,), (1.0,)),
        ("walk", (np.nan,), (1.0,)), ("walk", (1.0,), (1.0, 1.0)), ("walk", (), ()), ("walk", (1.0,), (1.0,), (1,)),
        ("velocity", (1.1e12,), (1.0,)), ("walk", (1.0,), (0.9e-12,)), ("walk", (1.0,), (1.1e12,)),
    )  # fmt: skip
    for values in none:
        with pytest.raises(ConfigError):
            Kalman(*values)
    for q, r in itertools.product((0.0, 1e12), (1e-12, 1e12)):
        assert np.isfinite(Kalman("velocity", (q,), (r,)).predict(np.array([[-1.0], [1.0]] * 6), 50)).all()


def test_episodes_that_say_nothing_are_refused() -> None:
    for episodes in ([], [np.zeros((1, 2))], [np.full((9, 2), np.nan)]):
        with pytest.raises(ConfigError, match="finite actions"):
            Kalman.fit(episodes, motion="walk")


# ---- the tolerance ---------------------------------------------------------------------------------------------------


def trace(rule: Rule, scale: float, *seen: float) -> list[float]:
    """The tolerance of 5 to 15 bins after every step of an episode, which knows nothing of the last one."""
    tolerance, traces = AdaptiveTolerance(5, 15, rule, scale), []
    for _ in range(2):
        tolerance.reset()
        tolerances = [tolerance.r]
        for value in seen:
            tolerance.update(value)
            tolerances.append(tolerance.r)
        traces.append(tolerances)
    assert traces[0] == traces[1] and traces[0][0] == 5 and min(traces[0]) >= 5 and max(traces[0]) <= 15
    return traces[0][1:]


def test_variability_is_the_distance_in_actions() -> None:
    verified, drafted = np.array([10, 200, 255]), np.array([13, 196, 255])
    assert variability(verified, drafted) == pytest.approx(7 * 2 / 255)
    assert variability(verified, verified) == 0.0
    assert variability(verified[:0], drafted[:0]) == 0.0


def test_the_rules_are_their_equations() -> None:
    # dK is 0.3, then -0.2; K_S = 0.5.
    first, second = 10.0 * math.exp(-(0.6**2)), 10.0 * math.exp(-(0.4**2))
    assert trace("repaired", 0.5, 0.1, 0.4, 0.2) == pytest.approx([5.0, 5.0 + first, 5.0 + second])
    assert trace("printed", 0.5, 0.1, 0.4, 0.2) == pytest.approx([5.0, 5.0 + first, 15.0])


@given(st.lists(st.floats(0.0, 100.0), max_size=30))
def test_the_printed_rule_never_falls_and_is_soon_at_its_bound(seen: list[float]) -> None:
    trace("repaired", 0.01, *seen)
    rising = trace("printed", 1.0, *seen)
    assert rising == sorted(rising)
    # Wherever the variability changes by less than the scale, r grows by more than a third of its range.
    if np.count_nonzero(np.abs(np.diff(seen)) <= 1.0) >= 3:
        assert rising[-1] == 15.0


def test_the_repaired_rule_falls_again() -> None:
    calm, upset = [0.2] * 5, [3.0]
    repaired = trace("repaired", 0.5, *calm, *upset, *calm)
    assert repaired[4] == 15.0 and repaired[5] < 5.01 and repaired[-1] == 15.0
    assert trace("printed", 0.5, *calm, *upset, *calm)[4:] == [15.0] * 7
    # What was accepted is far off in every step, and steadily so.
    assert trace("repaired", 0.5, *[3.0] * 4)[-1] == 15.0


def test_the_scale_is_the_median_change_within_episodes() -> None:
    # Changes: 0.1, 0.3, 0 and 0.2; not the 8.6 from one episode to the next.
    episodes = [[0.1, 0.2, 0.5, 0.5], [9.1, 8.9], [3.0]]
    assert typical_change(episodes) == pytest.approx(0.2)
    for nothing in ([], [[0.0, 0.0]]):
        with pytest.raises(ConfigError, match="does not change"):
            typical_change(nothing)
