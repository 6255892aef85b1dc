"""The kinematic metric by which HeiSD (Zheng et al. 2026, arXiv 2603.17573) selects a drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.errors import ConfigError, ObservationError
from specact.records import Share, check_fields

_Floats = NDArray[np.float64]
Definition = Literal["paper", "code"]
_PERCENTILE = 95.0
# A window with a smaller extent, relative to its distance from the origin, does not move: that is rounding error. One
# with a smaller width, relative to its length, is straight.
_MIN_EXTENT, _MIN_WIDTH = 1e-12, 1e-6


@dataclass(frozen=True)
class KinematicMetric:
    """The fused metric ``F = alpha Norm(R) + (1 - alpha) Norm(D)`` of the last w points of a path.

    R measures how straight the path is. The points are projected onto their plane (the first two principal axes), and a
    circle is fitted to them by least squares (Kasa 1976; the paper fits iteratively). ``paper``: R is the mean distance
    of the projected points to its centre, and D the length of the path, ``sum |P_i - P_i+1|``. ``code``, as in the
    code that was released: R is the circle's radius, and ``D = sum |P_last - P_i|``.
    ``Norm(x) = (x - least) / (most - least)``, within [0, 1].

    Straight windows have an infinite radius, so that their Norm(R) is 1; without motion, F is 0.

    Args:
        window: w, number of points, at least 3.
        alpha: weight of the radius, in [0, 1].
        least_radius, most_radius: smallest R of calibration, and its 95th percentile, in the unit of the points.
        least_distance, most_distance: the same for D.
        definition: which of the two.

    Raises:
        ConfigError: for values that are not allowed.
    """

    window: Annotated[int, Meta(ge=3, le=1 << 20)]
    alpha: Share
    least_radius: float
    most_radius: float
    least_distance: float
    most_distance: float
    definition: Definition = "paper"

    def __post_init__(self) -> None:
        check_fields(self)
        for least, most in ((self.least_radius, self.most_radius), (self.least_distance, self.most_distance)):
            if not 0.0 <= least <= most < math.inf:
                raise ConfigError(f"ranges of the kinematic metric must fulfil 0 <= least <= most, got {least}, {most}")

    @classmethod
    def fit(
        cls,
        paths: Sequence[NDArray[np.floating]],
        window: int = 15,
        alpha: float = 0.5,
        definition: Definition = "paper",
    ) -> Self:
        """The metric with the ranges of given paths: from the smallest value to the 95th percentile.

        Args:
            paths: points of the end effector, or joints, one per control step, ``[n, d]`` with d at least 2.
            window, alpha, definition: as of the metric.

        Raises:
            ConfigError: for points that are not finite or of one dimension, or if no path is as long as a window.
        """
        try:
            found = [_measure(path, window, definition) for path in paths if len(path) >= window]
        except ObservationError as error:
            raise ConfigError(f"the kinematic metric cannot be fitted to these paths: {error}") from None
        if not found:
            raise ConfigError(f"the kinematic metric needs a path of at least {window} points to be fitted to")
        radii, distances = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return cls(window, alpha, *_range(radii[np.isfinite(radii)]), *_range(distances), definition)

    def now(self, points: NDArray[np.floating]) -> float:
        """F of the last w points, in [0, 1]; 0 if there are fewer, as for precise motion.

        Args:
            points: oldest first, ``[k, d]``.

        Raises:
            ObservationError: for points that are not finite, or of one dimension.
        """
        found = self.along(points[-self.window :])
        return float(found[-1]) if len(found) else 0.0

    def along(self, path: NDArray[np.floating]) -> _Floats:
        """F at every point of a path, ``[n]``; see :meth:`now`."""
        found = np.zeros(len(path))
        if len(path) >= self.window:
            radii, distances = _measure(path, self.window, self.definition)
            straight = _normalised(radii, self.least_radius, self.most_radius)
            fast = _normalised(distances, self.least_distance, self.most_distance)
            fused = self.alpha * straight + (1.0 - self.alpha) * fast
            found[self.window - 1 :] = np.where(distances > 0.0, fused, 0.0)
        return found


def _measure(path: NDArray[np.floating], window: int, definition: Definition) -> tuple[_Floats, _Floats]:
    """R and D of every window of a path, ``[n - w + 1]`` each; both 0 without motion."""
    path = np.asarray(path, np.float64)
    if path.ndim != 2 or path.shape[1] < 2 or not np.isfinite(path).all():
        raise ObservationError(
            f"a path must be finite points of at least 2 dimensions, got an array of shape {path.shape}", "not_finite"
        )
    points = np.swapaxes(np.lib.stride_tricks.sliding_window_view(path, window, axis=0), 1, 2)
    offsets = points - points.mean(axis=1, keepdims=True)
    _, extents, axes = np.linalg.svd(offsets, full_matrices=False)
    moves = extents[:, 0] > _MIN_EXTENT * np.abs(points).max(axis=(1, 2))
    bent = moves & (extents[:, 1] > _MIN_WIDTH * extents[:, 0])
    # Along principal axes through the mean, the normal equations of x^2 + y^2 = 2 a x + 2 b y + c are diagonal.
    plane = offsets[bent] @ np.swapaxes(axes[bent, :2], 1, 2)
    squares = (plane**2).sum(axis=2, keepdims=True)
    centres = (plane * squares).sum(axis=1, keepdims=True) / (2.0 * extents[bent, None, :2] ** 2)
    radii = np.where(moves, np.inf, 0.0)
    if definition == "paper":
        radii[bent] = np.linalg.norm(plane - centres, axis=2).mean(axis=1)
        lengths = np.linalg.norm(np.diff(points, axis=1), axis=2)
    else:
        radii[bent] = np.sqrt((centres**2).sum(axis=(1, 2)) + squares.mean(axis=(1, 2)))
        lengths = np.linalg.norm(points[:, -1:] - points, axis=2)
    return radii, np.where(moves, lengths.sum(axis=1), 0.0)


def _range(values: _Floats) -> tuple[float, float]:
    """Smallest value and 95th percentile; both 0 for no values, as if no radius is finite."""
    return (float(values.min()), float(np.percentile(values, _PERCENTILE))) if len(values) else (0.0, 0.0)


def _normalised(values: _Floats, least: float, most: float) -> _Floats:
    """From 0 at ``least`` to 1 at ``most``; 1 if they are equal."""
    shares = np.clip((values - least) / (most - least if most > least else 1.0), 0.0, 1.0)
    return np.where(values >= most, 1.0, shares)
