"""The analysis of a TISED sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specact.lab.evaluation.metrics import Table
from specact.lab.tised.aggregates import Aggregate, aggregates_of
from specact.lab.tised.contrasts import LeverContrast, contrasts_of
from specact.lab.tised.curves import sort_curves
from specact.lab.tised.findings import Finding, find_all
from specact.lab.tised.frontier import MethodContrast, compare_methods
from specact.lab.tised.heldout import HeldOut, HeldOutTime, hold_out, hold_out_time
from specact.lab.tised.optima import PlacedOptimum, optima_of


@dataclass(frozen=True)
class Analysis:
    """The results of a sweep.

    Attributes:
        cells: every setting of every lever at every place.
        contrasts: each against its lever's baseline.
        methods: the frontier's methods, pair by pair at every place.
        spots: the optimum of each lever, by end point.
        findings: the three of the paper.
        held_out, held_out_time: predictions of success and of task time.
    """

    cells: tuple[Aggregate, ...]
    contrasts: tuple[LeverContrast, ...]
    methods: tuple[MethodContrast, ...]
    spots: tuple[PlacedOptimum, ...]
    findings: tuple[Finding, ...]
    held_out: tuple[HeldOut, ...]
    held_out_time: tuple[HeldOutTime, ...]


def analyse(table: Table, baselines: Mapping[str, float]) -> Analysis:
    """Analyses a sweep.

    Within one place (lever, task, pace, idle mode, hardware, link) a strength determines the execution mode; two
    execution modes are two levers.

    Args:
        table: one row per episode, see :data:`~specact.lab.tised.curves.COLUMNS`.
        baselines: the strength of each lever at which it has no effect.

    Raises:
        DataError: for a table that is not one of a sweep.
        ConfigError: for a lever without a baseline, or a baseline that was not run.
    """
    curves = [(curve, aggregates_of(curve)) for curve in sort_curves(table, baselines)]
    cells = [cell for _, cells_of_curve in curves for cell in cells_of_curve]
    contrasts = contrasts_of(curves)
    spots = [spot for curve, cells_of_curve in curves for spot in optima_of(curve, cells_of_curve)]
    return Analysis(
        tuple(cells),
        tuple(contrasts),
        tuple(compare_methods(table)),
        tuple(spots),
        tuple(find_all(cells, contrasts, spots)),
        tuple(hold_out(cells, baselines)),
        tuple(hold_out_time(cells)),
    )


def as_rows(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Cells, contrasts, spots or predictions as flat rows, with nested names joined by a dot."""
    return [_flat(asdict(value)) for value in values]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, dict):
            # The parts of the place identify a row, so they have no prefix.
            row |= _flat(entry, "" if name == "place" else f"{prefix}{name}.")
        else:
            row[f"{prefix}{name}"] = entry
    return row
