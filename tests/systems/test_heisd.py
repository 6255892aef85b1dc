"""HeiSD: the metric of fast and straight motion, and the memory."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.errors import ConfigError, ObservationError
from specact.records import read_record
from specact.systems.heisd import KinematicMetric, Memory, unit

W = 15
# R and D themselves, as long as they are below 1.
RADIUS = KinematicMetric(W, 1.0, 0.0, 1.0, 0.0, 1.0)
DISTANCE = replace(RADIUS, alpha=0.0)


def turned(points: np.ndarray, seed: int, dimensions: int = 3) -> np.ndarray:
    """The same points somewhere else: turned, perhaps mirrored, moved by up to 2 in every direction."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(dimensions, dimensions)))
    flat = np.zeros((len(points), dimensions))
    flat[:, : points.shape[1]] = points
    return np.asarray(flat @ turn.T + rng.uniform(-2.0, 2.0, dimensions))


def arc(radius: float, angle: float = 1.2) -> np.ndarray:
    """Points on part of a circle."""
    angles = np.linspace(0.0, angle, W)
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def line(speed: float, count: int = W) -> np.ndarray:
    return np.linspace([0.0, 0.0], [speed * (count - 1), 0.0], count)


def wandering(seed: int, count: int = 60) -> np.ndarray:
    """A smooth path of changing speed and direction."""
    return np.cumsum(np.cumsum(np.random.default_rng(seed).normal(0.0, 1e-3, (count, 3)), axis=0), axis=0)


@pytest.mark.parametrize("dimensions", [2, 3, 7])
@pytest.mark.parametrize("angle", [0.1, 1.2, 2 * np.pi])
def test_the_radius_is_that_of_the_circle(dimensions: int, angle: float) -> None:
    for seed, radius in enumerate((0.02, 0.3, 0.9)):
        assert RADIUS.now(turned(arc(radius, angle), seed, dimensions)) == pytest.approx(radius, rel=1e-6)


def test_the_radius_is_that_of_the_least_squares_circle_and_the_distance_the_length_of_the_path() -> None:
    rng = np.random.default_rng(1)
    for seed in range(5):
        flat = arc(0.4) + rng.normal(0.0, 0.01, (W, 2))
        sides = np.c_[2.0 * flat, np.ones(W)]
        x, y, _ = np.linalg.lstsq(sides, (flat**2).sum(axis=1), rcond=None)[0]
        # Noise across the plane is projected away, the plane being that of most variance.
        away = np.linalg.norm(flat - [x, y], axis=1).mean()
        assert RADIUS.now(turned(flat, seed)) == pytest.approx(away, rel=1e-9)
    there_and_back = np.concatenate([line(0.01, 8), line(0.01, 8)[-2::-1]])
    assert DISTANCE.now(turned(there_and_back, 0)) == pytest.approx(0.14)
    assert DISTANCE.now(turned(arc(0.1, 1.4), 1)) == pytest.approx(2 * 0.1 * 14 * np.sin(0.05))


@given(st.integers(0, 10_000))
def test_turning_moving_and_reversing_a_path_changes_nothing(seed: int) -> None:
    metric, path = KinematicMetric.fit([wandering(number) for number in range(4)]), wandering(seed)
    profile = metric.along(path)
    np.testing.assert_allclose(metric.along(turned(path, seed + 1)), profile, atol=1e-6)
    assert profile.min() >= 0.0 and profile.max() <= 1.0 and not profile[: W - 1].any()
    assert [metric.now(path[: end + 1]) for end in (5, W - 1, 40)] == pytest.approx(profile[[5, W - 1, 40]])
    assert metric.now(path[-W:]) == pytest.approx(metric.now(path[::-1][:W]), abs=1e-6)


def test_ranges_are_the_smallest_and_the_95th_percentile_of_calibration() -> None:
    paths = [turned(arc(radius), number) for number, radius in enumerate(np.linspace(0.1, 0.9, 81))]
    metric = KinematicMetric.fit([*paths, line(0.01)])
    assert metric.least_radius == pytest.approx(0.1) and metric.most_radius == pytest.approx(0.86)
    # Norm(D) of the arcs is their Norm(R), but for the line among them.
    fused = [metric.now(turned(arc(radius), 7)) for radius in (0.05, 0.1, 0.48, 0.86, 5.0)]
    assert fused == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0], abs=0.01)
    assert read_record(asdict(metric), KinematicMetric, "metric") == metric


def test_what_does_not_move_is_0_wherever_it_is() -> None:
    metric = replace(KinematicMetric.fit([wandering(0)]), least_radius=0.0, least_distance=0.0)
    for place in ([0.0, 0.0, 0.0], [0.7, -1e5, 1e-9]):
        still = np.tile(place, (W, 1))
        assert metric.now(still) == 0.0
        # So is what differs in the last bit.
        still[3] = np.nextafter(still[3], np.inf)
        assert metric.now(still) == 0.0
    assert metric.now(line(0.01, W - 1)) == 0.0 and metric.now(np.zeros((0, 3))) == 0.0


def test_calibration_that_has_no_range_gives_one() -> None:
    # The radius of a line is infinite, and more than any other.
    straight = KinematicMetric.fit([line(0.01, 40), line(0.02, 40)])
    assert (straight.least_radius, straight.most_radius) == (0.0, 0.0)
    assert [straight.now(line(speed)) for speed in (0.01, 0.02)] == pytest.approx([0.5, 1.0])
    still = KinematicMetric.fit([np.ones((40, 3))])
    assert still.now(line(0.02)) == 1.0 and still.now(np.ones((W, 3))) == 0.0


def test_paths_and_ranges_that_are_none_are_refused() -> None:
    metric = KinematicMetric.fit([wandering(0)])
    for path in (np.full((W, 3), np.nan), np.zeros((W, 1)), np.zeros(W)):
        with pytest.raises(ObservationError, match="at least 2 dimensions"):
            metric.now(path)
        with pytest.raises(ConfigError, match="cannot be fitted"):
            KinematicMetric.fit([path])
    for paths in ([], [wandering(0, W - 1)]):
        with pytest.raises(ConfigError, match="at least 15 points"):
            KinematicMetric.fit(paths)
    for values in ({"least_radius": 2.0}, {"most_distance": np.inf}, {"least_distance": -1.0}, {"most_radius": np.nan}):
        with pytest.raises(ConfigError):
            KinematicMetric(**{**asdict(RADIUS), **values})


# ---- the memory ------------------------------------------------------------------------------------------------------


def remembered(count: int = 60) -> Memory:
    rng = np.random.default_rng(0)
    return Memory(unit(rng.normal(size=(count, 12))), rng.integers(256, size=(count, 8)))


def test_the_nearest_come_first() -> None:
    known = remembered()
    for seed in range(10):
        query = np.random.default_rng(100 + seed).normal(size=12)
        order = np.argsort(-(known.features @ query))
        for count in (1, 5, 1000):
            np.testing.assert_array_equal(known.nearest(query, count), known.tokens[order[:count]])
    # By cosine: how long a feature is does not matter.
    np.testing.assert_array_equal(known.nearest(query), known.nearest(100.0 * query))


def test_equal_features_come_in_their_order() -> None:
    known, same = remembered(200), np.random.default_rng(1).permutation(200) < 60
    known = Memory(known.features[np.where(same, 0, 1)], np.arange(200)[:, None])
    assert known.nearest(known.features[same][0], 60)[:, 0].tolist() == np.flatnonzero(same).tolist()


def test_features_that_point_nowhere_and_memories_that_are_none_are_refused() -> None:
    known = remembered()
    for feature in (np.zeros(12), np.full(12, np.nan), np.full(12, np.inf)):
        with pytest.raises(ObservationError, match="0 or not finite"):
            known.nearest(feature)
    np.testing.assert_allclose(np.linalg.norm(unit(np.full((3, 2), 1e30, np.float32)), axis=1), 1.0, rtol=1e-6)
    for features in (2.0 * known.features, known.features[:-1], np.zeros((0, 12), np.float32)):
        with pytest.raises(ConfigError, match="length 1"):
            Memory(features, known.tokens)
