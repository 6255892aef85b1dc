"""TISED's three findings, looked for on a sweep: what was seen, what was not, and why, in words with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specact.lab.tised.aggregates import Aggregate, grouped
from specact.lab.tised.contrasts import LEVEL, LeverContrast, in_words
from specact.lab.tised.curves import Place
from specact.lab.tised.optima import PlacedOptimum, decisive

# A chunk whose time fell by less than this did not become faster.
_FASTER = 1.005


@dataclass(frozen=True)
class Finding:
    """One of the three, at one place or along one axis.

    Attributes:
        number: 1, a faster chunk makes a static task slower; 2, a cheaper policy that is worse where least is stale
            wins where more is, and where it does moves with the pace; 3, a sweet spot moves with the hardware, or with
            the link to it. A task is static where its world stands still while the robot waits
            (:attr:`Place.static <specact.lab.tised.curves.Place.static>`).
        about: lever, task and so on.
        seen: whether it was, by paired tests at the level of 5 %, corrected over all contrasts of the sweep.
        words: what was found, and what not and why.
    """

    number: Literal[1, 2, 3]
    about: str
    seen: bool
    words: str


def find_all(
    cells: Sequence[Aggregate], contrasts: Sequence[LeverContrast], spots: Sequence[PlacedOptimum]
) -> list[Finding]:
    """All findings of a sweep: at every place, along the pace, and along the hardware.

    Args:
        cells, contrasts, spots: of all curves.
    """
    # A lever with one setting has no sweet spot.
    deciding = [spot for spot in spots if spot.end_point == decisive(spot.place) and len(spot.strengths) > 1]
    at = {spot.place: spot for spot in deciding}
    found = []
    for place, rows in grouped(contrasts, lambda row: row.place):
        found.append(_slower(rows, at[place]) if place.static else _fresher(rows, at[place], cells, contrasts))
    dynamic = [spot for spot in deciding if not spot.place.static]
    for (family, machine), row in grouped(dynamic, lambda spot: (_family(spot.place), spot.place.machine)):
        if len(row) > 1:
            seen, words = _moves([(spot, f"pace {spot.place.pace:g}") for spot in row])
            lever, task, idle = family
            found.append(Finding(2, f"{lever} on {task}, idle {idle}, over the pace, {machine}", seen, words))
    for (lever, world), row in grouped(deciding, lambda spot: (spot.place.lever, spot.place.world)):
        if len(row) > 1:
            row.sort(key=lambda spot: spot.inference_s)
            seen, words = _moves([(spot, spot.place.machine) for spot in row])
            found.append(Finding(3, f"{lever} on {world}, over hardware", seen, words))
    return found


def _slower(rows: Sequence[LeverContrast], spot: PlacedOptimum) -> Finding:
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


def _fresher(
    rows: Sequence[LeverContrast], spot: PlacedOptimum, cells: Sequence[Aggregate], contrasts: Sequence[LeverContrast]
) -> Finding:
    """Finding 2: a setting that is worse than the baseline where least is stale succeeds more often here.

    Both ends are tested. One that is better here and no worse there is simply the better policy.
    """
    about, shape = str(spot.place), _shape(spot, "success", "")
    freshest = min(_baselines(rows[0], cells), key=_staleness).place
    there = {row.strength: row for row in contrasts if row.place == freshest}
    turned = [row for row in rows if _is_better(row) and row.strength in there and _is_worse(there[row.strength])]
    best = max(turned or rows, key=lambda row: row.success.difference.mean)
    words = (
        f"at {best.strength:g} against {best.baseline:g} success changes by {in_words(best.success, best.success_p)}; "
    )
    if freshest == spot.place:
        return Finding(2, about, False, f"not seen; here least is stale: {words}{_room(best, cells)} {shape}")
    words += f"where least is stale ({freshest.world}, {freshest.machine}) "
    if best.strength in there:
        far = there[best.strength]
        words += f"by {in_words(far.success, far.success_p)}."
    else:
        words += "it was not run."
    if turned:
        return Finding(2, about, True, f"seen: {words} {shape}")
    if _is_better(best):
        return Finding(2, about, False, f"not seen, because it is better here and not worse there: {words} {shape}")
    return Finding(2, about, False, f"not seen; nearest to it: {words} {_room(best, cells)} {shape}")


def _is_better(row: LeverContrast) -> bool:
    return row.success_p < LEVEL and row.success.difference.mean > 0.0


def _is_worse(row: LeverContrast) -> bool:
    return row.success_p < LEVEL and row.success.difference.mean < 0.0


def _family(place: Place) -> tuple[str, str, str]:
    return place.lever, place.task, place.idle


def _baselines(row: LeverContrast, cells: Sequence[Aggregate]) -> list[Aggregate]:
    """The baseline's cells at all paces and on all machines."""
    return [cell for cell in cells if _family(cell.place) == _family(row.place) and cell.strength == row.baseline]


def _staleness(cell: Aggregate) -> tuple[float, float]:
    """``v tau``, and the age alone where it is the same: what moves by itself moves at pace 0, too."""
    return cell.place.pace * cell.age_s, cell.age_s


def _moves(path: Sequence[tuple[PlacedOptimum, str]]) -> tuple[bool, str]:
    """Whether sweet spots along an axis differ beyond doubt, and the words for it.

    Two do if no setting is plausible for both, see :attr:`~specact.lab.tised.optima.PlacedOptimum.plausible`.
    """
    words = ", ".join(f"{spot.spot.where:g} at {label}" for spot, label in path)
    spots = [spot for spot, _ in path]
    if any(not one.plausible & other.plausible for one in spots for other in spots):
        return True, f"the sweet spot moves: {words}."
    if len({spot.spot.where for spot in spots}) == 1:
        return False, f"the sweet spot stays: {words}."
    return False, f"the sweet spots differ within the noise: {words}; every two have plausible settings in common."


def _room(row: LeverContrast, cells: Sequence[Aggregate]) -> str:
    """How much fresher observations could gain at most: what the baseline loses to delay."""
    here = [cell for cell in _baselines(row, cells) if cell.place.pace == row.place.pace]
    fastest = min(here, key=lambda cell: cell.age_s)
    own = next(cell for cell in here if cell.place == row.place)
    if fastest is own:
        return f"Observations are {1e3 * own.age_s:.3g} ms old here, and nothing was run with fresher ones."
    return (
        f"The baseline succeeds in {own.success.mean:.3f} with observations {1e3 * own.age_s:.3g} ms old and in "
        f"{fastest.success.mean:.3f} with {1e3 * fastest.age_s:.3g} ms: "
        "fresher observations can gain no more than that."
    )


def _shape(spot: PlacedOptimum, what: str, unit: str) -> str:
    kind = "interior" if spot.spot.interior else "at an end"
    share = spot.support[spot.strengths.index(spot.spot.where)]
    return (
        f"Best is {spot.spot.where:g} ({kind}, {what} {spot.spot.value:.3g}{unit}), in {100 * share:.0f} % of the "
        "bootstrap samples."
    )
