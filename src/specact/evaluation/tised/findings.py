"""TISED's three findings, looked for on a sweep: what was seen, what was not, and why, in words with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specact.evaluation.tised.cells import Cell, grouped
from specact.evaluation.tised.contrasts import LEVEL, LeverContrast, in_words
from specact.evaluation.tised.curves import Place
from specact.evaluation.tised.spots import PlacedSpot, decisive

# A chunk whose time fell by less than this did not become faster.
_FASTER = 1.005


@dataclass(frozen=True)
class Finding:
    """One of the three, at one place or along one axis.

    Attributes:
        number: 1, a faster chunk makes a static task slower; 2, a cheaper, worse policy wins a dynamic task, and where
            it does moves with the pace; 3, a sweet spot moves with the hardware, or with the link to it.
        about: lever, task and so on.
        seen: whether it was, by a test at the level of 5 % corrected over the settings of a curve.
        words: what was found, and what not and why.
    """

    number: Literal[1, 2, 3]
    about: str
    seen: bool
    words: str


def find_all(cells: Sequence[Cell], contrasts: Sequence[LeverContrast], spots: Sequence[PlacedSpot]) -> list[Finding]:
    """All findings of a sweep: at every place, along the pace, and along the hardware.

    Args:
        cells, contrasts, spots: of all curves.
    """
    # A lever with one setting has no sweet spot.
    deciding = [spot for spot in spots if spot.end_point == decisive(spot.place) and len(spot.strengths) > 1]
    at = {spot.place: spot for spot in deciding}
    found = []
    for place, rows in grouped(contrasts, lambda row: row.place):
        found.append(_slower(rows, at[place]) if place.is_static else _fresher(rows, at[place], cells))
    dynamic = [spot for spot in deciding if not spot.place.is_static]
    for (lever, task, machine), row in grouped(dynamic, lambda s: (s.place.lever, s.place.task, s.place.machine)):
        if len(row) > 1:
            seen, words = _moves([(spot, f"pace {spot.place.pace:g}") for spot in row])
            found.append(Finding(2, f"{lever} on {task} over the pace, {machine}", seen, words))
    for (lever, task, pace), row in grouped(deciding, lambda s: (s.place.lever, s.place.task, s.place.pace)):
        if len(row) > 1:
            row.sort(key=lambda spot: spot.inference_s)
            seen, words = _moves([(spot, spot.place.machine) for spot in row])
            found.append(Finding(3, f"{lever} on {task} at pace {pace:g} over hardware", seen, words))
    return found


def _slower(rows: Sequence[LeverContrast], spot: PlacedSpot) -> Finding:
    """Finding 1: every chunk faster, the task slower.

    It is decided over the episodes in which both succeed, where nothing but the number of chunks can eat up what each
    of them saves. Restricted mean time also rises with failures, and a mean over each one's own successes favours what
    fails on the long ones; both are said beside it.
    """
    about, shape = str(spot.place), _shape(spot, "restricted mean time", " s")
    faster = [(row, row.speedup) for row in rows if row.speedup and row.speedup.chunk_speedup > _FASTER]
    if not faster:
        return Finding(1, about, False, f"not seen: no setting makes a chunk faster. {shape}")
    slowed = [(row.both_s.difference.mean, row) for row, _ in faster if row.both_s and row.both_p < LEVEL]
    by_s, worst = max(slowed, key=lambda pair: pair[0], default=(0.0, rows[0]))
    if by_s > 0.0:
        return Finding(1, about, True, f"seen: {worst.explain()}. {shape}")
    # The one in which the additional chunks come nearest to eating up what each of them saves.
    nearest = min(faster, key=lambda pair: pair[1].task_speedup)[0]
    return Finding(1, about, False, f"not seen; nearest to it: {nearest.explain()}. {shape}")


def _fresher(rows: Sequence[LeverContrast], spot: PlacedSpot, cells: Sequence[Cell]) -> Finding:
    """Finding 2: a cheaper policy succeeds more often."""
    about, shape = str(spot.place), _shape(spot, "success", "")
    best = max(rows, key=lambda row: row.success.difference.mean)
    words = (
        f"at {best.strength:g} against {best.baseline:g} success changes by "
        f"{in_words(best.success, best.success_p)}; {_freshest(best, cells)}"
    )
    if best.success_p < LEVEL and best.success.difference.mean > 0.0:
        return Finding(2, about, True, f"seen: {words} {shape}")
    return Finding(2, about, False, f"not seen; nearest to it: {words} {_room(best, cells)} {shape}")


def _moves(path: Sequence[tuple[PlacedSpot, str]]) -> tuple[bool, str]:
    """Whether sweet spots along an axis differ beyond doubt, and the words for it.

    Two do if no setting is plausible for both, see :attr:`~specact.evaluation.tised.spots.PlacedSpot.plausible`.
    """
    words = ", ".join(f"{spot.spot.where:g} at {label}" for spot, label in path)
    spots = [spot for spot, _ in path]
    if any(not one.plausible & other.plausible for one in spots for other in spots):
        return True, f"the sweet spot moves: {words}."
    if len({spot.spot.where for spot in spots}) == 1:
        return False, f"the sweet spot stays: {words}."
    return False, f"the sweet spots differ within the noise: {words}; every two have plausible settings in common."


def _freshest(row: LeverContrast, cells: Sequence[Cell]) -> str:
    """What the setting is worth where observations are least stale: its quality against the baseline's."""
    pairs = [
        (setting, base)
        for setting in cells
        if _same_task(setting, row.place) and setting.strength == row.strength
        for base in cells
        if base.place == setting.place and base.strength == row.baseline
    ]
    setting, base = min(pairs, key=lambda pair: (pair[1].place.pace * pair[1].age_s, pair[1].age_s))
    return (
        f"where least is stale (pace {base.place.pace:g}, {base.place.machine}) it succeeds in "
        f"{setting.success.mean:.3f} against {base.success.mean:.3f}."
    )


def _room(row: LeverContrast, cells: Sequence[Cell]) -> str:
    """How much fresher observations could give back at most: what the baseline loses to delay."""
    here = [
        cell
        for cell in cells
        if _same_task(cell, row.place) and cell.place.pace == row.place.pace and cell.strength == row.baseline
    ]
    fastest = min(here, key=lambda cell: cell.age_s)
    own = next(cell for cell in here if cell.place == row.place)
    if fastest is own:
        return f"Observations are {1e3 * own.age_s:.3g} ms old here, and nothing was run with fresher ones."
    return (
        f"The baseline succeeds in {own.success.mean:.3f} with observations {1e3 * own.age_s:.3g} ms old and in "
        f"{fastest.success.mean:.3f} with {1e3 * fastest.age_s:.3g} ms: freshness has no more than that to give back."
    )


def _same_task(cell: Cell, place: Place) -> bool:
    return (cell.place.lever, cell.place.task) == (place.lever, place.task)


def _shape(spot: PlacedSpot, what: str, unit: str) -> str:
    kind = "interior" if spot.spot.interior else "at an end"
    share = spot.support[spot.strengths.index(spot.spot.where)]
    return (
        f"Best is {spot.spot.where:g} ({kind}, {what} {spot.spot.value:.3g}{unit}), in {100 * share:.0f} % of the "
        "bootstrap samples."
    )
