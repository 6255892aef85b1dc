"""The files of a sweep: a manifest, and JSON lines of calibrated gates and of episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import DataError
from specact.files import write_whole
from specact.lab.evaluation.metrics import Table
from specact.lab.tised.trial import Row

MANIFEST, CALIBRATIONS, EPISODES = "manifest.json", "calibrations.jsonl", "episodes.jsonl"


def read_sweeps(folders: Sequence[Path]) -> tuple[Table, dict[str, float], list[dict[str, Any]]]:
    """The episodes of one or more sweeps as one table, the baseline of every lever, and the manifests.

    Raises:
        DataError: if a folder holds no sweep, or two sweeps have different baselines of one lever.
    """
    rows: list[Row] = []
    baselines: dict[str, float] = {}
    manifests = []
    for folder in folders:
        manifest = read_manifest(folder)
        rows += read_rows(folder / EPISODES)
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
    """The calibrated gates of sweeps, see :func:`~specact.lab.tised.calibration.calibrate_gate`."""
    return [row for folder in folders for row in read_rows(folder / CALIBRATIONS)]


def read_manifest(folder: Path) -> dict[str, Any]:
    """A sweep's manifest.

    Raises:
        DataError: if the folder holds none.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise DataError(f"{folder} holds no sweep; make one with: specact tised sweep --out {folder}")
    try:
        manifest = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file} cannot be read ({error}); run the sweep again in another folder") from None
    if "baselines" not in manifest:
        raise DataError(f"{folder} is not the folder of a sweep; give one that specact tised sweep wrote")
    return manifest


def to_line(row: Row) -> str:
    """A row as a line of JSON, with null for NaN."""
    known = {name: None if value != value else value for name, value in row.items()}
    return json.dumps(known, allow_nan=False) + "\n"


def cut_torn_line(file: Path) -> None:
    """Removes an incomplete last line, which a kill may leave."""
    if file.exists() and not (text := file.read_text()).endswith("\n"):
        write_whole(file, text[: text.rfind("\n") + 1].encode())


def read_rows(file: Path) -> list[Row]:
    """The complete lines of a file."""
    if not file.exists():
        return []
    text = file.read_text()
    try:
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except ValueError as error:
        raise DataError(f"{file} is damaged ({error}); remove the damaged lines, or the folder") from None
    return [{name: float("nan") if value is None else value for name, value in row.items()} for row in rows]
