"""TISED's three findings, and the frontier's methods pair by pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from specact.lab.rollout.statistics import contrast
from specact.lab.rollout.steps import Table
from specact.lab.tised.analysis import Cell, Curve, LeverContrast, Place
from specact.lab.tised.drivers import ON_BOARD

# The family-wise error rate of a sweep, and the least speed-up of a faster chunk.
LEVEL, FASTER = 0.05, 1.005
# Bootstrap samples, and the share of them in which a plausible setting is best.
RESAMPLES, PLAUSIBLE = 1000, 0.05
# Methods of the frontier as levers with a strength; None for levers with a single strength.
FRONTIER: dict[str, tuple[str, float | None]] = {
    "late adahi": ("late", 0.6), "adahi": ("verification", 0.6), "random": ("chance", 0.6),
    "hybrid": ("verification", 1.0), "async target": ("remote_async", None), "target": ("remote", None),
    "target on device": ("alone", 0.0), "head as draft": ("alone", 1.0), "draft": ("verification", 0.0),
}  # fmt: skip
_WHERE = ("task", "pace", "idle", "hardware", "link")


@dataclass(frozen=True)
class Finding:
    """One of the three findings, at one place or along one axis.

    Attributes:
        number: 1, a faster chunk makes a static task slower; 2, a cheaper policy that is worse at the least staleness
            is better at a larger one, or the best setting depends on the pace; 3, it depends on the hardware or the
            link. A task is static where its world stands still while the robot waits (``Place.static``).
        about: lever, task and so on.
        seen: whether it is significant, by paired tests at the level of 5 %, corrected over all contrasts of the sweep;
            of best settings, whether two of them have no plausible one in common.
    """

    number: Literal[1, 2, 3]
    about: str
    seen: bool


def find_all(curves: Sequence[Curve], contrasts: Sequence[LeverContrast]) -> list[Finding]:
    """All findings of a sweep: at every place, along the pace, and along the hardware."""
    cells = [cell for curve in curves for cell in curve.cells]
    findings = [
        Finding(1, str(place), any(map(_slower, rows))) if place.static
        else Finding(2, str(place), _crosses(place, rows, cells, contrasts))
        for place, rows in _grouped(contrasts, lambda row: row.place)
    ]  # fmt: skip
    several = [curve for curve in curves if len(curve.cells) > 1]
    moving = [curve for curve in several if not curve.place.static]
    about_pace = "{0.lever} on {0.task}, idle {0.idle}, over the pace, {0.machine}"
    for about, row in _grouped(moving, lambda curve: about_pace.format(curve.place)):
        findings += _moves(2, about, row)
    for about, row in _grouped(several, lambda curve: f"{curve.place.lever} on {curve.place.world}, over hardware"):
        findings += _moves(3, about, row)
    return findings


def _grouped(values: Sequence[Any], key: Callable[[Any], Any]) -> Iterable[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}  # in the order of the keys' first occurrence
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups.items()


def _slower(row: LeverContrast) -> bool:
    """Whether every chunk is faster, and the task slower.

    It is tested on the episodes in which both succeed, where only the number of chunks can cancel the time saved per
    chunk. Restricted mean time also rises with failures, and a mean over each one's own successes favours settings that
    fail on long episodes; both are reported as well.
    """
    faster = row.speedup is not None and row.speedup.chunk_speedup > FASTER
    return faster and row.both_s is not None and row.both_p < LEVEL and row.both_s.difference.mean > 0.0


def _crosses(
    place: Place, rows: Sequence[LeverContrast], cells: Sequence[Cell], contrasts: Sequence[LeverContrast]
) -> bool:
    """Whether a setting that is worse than the baseline at the least staleness succeeds more often here.

    Both conditions are tested. A setting that is better here and not worse there is simply the better policy.
    """
    baselines = [cell for cell in cells if _family(cell.place) == _family(place) and cell.strength == rows[0].baseline]
    # Ordered by pace times age, then by age, because objects in free motion move at pace 0 too.
    freshest = min(baselines, key=lambda cell: (cell.place.pace * cell.age_s, cell.age_s)).place
    worse = {row.strength for row in contrasts if row.place == freshest and _change(row) < 0}
    return any(_change(row) > 0 and row.strength in worse for row in rows)


def _change(row: LeverContrast) -> float:
    """The difference of success if it is significant, else 0."""
    return row.success.difference.mean if row.success_p < LEVEL else 0.0


def _family(place: Place) -> tuple[str, str, str]:
    return place.lever, place.task, place.idle


def _moves(number: Literal[2, 3], about: str, curves: Sequence[Curve]) -> list[Finding]:
    """Whether the best setting moves along an axis, if there are several curves."""
    seen = any(not first & second for first, second in combinations(map(plausible, curves), 2))
    return [Finding(number, about, seen)] if len(curves) > 1 else []


def plausible(curve: Curve) -> frozenset[float]:
    """The settings that are best in at least 5 % of 1,000 paired bootstrap samples of the episodes.

    Restricted mean time decides where the world waits, else success.
    """
    episodes = curve.success.shape[1]
    drawn = np.random.default_rng(0).multinomial(episodes, np.full(episodes, 1.0 / episodes), size=RESAMPLES)
    end_point = -curve.restricted_s if curve.place.static else curve.success.astype(np.float64)
    winners = np.argmax(end_point @ drawn.T.astype(np.float64), axis=0)
    share = np.bincount(winners, minlength=len(curve.cells)) / RESAMPLES
    return frozenset(cell.strength for cell, part in zip(curve.cells, share, strict=True) if part >= PLAUSIBLE)


def method_of(lever: str, strength: float) -> str | None:
    """The frontier's method of a lever at a strength, or None."""
    return next((name for name, (wanted, at) in FRONTIER.items() if lever == wanted and at in (None, strength)), None)


def compare_methods(table: Table) -> list[dict[str, Any]]:
    """Every pair of the frontier's methods at every place where both ran; methods without a link count for all links.

    Of each its place, ``first``, ``second``, the number of their common ``episodes``, and the contrast of ``success``.
    """
    runs: dict[tuple[Any, ...], dict[str, dict[int, bool]]] = defaultdict(lambda: defaultdict(dict))
    rows = zip(*(table[name].tolist() for name in ("lever", "strength", *_WHERE, "episode", "success")), strict=True)
    for lever, strength, *where, episode, success in rows:
        method = method_of(lever, strength)
        if method is not None:
            runs[tuple(where)][method][episode] = bool(success)
    on_board = {place[:-1]: runs.pop(place) for place in list(runs) if place[-1] == ON_BOARD}
    contrasts = []
    for place, methods in sorted(runs.items()):
        methods |= on_board.get(place[:-1], {})
        for first, second in combinations([name for name in FRONTIER if name in methods], 2):
            episodes = sorted(methods[first].keys() & methods[second].keys())
            if episodes:
                won = (np.array([methods[name][episode] for episode in episodes], float) for name in (first, second))
                contrasts.append({
                    **dict(zip(_WHERE, place, strict=True)), "first": first, "second": second,
                    "episodes": len(episodes), "success": asdict(contrast(*won)),
                })  # fmt: skip
    return contrasts
