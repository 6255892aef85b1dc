"""The rejection model: how well a gate's score predicts the target's rejection (ADAHI, equation 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

from specact.lab.rollout.statistics import roc_auc
from specact.types import Floats


@dataclass(frozen=True)
class Fit:
    """``r = slope * x + intercept`` over bins, with ``x = D`` (linear, shift 0) or ``x = ln(D + shift)`` (logarithmic).

    ``r2`` is the explained share of the bins' variance.
    """

    slope: float
    intercept: float
    shift: float
    r2: float


@dataclass(frozen=True)
class RejectionModel:
    """Rejection over score.

    R² of the bins can be high with a negative slope, where the gate asks at the wrong steps; so report the slope's
    sign and the step-level figures as well.
    """

    # Mean score, mean rejection and its standard error per bin of equal count, [bins].
    scores: list[float]
    rejections: list[float]
    errors: list[float]
    linear: Fit
    logarithmic: Fit
    spearman: float  # rank correlation over single steps
    auroc: float  # area under the ROC curve of the score, for rejections above 1/2; 0.5 is chance
    steps: int


def rejection_models(steps: Mapping[str, Floats]) -> dict[str, Any]:
    """The rejection models of a gate's freely decided steps, as plain values.

    Args:
        steps: columns ``score``, ``rejection`` and ``rejection_0`` of a step table.

    Returns:
        The :class:`RejectionModel` of R(z), the rejection of any code, and as ``primary`` that of r, the rejection of
        the primary code, as in the paper's figure 2.
    """
    model = asdict(fit_rejection(steps["score"], steps["rejection"]))
    return {**model, "primary": asdict(fit_rejection(steps["score"], steps["rejection_0"]))}


def fit_rejection(scores: Floats, rejections: Floats, bins: int = 20) -> RejectionModel:
    """Fits both models to steps ``[N]``; bins hold equal counts."""
    order = np.argsort(scores, kind="stable")
    parts = [part for part in np.array_split(order, min(bins, len(order))) if len(part)]
    x = np.array([scores[part].mean() for part in parts])
    y = np.array([rejections[part].mean() for part in parts])
    errors = [float(rejections[part].std() / np.sqrt(len(part))) for part in parts]
    auroc, constant = roc_auc(scores, rejections > 0.5), np.ptp(scores) == 0.0 or np.ptp(rejections) == 0.0
    spearman = float("nan") if constant else float(stats.spearmanr(scores, rejections).statistic)
    auroc = float("nan") if auroc is None else auroc
    fits = _line(x, y, 0.0), _logarithm(x, y)
    return RejectionModel(x.tolist(), y.tolist(), errors, *fits, spearman, auroc, len(scores))


def _line(x: Floats, y: Floats, shift: float) -> Fit:
    if np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return Fit(0.0, float(y.mean()), shift, 0.0)
    line: Any = stats.linregress(x, y)
    return Fit(float(line.slope), float(line.intercept), shift, float(line.rvalue**2))


def _logarithm(x: Floats, y: Floats) -> Fit:
    """The shift is searched between a thousandth and a hundred times the largest score."""
    lowest, top = float(x.min()), max(float(x.max()), 1e-9)
    x = x - min(0.0, lowest)

    def fit(log_shift: float) -> Fit:
        shift = float(np.exp(log_shift))
        return _line(np.log(x + shift), y, shift)

    bounds = (np.log(top * 1e-3), np.log(top * 1e2))
    return fit(float(optimize.minimize_scalar(lambda value: -fit(value).r2, bounds=bounds, method="bounded").x))
