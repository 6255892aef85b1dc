"""What a robot does while its link is pulled: real sockets, real time, on PushT; and the film of it (docs/film.gif)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grid import Cell, Results, Run
from experiments.measure import from_digits
from experiments.outage.film import FILMED, Film
from experiments.outage.robots import METHODS, OUTAGE_S, PERIOD_S, PULLED_S, race
from experiments.report import Picture, Report, Table, contrast_table, one_family
from specact.lab.rollout.statistics import bootstrap_interval, contrast, wilson

EPISODES, HEATS = 12, 2
_OUTAGE = slice(round(PULLED_S / PERIOD_S), round((PULLED_S + OUTAGE_S) / PERIOD_S))


def plan(run: Run) -> Iterator[Cell]:
    """The episodes in parts, of all methods at once."""
    for heat in range(HEATS):
        yield Cell(f"races/{heat}", partial(measure, heat))


def measure(heat: int, folder: Path, run: Run) -> dict[str, list[dict[str, Any]]]:
    """Races some episodes; the path of the very first one is kept, for the film."""
    episodes = range(heat * EPISODES, heat * EPISODES + run.few(EPISODES))
    races = race(list(METHODS), episodes, run.seed)
    for rows in races.values():
        for row in rows[heat == 0 :]:
            del row["path"], row["whom"]
    return races


def report(results: Results) -> Report:
    """Still periods, longest stall and success of every method, and the film of the first episode."""
    races = {method: [row for heat in results["races"].values() for row in heat[method]] for method in METHODS}
    measures = {method: measures_of(rows) for method, rows in races.items()}
    rows = [{"method": method, "about": METHODS[method], **summary_of(values)} for method, values in measures.items()]
    family = one_family(
        {"on": "PushT", "measure": measure, "first": "adahi", "second": second,
         **asdict(contrast(measures["adahi"][measure], measures[second][measure]))}
        for second, measure in product(METHODS, ("down", "success", "success_s")) if second != "adahi"
    )  # fmt: skip
    still = Table(
        "still", f"{len(races['target'])} outages of {OUTAGE_S:g} s, one per episode; 95 % intervals over episodes.",
        "method | what it does | stands still while the link is down | at other times | longest stall [s] "
        "| success | until success [s]",
        "`{method}` | {about} | {down:ci2} | {rest:ci2} | {stall_s:.1f} | {success:ci2} | {success_s:ci1}", rows,
    )  # fmt: skip
    facts = {row["method"]: row for row in rows} | {f"{test['second']}_{test['measure']}": test for test in family}
    pictures = [Picture("../film.gif", partial(Film, {method: races[method][0] for method in FILMED}))]
    return Report([still, contrast_table(family)], facts, pictures)


def measures_of(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """For each episode the share of still periods with the link ``down`` and in the ``rest``, and the longest stall."""
    still = [from_digits(row["still"]) for row in rows]
    stalls = [max((len([*run]) for stood, run in groupby(row["still"]) if stood == "1"), default=0) for row in rows]
    return {
        "down": np.array([episode[_OUTAGE].mean() for episode in still]),
        "rest": np.array([np.delete(episode, _OUTAGE).mean() for episode in still]),
        "stall_s": PERIOD_S * np.array(stalls, float),
        "success": np.array([row["success"] for row in rows], float),
        "success_s": np.array([row["success_s"] for row in rows], float),
    }


def summary_of(measures: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Means with their intervals over episodes; of the stalls the longest of all."""
    means = {name: vars(bootstrap_interval(measures[name])) for name in ("down", "rest", "success_s")}
    won, stalls = measures["success"], measures["stall_s"]
    return means | {"stall_s": float(stalls.max()), "success": vars(wilson(int(won.sum()), len(won)))}
