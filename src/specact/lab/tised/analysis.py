"""The analysis of sweeps: episodes sorted into curves over a lever's strength, their cells, and paired contrasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError, unknown_name
from specact.lab.data.folder import JsonLines, Row
from specact.lab.rollout.statistics import Contrast, Interval, bootstrap_interval, contrast, holm, wilson
from specact.lab.rollout.steps import Table
from specact.lab.tised.drivers import ON_BOARD
from specact.lab.tised.equations import Decomposition, decompose
from specact.lab.tised.sweep import CALIBRATIONS, EPISODES, sweep_folder


@dataclass(frozen=True, order=True)
class Place:
    """The conditions under which a lever was applied: its name, the world, and what latency depends on."""

    lever: str
    task: str
    pace: float  # rate v of change of the world, in the task's own unit
    idle: str  # the robot's behaviour while it waits, see MovingWorld
    # Whether the world stands still while the robot waits: then the end point is task time, else success. Pace 0 is not
    # sufficient: a ball rolls on while the robot waits.
    static: bool
    kappa: float  # factor on stored times; 0 where the hardware has absolute ones
    hardware: str  # the profile's name
    link: str  # to the server, ON_BOARD for none

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
class Cell:
    """One setting of a lever at one place, over all its episodes."""

    place: Place
    strength: float
    execution: str  # how chunks were executed
    overlap: int  # m
    execute: int  # n
    n: int  # episodes
    successes: int
    success: Interval  # Wilson's
    score: float  # mean over all episodes
    # N, T_task and T_chunk = T_task / N [s], means over successes (31); NaN without one.
    chunks: float
    task_s: float
    chunk_s: float
    # The mean over all episodes of the time of success, or of the limit without success [s], with an interval from
    # bootstrap samples. Unlike (31) it does not favour settings that fail on hard episodes.
    restricted_s: Interval
    inference_s: float  # mean T_inf [s]
    stall_s: float  # mean time waited per chunk [s] (6)
    age_s: float  # mean age of the observation when the first action of its chunk ran [s]
    jerk: float  # as path a mean over episodes (32), in the task's units
    path: float
    sent: float  # mean over episodes, NaN without a gate
    # Where one chunk follows another, means over episodes; NaN in sweeps of earlier versions.
    seam_step: float
    seam_jerk: float

    @classmethod
    def of(cls, place: Place, table: Table) -> Cell:
        """The cell of these episodes, a row each."""
        won = table["success"].astype(bool)
        n, k = len(won), int(won.sum())
        chunks, task_s = _mean(table["chunks"][won]), _mean(table["task_s"][won])
        means = ("score", "inference_s", "age_s", "jerk", "path", "sent", "seam_step", "seam_jerk")
        return cls(
            place, float(table["strength"][0]), str(table["execution"][0]), int(table["overlap"][0]),
            int(table["execute"][0]), n, k, wilson(k, n), chunks=chunks, task_s=task_s, chunk_s=task_s / chunks,
            restricted_s=bootstrap_interval(_restricted_time_s(table)),
            stall_s=float(table["stall_s"].sum() / max(1, table["chunks"].sum())),
            **{name: _mean(table[name]) if name in table else float("nan") for name in means},
        )  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One lever at one place, from its baseline to its strongest setting, paired by episode.

    Attributes:
        place: of the lever.
        cells: the baseline first, then by distance from it, ``[S]``.
        success: of the common episodes of all settings, bool ``[S, E]``.
        task_s: time of success, or of the episode's end, ``[S, E]`` [s].
        restricted_s: time of success, or the limit without success, ``[S, E]`` [s].
        score, jerk: as of :class:`~specact.lab.rollout.episode.Episode`, ``[S, E]``.
    """

    place: Place
    cells: tuple[Cell, ...]
    success: NDArray[np.bool_]
    task_s: NDArray[np.float64]
    restricted_s: NDArray[np.float64]
    score: NDArray[np.float64]
    jerk: NDArray[np.float64]


@dataclass(frozen=True)
class LeverContrast:
    """One setting against the baseline, or its neighbour, at the same place, on the same episodes.

    Attributes:
        place, strength, baseline: of the lever.
        episodes: number of common ones; both: of those in which both succeeded.
        success, restricted_s: differences of success and of restricted mean time [s], setting minus baseline.
        both_s: difference of task time over the episodes in which both succeeded [s], or None if there are none.
        own_s: difference of the means over each one's own successes (31) [s], which favour settings that fail where a
            task is long; None where one has no success.
        score, jerk: differences of their means over all episodes; jerk is None where the task has no end effector.
        success_p, restricted_p, both_p: after Holm's correction over all contrasts of the sweep; 1 without a test.
        speedup: of the means over each one's own successes (31), in factors (5); None where one has no success.
    """

    place: Place
    strength: float
    baseline: float
    episodes: int
    success: Contrast
    restricted_s: Contrast
    both_s: Contrast | None
    both: int
    own_s: Contrast | None
    score: Contrast
    jerk: Contrast | None
    speedup: Decomposition | None
    success_p: float = 1.0
    restricted_p: float = 1.0
    both_p: float = 1.0

    def explain(self) -> str:
        """Describes the factors of the speed-up and the differences, with numbers."""
        text = f"at {self.strength:g} against {self.baseline:g} "
        text += self.speedup.explain() if self.speedup else "one of the two never succeeds, so no task time compares"
        text += f"; restricted mean time changes by {in_words(self.restricted_s, self.restricted_p, ' s')}"
        if self.both_s is not None:
            text += f", task time over the {self.both} episodes in which both succeed by "
            text += in_words(self.both_s, self.both_p, " s")
        return f"{text}, success by {in_words(self.success, self.success_p)}"


def read_sweeps(folders: Sequence[Path]) -> tuple[Table, dict[str, float], list[dict[str, Any]]]:
    """The episodes of one or more sweeps as one table, the baseline of every lever, and the manifests.

    Raises:
        DataError: if a folder holds no sweep, or two sweeps have different baselines of one lever.
        ConfigError: for a damaged manifest, or one of another kind of run.
    """
    rows: list[Row] = []
    baselines: dict[str, float] = {}
    manifests = []
    for folder in folders:
        if not (folder / "manifest.json").is_file():
            raise DataError(f"{folder} holds no sweep; make one with: specact tised sweep --out {folder}")
        manifests.append(sweep_folder(folder).manifest())
        # Until 0.2 the share that was sent was called transmission_rate.
        rows += [{name.replace("transmission_rate", "sent"): value for name, value in row.items()}
                 for row in JsonLines(folder / EPISODES).read()]  # fmt: skip
        for lever, baseline in manifests[-1]["baselines"].items():
            if baselines.setdefault(lever, baseline) != baseline:
                raise DataError(
                    f"{folder}: the baseline of {lever!r} is {baseline:g}, that of another sweep {baselines[lever]:g}; "
                    "analyse them separately"
                )
    if not rows:
        raise DataError(f"there are no finished episodes in {', '.join(map(str, folders))}; run the sweep again")
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}, baselines, manifests


def read_calibrations(folders: Sequence[Path]) -> list[Row]:
    """The calibrated gates of sweeps, see :func:`~specact.lab.tised.sweep.calibrate_gate`."""
    return [row for folder in folders for row in JsonLines(folder / CALIBRATIONS).read()]


def sort_curves(table: Table, baselines: Mapping[str, float]) -> list[Curve]:
    """Sorts a sweep's episodes into curves, by place.

    Args:
        table: one row per episode, see :func:`~specact.lab.tised.sweep.run_trial`.
        baselines: the strength of each lever at which it has no effect.

    Raises:
        DataError: for a table that has an episode twice, or settings without a common episode.
        ConfigError: for a lever without a baseline, or a baseline that was not run.
    """
    rows: dict[Place, list[int]] = {}
    for i, conditions in enumerate(zip(*(table[name].tolist() for name in Place.__dataclass_fields__), strict=True)):
        rows.setdefault(Place(*conditions), []).append(i)
    return [_curve(place, _select(table, np.array(rows[place])), baselines) for place in sorted(rows)]


def contrasts_of(curves: Sequence[Curve]) -> list[LeverContrast]:
    """Every setting of every curve against its baseline, curve by curve in order of strength."""
    rows = [_contrast(curve, i) for curve in curves for i in range(1, len(curve.cells))]
    corrected: dict[str, Any] = {}
    for name, end_point in (("success_p", "success"), ("restricted_p", "restricted_s"), ("both_p", "both_s")):
        tests: list[Contrast | None] = [getattr(row, end_point) for row in rows]
        corrected[name] = holm([test.p if test else 1.0 for test in tests])
    return [replace(row, **{name: p[i] for name, p in corrected.items()}) for i, row in enumerate(rows)]


def neighbours_of(curves: Sequence[Curve]) -> list[LeverContrast]:
    """Every setting but the first two against the one before it, without correction of p: where a curve dips, it rises.

    The second one's neighbour is the baseline, see :func:`contrasts_of`.
    """
    return [_contrast(curve, i, i - 1) for curve in curves for i in range(2, len(curve.cells))]


def in_words(result: Contrast, corrected_p: float, unit: str = "") -> str:
    """A difference with its interval and its corrected p-value."""
    difference = result.difference
    return f"{difference.mean:+.3f}{unit} ({difference.low:+.3f} to {difference.high:+.3f}, p = {corrected_p:.2g})"


def as_row(value: Mapping[str, Any], prefix: str = "") -> Row:
    """A result as a flat row: nested names are joined by a dot, but for the parts of a place, which identify it."""
    row: Row = {}
    for name, entry in value.items():
        nested = isinstance(entry, dict)
        row |= as_row(entry, "" if name == "place" else f"{prefix}{name}.") if nested else {f"{prefix}{name}": entry}
    return row


def _contrast(curve: Curve, i: int, to: int = 0) -> LeverContrast:
    """The contrast of one setting and another, with uncorrected p-values."""
    success, both = curve.success.astype(np.float64), curve.success[i] & curve.success[to]
    base, cell = curve.cells[to], curve.cells[i]
    comparable = bool(base.successes and cell.successes)
    return LeverContrast(
        curve.place, cell.strength, base.strength, len(both), contrast(success[i], success[to]),
        contrast(curve.restricted_s[i], curve.restricted_s[to]),
        contrast(curve.task_s[i][both], curve.task_s[to][both]) if both.any() else None, int(both.sum()),
        _own_s(success[[i, to]], curve.task_s[[i, to]]) if comparable else None,
        contrast(curve.score[i], curve.score[to]),
        contrast(curve.jerk[i], curve.jerk[to]) if np.isfinite(curve.jerk[[i, to]]).all() else None,
        decompose(base.chunks, base.task_s, cell.chunks, cell.task_s) if comparable else None,
    )  # fmt: skip


def _own_s(success: NDArray[np.float64], task_s: NDArray[np.float64], samples: int = 2000) -> Contrast:
    """The difference of two settings' means over their own successes (31), first minus second, of ``[2, E]`` each.

    Its episodes are not the same, so interval and p are of bootstrap samples of the episodes, both settings together.
    """
    episodes = success.shape[1]
    weights = np.random.default_rng(0).multinomial(episodes, np.full(episodes, 1.0 / episodes), size=samples)
    hits, seconds = success @ weights.T, (success * task_s) @ weights.T
    drawn = seconds / np.where(hits > 0.0, hits, np.nan)
    differences = drawn[0] - drawn[1]
    differences = differences[np.isfinite(differences)]
    means = (success * task_s).sum(axis=1) / success.sum(axis=1)
    low, high = np.quantile(differences, [0.025, 0.975])
    beyond = min((differences <= 0.0).sum(), (differences >= 0.0).sum())
    p = min(1.0, 2.0 * (beyond + 1) / (len(differences) + 1))
    return Contrast(Interval(float(means[0] - means[1]), float(low), float(high)), float(p), "bootstrap")


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
    strengths = sorted(present, key=lambda strength: (abs(strength - base), strength))
    tables = [_setting(place, _select(table, table["strength"] == strength)) for strength in strengths]
    common = set.intersection(*(set(rows["episode"].tolist()) for rows in tables))
    if not common:
        raise DataError(f"{place}: no episode was run at all of its settings, so nothing can be paired; run it again")
    paired = [_select(rows, np.isin(rows["episode"], list(common))) for rows in tables]
    return Curve(
        place,
        tuple(Cell.of(place, rows) for rows in tables),
        success=np.stack([rows["success"].astype(bool) for rows in paired]),
        task_s=np.stack([rows["task_s"] for rows in paired]),
        restricted_s=np.stack([_restricted_time_s(rows) for rows in paired]),
        score=np.stack([rows["score"] for rows in paired]),
        jerk=np.stack([rows["jerk"] for rows in paired]),
    )


def _setting(place: Place, table: Table) -> Table:
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
    return {name: column[rows] for name, column in table.items()}


def _restricted_time_s(table: Table) -> NDArray[np.float64]:
    return np.where(table["success"], np.minimum(table["task_s"], table["limit_s"]), table["limit_s"])


def _mean(values: NDArray[np.generic]) -> float:
    """The mean of the finite values; NaN if there are none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else float("nan")
