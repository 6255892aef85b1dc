"""Groups the episodes of a TISED sweep into cells and into curves over a lever's strength."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError, unknown_name
from specact.lab.evaluation.metrics import Table
from specact.lab.tised.drivers import ON_BOARD

COLUMNS = (
    "lever", "strength", "task", "pace", "idle", "static", "hardware", "kappa", "link", "execution", "overlap",
    "execute", "episode", "success", "score", "task_s", "limit_s", "chunks", "inference_s", "stall_s", "age_s", "jerk",
    "path", "transmission_rate",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Place:
    """The conditions under which a lever was applied.

    Attributes:
        lever: its name.
        task: its name.
        pace: rate v of change of the world, in the task's own unit.
        idle: the robot's behaviour while it waits, see :class:`~specact.lab.envs.moving.MovingWorld`.
        static: whether the world stands still while the robot waits: then the end point is task time, else success.
            Pace 0 is not sufficient: a ball rolls on while the robot waits.
        kappa: factor on latency.
        hardware: the profile's name.
        link: to the server, :data:`ON_BOARD` for none.
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
        """The task, its pace, and the idle mode."""
        return f"{self.task} at pace {self.pace:g}, idle {self.idle}"

    @property
    def machine(self) -> str:
        """The conditions of latency: the hardware, and the link if there is one."""
        return self.hardware if self.link == ON_BOARD else f"{self.hardware} over {self.link}"

    def __str__(self) -> str:
        return f"{self.lever} on {self.world}, {self.machine}"


@dataclass(frozen=True)
class Curve:
    """One lever at one place, from its baseline to its strongest setting, paired by episode.

    Attributes:
        place: of the lever.
        strengths: ``[S]``, the baseline first, then by distance from it.
        cells: all episodes of each, ``[S]`` tables with :data:`COLUMNS`.
        success: of the common episodes of all settings, bool ``[S, E]``.
        task_s: time of success, or of the episode's end, ``[S, E]`` [s].
        restricted_s: time of success, or the limit without success, ``[S, E]`` [s].
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
        baselines: the strength of each lever at which it has no effect.

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
    for i, conditions in enumerate(zip(*(table[name].tolist() for name in Place.__dataclass_fields__), strict=True)):
        rows.setdefault(Place(*conditions), []).append(i)
    return [_curve(place, _select(table, np.array(rows[place])), baselines) for place in sorted(rows)]


def restricted_time_s(table: Table) -> NDArray[np.float64]:
    """Time of success, or the limit without success [s]; its mean is the restricted mean time."""
    return np.where(table["success"], np.minimum(table["task_s"], table["limit_s"]), table["limit_s"])


def _curve(place: Place, table: Table, baselines: Mapping[str, float]) -> Curve:
    if place.lever not in baselines:
        raise unknown_name("lever without a baseline", place.lever, baselines)
    base = baselines[place.lever]
    present = set(table["strength"].tolist())
    if base not in present:
        raise ConfigError(
            f"{place}: the baseline {base:g} was not run, only {', '.join(f'{value:g}' for value in sorted(present))}; "
            "run it too, because a lever is compared with its baseline"
        )
    strengths = tuple(sorted(present, key=lambda strength: (abs(strength - base), strength)))
    cells = tuple(_cell(place, _select(table, table["strength"] == strength)) for strength in strengths)
    common = set.intersection(*(set(cell["episode"].tolist()) for cell in cells))
    if not common:
        raise DataError(f"{place}: no episode was run at all of its settings, so nothing can be paired; run it again")
    paired = [_select(cell, np.isin(cell["episode"], list(common))) for cell in cells]
    return Curve(
        place,
        strengths,
        cells,
        success=np.stack([cell["success"].astype(bool) for cell in paired]),
        task_s=np.stack([cell["task_s"] for cell in paired]),
        restricted_s=np.stack([restricted_time_s(cell) for cell in paired]),
    )


def _cell(place: Place, table: Table) -> Table:
    """One setting's episodes, sorted; refuses duplicates."""
    table = _select(table, np.argsort(table["episode"], kind="stable"))
    duplicates = table["episode"][:-1][np.diff(table["episode"]) == 0]
    if len(duplicates):
        raise DataError(
            f"{place}: episode {duplicates[0]} occurs twice at strength {table['strength'][0]:g}; either a row was "
            "written twice, or two execution modes have the same lever name; give each its own name"
        )
    return table


def _select(table: Table, rows: NDArray[np.generic]) -> Table:
    return {name: table[name][rows] for name in COLUMNS}
