"""Figures over the transmission rate: success, true skip ratio and gate efficiency of every gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes

from specact.lab.report.drawing import Drawing, blank, legend_below, style_of
from specact.lab.report.runs import Study
from specact.lab.rollout.methods import METHODS

Metrics = Mapping[str, Any]
# A value with its interval; None where the method has none.
Point = tuple[float, float, float] | None


def draw_sweep(study: Study) -> Iterator[Drawing]:
    """The figures; none if the study has only one rate."""
    if len({run.summary["rate"] for run in study.sweep}) < 2:
        return
    yield _draw(study, "success", "success", lambda m: _with_interval(m["success"], "rate"), level=True)
    if not study.table.binary:
        yield _draw(study, "score", "score", lambda m: _with_interval(m["score"], "mean"), level=True)
    yield _draw(study, "true-skip", "true skip ratio", lambda m: _without_interval(m["true_skip_ratio"]))
    if any(m["gate_efficiency"] is not None for run in study.sweep for m in run.methods.values()):
        yield _draw(study, "efficiency", "gate efficiency", lambda m: _without_interval(m["gate_efficiency"]))


def _draw(study: Study, name: str, label: str, point: Callable[[Metrics], Point], level: bool = False) -> Drawing:
    figure, axes = blank()
    rows: list[dict[str, Any]] = []
    for method in _methods(study):
        rows_of_method = _rows(study, method, point)
        if not _is_constant(method):
            _draw_line(axes, method, rows_of_method)
        elif level and rows_of_method:
            rows_of_method = [max(rows_of_method, key=lambda row: int(row["episodes"]))]
            _draw_level(axes, method, rows_of_method[0])
        else:
            continue
        rows += rows_of_method
    axes.set(xlabel="transmission rate that was achieved", ylabel=label, xlim=(-0.02, 1.02))
    legend_below(figure)
    episodes = sorted({run.summary["episodes"] for run in study.sweep})
    span = f"{episodes[0]}" if len(episodes) == 1 else f"{episodes[0]} to {episodes[-1]}"
    rates = ", ".join(f"{rate:g}" for rate in sorted({run.summary["rate"] for run in study.sweep}))
    caption = (
        f"Gates calibrated for rates of {rates}; {span} episodes per point, seed {study.sweep[0].evaluation['seed']}."
    )
    if level:
        caption += " Bands: 95 % intervals. Level lines: methods that have no rate to choose."
    return Drawing(f"{name}-over-rate", f"{label.capitalize()} over rate", caption, figure, rows)


def _methods(study: Study) -> list[str]:
    """The methods in the order of the tables."""
    present = {method for run in study.sweep for method in run.methods}
    known = [method for method in METHODS if method in present]
    return known + sorted(present - set(known))


def _is_constant(method: str) -> bool:
    return method in METHODS and METHODS[method].gate in ("never", "always")


def _rows(study: Study, method: str, point: Callable[[Metrics], Point]) -> list[dict[str, Any]]:
    """A row per rate at which the method has this metric, from the run with the most episodes, by achieved rate."""
    rows: dict[float, dict[str, Any]] = {}
    for run in sorted(study.sweep, key=lambda run: int(run.summary["episodes"])):
        metrics = run.methods.get(method)
        value = point(metrics) if metrics is not None else None
        if metrics is not None and value is not None:
            rows[run.summary["rate"]] = {
                "method": method,
                "wanted_rate": run.summary["rate"],
                "transmission_rate": metrics["transmission_rate"],
                **dict(zip(("value", "low", "high"), value, strict=True)),
                "episodes": run.summary["episodes"],
            }
    return sorted(rows.values(), key=lambda row: float(row["transmission_rate"]))


def _draw_line(axes: Axes, method: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        style = style_of(method)
        x, y, low, high = ([row[key] for row in rows] for key in ("transmission_rate", "value", "low", "high"))
        axes.plot(x, y, color=style.light, marker=style.marker, markersize=4, linewidth=1.4, label=method)
        axes.fill_between(x, low, high, color=style.light, alpha=0.14, linewidth=0)


def _draw_level(axes: Axes, method: str, row: dict[str, Any]) -> None:
    style = style_of(method)
    axes.axhline(row["value"], color=style.light, linewidth=1.2, linestyle="--", label=method)
    axes.axhspan(row["low"], row["high"], color=style.light, alpha=0.08, linewidth=0)


def _with_interval(metric: Metrics, key: str) -> Point:
    return metric[key], metric["low"], metric["high"]


def _without_interval(value: float | None) -> Point:
    return None if value is None else (value, value, value)
