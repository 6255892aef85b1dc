"""Success over device cost: one panel per transmission rate, plain drafts above, distilled ones below."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from specact.lab.evaluation.budget import Way
from specact.lab.report.drawing import INK, legend_below, style_of


def draw_budget(task: str, ways: Sequence[Way]) -> Figure:
    """Draws success over cost as a share of the target's time.

    Points are ways with their 95 % intervals; lines join the draft sizes of one method. The vertical line is the
    target's own cost on the device, the horizontal one its success.
    """
    rates = sorted({way.asked for way in ways})
    target = next((way for way in ways if way.method == "target_on_device"), None)
    figure = Figure(figsize=(2.5 * len(rates) + 0.8, 6.2), layout="constrained")
    panels = figure.subplots(2, len(rates), sharex=True, sharey=True, squeeze=False)
    labelled = set[str]()
    for line, distilled in zip(panels, (False, True), strict=True):
        for axes, rate in zip(line, rates, strict=True):
            selected = [w for w in ways if w.asked == rate and w.draft and w.draft.startswith("distilled") == distilled]
            for method in dict.fromkeys(way.method for way in selected):
                points = sorted((way for way in selected if way.method == method), key=lambda way: way.cost)
                y = [way.success.mean for way in points]
                error_bars = (
                    [way.success.mean - way.success.low for way in points],
                    [way.success.high - way.success.mean for way in points],
                )
                style = style_of(method)
                axes.errorbar(
                    [way.cost for way in points], y, error_bars, marker=style.marker, color=style.light, markersize=5,
                    linewidth=1, elinewidth=0.8, label=None if method in labelled else method.replace("_", " "),
                )  # fmt: skip
                labelled.add(method)
            if target is not None:
                colour = style_of("target_on_device").light
                axes.axhline(target.success.mean, color=colour, linewidth=1, linestyle=":")
                axes.axvline(
                    1.0, color=colour, linewidth=1,
                    label=None if "target" in labelled else "target (level: its success, line: its cost)",
                )  # fmt: skip
                labelled.add("target")
            axes.set(ylim=(-0.02, 1.04))
            if not distilled:
                sent = {0.0: "nothing sent", 1.0: "every inference sent"}.get(rate, f"{rate:.0%} asked for")
                axes.set_title(sent, fontsize=10, color=INK.light)
        line[0].set_ylabel(f"success, {'distilled' if distilled else 'plain'} drafts")
    panels[-1, len(rates) // 2].set_xlabel("device time of an inference, as a share of the target's")
    figure.suptitle(task, fontsize=11)
    legend_below(figure, columns=4)
    return figure
