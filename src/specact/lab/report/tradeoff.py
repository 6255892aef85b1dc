"""The paper's figure 4: success over time per action, and the distribution of inference times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from specact.lab.report.drawing import GROUND, Drawing, blank, legend_below, style_of
from specact.lab.report.runs import Run, Study
from specact.lab.rollout.steps import STAGES

STAGE_COLOURS = {
    "draft": "#30638e", "gate": "#6a9fc0", "encode": "#edae49", "network": "#d1495b", "queue": "#8d6a9f",
    "target": "#66a182", "finish": "#9aa0a6",
}  # fmt: skip
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
    link = f"link {summary['link']}"
    if summary["realtime"]:
        return f"Measured over real sockets, {link}, {summary['episodes']} episodes per method."
    return (
        f"Accounted in virtual time, not measured over sockets: draft {timing['draft_ms']:.2f} ms, target "
        f"{timing['target_ms']:.2f} ms, {link}, {summary['episodes']} episodes per method."
    )


def _timing_text(run: Run) -> str:
    how = "Measured over real sockets" if run.summary["realtime"] else "Accounted in virtual time"
    return f"{how}, {run.summary['episodes']} episodes per method."


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
        style = style_of(method)
        error_bars = [[success["rate"] - success["low"]], [success["high"] - success["rate"]]]
        axes.errorbar(
            [x],
            [success["rate"]],
            error_bars,
            fmt=style.marker,
            color=style.light,
            markersize=6,
            elinewidth=1,
            label=method,
        )
    axes.set(xlabel=label, ylabel="success")
    legend_below(figure)
    caption = f"{_timing_text(run)} Bars: Wilson's 95 % interval."
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
        per_s = np.quantile(1.0 / seconds[seconds > 0.0], shares) if (seconds > 0.0).any() else np.empty(0)
        if not len(per_s):
            continue
        axes.plot(per_s, shares, color=style_of(method).light, linewidth=1.4, label=method)
        slow.append(f"{method} {per_s[5]:,.1f}")
        rows += [{"method": method, "share": q, "inferences_per_s": v} for q, v in zip(shares, per_s, strict=True)]
    axes.set(xlabel="inferences per second", ylabel="share of inferences", xscale="log", ylim=(0, 1.02))
    legend_below(figure)
    caption = f"{_timing_text(run)} 2.5th percentile, inferences per second: {', '.join(slow)}."
    return Drawing("throughput-cdf", "Distribution of throughput", caption, figure, rows)


def _split(run: Run) -> Drawing:
    methods = run.methods
    figure, axes = blank(height_in=1.3 + 0.24 * len(methods))
    left = np.zeros(len(methods))
    for stage, colour in STAGE_COLOURS.items():
        widths = np.array([max(0.0, metrics["latency"][f"{stage}_ms"]) for metrics in methods.values()])
        axes.barh(list(methods), widths, left=left, color=colour, edgecolor=GROUND.light, linewidth=0.4, label=stage)
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
    caption = f"{_timing_text(run)} Of an inference, not of an action: an inference may give several actions."
    return Drawing("latency-split", "Where the time goes", caption, figure, rows)
