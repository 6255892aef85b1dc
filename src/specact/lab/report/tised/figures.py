"""All figures of a TISED sweep, as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from specact.lab.report.drawing import Drawing, save, style
from specact.lab.report.tised.curves import draw_curves, draw_staleness
from specact.lab.report.tised.frontier import draw_frontier
from specact.lab.report.tised.hardware import draw_hardware
from specact.lab.tised.analysis import Analysis


def draw_figures(analysis: Analysis, rtt_ms: Mapping[str, float]) -> Iterator[Drawing]:
    """Every figure that the sweep has the numbers for; to be drawn under :func:`~specact.lab.report.drawing.style`.

    Args:
        analysis: of the sweep.
        rtt_ms: mean round trip of each link, by name [ms]; empty if there is none.
    """
    yield from draw_frontier(analysis.cells, rtt_ms)
    yield from draw_curves(analysis)
    yield from draw_staleness(analysis.cells)
    yield from draw_hardware(analysis.spots)


def save_figures(analysis: Analysis, folder: Path, rtt_ms: Mapping[str, float]) -> list[Path]:
    """Writes every figure as PNG, SVG and CSV.

    Args:
        analysis: of the sweep.
        folder: where to.
        rtt_ms: see :func:`draw_figures`.

    Raises:
        ConfigError: if a file cannot be written.
    """
    with style():
        return [path for drawing in draw_figures(analysis, rtt_ms) for path in save(drawing, folder, drawing.name)[1]]
