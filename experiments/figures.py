"""How every picture of a report is drawn: a line or points of each method in its colour, its name beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specact.lab.report.figures import INK, style_of

MOST = 7  # series of one picture
_LINE = 0.18  # inches, for a label


class Point(NamedTuple):
    """A value with its interval, over a cost."""

    x: float
    y: float
    low: float
    high: float


def points_of(rows: Mapping[float, Mapping[str, Any]]) -> list[Point]:
    """Rates or means with their intervals, by cost."""
    return [Point(x, row.get("rate", row.get("mean")), row["low"], row["high"]) for x, row in rows.items()]


def draw_series(
    series: Mapping[str, Sequence[Point]], x: str, y: str, title: str = "", names: Mapping[str, str] | None = None
) -> Figure:
    """One picture of at most seven methods; see :func:`add_series`."""
    figure = Figure(figsize=(4.8, 3.6), layout="constrained")
    add_series(figure.subplots(), series, x, y, title, names)
    return figure


def add_series(
    axes: Axes, series: Mapping[str, Sequence[Point]], x: str, y: str, title: str = "",
    names: Mapping[str, str] | None = None, lead: bool = True,
) -> None:  # fmt: skip
    """Draws methods, each with 95 % intervals and its name at the right edge, in the height of its last point.

    Args:
        series: points of each method, which choose its colour by its name; one without points is left out.
        x, y: what the axes are, in words, with the unit.
        names, lead: what to write instead of a method's name, and whether with a line to its point.
    """
    series = {method: points for method, points in series.items() if points}
    assert len(series) <= MOST, f"{len(series)} series in one picture; at most {MOST} can be told apart"
    ends = []
    for method, unordered in series.items():
        points, (colour, marker) = sorted(unordered), style_of(method)
        xs, ys, lows, highs = (np.array([point[column] for point in points]) for column in range(4))
        axes.errorbar(
            xs, ys, [ys - lows, highs - ys], color=colour, marker=marker, ms=5, lw=1.4, elinewidth=0.8, capsize=2,
        )  # fmt: skip
        ends.append((ys[-1], xs[-1], (names or {}).get(method, method), colour))
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.margins(x=0.04, y=0.08)
    _label(axes, ends, lead)


def _label(axes: Axes, ends: Sequence[tuple[float, float, str, str]], lead: bool) -> None:
    """Names to the right of the axes, moved apart where they would overlap, with lines to the last points."""
    bottom, top = axes.get_ylim()
    line = _LINE * axes.figure.dpi / axes.bbox.height
    at = np.array(sorted((y - bottom) / (top - bottom) for y, *_ in ends))
    for _ in range(200):
        gaps = np.maximum(0.0, line - np.diff(at)) / 2
        at[:-1] -= gaps
        at[1:] += gaps
    at += max(0.0, -at[0]) - max(0.0, at[-1] - 1.0)
    for height, (y, x, name, colour) in zip(at, sorted(ends), strict=True):
        axes.annotate(
            name, (x, y), (1.03, height), textcoords="axes fraction", color=colour, fontsize=9, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6 * lead, "shrinkA": 1, "shrinkB": 2},
            annotation_clip=False,
        )  # fmt: skip
