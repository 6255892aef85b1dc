"""Paired contrasts of a lever's setting and its baseline on the same episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specact.lab.statistics import Contrast, contrast, holm
from specact.lab.tised.aggregates import Aggregate
from specact.lab.tised.curves import Curve, Place
from specact.lab.tised.decomposition import Averages, Decomposition, decompose

# Family-wise error rate of a sweep.
LEVEL = 0.05


@dataclass(frozen=True)
class LeverContrast:
    """One setting against the baseline at the same place.

    Attributes:
        place, strength, baseline: of the lever.
        episodes: number of common ones.
        success: difference of success, setting minus baseline.
        restricted_s: difference of restricted mean time [s].
        both_s: difference of task time over the episodes in which both succeeded [s], or None if there are none.
        both: number of these episodes.
        success_p, restricted_p, both_p: p-values after Holm's correction over all contrasts of the sweep for that end
            point; 1 where there is nothing to test.
        speedup: of the averages over each one's own successes (31), split into its factors (5); None where one has no
            success.
    """

    place: Place
    strength: float
    baseline: float
    episodes: int
    success: Contrast
    restricted_s: Contrast
    both_s: Contrast | None
    both: int
    success_p: float
    restricted_p: float
    both_p: float
    speedup: Decomposition | None

    def explain(self) -> str:
        """Describes the factors of the speed-up and the differences, with numbers."""
        text = f"at {self.strength:g} against {self.baseline:g} "
        text += self.speedup.explain() if self.speedup else "one of the two never succeeds, so no task time compares"
        text += f"; restricted mean time changes by {in_words(self.restricted_s, self.restricted_p, ' s')}"
        if self.both_s is not None:
            text += f", task time over the {self.both} episodes in which both succeed by "
            text += in_words(self.both_s, self.both_p, " s")
        return f"{text}, success by {in_words(self.success, self.success_p)}"


def contrasts_of(curves: Sequence[tuple[Curve, Sequence[Aggregate]]]) -> list[LeverContrast]:
    """Every setting of every curve against its baseline, curve by curve in order of strength.

    Args:
        curves: the episodes, and their cells in the same order.
    """
    rows = [_contrast(curve, cells, i) for curve, cells in curves for i in range(1, len(curve.strengths))]
    success_p, restricted_p, both_p = (
        (
            holm([found.p if found else 1.0 for found in column])
            for column in zip(*((row.success, row.restricted_s, row.both_s) for row in rows), strict=True)
        )
        if rows
        else ([], [], [])
    )
    return [
        replace(row, success_p=success_p[i], restricted_p=restricted_p[i], both_p=both_p[i])
        for i, row in enumerate(rows)
    ]


def _contrast(curve: Curve, cells: Sequence[Aggregate], i: int) -> LeverContrast:
    """The contrast of one setting, with uncorrected p-values."""
    success = curve.success.astype(np.float64)
    both = curve.success[i] & curve.success[0]
    common = contrast(curve.task_s[i][both], curve.task_s[0][both]) if both.any() else None
    return LeverContrast(
        place=curve.place,
        strength=curve.strengths[i],
        baseline=curve.strengths[0],
        episodes=len(both),
        success=contrast(success[i], success[0]),
        restricted_s=contrast(curve.restricted_s[i], curve.restricted_s[0]),
        both_s=common,
        both=int(both.sum()),
        success_p=1.0,
        restricted_p=1.0,
        both_p=1.0,
        speedup=_speedup(cells[0].averages, cells[i].averages),
    )


def in_words(result: Contrast, corrected_p: float, unit: str = "") -> str:
    """A difference with its interval and its corrected p-value."""
    difference = result.difference
    return f"{difference.mean:+.3f}{unit} ({difference.low:+.3f} to {difference.high:+.3f}, p = {corrected_p:.2g})"


def _speedup(baseline: Averages | None, lever: Averages | None) -> Decomposition | None:
    return decompose(baseline, lever) if baseline is not None and lever is not None else None
