"""The paper's figure 2: probability of rejection by the target over the action deviation.

The paper shows the rejection of the primary code, r; a step is transmitted for any of its codes, R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specact.lab.evaluation.rejection import RejectionModel, fit_rejection
from specact.lab.report.drawing import MUTED, Drawing, blank, legend_below, style_of
from specact.lab.report.runs import Run, Study
from specact.lab.rollout.steps import free_steps

_LEAST = 40  # steps, to fill 20 bins
_WIDE = 20.0  # ratio of the largest score to the median above which the axis is logarithmic


@dataclass(frozen=True)
class Rejections:
    """Rejection over deviation in one run.

    Attributes:
        run: whose freely decided steps these are.
        every: of any code, R.
        primary: of the primary code, r.
    """

    run: Run
    every: RejectionModel
    primary: RejectionModel


def rejections_of(study: Study) -> Rejections | None:
    """The models of the longest run of ADAHI; None where there is none, or too few steps.

    Raises:
        DataError: if its step table cannot be read.
    """
    run = study.rejections
    if run is None:
        return None
    steps = run.steps("adahi")
    free = free_steps(steps)
    if free.sum() < _LEAST:
        return None
    every, primary = (fit_rejection(steps["score"][free], steps[name][free]) for name in ("rejection", "rejection_0"))
    return Rejections(run, every, primary)


def draw_rejection(study: Study) -> Iterator[Drawing]:
    """The figure of both rejections over the deviation, if the study has them.

    Raises:
        DataError: if a step table cannot be read.
    """
    rejections = rejections_of(study)
    if rejections is None:
        return
    run, every, primary = rejections.run, rejections.every, rejections.primary
    figure, axes = blank()
    x = np.array(every.scores)
    wide = x.min() > 0.0 and x.max() > _WIDE * float(np.median(x))
    x_line = (np.geomspace if wide else np.linspace)(x.min(), x.max(), 200)
    # The fit shifts negative scores to start at 0.
    log_x = x_line - min(0.0, x.min())
    styles = ((every, style_of("adahi").colour, None, "any code, R"), (primary, MUTED, "none", "primary code, r"))
    for model, colour, face, label in styles:
        errors = 1.96 * np.array(model.errors)
        axes.errorbar(x, model.rejections, errors, fmt="o", color=colour, mfc=face, markersize=4, label=label)
        linear, log = model.linear, model.logarithmic
        line = linear.slope * x_line + linear.intercept
        curve = log.slope * np.log(log_x + log.shift) + log.intercept
        axes.plot(x_line, line, "--", color=colour, linewidth=1, label=f"linear fit to {label[-1]}")
        axes.plot(x_line, curve, color=colour, linewidth=1, label=f"logarithmic fit to {label[-1]}")
    reading = dict(run.summary["gates"]["adahi"]["options"]).get("reading", "reading unknown")
    axes.set(xlabel=f"action deviation ({reading})", ylabel="rejection", ylim=(0, 1.02))
    axes.set_xscale("log" if wide else "linear")
    legend_below(figure, columns=2)
    caption = (
        f"{every.steps:,} freely decided steps of {run.folder}, in {len(every.scores)} bins of equal count, with "
        f"95 % intervals. Of any code (R): {_text(every)}. Of the primary code, as in the paper (r): "
        f"{_text(primary)}. A negative slope would mean a gate that asks where the target agrees."
    )
    yield Drawing("rejection", "Rejection over deviation", caption, figure, _rows(every, primary))


def _text(model: RejectionModel) -> str:
    fits = [
        f"{name} R² {fit.r2:.2f}, slope {fit.slope:+.3g}"
        for name, fit in (("linear", model.linear), ("logarithmic", model.logarithmic))
    ]
    return f"{'; '.join(fits)}; over single steps Spearman {model.spearman:+.2f}, AUROC {model.auroc:.2f}"


def _rows(every: RejectionModel, primary: RejectionModel) -> list[dict[str, Any]]:
    bins = zip(every.scores, every.rejections, every.errors, primary.rejections, primary.errors, strict=True)
    names = ("deviation", "rejection", "standard_error", "primary_rejection", "primary_standard_error")
    rows: list[dict[str, Any]] = [{"row": "bin", **dict(zip(names, values, strict=True))} for values in bins]
    for code, model in (("any", every), ("primary", primary)):
        fits = (("linear", model.linear), ("logarithmic", model.logarithmic))
        rows += [{"row": name, "code": code, **vars(fit)} for name, fit in fits]
        rows.append({"row": "steps", "code": code, "n": model.steps, "spearman": model.spearman, "auroc": model.auroc})
    return rows
