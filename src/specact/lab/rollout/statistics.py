"""Confidence intervals and paired tests of evaluation results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's 95 % interval of a proportion."""
    bounds = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    return Interval(successes / trials, float(bounds.low), float(bounds.high))


def mean_interval(values: NDArray[np.float64]) -> Interval:
    """Student's 95 % interval of a mean over episodes."""
    mean, error = float(np.mean(values)), float(stats.sem(values)) if len(values) > 1 else float("nan")
    if not error > 0.0:
        return Interval(mean, mean, mean)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=error)
    return Interval(mean, float(low), float(high))


def bootstrap_interval(values: NDArray[np.float64], rng: np.random.Generator | int = 0) -> Interval:
    """The mean of ``[episodes]`` with a 95 % percentile interval from 2,000 bootstrap samples."""
    drawn = np.random.default_rng(rng).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def seeds_interval(groups: Sequence[NDArray[np.float64]]) -> Interval:
    """The mean over training seeds of the means over their episodes, with a 95 % interval over both.

    A percentile interval of a crossed bootstrap: 2,000 samples, each of seeds and of episodes, which are the same for
    every seed, in the same order. With only three seeds it is too narrow, but less so than one of episodes alone.
    """
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(groups), size=(2000, len(groups)))
    places = generator.random((2000, max(map(len, groups))))
    episodes = [(len(values) * places[:, : len(values)]).astype(int) for values in groups]
    means = np.stack([values[at].mean(axis=1) for values, at in zip(groups, episodes, strict=True)], axis=1)
    low, high = np.quantile(np.take_along_axis(means, drawn, axis=1).mean(axis=1), [0.025, 0.975])
    return Interval(float(np.mean([values.mean() for values in groups])), float(low), float(high))


@dataclass(frozen=True)
class Contrast:
    """The paired comparison of two methods on the same episodes: the mean of first minus second.

    With a 95 % interval from 2,000 paired bootstrap samples; ``p`` is two-sided, of the ``test``: exact McNemar for
    successes, sign-flip permutations (10,000) for scores.
    """

    difference: Interval
    p: float
    test: str


def contrast(first: NDArray[np.float64], second: NDArray[np.float64]) -> Contrast:
    """Paired contrast of two methods' results, ``[episodes]`` each, in the same order.

    Successes are given as 0 and 1 and compared with McNemar's exact test.
    """
    differences, rng = first - second, np.random.default_rng(0)
    difference = bootstrap_interval(differences, rng)
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
        p = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        return Contrast(difference, float(p), "exact McNemar")
    signs = rng.choice([-1.0, 1.0], size=(10_000, len(differences)))
    extreme = np.abs((signs * differences).mean(axis=1)) >= abs(differences.mean()) - 1e-12
    return Contrast(difference, float((extreme.sum() + 1) / (len(extreme) + 1)), "sign-flip permutation")


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction of the p-values of one family, in the given order (Holm 1979).

    The k-th smallest of m values (k from 0) becomes the largest of ``min(1, (m - i) p_i)`` over ``i <= k``. This
    controls the family-wise error rate under any dependence. A table's family is all its contrasts for one end point.
    A value outside [0, 1] or NaN is a :exc:`ValueError`.
    """
    values = np.asarray(p, dtype=np.float64)
    if not ((values >= 0.0) & (values <= 1.0)).all():
        raise ValueError(f"p-values must lie between 0 and 1, got {list(p)}")
    order = np.argsort(values, kind="stable")
    factors = len(values) - np.arange(len(values))
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(factors * values[order]))
    return [float(value) for value in corrected]


# Of the gated loss, per step; below it an efficiency is not meaningful.
LEAST_GAIN = 0.01


def choice_efficiency(rejection: NDArray[np.float64], sent: NDArray[np.bool_]) -> float | None:
    """How well a gate chose among its own steps: 0 is chance, 1 the least R(z) for the same number of skips.

    Of R(z) and whether it was transmitted, ``[N]`` each. Unlike the gate efficiency it uses no other method's states.
    None where the possible gain is negligible.
    """
    skips = int((~sent).sum())
    chance = float(rejection.mean()) * skips
    best = float(np.sort(rejection)[:skips].sum())
    if chance - best < LEAST_GAIN * len(sent):
        return None
    return (chance - float(rejection[~sent].sum())) / (chance - best)


def roc_auc(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float | None:
    """Area under the ROC curve: the probability that a positive scores above a negative, ties counted half, ``[N]``.

    The Mann-Whitney statistic over the number of pairs; 1/2 is chance. None where one class is empty.
    """
    count = int(positive.sum())
    if count in (0, len(positive)):
        return None
    above = stats.rankdata(scores)[positive].sum() - count * (count + 1) / 2
    return float(above / (count * (len(positive) - count)))


def roc_auc_interval(
    scores: NDArray[np.float64], positive: NDArray[np.bool_], episodes: NDArray[np.int64]
) -> Interval | None:
    """:func:`roc_auc` with a 95 % percentile interval from 2,000 bootstrap samples of the rows' ``episodes``, ``[N]``.

    Samples in which one class is empty are left out. None where it is empty in all rows.
    """
    mean = roc_auc(scores, positive)
    if mean is None:
        return None
    rows, rng = [np.flatnonzero(episodes == number) for number in np.unique(episodes)], np.random.default_rng(0)
    drawn = (np.concatenate([rows[at] for at in rng.integers(len(rows), size=len(rows))]) for _ in range(2000))
    areas = [auc for sample in drawn if (auc := roc_auc(scores[sample], positive[sample])) is not None]
    low, high = np.quantile(areas, [0.025, 0.975])
    return Interval(mean, float(low), float(high))
