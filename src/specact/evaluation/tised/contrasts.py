"""A lever's setting against its baseline on the same episodes: what it bought, what paid, and what is significant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.evaluation.statistics import Contrast, contrast, holm
from specact.evaluation.tised.cells import Cell
from specact.evaluation.tised.curves import Curve, Place
from specact.tised.decomposition import Averages, Decomposition, decompose

# Probability of calling a difference significant on a curve where there is none.
LEVEL = 0.05


@dataclass(frozen=True)
class LeverContrast:
    """One setting against the baseline at the same place.

    Attributes:
        place, strength, baseline: which.
        episodes: that both ran.
        success: difference of success, setting minus baseline.
        restricted_s: difference of restricted mean time [s].
        both_s: difference of task time over the episodes in which both succeeded [s], or None if there are none.
        both: how many these are.
        success_p, restricted_p, both_p: p-values after Holm's correction over the settings of the curve; 1 where there
            is nothing to test.
        speedup: of the averages over each one's own successes (31), split into its factors (5); None where one of the
            two had none.
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
        """What bought it and what paid for it, in words with numbers."""
        words = f"at {self.strength:g} against {self.baseline:g} "
        words += self.speedup.explain() if self.speedup else "one of the two never succeeds, so no task time compares"
        words += f"; restricted mean time changes by {in_words(self.restricted_s, self.restricted_p, ' s')}"
        if self.both_s is not None:
            words += f", task time over the {self.both} episodes in which both succeed by "
            words += in_words(self.both_s, self.both_p, " s")
        return f"{words}, success by {in_words(self.success, self.success_p)}"


def contrasts_of(curve: Curve, cells: Sequence[Cell]) -> list[LeverContrast]:
    """Every setting of a curve against its baseline, in order of strength.

    Args:
        curve: the episodes.
        cells: its cells, in the same order.
    """
    settings = range(1, len(curve.strengths))
    won = curve.success.astype(np.float64)
    both = curve.success & curve.success[0]
    success = [contrast(won[i], won[0]) for i in settings]
    restricted = [contrast(curve.restricted_s[i], curve.restricted_s[0]) for i in settings]
    common = [_over(curve, i, both[i]) for i in settings]
    success_p, restricted_p, both_p = (
        holm([found.p if found else 1.0 for found in row]) for row in (success, restricted, common)
    )
    return [
        LeverContrast(
            place=curve.place,
            strength=curve.strengths[i],
            baseline=curve.strengths[0],
            episodes=both.shape[1],
            success=success[i - 1],
            restricted_s=restricted[i - 1],
            both_s=common[i - 1],
            both=int(both[i].sum()),
            success_p=success_p[i - 1],
            restricted_p=restricted_p[i - 1],
            both_p=both_p[i - 1],
            speedup=_speedup(cells[0].averages, cells[i].averages),
        )
        for i in settings
    ]


def in_words(found: Contrast, corrected_p: float, unit: str = "") -> str:
    """A difference with its interval and its corrected p-value."""
    away = found.difference
    return f"{away.mean:+.3f}{unit} ({away.low:+.3f} to {away.high:+.3f}, p = {corrected_p:.2g})"


def _over(curve: Curve, setting: int, both: NDArray[np.bool_]) -> Contrast | None:
    """Task time over the episodes in which both succeed."""
    return contrast(curve.task_s[setting][both], curve.task_s[0][both]) if both.any() else None


def _speedup(baseline: Averages | None, lever: Averages | None) -> Decomposition | None:
    return decompose(baseline, lever) if baseline is not None and lever is not None else None
