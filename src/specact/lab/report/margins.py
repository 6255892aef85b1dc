"""Bootstrap intervals of statistics of a run's step tables; the samples are of whole episodes (cluster bootstrap)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.lab.evaluation.metrics import Table, add_gate_efficiency
from specact.lab.report.runs import Run
from specact.lab.rollout.methods import load_method
from specact.lab.statistics import Interval

SAMPLES = 400
# Maximum share of samples with an undefined statistic; above it there is no interval. One tail of the interval.
_UNDEFINED = 0.025


def skip_margin(run: Run, first: str, second: str) -> Interval:
    """True skip ratio of one method minus another's, with a 95 % interval; NaN where one of them skipped nothing.

    Raises:
        DataError: if a step table cannot be read.
    """

    def margin(tables: Mapping[str, Table]) -> float:
        ratios = [1.0 - _mean(tables[name]["rejection"][~tables[name]["transmitted"]]) for name in (first, second)]
        return ratios[0] - ratios[1]

    return _bootstrap({name: run.steps(name) for name in (first, second)}, margin)


def efficiency(run: Run, method: str) -> Interval:
    """Gate efficiency with a 95 % interval; NaN where it is undefined, or in more than 2.5 % of the samples.

    Raises:
        DataError: if a step table cannot be read.
    """
    needed = [name for name in (method, "random", f"random_{method}", "oracle") if name in run.methods]

    def statistic(tables: Mapping[str, Table]) -> float:
        methods: dict[str, dict[str, Any]] = {
            name: {
                "transmission_rate": float(table["transmitted"].mean()),
                "gated_loss": float((table["rejection"] * (~table["transmitted"] | table["missed"])).mean()),
            }
            for name, table in tables.items()
        }
        add_gate_efficiency(map(load_method, methods), methods, tables["oracle"])
        value = methods[method]["gate_efficiency"]
        return float("nan") if value is None else float(value)

    return _bootstrap({name: run.steps(name) for name in needed}, statistic)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _bootstrap(tables: Mapping[str, Table], statistic: Callable[[Mapping[str, Table]], float]) -> Interval:
    """The statistic of the tables, and its bootstrap interval over their common episodes."""
    names = ("episode", "transmitted", "missed", "rejection", "reason")
    columns = {method: {name: table[name] for name in names} for method, table in tables.items()}
    rows = {
        method: {episode: np.flatnonzero(table["episode"] == episode) for episode in np.unique(table["episode"])}
        for method, table in columns.items()
    }
    episodes = sorted(set.intersection(*(set(by_episode) for by_episode in rows.values())))
    rng = np.random.default_rng(0)
    values = []
    for drawn in rng.choice(episodes, size=(SAMPLES, len(episodes))):
        sample = {}
        for method, table in columns.items():
            chosen = np.concatenate([rows[method][episode] for episode in drawn])
            sample[method] = {name: column[chosen] for name, column in table.items()}
        values.append(statistic(sample))
    if np.isnan(values).mean() > _UNDEFINED:
        return Interval(statistic(columns), float("nan"), float("nan"))
    low, high = np.nanquantile(values, [0.025, 0.975])
    return Interval(statistic(columns), float(low), float(high))
