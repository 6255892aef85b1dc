"""Extrapolation of executed actions: the tail of KERV (Zheng et al. 2026, arXiv 2603.01581).

KERV predicts one action from the last ten, per dimension. The paper does not specify the state; its code has a random
walk with Q = 1 and R = 0.001, whose gain of 0.999 repeats the last action. Here the state is an action and its
velocity, fitted by maximum likelihood; random walk and persistence are available for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError

Actions = NDArray[np.float32]
_Floats = NDArray[np.float64]
Motion = Literal["velocity", "walk"]

# Transition of the state over a control step, and the covariance that noise of variance 1 adds to it.
_MOTIONS: dict[Motion, tuple[_Floats, _Floats]] = {
    "velocity": (np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[0.25, 0.5], [0.5, 1.0]])),
    "walk": (np.array([[1.0]]), np.array([[1.0]])),
}
# Variance of an uninformative prior, in units of the measurement noise.
_PRIOR_VARIANCE = 1e9
# Initial grid of ratios q / r of a fit; the minimum of r, for constant actions; and the maximum of both, with which
# covariances stay finite.
_RATIOS, _MIN_VARIANCE, _MAX_VARIANCE = np.geomspace(1e-6, 1e6, 49), 1e-12, 1e12


class Extrapolation(Protocol):
    """Predicts actions from past ones."""

    def predict(self, history: NDArray[np.floating], steps: int) -> Actions:
        """The next actions ``[steps, A]``, in [-1, 1].

        Args:
            history: executed actions, normalised, oldest first, ``[k, A]`` with k at least 1. NaN for missing
                measurements.
            steps: number of predicted actions, at least 1.

        Raises:
            ConfigError: if a dimension has no measurement at all, or the shapes do not fit.
        """
        ...


@dataclass(frozen=True)
class Persistence:
    """Repeats the last action: the baseline for filters."""

    def predict(self, history: NDArray[np.floating], steps: int) -> Actions:
        """See :class:`Extrapolation`."""
        return _clipped(np.repeat(_last(_check_history(history))[None], steps, axis=0))


@dataclass(frozen=True)
class Kalman:
    """An independent Kalman filter for every dimension.

    ``velocity``: ``x = [a, v]``, ``x' = [[1, 1], [0, 1]] x + w``, where an acceleration of variance q is constant over
    a step: ``Cov w = q [[1/4, 1/2], [1/2, 1]]``. ``walk``: ``a' = a + w``, ``Var w = q``. Both measure ``a`` with
    variance r. The prior is uninformative: one measurement determines the action, two the velocity.

    Args:
        motion: which of the two.
        q, r: variances of every dimension, in squared normalised actions and control steps; q 0 to 1e12, r 1e-12 to
            1e12.
        copied: dimensions whose last value is repeated instead, such as a binary gripper.

    Raises:
        ConfigError: for values that are not allowed.
    """

    motion: Motion
    q: tuple[float, ...]
    r: tuple[float, ...]
    copied: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        fine = len(self.q) == len(self.r) > 0 and all(0.0 <= q <= _MAX_VARIANCE for q in self.q)
        if self.motion not in _MOTIONS or not fine or not all(_MIN_VARIANCE <= r <= _MAX_VARIANCE for r in self.r):
            raise ConfigError(
                "a filter needs the motion velocity or walk, and of each dimension a q from 0 to 1e12 and an r from "
                f"1e-12 to 1e12, got {self.motion!r}, q = {self.q} and r = {self.r}"
            )
        if not set(self.copied) <= set(range(len(self.q))):
            raise ConfigError(f"copied dimensions must lie between 0 and {len(self.q) - 1}, got {self.copied}")

    def predict(self, history: NDArray[np.floating], steps: int) -> Actions:
        """See :class:`Extrapolation`."""
        history, count = _check_history(history), len(self.q)
        if history.shape[1] != count:
            raise ConfigError(f"this filter is for {count} dimensions, but the actions have {history.shape[1]}")
        transition, noise = _MOTIONS[self.motion]
        noise = (np.array(self.q) / np.array(self.r))[:, None, None] * noise
        mean, covariance = np.zeros((count, len(transition))), _PRIOR_VARIANCE * np.eye(len(transition))
        begun = np.zeros(count, np.bool_)
        for action in history:
            seen, learned = np.isfinite(action), _update_state(mean, covariance, action)
            mean = np.where(seen[:, None], learned[0], mean)
            covariance = np.where(seen[:, None, None], learned[1], covariance)
            begun |= seen
            mean, passed = _predict_state(mean, covariance, transition, noise)
            covariance = np.where(begun[:, None, None], passed, covariance)
        ahead = np.empty((steps, count))
        for step in range(steps):
            ahead[step], mean = mean[:, 0], mean @ transition.T
        return _clipped(np.where(np.isin(np.arange(count), self.copied), _last(history), ahead))

    @classmethod
    def fit(
        cls, episodes: Sequence[NDArray[np.floating]], *, motion: Motion = "velocity", copied: Sequence[int] = ()
    ) -> Self:
        """The maximum likelihood filter for one-step predictions of these actions.

        The gain depends on ``q / r`` alone, so r has a closed form for every ratio (the concentrated likelihood, Harvey
        1989, section 3.4), and the ratio is found by search: on a logarithmic grid from 1e-6 to 1e6, then twice between
        the neighbours of the best one. Measurements before the state is determined are excluded.

        Args:
            episodes: normalised actions ``[n, A]``, without gaps.
            motion, copied: as of the filter.

        Raises:
            ConfigError: for actions that are not finite, or if no episode is long enough.
        """
        order = len(_MOTIONS[motion][0])
        used = [np.asarray(episode, np.float64) for episode in episodes if len(episode) > order]
        if not used or not all(np.isfinite(episode).all() for episode in used):
            raise ConfigError(f"a filter is fitted to finite actions in episodes of more than {order} steps")
        padded = np.full((max(map(len, used)), len(used), used[0].shape[1]), np.nan)
        for number, episode in enumerate(used):
            padded[: len(episode), number] = episode
        found = [_fit_dimension(motion, padded[..., dimension]) for dimension in range(padded.shape[-1])]
        return cls(motion, tuple(q for q, _ in found), tuple(r for _, r in found), tuple(copied))


def _fit_dimension(motion: Motion, values: _Floats) -> tuple[float, float]:
    """Both variances of one dimension, of ``[n, E]`` with NaN after an episode's end."""
    ratios = _RATIOS
    for _ in range(3):
        losses, r = _losses(motion, values, ratios)
        best = int(np.argmin(losses))
        found = float(ratios[best] * r[best]), float(r[best])
        ratios = np.geomspace(ratios[max(best - 1, 0)], ratios[min(best + 1, len(ratios) - 1)], len(ratios))
    return found


def _losses(motion: Motion, values: _Floats, ratios: _Floats) -> tuple[_Floats, _Floats]:
    """-2 log likelihood up to a constant, and the optimal r, of every ratio ``[G]``."""
    transition, noise = _MOTIONS[motion]
    noise = ratios[:, None, None] * noise
    mean, covariance = (
        np.zeros((values.shape[1], len(ratios), len(transition))),
        _PRIOR_VARIANCE * np.eye(len(transition)),
    )
    squares, logarithms, count = np.zeros(len(ratios)), np.zeros(len(ratios)), 0
    for step, value in enumerate(values):
        if step >= len(transition):
            going, variance = np.isfinite(value), covariance[..., 0, 0] + 1.0
            squares += ((value[going, None] - mean[going, :, 0]) ** 2).sum(axis=0) / variance
            logarithms += going.sum() * np.log(variance)
            count += int(going.sum())
        mean, covariance = _predict_state(*_update_state(mean, covariance, value[:, None]), transition, noise)
    r = np.maximum(squares / count, _MIN_VARIANCE)
    return count * np.log(r) + logarithms, r


# The filter itself, in units of the measurement noise: r = 1. States are [..., S] and covariances [..., S, S].
def _predict_state(mean: _Floats, covariance: _Floats, transition: _Floats, noise: _Floats) -> tuple[_Floats, _Floats]:
    """Prediction step of the filter."""
    return mean @ transition.T, transition @ covariance @ transition.T + noise


def _update_state(mean: _Floats, covariance: _Floats, measured: _Floats) -> tuple[_Floats, _Floats]:
    """Update step of the filter with a measurement ``[...]``."""
    gain = covariance[..., :, 0] / (covariance[..., 0, 0] + 1.0)[..., None]
    error = measured - mean[..., 0]
    return mean + gain * error[..., None], covariance - gain[..., None] * covariance[..., :1, :]


def _check_history(history: NDArray[np.floating]) -> _Floats:
    found = np.asarray(history, np.float64)
    if found.ndim != 2 or not np.isfinite(found).any(axis=0).all():
        raise ConfigError(
            f"a prediction needs actions [k, A] that measure every dimension at least once, got {found.tolist()!r:.200}"
        )
    return found


def _last(history: _Floats) -> _Floats:
    """The last measurement of every dimension."""
    newest = np.isfinite(history)[::-1].argmax(axis=0)
    last: _Floats = history[::-1][newest, np.arange(history.shape[1])]
    return last


def _clipped(actions: _Floats) -> Actions:
    return np.clip(actions, -1.0, 1.0).astype(np.float32)
