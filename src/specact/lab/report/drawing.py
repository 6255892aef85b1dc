"""A figure of a report: drawn once, written as PNG, SVG and CSV, and put into the page as SVG."""

from __future__ import annotations

import csv
import io
import re
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
from specact.lab.report.html import Html
from specact.lab.report.style import GROUND, INK, RULE

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# One axes to a figure and large type: on a phone a figure is as wide as the screen, and still to be read.
WIDTH_IN, HEIGHT_IN = 4.6, 3.7
Rows = Sequence[Mapping[str, Any]]


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


def save(drawing: Drawing, folder: Path, stem: str) -> tuple[Html, list[Path]]:
    """Writes ``STEM.png``, ``STEM.svg`` and ``STEM.csv``, under :func:`style`.

    Returns:
        The figure as part of a page, and the files.
    """
    pictures = {}
    # The salt makes ids that are the same in every report, and different in every figure of a page.
    with mpl.rc_context({"svg.hashsalt": stem}):
        for kind in ("png", "svg"):
            file = io.BytesIO()
            drawing.figure.savefig(file, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
            pictures[kind] = file.getvalue()
    paths = []
    for kind, content in {**pictures, "csv": as_csv(drawing.rows)}.items():
        paths.append(folder / f"{stem}.{kind}")
        write_whole(paths[-1], content)
    return inline(pictures["svg"], f"{drawing.title}. {drawing.caption}"), paths


def inline(svg: bytes, label: str) -> Html:
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
    return Html(ElementTree.tostring(root, encoding="unicode"))
