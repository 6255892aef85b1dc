"""Success over staleness, one curve per setting: what freshness is worth, and to whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specact.lab.report.drawing import Drawing, blank, legend_below
from specact.lab.report.tised.settings import series, stem
from specact.lab.tised.aggregates import Aggregate, grouped


def draw_staleness(cells: Sequence[Aggregate]) -> Iterator[Drawing]:
    """Success over ``v`` times the observation's age, for every lever with several settings and every task that moves.

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
            found = sorted((_row(cell) for cell in curve), key=lambda row: float(row["staleness"]))
            x, y, low, high = ([row[key] for row in found] for key in ("staleness", "success", "low", "high"))
            style = series(number)
            axes.plot(x, y, color=style.light, marker=style.marker, markersize=4, linewidth=1.4, label=f"{strength:g}")
            axes.fill_between(x, low, high, color=style.light, alpha=0.12, linewidth=0)
            rows += found
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


def _row(cell: Aggregate) -> dict[str, Any]:
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
