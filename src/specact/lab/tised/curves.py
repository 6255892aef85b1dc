"""The episodes of a TISED sweep, sorted into cells and into curves over a lever's strength."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError, unknown_name
from specact.lab.evaluation.metrics import Table

COLUMNS = (
    "lever", "strength", "task", "pace", "idle", "static", "hardware", "kappa", "link", "execution", "overlap",
    "execute", "episode", "success", "score", "task_s", "limit_s", "chunks", "inference_s", "stall_s", "age_s", "jerk",
    "path", "transmission_rate",
)  # fmt: skip


# A policy that asks nobody.
ON_BOARD = "none"


@dataclass(frozen=True, order=True)
class Place:
    """Where a lever was pulled.

    Attributes:
        lever: its name.
        task: its name.
        pace: rate v of change of the world, in the task's own unit.
        idle: what the robot does while it waits, see :class:`~specact.lab.envs.moving.MovingWorld`.
        static: whether the world stands still while the robot waits: task time is what counts then, and success where
            it does not. Pace 0 is not enough: a ball rolls on while the robot waits.
        kappa: factor on latency.
        hardware: the profile's name.
        link: to what is at the far end, :data:`ON_BOARD` for none.
    """

    lever: str
    task: str
    pace: float
    idle: str
    static: bool
    kappa: float
    hardware: str
    link: str

    @property
    def world(self) -> str:
        """The task, how fast it changes, and what the robot does while it waits."""
        return f"{self.task} at pace {self.pace:g}, idle {self.idle}"

    @property
    def machine(self) -> str:
        """What decides on latency: the hardware, and the link where there is one."""
        return self.hardware if self.link == ON_BOARD else f"{self.hardware} over {self.link}"

    def __str__(self) -> str:
        return f"{self.lever} on {self.world}, {self.machine}"


@dataclass(frozen=True)
class Curve:
    """One lever at one place, from its baseline to its strongest setting, paired by episode.

    Attributes:
        place: where.
        strengths: ``[S]``, the baseline first, then by distance from it.
        cells: all episodes of each, ``[S]`` tables with :data:`COLUMNS`.
        success: of the episodes that all settings ran, bool ``[S, E]``.
        task_s: time of success, or at which the episode ended, ``[S, E]`` [s].
        restricted_s: time of success, and the limit where there was none, ``[S, E]`` [s].
    """

    place: Place
    strengths: tuple[float, ...]
    cells: tuple[Table, ...]
    success: NDArray[np.bool_]
    task_s: NDArray[np.float64]
    restricted_s: NDArray[np.float64]


def sort_curves(table: Table, baselines: Mapping[str, float]) -> list[Curve]:
    """Sorts a sweep's episodes into curves, by place.

    Args:
        table: one row per episode, with :data:`COLUMNS`.
        baselines: the strength of each lever at which it does nothing.

    Raises:
        DataError: for a table that lacks columns, has an episode twice, or settings without a common episode.
        ConfigError: for a lever without a baseline, or a baseline that was not run.
    """
    missing = [name for name in COLUMNS if name not in table]
    if missing:
        raise DataError(
            f"the episode table lacks the columns {', '.join(missing)}; it is not the table of a TISED sweep"
        )
    rows: dict[Place, list[int]] = {}
    for i, found in enumerate(zip(*(table[name].tolist() for name in Place.__dataclass_fields__), strict=True)):
        rows.setdefault(Place(*found), []).append(i)
    return [_curve(place, _take(table, np.array(rows[place])), baselines) for place in sorted(rows)]


def restricted_time_s(table: Table) -> NDArray[np.float64]:
    """Time of success, and the limit where there was none [s]; its mean is the restricted mean time."""
    return np.where(table["success"], np.minimum(table["task_s"], table["limit_s"]), table["limit_s"])


def _curve(place: Place, table: Table, baselines: Mapping[str, float]) -> Curve:
    if place.lever not in baselines:
        raise unknown_name("lever without a baseline", place.lever, baselines)
    base = baselines[place.lever]
    found = set(table["strength"].tolist())
    if base not in found:
        raise ConfigError(
            f"{place}: the baseline {base:g} was not run, only {', '.join(f'{value:g}' for value in sorted(found))}; "
            "run it too, because a lever is compared with its baseline"
        )
    strengths = tuple(sorted(found, key=lambda strength: (abs(strength - base), strength)))
    cells = tuple(_cell(place, _take(table, table["strength"] == strength)) for strength in strengths)
    common = set.intersection(*(set(cell["episode"].tolist()) for cell in cells))
    if not common:
        raise DataError(f"{place}: no episode was run at all of its settings, so nothing can be paired; run it again")
    paired = [_take(cell, np.isin(cell["episode"], list(common))) for cell in cells]
    return Curve(
        place,
        strengths,
        cells,
        success=np.stack([cell["success"].astype(bool) for cell in paired]),
        task_s=np.stack([cell["task_s"] for cell in paired]),
        restricted_s=np.stack([restricted_time_s(cell) for cell in paired]),
    )


def _cell(place: Place, table: Table) -> Table:
    """One setting's episodes, in order; each once, and all run alike."""
    table = _take(table, np.argsort(table["episode"], kind="stable"))
    again = table["episode"][:-1][np.diff(table["episode"]) == 0]
    if len(again):
        raise DataError(
            f"{place}: episode {again[0]} occurs twice at strength {table['strength'][0]:g}; either a row was "
            "written twice, or two execution modes have the same lever name; give each its own name"
        )
    return table


def _take(table: Table, rows: NDArray[np.generic]) -> Table:
    return {name: table[name][rows] for name in COLUMNS}
