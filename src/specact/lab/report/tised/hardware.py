"""The sweet spot on each hardware and link over the inference time, with the plausible range of settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes

from specact.lab.report.drawing import Drawing, blank, legend_below
from specact.lab.report.tised.curves import series, stem
from specact.lab.tised.aggregates import grouped
from specact.lab.tised.optima import PlacedOptimum, decisive


def draw_hardware(spots: Sequence[PlacedOptimum]) -> Iterator[Drawing]:
    """The sweet spot on each machine, a curve per pace, for every lever with several settings that ran on several.

    Args:
        spots: of a sweep; those that decide at their place are drawn.
    """
    deciding = [spot for spot in spots if spot.end_point == decisive(spot.place)]
    for (lever, task, idle), family in grouped(deciding, lambda s: (s.place.lever, s.place.task, s.place.idle)):
        if len({spot.place.machine for spot in family}) > 1 and len(family[0].strengths) > 1:
            yield _draw_hardware(lever, task, idle, sorted(family, key=lambda spot: spot.inference_s))


def _draw_hardware(lever: str, task: str, idle: str, family: Sequence[PlacedOptimum]) -> Drawing:
    figure, axes = blank()
    strengths = list(dict.fromkeys(strength for spot in family for strength in spot.strengths))
    curves = sorted(grouped(family, lambda spot: spot.place.pace))
    for number, (_, curve) in enumerate(curves):
        # Shifted, so that curves on the same setting do not overlap.
        _draw_curve(axes, number, 1.04 ** (number - (len(curves) - 1) / 2), curve, strengths)
    axes.set(xlabel="inference time of the baseline [ms]", xscale="log", ylabel=f"best {lever}")
    machines = {spot.place.machine: f"{1e3 * spot.inference_s:.3g}" for spot in family}
    # Vertical labels, because links may differ by little.
    axes.set_xticks([float(label) for label in machines.values()], list(machines.values()), rotation=90, fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_ylim(-0.4, len(strengths) - 0.6)
    axes.set_yticks(range(len(strengths)), [f"{strength:g}" for strength in strengths])
    legend_below(figure)
    caption = (
        f"{', '.join(f'{label} ms: {machine}' for machine, label in machines.items())}. By restricted mean time "
        "where the world stands still while the robot waits, else by success. Bars reach over all settings that were "
        "best in one of twenty bootstrap samples or oftener."
    )
    rows = [row for spot in family for row in _hardware_rows(spot)]
    title = f"Sweet spot over hardware: {lever} on {task}, idle {idle}"
    return Drawing(stem("tised-hardware", lever, task, idle), title, caption, figure, rows)


def _draw_curve(
    axes: Axes, number: int, shift: float, curve: Sequence[PlacedOptimum], strengths: Sequence[float]
) -> None:
    style = series(number)
    x = [1e3 * spot.inference_s * shift for spot in curve]
    y = [strengths.index(spot.spot.where) for spot in curve]
    label = f"pace {curve[0].place.pace:g}"
    axes.plot(x, y, color=style.light, marker=style.marker, markersize=6, linewidth=1.2, label=label)
    for at, spot in zip(x, curve, strict=True):
        levels = [strengths.index(strength) for strength in spot.plausible]
        axes.plot([at] * 2, [min(levels), max(levels)], color=style.light, linewidth=5, alpha=0.3)


def _hardware_rows(spot: PlacedOptimum) -> list[dict[str, Any]]:
    place = spot.place
    common = {
        "pace": place.pace,
        "hardware": place.hardware,
        "kappa": place.kappa,
        "link": place.link,
        "inference_s": spot.inference_s,
        "end_point": spot.end_point,
    }
    return [
        common | {"strength": strength, "value": value, "support": share, "best": strength == spot.spot.where}
        for strength, value, share in zip(spot.strengths, spot.values, spot.support, strict=True)
    ]
