"""KERV (Zheng et al. 2026, arXiv 2603.01581): Spec-VLA with a Kalman tail and a tolerance that adapts.

From the first rejected token on, the action is a Kalman filter's extrapolation of the last ten executed ones, without
another pass of the target; the next control step infers anew, and at least four inferences lie between two such tails.
The tolerance r follows the kinematic variability ``K = sum |Map(t_i) - Map(d_i)|`` of the accepted tokens::

    g(dK) = (high - low) exp(-(|dK| / K_S) ** 2)
    printed:   r <- clip(r + g(dK), low, high)
    repaired:  r <- low + g(dK)

Target and head run at the server; filter and tolerance on the device, as in the paper on its CPU, but before the
verification: the extrapolation is part of the request.

What we changed: the printed rule only grows, as g is positive, so that the repaired one is the default; the paper has
no ``|dK|``, without which an odd power exceeds 1. The paper's policy predicts one action; of a chunk of several the
executed part ends with the extrapolated one, and the k-th action is extrapolated k steps ahead. The paper does not say
the filter's state; its code has a random walk with Q = 1 and R = 0.001, whose gain of 0.999 repeats the last action.
Here the state is an action and its velocity, fitted by maximum likelihood; random walk and last action are controls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.tokens.pair import Decoding, TokenDrafter, TokenParts
from specact.families.tokens.policy import to_actions, to_tokens
from specact.families.tokens.speculative import DRAFT, TAIL, Acceptance, Decoded, Tokens
from specact.records import check_fields
from specact.types import Chunk, Floats

Rule = Literal["printed", "repaired"]
Motion = Literal["velocity", "walk"]

PHI = 2  # exponent of the tolerance's rule
# Transition of the state over a control step, and the covariance that noise of variance 1 adds to it.
_MOTIONS: dict[Motion, tuple[Floats, Floats]] = {
    "velocity": (np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[0.25, 0.5], [0.5, 1.0]])),
    "walk": (np.array([[1.0]]), np.array([[1.0]])),
}
# Variance of an uninformative prior, in units of the measurement noise.
_PRIOR_VARIANCE = 1e9
# Initial grid of ratios q / r of a fit. Up to 1e12 covariances stay finite.
_RATIOS = np.geomspace(1e-6, 1e6, 49)
_MIN_VARIANCE = 1e-12  # of r, for constant actions
Q = Annotated[float, Meta(ge=0, le=1e12)]
R = Annotated[float, Meta(ge=_MIN_VARIANCE, le=1e12)]


@dataclass(frozen=True)
class Kalman:
    """An independent Kalman filter for every dimension, with an uninformative prior.

    ``velocity``: ``x = [a, v]``, ``x' = [[1, 1], [0, 1]] x + w``, where an acceleration of variance q is constant over
    a step: ``Cov w = q [[1/4, 1/2], [1/2, 1]]``. ``walk``: ``a' = a + w``, ``Var w = q``. Both measure ``a`` with
    variance r. Variances of every dimension are in squared normalised actions and control steps. Of ``copied``
    dimensions, such as a binary gripper, the last value is repeated instead.
    """

    motion: Motion
    q: tuple[Q, ...]
    r: tuple[R, ...]
    copied: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not len(self.q) == len(self.r) > 0:
            raise ConfigError(f"a filter needs a q and an r of each dimension, got q = {self.q} and r = {self.r}")
        if not set(self.copied) <= set(range(len(self.q))):
            raise ConfigError(f"copied dimensions must lie between 0 and {len(self.q) - 1}, got {self.copied}")

    def predict(self, history: NDArray[np.floating], steps: int) -> Chunk:
        """The next actions ``[steps, A]``, in [-1, 1], after executed ones ``[k, A]``, normalised, oldest first."""
        transition, noise = _MOTIONS[self.motion]
        noise = (np.array(self.q) / np.array(self.r))[:, None, None] * noise
        mean, covariance = np.zeros((len(self.q), len(transition))), _PRIOR_VARIANCE * np.eye(len(transition))
        for action in history.astype(np.float64):
            mean, covariance = _step(mean, covariance, action, transition, noise)
        ahead = np.empty((steps, len(self.q)))
        for step in range(steps):
            ahead[step], mean = mean[:, 0], mean @ transition.T
        ahead[:, list(self.copied)] = history[-1, list(self.copied)]
        return np.clip(ahead, -1.0, 1.0).astype(np.float32)

    @classmethod
    def fit(
        cls, episodes: Sequence[NDArray[np.floating]], *, motion: Motion = "velocity", copied: Sequence[int] = ()
    ) -> Self:
        """The maximum likelihood filter for one-step predictions of normalised actions ``[n, A]``.

        The gain depends on ``q / r`` alone, so r has a closed form for every ratio (the concentrated likelihood, Harvey
        1989, section 3.4), and the ratio is found by search: on a logarithmic grid from 1e-6 to 1e6, then twice between
        the neighbours of the best one. Measurements before the state is determined are excluded.

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
        variances = [_fit_dimension(motion, padded[..., dimension]) for dimension in range(padded.shape[-1])]
        return cls(motion, tuple(q for q, _ in variances), tuple(r for _, r in variances), tuple(copied))


def _fit_dimension(motion: Motion, values: Floats) -> tuple[float, float]:
    """Both variances of one dimension, of ``[n, E]`` with NaN after an episode's end."""
    ratios = _RATIOS
    for _ in range(3):
        losses, r = _losses(motion, values, ratios)
        best = int(np.argmin(losses))
        variances = float(ratios[best] * r[best]), float(r[best])
        ratios = np.geomspace(ratios[max(best - 1, 0)], ratios[min(best + 1, len(ratios) - 1)], len(ratios))
    return variances


def _losses(motion: Motion, values: Floats, ratios: Floats) -> tuple[Floats, Floats]:
    """-2 log likelihood up to a constant, and the optimal r, of every ratio ``[G]``."""
    transition, noise = _MOTIONS[motion]
    noise = ratios[:, None, None] * noise
    mean = np.zeros((values.shape[1], len(ratios), len(transition)))
    covariance = _PRIOR_VARIANCE * np.eye(len(transition))
    squares, logarithms, count = np.zeros(len(ratios)), np.zeros(len(ratios)), 0
    for step, value in enumerate(values):
        if step >= len(transition):
            running, variance = np.isfinite(value), covariance[..., 0, 0] + 1.0
            squares += ((value[running, None] - mean[running, :, 0]) ** 2).sum(axis=0) / variance
            logarithms += running.sum() * np.log(variance)
            count += int(running.sum())
        mean, covariance = _step(mean, covariance, value[:, None], transition, noise)
    r = np.maximum(squares / count, _MIN_VARIANCE)
    return count * np.log(r) + logarithms, r


def _step(
    mean: Floats, covariance: Floats, measured: Floats, transition: Floats, noise: Floats
) -> tuple[Floats, Floats]:
    """Update with a measurement ``[...]``, then prediction, of states ``[..., S]`` and covariances ``[..., S, S]``.

    All in units of the measurement noise: r = 1.
    """
    gain = covariance[..., :, 0] / (covariance[..., 0, 0] + 1.0)[..., None]
    mean = mean + gain * (measured - mean[..., 0])[..., None]
    covariance = covariance - gain[..., None] * covariance[..., :1, :]
    return mean @ transition.T, transition @ covariance @ transition.T + noise


def variability(verified: NDArray[np.int64], drafted: NDArray[np.int64]) -> float:
    """Kinematic variability of a step: the sum of ``|Map(verified) - Map(drafted)|``, in normalised actions.

    Of the target's tokens and the accepted ones ``[n]`` alone: after a rejected token the target's belongs to another
    prefix.
    """
    return float(np.abs(to_actions(verified).astype(np.float64) - to_actions(drafted)).sum())


def typical_change(episodes: Sequence[Sequence[float]]) -> float:
    """K_S: the median of the ``|dK|`` that are not 0, of the variability of every step of some episodes.

    Raises:
        ConfigError: if the variability never changes.
    """
    changes = np.concatenate([np.zeros(0), *(np.abs(np.diff(np.asarray(episode, np.float64))) for episode in episodes)])
    if not (changes > 0.0).any():
        raise ConfigError("the variability of these steps does not change; calibrate with a tolerance above 0")
    return float(np.median(changes[changes > 0.0]))


class AdaptiveTolerance:
    """The tolerance r of one robot's next step: the largest bias of an accepted token [bins], from low to high.

    ``repaired`` is strict when the variability changes, and tolerant when it is steady. The first step of an episode
    has r = ``low``; the first variability has no dK and leaves r unchanged. ``scale`` is K_S, see
    :func:`typical_change`.
    """

    def __init__(self, low: float, high: float, rule: Rule, scale: float) -> None:
        self._low, self._high, self._rule, self._scale = low, high, rule, scale
        self.reset()

    def reset(self) -> None:
        """Starts an episode."""
        self.r = self._low
        self._last: float | None = None

    def update(self, variability: float) -> None:
        """Updates r with the variability of a step."""
        last, self._last = self._last, variability
        if last is not None:
            growth = (self._high - self._low) * math.exp(-((abs(variability - last) / self._scale) ** PHI))
            self.r = min(self._high, (self.r if self._rule == "printed" else self._low) + growth)


class KervDrafter(TokenDrafter):
    """Keeps the tolerance of one robot, and how many inferences its next tail has to wait."""

    # Executed actions that are extrapolated, AC in the paper.
    history = 10
    decoding: Kerv

    def __init__(self, parts: TokenParts, decoding: Kerv) -> None:
        super().__init__(parts, decoding)
        self._wait = 0
        scale = parts.drafters.settings.scale if decoding.adapts and parts.drafters is not None else 1.0
        low = decoding.least if decoding.adapts else decoding.bins
        self._tolerance = AdaptiveTolerance(low, decoding.bins, decoding.adapts or "repaired", scale)

    def reset(self) -> None:
        super().reset()
        self._wait = 0
        self._tolerance.reset()

    def verified(self, decoded: Decoded) -> None:
        drafted = decoded.sources == DRAFT
        tokens, bias = decoded.tokens[drafted], decoded.bias[drafted]
        self._tolerance.update(variability(tokens - bias, tokens))
        self._wait = self.decoding.plain_steps if (decoded.sources == TAIL).any() else max(0, self._wait - 1)

    def rule(self) -> Acceptance:
        return self.within(int(self._tolerance.r))

    def tail(self) -> Tokens | None:
        motion = self.decoding.tail
        return self.extrapolated(motion) if motion and self.executed and not self._wait else None

    def extrapolated(self, motion: Motion | Literal["last"]) -> Tokens:
        """The tokens ``[T]`` that the executed actions lead to, with the filter of this motion or the last action."""
        if motion == "last":
            return to_tokens(self.repeated()).ravel()
        model: Kalman = self.parts.drafters.settings.filters[motion]
        return to_tokens(model.predict(np.stack(self.executed), self.parts.policy.spec.chunk)).ravel()


@dataclass(frozen=True)
class Kerv(Decoding):
    """KERV and its variants.

    Attributes:
        least, bins: smallest and largest tolerance of a token [bins].
        adapts: rule by which the tolerance changes; if None it is always ``bins``.
        tail: what replaces an action from its first rejected token on: the extrapolation by a filter of this motion, or
            the ``last`` action; if None the target decodes the rest.
        plain_steps: smallest number of inferences between two tails, so that errors do not accumulate.
    """

    then: str = "head"
    bins: int = 15
    least: int = 5
    adapts: Rule | None = "repaired"
    tail: Motion | Literal["last"] | None = "velocity"
    plain_steps: int = 4
    drafts = KervDrafter

    @property
    def learned(self) -> bool:
        return super().learned or self.tail in ("velocity", "walk")


_KERV = Kerv("KERV: Spec-VLA, a Kalman tail, a tolerance that adapts (the repaired rule)")
KERV: dict[str, Decoding] = {
    "kerv": _KERV,
    "kerv_last": replace(_KERV, about="KERV with the last action as the tail: the control", tail="last"),
    "kerv_no_tail": replace(_KERV, about="KERV's tolerance alone", tail=None),
}
