"""Figures of a latency measurement: time per stage, and its distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STAGES = {
    "draft": "#30638e",
    "gate": "#6a9fc0",
    "encode": "#edae49",
    "network": "#d1495b",
    "queue": "#8d6a9f",
    "target": "#66a182",
    "finish": "#9aa0a6",
}
# Colour: method.
_METHODS = {"draft": "#30638e", "target": "#66a182", "hybrid": "#d1495b", "adahi": "#edae49"}


def draw_latency(result: dict[str, Any], path: Path) -> None:
    """Writes stages and CDFs of one measurement as PNG (or SVG, by the path's suffix).

    Args:
        result: the result of :func:`~specact.lab.evaluation.latency.measure_latency`.
        path: of the figure.
    """
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 8), layout="constrained")
        stages, latency, throughput = figure.subplot_mosaic(
            [["stages", "stages"], ["latency", "throughput"]], height_ratios=[1.25, 1]
        ).values()
        _draw_stages(stages, result)
        _draw_cdfs(latency, result, "latency of an inference [ms]", lambda total: total)
        _draw_cdfs(throughput, result, "inferences per second", lambda total: 1e3 / total)
        latency.legend(fontsize=7, loc="lower right", frameon=False)
        latency.set_xlim(left=0)
        figure.suptitle(
            f"{result['bundle']} over {result['link']}: {result['steps']} steps, draft {result['draft_ms']:.2f} ms, "
            f"{'heavy target' if result['stand_in'] else 'target'} {result['target_ms']:.1f} ms, "
            f"link {result['link_ms']:.1f} ms"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _draw_stages(axes: Axes, result: dict[str, Any]) -> None:
    names = list(result["ways"])
    left = np.zeros(len(names))
    for stage, colour in STAGES.items():
        # The ungated target needs no draft.
        widths = np.array([
            0.0 if stage == "draft" and way["method"] == "target" else way["stages_ms"][stage]
            for way in result["ways"].values()
        ])  # fmt: skip
        axes.barh(names, widths, left=left, color=colour, label=stage, height=0.7)
        left += widths
    for row, way in enumerate(result["ways"].values()):
        axes.plot([way["bound_ms"]] * 2, [row - 0.42, row + 0.42], color="black", linewidth=1.4)
        axes.text(left[row], row, f"  {left[row]:.1f}", va="center", fontsize=7)
    axes.plot([], [], color="black", linewidth=1.4, label="draft + sent x (link + target)")
    axes.invert_yaxis()
    axes.set_xlabel("mean time of an inference [ms]")
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_cdfs(axes: Axes, result: dict[str, Any], label: str, transform: Any) -> None:
    for name, way in result["ways"].items():
        values = np.sort(transform(np.array(way["total_ms"])))
        share = (np.arange(len(values)) + 1) / len(values)
        axes.step(
            values,
            share,
            where="post",
            color=_METHODS[way["method"]],
            label=name,
        )
    axes.set_xscale("log" if "per second" in label else "linear")
    axes.set_xlabel(label)
    axes.set_ylabel("share of inferences")
