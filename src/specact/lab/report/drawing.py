"""Figures: their style, and their files (PNG, SVG, CSV)."""

from __future__ import annotations

import csv
import io
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specact.files import write_whole
from specact.lab.report.tables import Rows

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
# Their names in sweeps.
_METHODS |= {"head as draft": _METHODS["head_draft"], "target on device": _METHODS["target_on_device"]}
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
    """A figure with its texts and data.

    Attributes:
        name: part of its file names.
        title: its heading.
        caption: below it.
        figure: drawn under :func:`style`.
        rows: its data.
    """

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


def as_csv(rows: Rows) -> bytes:
    """Rows with the union of their columns, in order of occurrence; a missing value is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def save(drawing: Drawing, folder: Path, stem: str) -> tuple[bytes, list[Path]]:
    """Writes ``STEM.png``, ``STEM.svg`` and ``STEM.csv``, under :func:`style`.

    Returns:
        The figure as SVG, and the files.
    """
    contents = {}
    # The salt makes ids reproducible.
    with mpl.rc_context({"svg.hashsalt": stem}):
        for kind in ("png", "svg"):
            file = io.BytesIO()
            drawing.figure.savefig(file, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
            contents[folder / f"{stem}.{kind}"] = file.getvalue()
    contents[folder / f"{stem}.csv"] = as_csv(drawing.rows)
    for path, content in contents.items():
        write_whole(path, content)
    return contents[folder / f"{stem}.svg"], list(contents)
