"""Success over device cost and transmission rate: a panel for every rate, plain drafts above, distilled ones below."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from specact.lab.evaluation.budget import Way
from specact.lab.report.drawing import INK, legend_below, style_of


def draw_budget(task: str, ways: Sequence[Way]) -> Figure:
    """A figure; costs are shares of the target's time.

    Points are ways with their 95 % intervals, lines join the sizes of a draft under one method. A vertical line is
    where the target itself fits on the device; its success is the level line.
    """
    rates = sorted({way.asked for way in ways})
    target = next((way for way in ways if way.method == "target_on_device"), None)
    figure = Figure(figsize=(2.5 * len(rates) + 0.8, 6.2), layout="constrained")
    panels = figure.subplots(2, len(rates), sharex=True, sharey=True, squeeze=False)
    told = set[str]()
    for line, distilled in zip(panels, (False, True), strict=True):
        for axes, rate in zip(line, rates, strict=True):
            here = [w for w in ways if w.asked == rate and w.draft and w.draft.startswith("distilled") == distilled]
            for method in dict.fromkeys(way.method for way in here):
                points = sorted((way for way in here if way.method == method), key=lambda way: way.cost)
                y = [way.success.mean for way in points]
                reach = (
                    [way.success.mean - way.success.low for way in points],
                    [way.success.high - way.success.mean for way in points],
                )
                shown = style_of(method)
                axes.errorbar(
                    [way.cost for way in points], y, reach, marker=shown.marker, color=shown.light, markersize=5,
                    linewidth=1, elinewidth=0.8, label=None if method in told else method.replace("_", " "),
                )  # fmt: skip
                told.add(method)
            if target is not None:
                colour = style_of("target_on_device").light
                axes.axhline(target.success.mean, color=colour, linewidth=1, linestyle=":")
                axes.axvline(
                    1.0, color=colour, linewidth=1,
                    label=None if "target" in told else "target (level: its success, line: its cost)",
                )  # fmt: skip
                told.add("target")
            axes.set(ylim=(-0.02, 1.04))
            if not distilled:
                sent = {0.0: "nothing sent", 1.0: "every inference sent"}.get(rate, f"{rate:.0%} asked for")
                axes.set_title(sent, fontsize=10, color=INK.light)
        line[0].set_ylabel(f"success, {'distilled' if distilled else 'plain'} drafts")
    panels[-1, len(rates) // 2].set_xlabel("device time of an inference, as a share of the target's")
    figure.suptitle(task, fontsize=11)
    legend_below(figure, columns=4)
    return figure
