"""Sweet spots of levers, with the support that bootstrap samples of the episodes give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specact.lab.tised.analysis import Cell, Curve, Place
from specact.lab.tised.equations import Optimum, optimum

EndPoint = Literal["success", "restricted_s", "task_s"]
# Bootstrap samples, and the share of them in which a plausible setting is best.
RESAMPLES, PLAUSIBLE = 1000, 0.05


@dataclass(frozen=True)
class PlacedOptimum:
    """The sweet spot of one curve at an end point, by a scan; by T_inf of its baseline [s] machines are sorted.

    Of each setting with this end point, the baseline first: strength, value, and support, the share of 1,000 paired
    bootstrap samples of the episodes in which it is best, ``[S]``.
    """

    place: Place
    inference_s: float
    end_point: EndPoint
    spot: Optimum
    strengths: tuple[float, ...]
    values: tuple[float, ...]
    support: tuple[float, ...]

    @property
    def plausible(self) -> frozenset[float]:
        """The settings that are best in at least 5 % of the samples."""
        return frozenset(at for at, share in zip(self.strengths, self.support, strict=True) if share >= PLAUSIBLE)


def optima_of(curve: Curve) -> list[PlacedOptimum]:
    """The sweet spots of a curve for each end point that it has."""
    cells, episodes = curve.cells, curve.success.shape[1]
    # How often each episode is in each bootstrap sample, [1000, E].
    drawn = np.random.default_rng(0).multinomial(episodes, np.full(episodes, 1.0 / episodes), size=RESAMPLES)
    weights = drawn.astype(np.float64)
    hits = curve.success.astype(np.float64) @ weights.T
    restricted = curve.restricted_s @ weights.T
    optima = [
        _spot(cells, "success", [cell.success.mean for cell in cells], hits, "most"),
        _spot(cells, "restricted_s", [cell.restricted_s.mean for cell in cells], restricted, "least"),
    ]
    if any(cell.successes for cell in cells):
        time = np.where(curve.success, curve.task_s, 0.0) @ weights.T
        # A sample without success has no task time, so the setting cannot be best.
        sampled = np.where(hits > 0.0, time / np.maximum(hits, 1.0), np.inf)
        optima.append(_spot(cells, "task_s", [cell.task_s for cell in cells], sampled, "least"))
    return optima


def _spot(
    cells: Sequence[Cell], end_point: EndPoint, values: Sequence[float], sampled: NDArray[np.float64],
    best: Literal["least", "most"],
) -> PlacedOptimum:  # fmt: skip
    """The optimum from the values ``[S]`` and their bootstrap samples ``[S, 1000]``, up to a common factor."""
    defined = np.isfinite(values)
    strengths, known = np.array([cell.strength for cell in cells])[defined], np.array(values)[defined]
    winners = (np.argmin if best == "least" else np.argmax)(sampled[defined], axis=0)
    support = np.bincount(winners, minlength=len(known)) / RESAMPLES
    spot, lists = optimum(strengths, known, best), (tuple(each.tolist()) for each in (strengths, known, support))
    return PlacedOptimum(cells[0].place, cells[0].inference_s, end_point, spot, *lists)
