"""Success over time per action (the paper's figure 4), times of inferences, and metrics over the transmission rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from specact.lab.report.drawing import GROUND, STAGE_COLOURS, Drawing, blank, legend_below, style_of
from specact.lab.report.runs import Run, Study
from specact.lab.rollout.methods import METHODS
from specact.lab.rollout.steps import STAGES

# Methods with more than this times the throughput of the slowest one are not drawn, for readability.
_FAR = 10.0


def draw_tradeoffs(study: Study) -> Iterator[Drawing]:
    """Success over latency, success over throughput, throughput CDFs and the split of the latency.

    Raises:
        DataError: if a step table cannot be read.
    """
    run = study.timed
    yield _success_over(run, "latency", "per_action_ms", "time per action [ms]")
    yield _success_over(run, "throughput", "actions_per_s", "actions per second")
    yield _throughput_cdf(run)
    yield _split(run)


def time_of(run: Run) -> str:
    """Describes how the times of a run were obtained."""
    summary, timing = run.summary, run.manifest["timing"]
    link, episodes = f"link {summary['link']}", f"{summary['episodes']} episodes per method"
    if summary["realtime"]:
        return f"Measured over real sockets, {link}, {episodes}."
    if summary["link"] == "none":
        return f"Measured in one process, {episodes}."
    return (
        f"Accounted in virtual time, not measured over sockets: draft {timing['draft_ms']:.2f} ms, target "
        f"{timing['target_ms']:.2f} ms, {link}, {episodes}."
    )


def _success_over(run: Run, name: str, key: str, label: str) -> Drawing:
    figure, axes = blank()
    rows: list[dict[str, Any]] = []
    beyond = []
    limit = _FAR * min(metrics["latency"][key] for metrics in run.methods.values())
    for method, metrics in run.methods.items():
        success, x = metrics["success"], metrics["latency"][key]
        rows.append({"method": method, key: x, **{f"success.{k}": success[k] for k in ("rate", "low", "high", "n")}})
        if key == "actions_per_s" and x > limit:
            beyond.append(f"{method} ({x:,.0f} per second, success {success['rate']:.3f})")
            continue
        bars = [[success["rate"] - success["low"]], [success["high"] - success["rate"]]]
        colour, marker = style_of(method)
        axes.errorbar([x], [success["rate"]], bars, fmt=marker, color=colour, ms=6, elinewidth=1, label=method)
    axes.set(xlabel=label, ylabel="success")
    legend_below(figure)
    caption = f"{time_of(run)} Bars: Wilson's 95 % interval."
    if beyond:
        caption += f" Far to the right, not drawn: {', '.join(beyond)}."
    return Drawing(name, f"Success over {name}", caption, figure, rows)


def _throughput_cdf(run: Run) -> Drawing:
    figure, axes = blank()
    shares = np.linspace(0.0, 1.0, 201)
    rows: list[dict[str, Any]] = []
    slow = []
    for method in run.methods:
        steps = run.steps(method)
        seconds = np.sum([steps[f"{stage}_s"] for stage in STAGES], axis=0)
        # Steps of zero virtual time have no throughput.
        if not (seconds > 0.0).any():
            continue
        per_s = np.quantile(1.0 / seconds[seconds > 0.0], shares)
        axes.plot(per_s, shares, color=style_of(method).colour, linewidth=1.4, label=method)
        slow.append(f"{method} {per_s[5]:,.1f}")
        rows += [{"method": method, "share": q, "inferences_per_s": v} for q, v in zip(shares, per_s, strict=True)]
    axes.set(xlabel="inferences per second", ylabel="share of inferences", xscale="log", ylim=(0, 1.02))
    legend_below(figure)
    caption = f"{time_of(run)} 2.5th percentile, inferences per second: {', '.join(slow)}."
    return Drawing("throughput-cdf", "Distribution of throughput", caption, figure, rows)


def _split(run: Run) -> Drawing:
    methods = run.methods
    figure, axes = blank(height_in=1.3 + 0.24 * len(methods))
    left = np.zeros(len(methods))
    for stage, colour in STAGE_COLOURS.items():
        widths = np.array([max(0.0, metrics["latency"][f"{stage}_ms"]) for metrics in methods.values()])
        axes.barh(list(methods), widths, left=left, color=colour, edgecolor=GROUND, linewidth=0.4, label=stage)
        left += widths
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.3g}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="mean time of an inference [ms]", xlim=(0, 1.14 * max(left.max(), 1e-3)))
    axes.grid(axis="y", visible=False)
    legend_below(figure)
    rows = [
        {"method": method, **{f"{stage}_ms": metrics["latency"][f"{stage}_ms"] for stage in STAGE_COLOURS}}
        for method, metrics in methods.items()
    ]
    caption = f"{time_of(run)} Of an inference, not of an action: an inference may give several actions."
    return Drawing("latency-split", "Where the time goes", caption, figure, rows)


def draw_sweep(study: Study) -> Iterator[Drawing]:
    """Success, score, true skip ratio and gate efficiency over the rate; none if the study has only one rate."""
    if len({run.summary["rate"] for run in study.sweep}) < 2:
        return
    yield _over_rate(study, "success", "success", "success", level=True)
    if not study.table.binary:
        yield _over_rate(study, "score", "score", "score", level=True)
    for name, label, key in (
        ("true-skip", "true skip ratio", "true_skip_ratio"),
        ("efficiency", "gate efficiency", "gate_efficiency"),
    ):
        if any(m.get(key) is not None for run in study.sweep for m in run.methods.values()):
            yield _over_rate(study, name, label, key)


def _over_rate(study: Study, name: str, label: str, key: str, level: bool = False) -> Drawing:
    figure, axes = blank()
    rows: list[dict[str, Any]] = []
    present = {method for run in study.sweep for method in run.methods}
    known = [method for method in METHODS if method in present]
    for method in known + sorted(present - set(known)):
        points = _points(study, method, key)
        if not points:
            continue
        colour, marker = style_of(method)
        if not (method in METHODS and METHODS[method].gate in ("never", "always")):
            x, y, low, high = ([row[key] for row in points] for key in ("transmission_rate", "value", "low", "high"))
            axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.4, label=method)
            axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
        elif level:
            points = [max(points, key=lambda row: int(row["episodes"]))]
            axes.axhline(points[0]["value"], color=colour, linewidth=1.2, linestyle="--", label=method)
            axes.axhspan(points[0]["low"], points[0]["high"], color=colour, alpha=0.08, linewidth=0)
        else:
            continue
        rows += points
    axes.set(xlabel="transmission rate that was achieved", ylabel=label, xlim=(-0.02, 1.02))
    legend_below(figure)
    episodes = sorted({run.summary["episodes"] for run in study.sweep})
    rates = ", ".join(f"{rate:g}" for rate in sorted({run.summary["rate"] for run in study.sweep}))
    caption = (
        f"Gates calibrated for rates of {rates}; {' to '.join(map(str, dict.fromkeys((episodes[0], episodes[-1]))))} "
        f"episodes per point, seed {study.sweep[0].evaluation['seed']}."
    )
    if level:
        caption += " Bands: 95 % intervals. Level lines: methods that have no rate to choose."
    return Drawing(f"{name}-over-rate", f"{label.capitalize()} over rate", caption, figure, rows)


def _points(study: Study, method: str, key: str) -> list[dict[str, Any]]:
    """A row per rate at which the method has this metric, from the run with the most episodes, by achieved rate."""
    rows: dict[float, dict[str, Any]] = {}
    for run in sorted(study.sweep, key=lambda run: int(run.summary["episodes"])):
        metrics = run.methods.get(method, {})
        value = metrics.get(key)
        if value is not None:
            mean = value if isinstance(value, float | int) else value["rate" if "rate" in value else "mean"]
            low, high = (value["low"], value["high"]) if isinstance(value, dict) else (mean, mean)
            rate = run.summary["rate"]
            rows[rate] = {
                "method": method, "wanted_rate": rate, "transmission_rate": metrics["transmission_rate"],
                "value": mean, "low": low, "high": high, "episodes": run.summary["episodes"],
            }  # fmt: skip
    return sorted(rows.values(), key=lambda row: float(row["transmission_rate"]))
