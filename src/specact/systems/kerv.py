"""KERV (Zheng et al. 2026, arXiv 2603.01581): Spec-VLA with a Kalman tail and a tolerance that adapts.

From the first rejected token on, the chunk is a Kalman filter's extrapolation of the last ten executed actions, without
another pass of the target; at least four inferences lie between two such tails. The tolerance r follows the kinematic
variability ``K = sum |Map(t_i) - Map(d_i)|`` of the accepted tokens::

    g(dK) = (high - low) exp(-(|dK| / K_S) ** phi)
    printed:   r <- clip(r + g(dK), low, high)
    repaired:  r <- low + g(dK)

What we changed: the printed rule only grows, as g is positive, so that the repaired one is the default; the paper has
no ``|dK|``, without which an odd power exceeds 1. The paper does not say the filter's state; its code has a random walk
with Q = 1 and R = 0.001, whose gain of 0.999 repeats the last action. Here the state is an action and its velocity,
fitted by maximum likelihood; random walk and persistence are for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.tokens.pair import Decoding, TokenDrafter, TokenParts
from specact.families.tokens.policy import Tokens, to_actions, to_tokens
from specact.families.tokens.speculative import DRAFT, TAIL, Acceptance, Decoded
from specact.observation import Window
from specact.records import NotNegative, check_fields

Rule = Literal["printed", "repaired"]
Tail = Literal["velocity", "walk", "last"]
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


def variability(verified: NDArray[np.int64], drafted: NDArray[np.int64]) -> float:
    """Kinematic variability of a step: the sum of ``|Map(verified) - Map(drafted)|`` over its accepted tokens.

    Args:
        verified, drafted: the target's tokens and the accepted ones, ``[n]``; no others, because the target's token
            after a rejected one belongs to another prefix.

    Returns:
        In normalised actions; 0 for no tokens.
    """
    return float(np.abs(to_actions(verified).astype(np.float64) - to_actions(drafted)).sum())


def typical_change(episodes: Sequence[Sequence[float]]) -> float:
    """The scale of a rule: the median of the ``|dK|`` that are not 0, over the steps of some episodes.

    Args:
        episodes: the variability of every step.

    Raises:
        ConfigError: if the variability never changes.
    """
    found = np.concatenate([np.zeros(0), *(np.abs(np.diff(np.asarray(one, np.float64))) for one in episodes)])
    if not (found > 0.0).any():
        raise ConfigError("the variability of these steps does not change; calibrate with a tolerance above 0")
    return float(np.median(found[found > 0.0]))


@dataclass(frozen=True)
class Threshold:
    """The rule for r, the largest bias of an accepted token in bins, as a function of the variability K.

    With ``g(x) = (high - low) exp(-(|x| / scale) ** power)``:

    * ``printed``: ``r + g(dK)``, clipped to the bounds. As g is positive, r only grows, and soon stays at ``high``.
    * ``repaired``: ``low + g(dK)``: strict when the variability changes, tolerant when it is steady.

    The first step of an episode has r = ``low``; the first variability has no dK and leaves r unchanged. Deviation: the
    paper has no ``|x|``, without which an odd power makes the exponential exceed 1. A fixed r is ``low == high``.

    Args:
        low, high: bounds of r in bins, at least 0.
        rule: which of the two.
        scale: K_S of the paper, in normalised actions; see :func:`typical_change`.
        power: phi of the paper.

    Raises:
        ConfigError: for values that are not allowed.
    """

    low: NotNegative = 5.0
    high: NotNegative = 15.0
    rule: Rule = "repaired"
    scale: Annotated[float, Meta(ge=1e-6)] = 1.0
    power: Annotated[float, Meta(gt=0, le=10)] = 2.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.low > self.high:
            raise ConfigError(f"low must be at most high, got {self.low} and {self.high}")


class AdaptiveThreshold:
    """The threshold of one robot.

    Args:
        settings: its rule.

    Attributes:
        settings: as given.
        r: the threshold of the next step, in bins, within the bounds.
    """

    def __init__(self, settings: Threshold) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        """Starts an episode."""
        self.r = self.settings.low
        self._last: float | None = None

    @property
    def bins(self) -> int:
        """The largest integer bias that r accepts."""
        return int(self.r)

    def update(self, variability: float) -> None:
        """Updates r with the variability of a step, see :func:`variability`."""
        settings, last = self.settings, self._last
        self._last = variability
        if last is None:
            return
        share = math.exp(-((abs(variability - last) / settings.scale) ** settings.power))
        base = self.r if settings.rule == "printed" else settings.low
        self.r = min(settings.high, base + (settings.high - settings.low) * share)


class Spacing:
    """Minimum distance of compensated steps: none in the n steps after one, so that errors do not accumulate.

    Args:
        plain: n, at least 0.

    Attributes:
        plain: as given.

    Raises:
        ConfigError: if n is negative.
    """

    def __init__(self, plain: int = 4) -> None:
        if plain < 0:
            raise ConfigError(f"steps between two compensations must be at least 0, got {plain}")
        self.plain = plain
        self.reset()

    def reset(self) -> None:
        """Starts an episode: armed."""
        self._left = 0

    @property
    def armed(self) -> bool:
        """Whether the next step may be compensated."""
        return self._left == 0

    def update(self, compensated: bool) -> None:
        """Records whether a step was compensated."""
        self._left = self.plain if compensated else max(0, self._left - 1)


@dataclass(frozen=True)
class Kerv(Decoding):
    """KERV and its variants.

    Attributes:
        then, bins: the head; the largest tolerance.
        least: the smallest tolerance, if it adapts.
        adapts: the tolerance's rule; None leaves it at ``bins``.
        tail: what replaces everything from the first rejected token on; None: the target goes on.
        plain_steps: least number of inferences between two tails.
    """

    then: str = "head"
    bins: int = 15
    least: int = 5
    adapts: Rule | None = "repaired"
    tail: Tail | None = "velocity"
    plain_steps: int = 4

    @property
    def learned(self) -> bool:
        return super().learned or self.proposes == "filter" or self.tail in ("velocity", "walk")

    def drafter(self, parts: TokenParts) -> TokenDrafter:
        return KervDrafter(parts, self)


class KervDrafter(TokenDrafter):
    """Keeps the tolerance and the spacing of tails of one robot.

    Arguments as for :class:`~specact.families.tokens.pair.TokenDrafter`.
    """

    # Executed actions that are extrapolated, AC in the paper.
    history = 10

    def __init__(self, parts: TokenParts, decoding: Kerv) -> None:
        super().__init__(parts, decoding)
        self._kerv = decoding
        scale = parts.drafters.settings.scale if decoding.adapts and parts.drafters is not None else 1.0
        low = decoding.least if decoding.adapts else decoding.bins
        self._threshold = AdaptiveThreshold(Threshold(low, decoding.bins, decoding.adapts or "repaired", scale))
        self._spacing = Spacing(decoding.plain_steps)

    def reset(self) -> None:
        super().reset()
        self._threshold.reset()
        self._spacing.reset()

    def verified(self, decoded: Decoded) -> None:
        drafted = decoded.sources == DRAFT
        tokens, bias = decoded.tokens[drafted], decoded.bias[drafted]
        self._threshold.update(variability(tokens - bias, tokens))
        self._spacing.update(bool((decoded.sources == TAIL).any()))

    def candidates(self, window: Window, rng: np.random.Generator) -> Tokens:
        if self.decoding.proposes == "filter" and self.executed:
            return self._extrapolated("velocity")
        return super().candidates(window, rng)

    def rule(self) -> Acceptance:
        return self.within(self._threshold.bins)

    def tail(self) -> Tokens | None:
        how = self._kerv.tail
        if how is None or not self.executed or not self._spacing.armed:
            return None
        tail: Tokens = self._extrapolated(how)[0]
        return tail

    def _extrapolated(self, how: Tail) -> Tokens:
        """The tokens ``[1, T]`` that the executed actions lead to."""
        found: Extrapolation = Persistence() if how == "last" else self.parts.drafters.settings.filters[how]
        return to_tokens(found.predict(np.stack(self.executed), self.parts.policy.spec.chunk)).reshape(1, -1)


KERV: dict[str, Decoding] = {
    "kerv": Kerv("KERV: Spec-VLA, a Kalman tail, a tolerance that adapts (the repaired rule)"),
    "kerv_printed": Kerv("KERV with the tolerance's rule as printed", adapts="printed"),
    "kerv_last": Kerv("KERV with the last action as the tail: the control", tail="last"),
    "kerv_no_tail": Kerv("KERV's tolerance alone", tail=None),
}
