"""The frontier's methods over links, and paired tests of every two methods on the same episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from specact.lab.evaluation.metrics import Table
from specact.lab.statistics import Contrast, contrast, holm
from specact.lab.tised.drivers import ON_BOARD

# Methods as levers with a strength; None for levers with a single strength.
FRONTIER: Mapping[str, tuple[str, float | None]] = {
    "draft": ("verification", 0.0),
    "head as draft": ("alone", 1.0),
    "target on device": ("alone", 0.0),
    "target": ("remote", None),
    "async target": ("remote_async", None),
    "hybrid": ("verification", 1.0),
    "random": ("chance", 0.6),
    "adahi": ("verification", 0.6),
    "late adahi": ("late", 0.6),
}
_WHERE = ("task", "pace", "idle", "hardware", "link")


@dataclass(frozen=True)
class MethodContrast:
    """Two methods over one link, on their common episodes.

    Attributes:
        task, pace, idle, hardware, link: the conditions.
        first, second: of :data:`FRONTIER`.
        episodes: number of common ones.
        success: first minus second, with the p-value of McNemar's exact test.
        p: that p-value after Holm's correction over all pairs of methods at all places of the table.
    """

    task: str
    pace: float
    idle: str
    hardware: str
    link: str
    first: str
    second: str
    episodes: int
    success: Contrast
    p: float


def method_of(lever: str, strength: float) -> str | None:
    """The frontier's method of a lever at a strength, or None."""
    for name, (wanted, at) in FRONTIER.items():
        if lever == wanted and at in (None, strength):
            return name
    return None


def compare_methods(table: Table) -> list[MethodContrast]:
    """Every pair of the frontier's methods at every place where both ran; methods without a link count for all links.

    Args:
        table: of a sweep, see :data:`~specact.lab.tised.curves.COLUMNS`; rows of no method are left out.
    """
    runs: dict[tuple[str, float, str, str, str], dict[str, dict[int, bool]]] = {}
    rows = zip(*(table[name].tolist() for name in ("lever", "strength", *_WHERE, "episode", "success")), strict=True)
    for lever, strength, *where, episode, success in rows:
        method = method_of(lever, strength)
        if method is not None:
            task, pace, idle, hardware, link = where
            runs.setdefault((task, pace, idle, hardware, link), {}).setdefault(method, {})[episode] = bool(success)
    on_board = {place[:-1]: runs.pop(place) for place in list(runs) if place[-1] == ON_BOARD}
    for place, methods_here in runs.items():
        methods_here.update(on_board.get(place[:-1], {}))
    contrasts = [
        _compare(place, first, second, methods[first], methods[second])
        for place, methods in sorted(runs.items(), key=lambda pair: pair[0])
        for first, second in combinations([name for name in FRONTIER if name in methods], 2)
        if methods[first].keys() & methods[second].keys()
    ]
    return [replace(one, p=p) for one, p in zip(contrasts, holm([one.success.p for one in contrasts]), strict=True)]


def _compare(
    where: tuple[str, float, str, str, str], first: str, second: str, one: Mapping[int, bool], other: Mapping[int, bool]
) -> MethodContrast:
    episodes = sorted(one.keys() & other.keys())
    return MethodContrast(
        *where, first, second, len(episodes), contrast(_successes(one, episodes), _successes(other, episodes)), p=1.0
    )


def _successes(run: Mapping[int, bool], episodes: list[int]) -> NDArray[np.float64]:
    return np.array([run[episode] for episode in episodes], dtype=np.float64)
