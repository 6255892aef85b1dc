"""The optimum of a lever at each place, with its bootstrap support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specact.lab.tised.analysis import Cell, Curve, Place
from specact.lab.tised.equations import Optimum, optimum

EndPoint = Literal["success", "restricted_s", "task_s"]
_RESAMPLES = 1000
# Minimum bootstrap support of a plausible setting.
_PLAUSIBLE = 0.05


@dataclass(frozen=True)
class PlacedOptimum:
    """The sweet spot of one curve.

    Attributes:
        place: of the lever.
        inference_s: mean T_inf of the baseline [s], by which hardware and links are sorted.
        end_point: ``success``; ``restricted_s``, restricted mean time; or ``task_s``, T_task over successes (31).
        spot: the optimum, by a scan.
        strengths: the settings that have this end point, ``[S]``, the baseline first.
        values: of the end point, ``[S]``.
        support: share of 1,000 paired bootstrap samples of the episodes in which each setting is best, ``[S]``.
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
        return frozenset(
            strength for strength, share in zip(self.strengths, self.support, strict=True) if share >= _PLAUSIBLE
        )


def decisive(place: Place) -> EndPoint:
    """The end point of a place: restricted mean time where the world waits, else success."""
    return "restricted_s" if place.static else "success"


def optima_of(curve: Curve) -> list[PlacedOptimum]:
    """The sweet spots of a curve for each end point that it has."""
    cells = curve.cells
    weights = _resampled(curve.success.shape[1])
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


def _resampled(episodes: int) -> NDArray[np.float64]:
    """Multiplicity of each episode in each bootstrap sample, ``[1000, E]``."""
    rng = np.random.default_rng(0)
    return rng.multinomial(episodes, np.full(episodes, 1.0 / episodes), size=_RESAMPLES).astype(np.float64)


def _spot(
    cells: Sequence[Cell], end_point: EndPoint, values: Sequence[float], sampled: NDArray[np.float64],
    best: Literal["least", "most"],
) -> PlacedOptimum:  # fmt: skip
    """The optimum from the values ``[S]`` and their bootstrap samples ``[S, 1000]``, up to a common factor."""
    defined = np.isfinite(values)
    strengths, defined_values = np.array([cell.strength for cell in cells])[defined], np.array(values)[defined]
    winners = (np.argmin if best == "least" else np.argmax)(sampled[defined], axis=0)
    support = np.bincount(winners, minlength=len(defined_values)) / _RESAMPLES
    return PlacedOptimum(
        cells[0].place,
        cells[0].inference_s,
        end_point,
        optimum(strengths, defined_values, best),
        tuple(strengths.tolist()),
        tuple(defined_values.tolist()),
        tuple(support.tolist()),
    )
