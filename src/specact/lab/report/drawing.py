"""Figures of a report: their style, their files (PNG, SVG, CSV), and their inline SVG."""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specact.files import write_whole

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# One axes per figure and large type: a figure stays readable at the width of a phone.
WIDTH_IN, HEIGHT_IN = 4.6, 3.7
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Style:
    """The style of a method in every figure: colours as lower-case ``#rrggbb``, and a marker of Matplotlib.

    The colours are from the schemes of Okabe & Ito (2008) and Tol (2021), which are distinguishable with the common
    kinds of colour blindness; some are darkened to be readable as thin lines on white.

    Attributes:
        light, dark: colours on light and on dark background.
        marker: of points, where colours are not distinguishable.
    """

    light: str
    dark: str
    marker: str


INK = Style("#1b222b", "#e4e9ee", "")
MUTED = Style("#586372", "#9ba6b2", "")
RULE = Style("#dfe3e8", "#2d3640", "")
GROUND = Style("#ffffff", "#191f26", "")

_METHODS = {
    "draft": Style("#4477aa", "#7fb0e0", "v"),
    "head_draft": Style("#3f6f5f", "#86bfa9", ">"),
    "target": Style("#117733", "#4fbf76", "^"),
    "target_on_device": Style("#5a8f00", "#a4d44a", "d"),
    "hybrid": Style("#aa3377", "#e07ab3", "s"),
    "random": Style("#77787b", "#a9abb0", "X"),
    "plain_random": Style("#a08c7d", "#cdbcae", "."),
    "random_learned": Style("#8a7f9c", "#b9afcb", "H"),
    "head_random": Style("#b0607a", "#dc97ac", "8"),
    "adahi": Style("#d55e00", "#f08a3c", "o"),
    "gated_target": Style("#8f8f2b", "#c9c95e", "<"),
    "uncertainty": Style("#1f97b5", "#66ccee", "D"),
    "learned": Style("#332288", "#9d8df0", "P"),
    "learned_action": Style("#996d00", "#e0b04a", "p"),
    "oracle": Style("#000001", "#fffffe", "*"),
    "oracle_action": Style("#882256", "#d0789f", "h"),
}
# Their names in sweeps.
_METHODS |= {"head as draft": _METHODS["head_draft"], "target on device": _METHODS["target_on_device"]}
# For unknown methods.
_SPARE = (Style("#44aa99", "#6fd0c0", "d"), Style("#cc6677", "#e898a5", ">"), Style("#5d4e9c", "#a99be0", "8"))
STYLES = (INK, MUTED, RULE, GROUND, *_METHODS.values(), *_SPARE)


def style_of(method: str) -> Style:
    """The style of a method; deterministic also for unknown names."""
    return _METHODS.get(method) or _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]


def style() -> AbstractContextManager[None]:
    """The settings of Matplotlib under which figures are drawn and saved."""
    return mpl.rc_context(
        {
            "font.size": 10,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": INK.light,
            "axes.labelcolor": INK.light,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": RULE.light,
            "text.color": INK.light,
            "xtick.color": INK.light,
            "ytick.color": INK.light,
            "figure.facecolor": GROUND.light,
            "axes.facecolor": GROUND.light,
            "svg.fonttype": "none",  # text stays text, for search, copying and screen readers
        }
    )


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


def blank(height_in: float = HEIGHT_IN) -> tuple[Figure, Axes]:
    """An empty figure with one axes."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
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
    # The salt makes ids reproducible, and unique to each figure of a page.
    with mpl.rc_context({"svg.hashsalt": stem}):
        for kind in ("png", "svg"):
            file = io.BytesIO()
            drawing.figure.savefig(file, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
            contents[folder / f"{stem}.{kind}"] = file.getvalue()
    svg = file.getvalue()
    contents[folder / f"{stem}.csv"] = as_csv(drawing.rows)
    for path, content in contents.items():
        write_whole(path, content)
    return svg, list(contents)


def inline(svg: bytes, label: str) -> str:
    """An SVG of Matplotlib as an inline element of a page.

    Inline styles become presentation attributes, because the page's content security policy forbids inline styles, and
    because its style sheet can override attributes for dark mode.
    """
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(svg)
    # A shape in <defs> inherits its colours from each <use>; style sheets do not apply inside it.
    shapes = {shape for definitions in root.iter(f"{{{SVG}}}defs") for shape in definitions.iter()}
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                element.remove(child)
        if element.tag == f"{{{SVG}}}g":
            element.attrib.pop("id", None)  # not unique among the figures of a page
        for name, value in re.findall(r"([\w-]+):\s*([^;]+)", element.attrib.pop("style", "")):
            if name != "font-family" and not (element in shapes and name in ("fill", "stroke")):
                element.set(name, value)
    for name in ("width", "height"):
        root.attrib.pop(name)
    attributes = {"role": "img", "aria-label": label, "class": "plot"}
    for name, value in (attributes | {"stroke-linejoin": "round", "stroke-linecap": "butt"}).items():
        root.set(name, value)
    return ElementTree.tostring(root, encoding="unicode")


# Line height of labels on an axis from 0 to 1.
_LINE = 0.032


def label_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Labels points; overlapping labels move down, with a line to their point.

    Args:
        axes: with the limits of the vertical axis set.
        points: x, y and the name.
    """
    width, placed = 0.12 * max(x for x, _, _ in points), list[tuple[float, float]]()
    bottom, top = axes.get_ylim()
    line_height = _LINE * (top - bottom)
    for x, y, name in sorted(points, key=lambda point: (point[1], point[0]), reverse=True):
        label_y = y
        while any(abs(x - other) < width and abs(label_y - level) < line_height for other, level in placed):
            label_y -= line_height / 4
        placed.append((x, label_y))
        line = {"arrowstyle": "-", "color": RULE.light, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            name, (x, y), (x + 0.25 * width, label_y), fontsize=7, color=INK.light, va="center", arrowprops=line
        )
