"""TISED's three findings, and the frontier's methods pair by pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from experiments.tised.optima import PlacedOptimum
from specact.lab.evaluation.metrics import Table
from specact.lab.rollout.statistics import contrast, holm
from specact.lab.tised.analysis import Cell, LeverContrast, Place, in_words
from specact.lab.tised.drivers import ON_BOARD

# The family-wise error rate of a sweep, and the least speed-up of a faster chunk.
LEVEL, FASTER = 0.05, 1.005
# Methods of the frontier as levers with a strength; None for levers with a single strength.
FRONTIER: Mapping[str, tuple[str, float | None]] = {
    "draft": ("verification", 0.0), "head as draft": ("alone", 1.0), "target on device": ("alone", 0.0),
    "target": ("remote", None), "async target": ("remote_async", None), "hybrid": ("verification", 1.0),
    "random": ("chance", 0.6), "adahi": ("verification", 0.6), "late adahi": ("late", 0.6),
}  # fmt: skip
_WHERE = ("task", "pace", "idle", "hardware", "link")


@dataclass(frozen=True)
class Finding:
    """One of the three findings, at one place or along one axis.

    Attributes:
        number: 1, a faster chunk makes a static task slower; 2, a cheaper policy that is worse at the least staleness
            is better at a larger one, and the crossover depends on the pace; 3, the sweet spot depends on the hardware
            or the link. A task is static where its world stands still while the robot waits (``Place.static``).
        about: lever, task and so on.
        seen: whether it is significant, by paired tests at the level of 5 %, corrected over all contrasts of the sweep.
        words: the contrasts, or the sweet spots, that decide.
    """

    number: Literal[1, 2, 3]
    about: str
    seen: bool
    words: str


def find_all(
    cells: Sequence[Cell], contrasts: Sequence[LeverContrast], spots: Sequence[PlacedOptimum]
) -> list[Finding]:
    """All findings of a sweep, of all its curves: at every place, along the pace, and along the hardware."""
    findings = [
        _finding_1(place, rows) if place.static else _finding_2(place, rows, cells, contrasts)
        for place, rows in _grouped(contrasts, lambda row: row.place)
    ]
    # Restricted mean time decides where the world waits, else success. A lever with one setting has no sweet spot.
    deciding = [
        spot for spot in spots
        if spot.end_point == ("restricted_s" if spot.place.static else "success") and len(spot.strengths) > 1
    ]  # fmt: skip
    dynamic = [spot for spot in deciding if not spot.place.static]
    for (family, machine), row in _grouped(dynamic, lambda spot: (_family(spot.place), spot.place.machine)):
        lever, task, idle = family
        about = f"{lever} on {task}, idle {idle}, over the pace, {machine}"
        findings += _moves(2, about, [(spot, f"pace {spot.place.pace:g}") for spot in row])
    for (lever, world), row in _grouped(deciding, lambda spot: (spot.place.lever, spot.place.world)):
        row.sort(key=lambda spot: spot.inference_s)
        findings += _moves(3, f"{lever} on {world}, over hardware", [(spot, spot.place.machine) for spot in row])
    return findings


def _grouped(values: Sequence[Any], key: Callable[[Any], Any]) -> Iterable[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}  # in the order of the keys' first occurrence
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups.items()


def _finding_1(place: Place, rows: Sequence[LeverContrast]) -> Finding:
    """Finding 1: every chunk is faster, and the task slower.

    It is tested on the episodes in which both succeed, where only the number of chunks can cancel the time saved per
    chunk. Restricted mean time also rises with failures, and a mean over each one's own successes favours settings that
    fail on long episodes; both are reported as well.
    """
    faster = [(row.speedup.task_speedup, row) for row in rows if row.speedup and row.speedup.chunk_speedup > FASTER]
    slower = [
        (task, row) for task, row in faster
        if row.both_s is not None and row.both_p < LEVEL and row.both_s.difference.mean > 0.0
    ]  # fmt: skip
    _, told = min(slower or faster, key=lambda pair: pair[0], default=(0.0, None))
    return Finding(1, str(place), bool(slower), "no setting makes a chunk faster" if told is None else told.explain())


def _finding_2(
    place: Place, rows: Sequence[LeverContrast], cells: Sequence[Cell], contrasts: Sequence[LeverContrast]
) -> Finding:
    """Finding 2: a setting that is worse than the baseline at the least staleness succeeds more often here.

    Both conditions are tested. A setting that is better here and not worse there is simply the better policy.
    """
    baselines = [cell for cell in cells if _family(cell.place) == _family(place) and cell.strength == rows[0].baseline]
    # By v tau, then the age, because objects in free motion move at pace 0 too.
    freshest = min(baselines, key=lambda cell: (cell.place.pace * cell.age_s, cell.age_s)).place
    there = {row.strength: row for row in contrasts if row.place == freshest}
    crossed = [row for row in rows if _change(row) > 0 and row.strength in there and _change(there[row.strength]) < 0]
    best = max(crossed or rows, key=lambda row: row.success.difference.mean)
    words = (
        f"at {best.strength:g} against {best.baseline:g} success changes by {in_words(best.success, best.success_p)}"
    )
    if freshest != place and (fresh := there.get(best.strength)) is not None:
        words += f"; where least is stale ({freshest.world}, {freshest.machine}) by "
        words += in_words(fresh.success, fresh.success_p)
    return Finding(2, str(place), bool(crossed), words)


def _change(row: LeverContrast) -> float:
    """The difference of success if it is significant, else 0."""
    return row.success.difference.mean if row.success_p < LEVEL else 0.0


def _family(place: Place) -> tuple[str, str, str]:
    return place.lever, place.task, place.idle


def _moves(number: Literal[2, 3], about: str, path: Sequence[tuple[PlacedOptimum, str]]) -> list[Finding]:
    """Sweet spots along an axis, if there are several: they move if two of them have no plausible setting in common."""
    words = "sweet spots: " + ", ".join(f"{spot.spot.where:g} at {label}" for spot, label in path)
    seen = any(not one.plausible & other.plausible for (one, _), (other, _) in combinations(path, 2))
    return [Finding(number, about, seen, words)] if len(path) > 1 else []


def method_of(lever: str, strength: float) -> str | None:
    """The frontier's method of a lever at a strength, or None."""
    return next((name for name, (wanted, at) in FRONTIER.items() if lever == wanted and at in (None, strength)), None)


def compare_methods(table: Table) -> list[dict[str, Any]]:
    """Every pair of the frontier's methods at every place where both ran; methods without a link count for all links.

    Of each its place, ``first``, ``second``, the number of their common ``episodes``, the contrast of ``success``, and
    ``p``, after Holm's correction over all pairs of methods at all places of the table.
    """
    runs: dict[tuple[Any, ...], dict[str, dict[int, bool]]] = defaultdict(lambda: defaultdict(dict))
    rows = zip(*(table[name].tolist() for name in ("lever", "strength", *_WHERE, "episode", "success")), strict=True)
    for lever, strength, *where, episode, success in rows:
        method = method_of(lever, strength)
        if method is not None:
            runs[tuple(where)][method][episode] = bool(success)
    on_board = {place[:-1]: runs.pop(place) for place in list(runs) if place[-1] == ON_BOARD}
    found = []
    for place, methods in sorted(runs.items()):
        methods |= on_board.get(place[:-1], {})
        for first, second in combinations([name for name in FRONTIER if name in methods], 2):
            episodes = sorted(methods[first].keys() & methods[second].keys())
            if episodes:
                one, other = (
                    np.array([methods[name][episode] for episode in episodes], np.float64) for name in (first, second)
                )
                success = asdict(contrast(one, other))
                names = {"first": first, "second": second, "episodes": len(episodes)}
                found.append({**dict(zip(_WHERE, place, strict=True)), **names, "success": success})
    corrected = holm([row["success"]["p"] for row in found])
    return [{**row, "p": p} for row, p in zip(found, corrected, strict=True)]
