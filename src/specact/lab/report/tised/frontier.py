"""Which method to take on which link: success, or time, over the round trip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specact.lab.report.drawing import Drawing, blank, legend_below, style_of
from specact.lab.report.tised.curves import stem
from specact.lab.statistics import Interval
from specact.lab.tised.aggregates import Aggregate, grouped
from specact.lab.tised.curves import ON_BOARD
from specact.lab.tised.frontier import FRONTIER, method_of

_END_POINTS = (("success", "success"), ("restricted_s", "restricted mean time [s]"))
# Links that were recorded have no round trip of their own, only a mean one: no curve leads through them.
_RECORDED = ("rtt:", "mahimahi:")


def draw_frontier(cells: Sequence[Aggregate], rtt_ms: Mapping[str, float]) -> Iterator[Drawing]:
    """Success and restricted mean time over the round trip, a curve per method, for every world and hardware.

    Args:
        cells: of a sweep; those that are a method of the frontier are drawn.
        rtt_ms: mean round trip of each link, by name [ms]; cells over others are left out. What needs no link is a
            line across.
    """
    known = {ON_BOARD, *rtt_ms}
    methods = [(method_of(cell.place.lever, cell.strength), cell) for cell in cells if cell.place.link in known]
    known_cells = [(name, cell) for name, cell in methods if name is not None]
    for (world, hardware), family in grouped(known_cells, lambda pair: (pair[1].place.world, pair[1].place.hardware)):
        for end_point, label in _END_POINTS:
            rows = [_row(name, cell, rtt_ms, end_point) for name, cell in family]
            if all(row["link"] == ON_BOARD for row in rows):
                continue
            yield _draw(f"{world}, {hardware}", label, end_point, rows)


def _draw(where: str, label: str, end_point: str, rows: Sequence[dict[str, Any]]) -> Drawing:
    figure, axes = blank()
    for method in (name for name in FRONTIER if any(row["method"] == name for row in rows)):
        style = style_of(method)
        cells_of_method = [row for row in rows if row["method"] == method]
        for row in (row for row in cells_of_method if row["link"] == ON_BOARD):
            axes.axhline(row[end_point], color=style.light, linestyle="--", linewidth=1.4, label=method)
            axes.axhspan(row["low"], row["high"], color=style.light, alpha=0.06, linewidth=0)
        own = sorted((row for row in cells_of_method if row["link"] != ON_BOARD), key=lambda row: float(row["rtt_ms"]))
        if not own:
            continue
        synthetic = [row for row in own if not row["link"].startswith(_RECORDED)]
        x, y, low, high = ([row[key] for row in synthetic] for key in ("rtt_ms", end_point, "low", "high"))
        axes.plot(x, y, color=style.light, marker=style.marker, markersize=4, linewidth=1.4, label=method)
        axes.fill_between(x, low, high, color=style.light, alpha=0.1, linewidth=0)
        for row in own:
            if row not in synthetic:
                axes.plot(row["rtt_ms"], row[end_point], style.marker, color=style.light, mfc="none", markersize=7)
    # Linear below 1 ms, so that a link without delay has a place.
    axes.set(xlabel="mean round trip of the link [ms]", ylabel=label, xscale="symlog")
    ticks = sorted({row["rtt_ms"] for row in rows if not row["link"].startswith((ON_BOARD, *_RECORDED))})
    axes.set_xticks(ticks, _labels(ticks))
    axes.set_xticks([], minor=True)
    legend_below(figure)
    interval = "Wilson's" if end_point == "success" else "bootstrap"
    counts = sorted({int(row["n"]) for row in rows})
    caption = (
        f"{counts[0]} to {counts[-1]} paired episodes per point. Bands: {interval} 95 % interval. Hollow: recorded "
        "links, at their mean round trip. Dashed: on the device, without a link."
    )
    what = label.split(" [")[0].capitalize()
    return Drawing(
        stem("tised-frontier", end_point.removesuffix("_s"), where), f"{what} over the round trip: {where}", caption,
        figure, rows,
    )  # fmt: skip


def _labels(ticks: Sequence[float]) -> list[str]:
    """Labels of ticks; where two are too close, only the larger one has a label."""
    labels: list[str] = []
    above = float("inf")
    for tick in reversed(ticks):
        fits = 1.6 * tick <= above
        labels.append(f"{tick:g}" if fits else "")
        above = tick if fits else above
    return labels[::-1]


def _row(method: str, cell: Aggregate, rtt_ms: Mapping[str, float], end_point: str) -> dict[str, Any]:
    value: Interval = getattr(cell, end_point)
    return {
        "method": method,
        "lever": cell.place.lever,
        "strength": cell.strength,
        "link": cell.place.link,
        "rtt_ms": rtt_ms.get(cell.place.link),
        end_point: value.mean,
        "low": value.low,
        "high": value.high,
        "n": cell.n,
        "transmission_rate": cell.transmission_rate,
    }
