"""Where a lever is best at each place, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specact.lab.tised.aggregates import Aggregate
from specact.lab.tised.curves import Curve, Place
from specact.tised.optima import Best, Optimum, losses, scan

EndPoint = Literal["success", "restricted_s", "task_s"]
_RESAMPLES = 1000
# A setting that was best in fewer resamples than this is ruled out.
_PLAUSIBLE = 0.05


@dataclass(frozen=True)
class PlacedOptimum:
    """The sweet spot of one curve.

    Attributes:
        place: where.
        inference_s: mean T_inf of the baseline there [s]: by it hardware and links are put in order.
        end_point: ``success``; ``restricted_s``, restricted mean time; or ``task_s``, T_task over successes (31).
        spot: by a plain scan.
        strengths: the settings that have this end point, ``[S]``, the baseline first.
        values: of the end point there, ``[S]``.
        support: share of 1,000 bootstrap samples of the episodes, the same for all settings, in which each setting was
            best, ``[S]``.
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
        """The settings that were best in one of twenty samples, or oftener."""
        return frozenset(
            strength for strength, share in zip(self.strengths, self.support, strict=True) if share >= _PLAUSIBLE
        )


def decisive(place: Place) -> EndPoint:
    """What decides at a place: time where the world waits, success where it does not."""
    return "restricted_s" if place.static else "success"


def optima_of(curve: Curve, cells: Sequence[Aggregate]) -> list[PlacedOptimum]:
    """The sweet spots of a curve for each end point that it has.

    Args:
        curve: the episodes.
        cells: its cells, in the same order.
    """
    weights = _resampled(curve.success.shape[1])
    hits = curve.success.astype(np.float64) @ weights.T
    restricted = curve.restricted_s @ weights.T
    found = [
        _spot(cells, "success", [cell.success.mean for cell in cells], hits, "most"),
        _spot(cells, "restricted_s", [cell.restricted_s.mean for cell in cells], restricted, "least"),
    ]
    if any(cell.successes for cell in cells):
        time = np.where(curve.success, curve.task_s, 0.0) @ weights.T
        # A sample without success has no task time, so it cannot be the best.
        sampled = np.where(hits > 0.0, time / np.maximum(hits, 1.0), np.inf)
        found.append(_spot(cells, "task_s", [cell.task_s for cell in cells], sampled, "least"))
    return found


def _resampled(episodes: int) -> NDArray[np.float64]:
    """How often each episode is drawn in each bootstrap sample, ``[1000, E]``."""
    rng = np.random.default_rng(0)
    return rng.multinomial(episodes, np.full(episodes, 1.0 / episodes), size=_RESAMPLES).astype(np.float64)


def _spot(
    cells: Sequence[Aggregate], end_point: EndPoint, values: Sequence[float], sampled: NDArray[np.float64], best: Best
) -> PlacedOptimum:
    """From the values ``[S]`` and those of every sample ``[S, 1000]``, up to a common factor."""
    has = np.isfinite(values)
    strengths, known = np.array([cell.strength for cell in cells])[has], np.array(values)[has]
    winners = np.argmin(losses(sampled[has], best), axis=0)
    support = np.bincount(winners, minlength=len(known)) / _RESAMPLES
    return PlacedOptimum(
        cells[0].place,
        cells[0].inference_s,
        end_point,
        scan(strengths, known, best),
        tuple(strengths.tolist()),
        tuple(known.tolist()),
        tuple(support.tolist()),
    )
