"""Figures of a report: how they look, and each written as PNG, SVG and CSV and put into the page as SVG."""

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
# One axes to a figure and large type: on a phone a figure is as wide as the screen, and still to be read.
WIDTH_IN, HEIGHT_IN = 4.6, 3.7
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Style:
    """How something looks in every figure: colours as lower-case ``#rrggbb``, and a marker of Matplotlib.

    The colours are from the schemes of Okabe & Ito (2008) and Tol (2021), which stay apart under the common kinds of
    colour blindness; some are darkened to be readable as thin lines on white.

    Attributes:
        light, dark: colours on light and on dark ground.
        marker: of a point, for those who see no colour.
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
# As sweeps call them.
_METHODS |= {"head as draft": _METHODS["head_draft"], "target on device": _METHODS["target_on_device"]}
# For methods that come later.
_SPARE = (Style("#44aa99", "#6fd0c0", "d"), Style("#cc6677", "#e898a5", ">"), Style("#5d4e9c", "#a99be0", "8"))
STYLES = (INK, MUTED, RULE, GROUND, *_METHODS.values(), *_SPARE)


def style_of(method: str) -> Style:
    """The same for the same name, always."""
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
            "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
        }
    )


@dataclass(frozen=True)
class Drawing:
    """A figure and what it shows.

    Attributes:
        name: part of its file names.
        title: its heading.
        caption: what to know when reading it.
        figure: drawn under :func:`style`.
        rows: its numbers.
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
    """A legend under the axes, where it hides nothing."""
    figure.legend(loc="outside lower center", ncols=columns, handlelength=1.6, columnspacing=1.2)


def as_csv(rows: Rows) -> bytes:
    """Rows with all names that occur, in the order in which they do; a missing value is an empty field."""
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
    written = {}
    # The salt makes ids that are the same in every report, and different in every figure of a page.
    with mpl.rc_context({"svg.hashsalt": stem}):
        for kind in ("png", "svg"):
            file = io.BytesIO()
            drawing.figure.savefig(file, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
            written[folder / f"{stem}.{kind}"] = file.getvalue()
    svg = file.getvalue()
    written[folder / f"{stem}.csv"] = as_csv(drawing.rows)
    for path, content in written.items():
        write_whole(path, content)
    return svg, list(written)


def inline(svg: bytes, label: str) -> str:
    """An SVG of Matplotlib as an element of a page.

    Styles become presentation attributes: a page's security policy forbids the former, and its style sheet overrules
    the latter, which is how a figure gets its colours on dark ground.
    """
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(svg)
    # A shape that is used many times takes its colours from each use; a style sheet does not reach into the shape.
    shapes = {shape for definitions in root.iter(f"{{{SVG}}}defs") for shape in definitions.iter()}
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                element.remove(child)
        if element.tag == f"{{{SVG}}}g":
            element.attrib.pop("id", None)  # the same in every figure of a page
        for name, value in re.findall(r"([\w-]+):\s*([^;]+)", element.attrib.pop("style", "")):
            if name != "font-family" and not (element in shapes and name in ("fill", "stroke")):
                element.set(name, value)
    for name in ("width", "height"):
        root.attrib.pop(name)
    attributes = {"role": "img", "aria-label": label, "class": "plot"}
    for name, value in (attributes | {"stroke-linejoin": "round", "stroke-linecap": "butt"}).items():
        root.set(name, value)
    return ElementTree.tostring(root, encoding="unicode")


# Height of a line of names, where what is drawn reaches from 0 to 1.
_LINE = 0.032


def name_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Writes a name beside each point; names that would lie upon each other move down, with a line to their point.

    Args:
        axes: whose vertical axis reaches from 0 to about 1.
        points: x, y and the name.
    """
    reach_x, placed = 0.12 * max(x for x, _, _ in points), list[tuple[float, float]]()
    for x, y, name in sorted(points, key=lambda point: (point[1], point[0]), reverse=True):
        high = y
        while any(abs(x - other) < reach_x and abs(high - level) < _LINE for other, level in placed):
            high -= _LINE / 4
        placed.append((x, high))
        line = {"arrowstyle": "-", "color": RULE.light, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            name, (x, y), (x + 0.25 * reach_x, high), fontsize=7, color=INK.light, va="center", arrowprops=line
        )
