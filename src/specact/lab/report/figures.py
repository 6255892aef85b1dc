"""Figures: their style and files, and those of a study: success over time and rate, where time goes, rejections."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specact.files import write_whole
from specact.lab.evaluation.calibrate import RejectionModel, fit_rejection
from specact.lab.evaluation.runs import Run, Study
from specact.lab.report.tables import Rows, as_csv
from specact.lab.rollout.methods import METHODS
from specact.lab.rollout.steps import free_steps

INK, MUTED, RULE, GROUND = "#1b222b", "#586372", "#dfe3e8", "#ffffff"
# Colours of the parts of an inference's time.
STAGE_COLOURS = {
    "draft": "#30638e", "gate": "#6a9fc0", "encode": "#edae49", "network": "#d1495b", "queue": "#8d6a9f",
    "target": "#66a182", "finish": "#9aa0a6",
}  # fmt: skip


class Style(NamedTuple):
    """The style of a method in every figure.

    The colours are from the schemes of Okabe & Ito (2008) and Tol (2021), which are distinguishable with the common
    kinds of colour blindness; some are darkened to be readable as thin lines on white.
    """

    colour: str
    marker: str


_METHODS = {
    "draft": Style("#4477aa", "v"), "head_draft": Style("#3f6f5f", ">"), "target": Style("#117733", "^"),
    "target_on_device": Style("#5a8f00", "d"), "hybrid": Style("#aa3377", "s"), "random": Style("#77787b", "X"),
    "plain_random": Style("#a08c7d", "."), "random_learned": Style("#8a7f9c", "H"),
    "head_random": Style("#b0607a", "8"), "adahi": Style("#d55e00", "o"), "gated_target": Style("#8f8f2b", "<"),
    "uncertainty": Style("#1f97b5", "D"), "learned": Style("#332288", "P"), "learned_action": Style("#996d00", "p"),
    "oracle": Style("#000001", "*"), "oracle_action": Style("#882256", "h"),
}  # fmt: skip
# The same methods by other names: a full target, a part of its steps, its draft unchecked, and what a sweep calls them.
_SAME = {
    "target": ("full", "ar"), "target_on_device": ("full_2", "target on device", "flow, 1 steps"),
    "draft": ("block", "last"), "adahi": ("late adahi", "flash", "specvla", "late"),
    "random": ("flash_shuffled",), "head_draft": ("head as draft", "distilled", "regression"),
    "hybrid": ("asynchronous", "aligned"), "learned_action": ("kerv",), "plain_random": ("unchecked",),
    "uncertainty": ("heisd_similar", "heisd_fixed", "freqcache", "flash_fitted"),
}  # fmt: skip
_METHODS |= {other: _METHODS[name] for name, others in _SAME.items() for other in others}
_SPARE = (Style("#44aa99", "d"), Style("#cc6677", ">"), Style("#5d4e9c", "8"), *_METHODS.values())


def style_of(method: str) -> Style:
    """The style of a method; deterministic also for unknown names."""
    return _METHODS.get(method) or _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]


def style() -> AbstractContextManager[None]:
    """The settings of Matplotlib under which figures are drawn and saved."""
    inked = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    ink: Any = dict.fromkeys(inked, INK)
    return mpl.rc_context({
        **ink, "font.size": 10, "legend.fontsize": 9, "legend.frameon": False, "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": RULE,
        "figure.facecolor": GROUND, "axes.facecolor": GROUND,
    })  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A figure, drawn under :func:`style`: ``name`` is part of its files' names, ``rows`` its data."""

    name: str
    title: str
    caption: str
    figure: Figure
    rows: Rows


def blank(height_in: float = 3.7) -> tuple[Figure, Axes]:
    """An empty figure with one axes, small enough for its type to be readable at the width of a phone."""
    figure = Figure(figsize=(4.6, height_in), layout="constrained")
    return figure, figure.subplots()


def legend_below(figure: Figure, columns: int = 3) -> None:
    """A legend below the axes."""
    figure.legend(loc="outside lower center", ncols=columns, handlelength=1.6, columnspacing=1.2)


def save(drawing: Drawing, folder: Path, stem: str) -> dict[Path, bytes]:
    """Writes ``STEM.svg``, ``STEM.png`` and ``STEM.csv``, under :func:`style`; returns the files and their contents."""
    contents = {}
    # The salt makes ids reproducible.
    with mpl.rc_context({"svg.hashsalt": stem}):
        for kind in ("svg", "png"):
            file = io.BytesIO()
            drawing.figure.savefig(file, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
            contents[folder / f"{stem}.{kind}"] = file.getvalue()
    contents[folder / f"{stem}.csv"] = as_csv(drawing.rows)
    for path, content in contents.items():
        write_whole(path, content)
    return contents


_LEAST = 40  # steps, to fill 20 bins of rejections
_WIDE = 20.0  # ratio of the largest score to the median above which the axis is logarithmic


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


def draw_times(study: Study) -> Iterator[Drawing]:
    """Success over time per action (ADAHI's figure 4), and the stages of an inference."""
    run = study.timed
    figure, axes = blank()
    rows: list[dict[str, Any]] = []
    for method, metrics in run.methods.items():
        success, x = metrics["success"], metrics["latency"]["per_action_ms"]
        rows.append({"method": method, "per_action_ms": x, **{f"success.{name}": success[name] for name in success}})
        bars = [[success["rate"] - success["low"]], [success["high"] - success["rate"]]]
        colour, marker = style_of(method)
        axes.errorbar([x], [success["rate"]], bars, fmt=marker, color=colour, ms=6, elinewidth=1, label=method)
    axes.set(xlabel="time per action [ms]", ylabel="success")
    legend_below(figure)
    yield Drawing("latency", "Success over latency", f"{time_of(run)} Bars: Wilson's 95 % interval.", figure, rows)
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
    stages = [f"{stage}_ms" for stage in STAGE_COLOURS]
    rows = [{"method": name, **{key: m["latency"][key] for key in stages}} for name, m in methods.items()]
    caption = f"{time_of(run)} Of an inference, not of an action: an inference may give several actions."
    yield Drawing("latency-split", "Where the time goes", caption, figure, rows)


def draw_sweep(study: Study) -> Iterator[Drawing]:
    """Success over the rate; nothing if the study has only one rate."""
    rates, episodes = ({run.summary[name] for run in study.sweep} for name in ("rate", "episodes"))
    if len(rates) < 2:
        return
    figure, axes = blank()
    rows: list[dict[str, Any]] = []
    present = {method for run in study.sweep for method in run.methods}
    known = [method for method in METHODS if method in present]
    for method in known + sorted(present - set(known)):
        points = _points(study, method)
        colour, marker = style_of(method)
        if method in METHODS and METHODS[method].gate in ("never", "always"):
            points = [max(points, key=lambda row: int(row["episodes"]))]
            axes.axhline(points[0]["value"], color=colour, linewidth=1.2, linestyle="--", label=method)
            axes.axhspan(points[0]["low"], points[0]["high"], color=colour, alpha=0.08, linewidth=0)
        else:
            x, y, low, high = ([row[key] for row in points] for key in ("sent", "value", "low", "high"))
            axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.4, label=method)
            axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
        rows += points
    axes.set(xlabel="share of inferences that was sent", ylabel="success", xlim=(-0.02, 1.02))
    legend_below(figure)
    caption = (
        f"Gates calibrated for rates of {', '.join(f'{rate:g}' for rate in sorted(rates))}; "
        f"{' to '.join(map(str, dict.fromkeys((min(episodes), max(episodes)))))} episodes per point, seed "
        f"{study.sweep[0].evaluation['seed']}. Bands: 95 % intervals. Level lines: methods that have no rate to choose."
    )
    yield Drawing("success-over-rate", "Success over rate", caption, figure, rows)


def _points(study: Study, method: str) -> list[dict[str, Any]]:
    """A row per rate at which the method ran, from the run with the most episodes, by achieved rate."""
    rows: dict[float, dict[str, Any]] = {}
    for run in sorted(study.sweep, key=lambda run: int(run.summary["episodes"])):
        if (metrics := run.methods.get(method)) is not None:
            success, rate = metrics["success"], run.summary["rate"]
            rows[rate] = {
                "method": method, "wanted_rate": rate, "sent": metrics["sent"],
                "value": success["rate"], "low": success["low"], "high": success["high"],
                "episodes": run.summary["episodes"],
            }  # fmt: skip
    return sorted(rows.values(), key=lambda row: float(row["sent"]))


def rejections_of(run: Run) -> dict[str, RejectionModel]:
    """Rejection over deviation on ADAHI's freely decided steps: ``any code, R``, and the paper's ``primary code, r``.

    Empty where there are too few steps; DataError if the step table cannot be read.
    """
    steps = run.steps("adahi")
    free = free_steps(steps)
    columns = {"any code, R": "rejection", "primary code, r": "rejection_0"} if free.sum() >= _LEAST else {}
    return {name: fit_rejection(steps["score"][free], steps[column][free]) for name, column in columns.items()}


def draw_rejection(study: Study) -> Iterator[Drawing]:
    """ADAHI's figure 2, probability of rejection by the target over the action deviation, if the study has them.

    DataError if a step table cannot be read.
    """
    run = study.rejections
    models = {} if run is None else rejections_of(run)
    if run is None or not models:
        return
    figure, axes = blank()
    every = next(iter(models.values()))
    x = np.array(every.scores)
    wide = x.min() > 0.0 and x.max() > _WIDE * float(np.median(x))
    x_line = (np.geomspace if wide else np.linspace)(x.min(), x.max(), 200)
    # The fit shifts negative scores to start at 0.
    log_x = x_line - min(0.0, x.min())
    rows: list[dict[str, Any]] = []
    styles = ((style_of("adahi").colour, None), (MUTED, "none"))
    for (code, model), (colour, face) in zip(models.items(), styles, strict=True):
        errors = 1.96 * np.array(model.errors)
        axes.errorbar(x, model.rejections, errors, fmt="o", color=colour, mfc=face, markersize=4, label=code)
        linear, log = model.linear, model.logarithmic
        curve = log.slope * np.log(log_x + log.shift) + log.intercept
        label = f"fit to {code[-1]}"
        axes.plot(x_line, linear.slope * x_line + linear.intercept, "--", color=colour, lw=1, label=f"linear {label}")
        axes.plot(x_line, curve, color=colour, linewidth=1, label=f"logarithmic {label}")
        bins = zip(model.scores, model.rejections, model.errors, strict=True)
        rows += [{"code": code, "row": "bin", "deviation": d, "rejection": r, "error": e} for d, r, e in bins]
        rows += [{"code": code, "row": name, **vars(getattr(model, name))} for name in ("linear", "logarithmic")]
        rows.append({"code": code, "row": "steps", "n": model.steps, "spearman": model.spearman, "auroc": model.auroc})
    reading = dict(run.summary["gates"]["adahi"]["options"]).get("reading", "reading unknown")
    axes.set(xlabel=f"action deviation ({reading})", ylabel="rejection", ylim=(0, 1.02))
    axes.set_xscale("log" if wide else "linear")
    legend_below(figure, columns=2)
    caption = (
        f"{every.steps:,} freely decided steps of {run.folder}, in {len(every.scores)} bins of equal count, with "
        f"95 % intervals. {' '.join(f'Of {code}: {_text(model)}.' for code, model in models.items())} A negative slope "
        "would mean a gate that asks where the target agrees."
    )
    yield Drawing("rejection", "Rejection over deviation", caption, figure, rows)


def _text(model: RejectionModel) -> str:
    fits = (("linear", model.linear), ("logarithmic", model.logarithmic))
    text = "; ".join(f"{name} R² {fit.r2:.2f}, slope {fit.slope:+.3g}" for name, fit in fits)
    return f"{text}; over single steps Spearman {model.spearman:+.2f}, AUROC {model.auroc:.2f}"
