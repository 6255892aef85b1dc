"""The frontier's methods over links, and paired tests of every two methods on the same episodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np

from specact.lab.evaluation.metrics import Table
from specact.lab.rollout.statistics import contrast, holm
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


def method_of(lever: str, strength: float) -> str | None:
    """The frontier's method of a lever at a strength, or None."""
    for name, (wanted, at) in FRONTIER.items():
        if lever == wanted and at in (None, strength):
            return name
    return None


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
