"""The files of a sweep: a manifest, and JSON lines of calibrated gates and of episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import DataError
from specact.lab.evaluation.metrics import Table
from specact.lab.rollout.folder import JsonLines, Row, RunFolder

CALIBRATIONS, EPISODES = "calibrations.jsonl", "episodes.jsonl"


def sweep_folder(path: Path) -> RunFolder:
    """The folder of a sweep."""
    return RunFolder(path, "sweep")


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
        manifest = sweep_folder(folder).manifest()
        rows += JsonLines(folder / EPISODES).read()
        manifests.append(manifest)
        for lever, baseline in manifest["baselines"].items():
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


def as_rows(values: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results of an analysis as flat rows: nested names are joined by a dot, but for the parts of a place."""
    return [_flat(value) for value in values]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, dict):
            # The parts of the place identify a row, so they have no prefix.
            row |= _flat(entry, "" if name == "place" else f"{prefix}{name}.")
        else:
            row[f"{prefix}{name}"] = entry
    return row
