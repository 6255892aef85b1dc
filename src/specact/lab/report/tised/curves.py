"""Figures of a sweep: times, motion and success over a lever's strength."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from specact.lab.report.drawing import INK, MUTED, Drawing, Style, blank, legend_below, style_of
from specact.lab.rollout.methods import METHODS
from specact.lab.tised.aggregates import Aggregate, grouped
from specact.lab.tised.analysis import Analysis, as_rows
from specact.lab.tised.curves import Place
from specact.lab.tised.optima import PlacedOptimum

_STYLES = tuple(map(style_of, METHODS))


def series(number: int) -> Style:
    """The style of the n-th curve, where curves are no methods: the methods' styles in their order."""
    return _STYLES[number % len(_STYLES)]


def label_settings(axes: Axes, strengths: Sequence[float], lever: str) -> None:
    """Labels settings as equidistant ticks, from the baseline to the strongest."""
    axes.set_xticks(range(len(strengths)), [f"{strength:g}" for strength in strengths])
    axes.set_xlabel(f"{lever}, from the baseline to the strongest setting")


def stem(*parts: object) -> str:
    """Part of a file name."""
    text = "-".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
    # A link may be a path.
    return re.sub(r"[^\w.+=-]+", "-", text)


_TIMES = (("chunks", "N"), ("chunk_s", "T chunk"), ("task_s", "T task"))
_MOTIONS = (("jerk", "jerk"), ("path", "path length"))


def draw_curves(analysis: Analysis) -> Iterator[Drawing]:
    """N, T_chunk and T_task over each lever's strength, where its baseline has successes; jerk and path over hardware.

    Figures are drawn under :func:`~specact.lab.report.drawing.style`.
    """
    for place, cells in grouped(analysis.cells, lambda cell: cell.place):
        if len(cells) > 1 and cells[0].successes:
            yield _times(place, cells, {s.end_point: s for s in analysis.spots if s.place == place})
    for _, cells in grouped(analysis.cells, lambda cell: (cell.place.lever, cell.place.world)):
        for name, label in _MOTIONS:
            if len({cell.strength for cell in cells}) > 1:
                yield _motion(cells[0].place, cells, name, label)


def _times(place: Place, cells: Sequence[Aggregate], spots: dict[str, PlacedOptimum]) -> Drawing:
    figure, axes = blank()
    x = np.arange(len(cells))
    rows: list[dict[str, Any]] = [
        {"strength": cell.strength, "n": cell.n, "successes": cell.successes} for cell in cells
    ]
    for number, (name, label) in enumerate(_TIMES):
        values = np.array([getattr(cell, name) for cell in cells])
        style = series(number)
        axes.plot(
            x, values / values[0], color=style.light, marker=style.marker, markersize=4, linewidth=1.4, label=label
        )
        for row, value in zip(rows, values.tolist(), strict=True):
            row |= {name: value, f"{name}.normalised": value / values[0]}
    mean, low, high = (np.array([getattr(cell.restricted_s, k) for cell in cells]) for k in ("mean", "low", "high"))
    axes.plot(x, mean / mean[0], color=INK.light, linestyle="--", linewidth=1.2, label="restricted mean time")
    axes.fill_between(x, low / mean[0], high / mean[0], color=INK.light, alpha=0.08, linewidth=0)
    for i, row in enumerate(rows):
        row |= {"restricted_s": mean[i], "restricted_s.low": low[i], "restricted_s.high": high[i]}
    strengths = [cell.strength for cell in cells]
    for end_point, curve in (("task_s", [cell.task_s for cell in cells]), ("restricted_s", mean.tolist())):
        at = strengths.index(spots[end_point].spot.where)
        axes.plot(at, curve[at] / curve[0], "o", color=MUTED.light, mfc="none", markersize=11)
    axes.set_ylabel("over the baseline's")
    label_settings(axes, strengths, place.lever)
    legend_below(figure, columns=2)
    caption = (
        f"{_episodes(cells)}; N, T chunk and T task are means over successes, restricted mean time is over all "
        "episodes with time-outs counted, with its 95 % interval. Rings: the sweet spots, "
        f"{spots['task_s'].spot.where:g} for T task and {_spot_text(spots['restricted_s'])} for restricted mean time."
    )
    name = stem("tised", place.lever, place.task, place.pace, place.idle, place.machine)
    return Drawing(name, f"{place}: chunks and times", caption, figure, rows)


def _motion(place: Place, cells: Sequence[Aggregate], name: str, label: str) -> Drawing:
    figure, axes = blank()
    strengths = list(dict.fromkeys(cell.strength for cell in cells))
    for number, (machine, row) in enumerate(grouped(cells, lambda cell: cell.place.machine)):
        style = series(number)
        axes.plot(
            [strengths.index(cell.strength) for cell in row],
            [getattr(cell, name) for cell in row],
            color=style.light, marker=style.marker, markersize=4, linewidth=1.4, label=machine,
        )  # fmt: skip
    axes.set_ylabel(f"{label} [task's units]")
    label_settings(axes, strengths, place.lever)
    legend_below(figure, columns=2)
    columns = ("lever", "task", "pace", "idle", "hardware", "link", "strength", "n", name)
    rows = [{key: row[key] for key in columns} for row in as_rows(cells)]
    caption = f"{_episodes(cells)}, means over all of them."
    title = f"{label.capitalize()}: {place.lever} on {place.world}"
    return Drawing(stem("tised", name, place.lever, place.task, place.pace, place.idle), title, caption, figure, rows)


def _episodes(cells: Sequence[Aggregate]) -> str:
    counts = sorted({cell.n for cell in cells})
    return f"{counts[0]} episodes per point" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} episodes per point"


def _spot_text(spot: PlacedOptimum) -> str:
    share = spot.support[spot.strengths.index(spot.spot.where)]
    return f"{spot.spot.where:g} (best in {100 * share:.0f} % of the bootstrap samples)"


def draw_staleness(cells: Sequence[Aggregate]) -> Iterator[Drawing]:
    """Success over ``v`` times the observation's age, for every lever with several settings and every moving task.

    Args:
        cells: of a sweep, each curve's from the baseline to its strongest setting.
    """
    moving = [cell for cell in cells if cell.place.pace > 0.0]
    for (lever, task, idle), family in grouped(moving, lambda c: (c.place.lever, c.place.task, c.place.idle)):
        if len({cell.strength for cell in family}) == 1:
            continue
        figure, axes = blank()
        rows: list[dict[str, Any]] = []
        for number, (strength, curve) in enumerate(grouped(family, lambda cell: cell.strength)):
            points = sorted((_staleness_row(cell) for cell in curve), key=lambda row: float(row["staleness"]))
            x, y, low, high = ([row[key] for row in points] for key in ("staleness", "success", "low", "high"))
            style = series(number)
            axes.plot(x, y, color=style.light, marker=style.marker, markersize=4, linewidth=1.4, label=f"{strength:g}")
            axes.fill_between(x, low, high, color=style.light, alpha=0.12, linewidth=0)
            rows += points
        axes.locator_params(axis="x", nbins=5)
        axes.set(xlabel="pace x age of the observation [task's unit]", ylabel="success", ylim=(0, 1.02))
        legend_below(figure)
        paces = ", ".join(f"{pace:g}" for pace in sorted({cell.place.pace for cell in family}))
        machines = ", ".join(dict.fromkeys(cell.place.machine for cell in family))
        caption = (
            f"One curve per setting of {lever}; a point is one pace ({paces}) on one machine ({machines}), "
            f"{family[0].n} episodes. Bands: Wilson's 95 % interval."
        )
        name = stem("tised-staleness", lever, task, idle)
        yield Drawing(name, f"Success over staleness: {lever} on {task}, idle {idle}", caption, figure, rows)


def _staleness_row(cell: Aggregate) -> dict[str, Any]:
    return {
        "strength": cell.strength,
        "pace": cell.place.pace,
        "hardware": cell.place.hardware,
        "link": cell.place.link,
        "age_s": cell.age_s,
        "stall_s": cell.stall_s,
        "staleness": cell.place.pace * cell.age_s,
        "success": cell.success.mean,
        "low": cell.success.low,
        "high": cell.success.high,
        "n": cell.n,
    }
