"""Pictures of a latency measurement: where the time goes, and how it is distributed."""

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
# Colour says the method; a full line our codec, a dashed one the paper's; thin without overlap.
_METHODS = {"draft": "#30638e", "target": "#66a182", "hybrid": "#d1495b", "adahi": "#edae49"}


def draw_latency(found: dict[str, Any], path: Path) -> None:
    """Writes stages and CDFs of one measurement as PNG (or SVG, by the path's suffix).

    Args:
        found: what :func:`~specact.lab.evaluation.latency.measure_latency` returned.
        path: of the picture.
    """
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 8), layout="constrained")
        stages, latency, throughput = figure.subplot_mosaic(
            [["stages", "stages"], ["latency", "throughput"]], height_ratios=[1.25, 1]
        ).values()
        _draw_stages(stages, found)
        _draw_cdfs(latency, found, "latency of an inference [ms]", lambda total: total)
        _draw_cdfs(throughput, found, "inferences per second", lambda total: 1e3 / total)
        latency.legend(fontsize=7, loc="lower right", frameon=False)
        latency.set_xlim(left=0)
        figure.suptitle(
            f"{found['bundle']} over {found['link']}: {found['steps']} steps, draft {found['draft_ms']:.2f} ms, "
            f"{'heavy target' if found['stand_in'] else 'target'} {found['target_ms']:.1f} ms, "
            f"link {found['link_ms']:.1f} ms"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _draw_stages(axes: Axes, found: dict[str, Any]) -> None:
    names = list(found["ways"])
    left = np.zeros(len(names))
    for stage, colour in STAGES.items():
        # The ungated target needs no draft.
        widths = np.array([
            0.0 if stage == "draft" and way["method"] == "target" and not way["overlap"] else way["stages_ms"][stage]
            for way in found["ways"].values()
        ])  # fmt: skip
        axes.barh(names, widths, left=left, color=colour, label=stage, height=0.7)
        left += widths
    for row, way in enumerate(found["ways"].values()):
        axes.plot([way["bound_ms"]] * 2, [row - 0.42, row + 0.42], color="black", linewidth=1.4)
        axes.text(left[row], row, f"  {left[row]:.1f}", va="center", fontsize=7)
    axes.plot([], [], color="black", linewidth=1.4, label="draft + sent x (link + target)")
    axes.invert_yaxis()
    axes.set_xlabel("mean time of an inference [ms]")
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_cdfs(axes: Axes, found: dict[str, Any], label: str, of: Any) -> None:
    for name, way in found["ways"].items():
        values = np.sort(of(np.array(way["total_ms"])))
        share = (np.arange(len(values)) + 1) / len(values)
        axes.step(
            values,
            share,
            where="post",
            color=_METHODS[way["method"]],
            linestyle="--" if way["codec"] == "json" else "-",
            linewidth=1.8 if way["overlap"] else 0.9,
            label=name,
        )
    axes.set_xscale("log" if "per second" in label else "linear")
    axes.set_xlabel(label)
    axes.set_ylabel("share of inferences")
