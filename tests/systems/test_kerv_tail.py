"""Filters that extrapolate executed actions."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.families.tokens.policy import to_actions, to_tokens
from specact.records import read_record
from specact.systems.kerv import Extrapolation, Kalman, Persistence


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
        if np.isfinite(value):
            gain = spread @ looks.T @ np.linalg.inv(looks @ spread @ looks.T + r)
            state = state + gain @ (np.array([[value]]) - looks @ state)
            rest = np.eye(2) - gain @ looks
            spread = rest @ spread @ rest.T + r * gain @ gain.T
        state, spread = step @ state, step @ spread @ step.T + noise
    return float(state[0, 0])


def smooth(rng: np.random.Generator, count: int, dimensions: int = 3) -> np.ndarray:
    """Bin centres of the steps of minimum-jerk motions over 110 steps, with noise of 0.02: ``[count, 110, A]``."""
    time = np.linspace(0.0, 1.0, 110)
    speed = 30.0 * time**2 - 60.0 * time**3 + 30.0 * time**4
    heights = rng.uniform(-0.5, 0.5, (count, 1, dimensions))
    actions = heights * speed[:, None] + rng.normal(0.0, 0.02, (count, 110, dimensions))
    return to_actions(to_tokens(actions.astype(np.float32)))


def error(model: Extrapolation, episodes: np.ndarray) -> float:
    """Mean error of the next action after ten."""
    return float(
        np.mean(
            [
                np.abs(model.predict(episode[step - 10 : step], 1)[0] - episode[step]).mean()
                for episode in episodes
                for step in range(10, len(episode), 3)
            ]
        )
    )


def test_every_dimension_is_the_textbook_filter() -> None:
    rng = np.random.default_rng(0)
    q, r = (1e-4, 0.02, 1e-3), (2e-3, 1e-3, 0.05)
    history = rng.uniform(-0.3, 0.3, (12, 3))
    history[3, 0] = history[5] = np.nan
    found = Kalman("velocity", q, r).predict(history, 1)[0]
    for dimension in range(3):
        expected = textbook(q[dimension], r[dimension], history[:, dimension])
        assert found[dimension] == pytest.approx(expected, abs=1e-6)
        wrong = textbook(q[dimension], r[dimension], history[:, dimension], halved=True)
        assert found[dimension] != pytest.approx(wrong, abs=1e-6)


def test_constant_velocity_is_predicted_exactly_across_gaps_too() -> None:
    line = np.array([-0.3, 0.1]) + np.arange(12)[:, None] * np.array([0.05, -0.02])
    model = Kalman("velocity", (1e-4, 1e-4), (1e-9, 1e-9))
    np.testing.assert_allclose(model.predict(line[:8], 4), line[8:], atol=1e-5)
    gaps = line[:8].copy()
    gaps[0] = gaps[3] = gaps[7] = np.nan
    np.testing.assert_allclose(model.predict(gaps, 4), line[8:], atol=1e-5)
    # If the gaps were left out, time would not pass in them.
    assert np.abs(model.predict(gaps[np.isfinite(gaps[:, 0])], 4) - line[8:]).max() > 0.01


@pytest.mark.parametrize("motion", ["velocity", "walk"])
def test_one_action_is_repeated_and_nothing_leaves_the_range(motion: str) -> None:
    model = read_record({"motion": motion, "q": [0.01], "r": [0.01]}, Kalman, "filter")
    assert model.predict(np.array([[0.25]]), 3) == pytest.approx(0.25)
    # What came before the first measurement says nothing of the velocity.
    assert model.predict(np.array([[np.nan], [np.nan], [0.25]]), 3) == pytest.approx(0.25)
    rising = model.predict(np.linspace(0.0, 0.9, 10)[:, None], 20)
    assert rising.dtype == np.float32 and rising.shape == (20, 1) and rising.max() <= 1.0
    assert (rising[-1] == 1.0) == (motion == "velocity")


def test_the_random_walk_of_the_released_code_repeats_the_last_action() -> None:
    history = np.r_[np.zeros(40), 0.5][:, None]
    model = Kalman("walk", (1.0,), (1e-3,))
    # p = q + p r / (p + r), gain = p / (p + r).
    spread = (1.0 + np.sqrt(1.0 + 4e-3)) / 2.0
    gain = spread / (spread + 1e-3)
    assert gain == pytest.approx(0.999, abs=1e-5)
    assert model.predict(history, 1)[0, 0] == pytest.approx(0.5 * gain, abs=1e-7)
    assert Persistence().predict(history, 2).tolist() == [[0.5], [0.5]]


def test_a_gripper_is_copied_and_never_extrapolated() -> None:
    history = np.stack([np.linspace(0.0, 0.5, 6), np.array([-1.0, -1.0, -1.0, -1.0, 0.9, np.nan])], axis=1)
    q, r = (0.1, 0.1), (1e-3, 1e-3)
    assert Kalman("velocity", q, r, copied=(1,)).predict(history, 3)[:, 1].tolist() == [pytest.approx(0.9)] * 3
    assert Kalman("velocity", q, r).predict(history, 3)[:, 1].tolist() == [1.0] * 3
    np.testing.assert_array_equal(
        Kalman("velocity", q, r, copied=(1,)).predict(history, 3)[:, 0],
        Kalman("velocity", q, r).predict(history, 3)[:, 0],
    )
    # The last measurement of each dimension, not the last row.
    assert Persistence().predict(history, 1).tolist() == [[0.5, pytest.approx(0.9)]]


def test_on_smooth_motion_a_velocity_beats_persistence() -> None:
    rng = np.random.default_rng(3)
    model, walk = (Kalman.fit(list(smooth(rng, 40)), motion=motion) for motion in ("velocity", "walk"))
    held_out = smooth(rng, 12)
    persistence = error(Persistence(), held_out)
    assert error(model, held_out) < 0.9 * persistence
    assert error(Kalman("walk", (1.0,) * 3, (1e-3,) * 3), held_out) == pytest.approx(persistence, rel=0.01)
    # Fitted, the walk averages as much as pays, and still lags behind.
    assert error(model, held_out) < 0.95 * error(walk, held_out)


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


@pytest.mark.parametrize(
    ("motion", "q", "r", "copied"),
    [("jump", (1.0,), (1.0,), ()), ("walk", (-1.0,), (1.0,), ()), ("walk", (1.0,), (0.0,), ()),
     ("walk", (np.inf,), (1.0,), ()), ("walk", (1.0,), (1.0, 1.0), ()), ("walk", (), (), ()),
     ("walk", (1.0,), (1.0,), (1,)), ("velocity", (1e308,), (1.0,), ()), ("walk", (1.0,), (1e-300,), ())],
)  # fmt: skip
def test_settings_that_are_none_are_refused(motion: str, q: tuple, r: tuple, copied: tuple) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError):
        Kalman(motion, q, r, copied)  # type: ignore[arg-type]


@pytest.mark.parametrize(("q", "r"), [(0.0, 1e-12), (0.0, 1e12), (1e12, 1e-12), (1e12, 1e12)])
def test_the_extremes_of_the_settings_give_finite_actions(q: float, r: float) -> None:
    history = np.array([[-1.0], [np.nan], [1.0]] * 4)
    assert np.isfinite(Kalman("velocity", (q,), (r,)).predict(history, 50)).all()


def test_histories_that_say_nothing_are_refused() -> None:
    model = Kalman("walk", (1.0, 1.0), (1.0, 1.0))
    for history in (np.zeros((0, 2)), np.zeros(2), np.array([[0.0, np.nan], [0.1, np.nan]])):
        with pytest.raises(ConfigError, match="at least once"):
            model.predict(history, 1)
        with pytest.raises(ConfigError, match="at least once"):
            Persistence().predict(history, 1)
    with pytest.raises(ConfigError, match="2 dimensions"):
        model.predict(np.zeros((3, 4)), 1)
    for episodes in ([], [np.zeros((1, 2))], [np.full((9, 2), np.nan)]):
        with pytest.raises(ConfigError, match="finite actions"):
            Kalman.fit(episodes, motion="walk")
