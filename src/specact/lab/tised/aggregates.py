"""Results at each setting of a lever: counts, means and their intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.lab.evaluation.metrics import Table
from specact.lab.statistics import Interval, bootstrap_interval, wilson
from specact.lab.tised.curves import Curve, Place, restricted_time_s
from specact.lab.tised.decomposition import Averages

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Aggregate:
    """One setting of a lever at one place.

    Attributes:
        place, strength: of the lever.
        execution: how chunks were executed; overlap: m; execute: n.
        n: episodes; successes: how many of them succeeded.
        success: rate, with Wilson's 95 % interval.
        score: mean over all episodes.
        chunks: N, mean over successes (31); NaN without one, as the next two.
        task_s: T_task, mean over successes (31) [s].
        chunk_s: T_chunk = T_task / N [s].
        restricted_s: restricted mean time: the mean over all episodes of the time of success, or of the limit without
            success [s], with a 95 % interval from 2,000 bootstrap samples. Unlike (31) it does not favour settings that
            fail on hard episodes.
        inference_s: mean T_inf [s].
        stall_s: mean time waited per chunk [s] (6).
        age_s: mean age of the observation when the first action of its chunk ran [s].
        jerk, path: means over episodes (32), in the task's units.
        transmission_rate: mean over episodes, NaN without a gate.
    """

    place: Place
    strength: float
    execution: str
    overlap: int
    execute: int
    n: int
    successes: int
    success: Interval
    score: float
    chunks: float
    task_s: float
    chunk_s: float
    restricted_s: Interval
    inference_s: float
    stall_s: float
    age_s: float
    jerk: float
    path: float
    transmission_rate: float

    @property
    def averages(self) -> Averages | None:
        """N and T_task, or None without a success."""
        return Averages(self.chunks, self.task_s) if self.successes else None


def aggregates_of(curve: Curve) -> list[Aggregate]:
    """The cells of a curve, the baseline first, from all episodes of each."""
    return [_aggregate(curve.place, table) for table in curve.cells]


def grouped(values: Sequence[Value], key: Callable[[Value], Key]) -> Iterator[tuple[Key, list[Value]]]:
    """Groups values by key, in the order of the keys' first occurrence."""
    groups: dict[Key, list[Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    yield from groups.items()


def _aggregate(place: Place, table: Table) -> Aggregate:
    won = table["success"].astype(bool)
    n, k = len(won), int(won.sum())
    chunks, task_s = _mean(table["chunks"][won]), _mean(table["task_s"][won])
    return Aggregate(
        place=place,
        strength=float(table["strength"][0]),
        execution=str(table["execution"][0]),
        overlap=int(table["overlap"][0]),
        execute=int(table["execute"][0]),
        n=n,
        successes=k,
        success=wilson(k, n),
        score=_mean(table["score"]),
        chunks=chunks,
        task_s=task_s,
        chunk_s=task_s / chunks,
        restricted_s=bootstrap_interval(restricted_time_s(table)),
        inference_s=_mean(table["inference_s"]),
        stall_s=float(table["stall_s"].sum() / max(1, table["chunks"].sum())),
        age_s=_mean(table["age_s"]),
        jerk=_mean(table["jerk"]),
        path=_mean(table["path"]),
        transmission_rate=_mean(table["transmission_rate"]),
    )


def _mean(values: NDArray[np.generic]) -> float:
    """The mean of the finite values; NaN if there are none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else float("nan")
