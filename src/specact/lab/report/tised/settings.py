"""How the settings of a lever are drawn: one beside the other, the weakest first, and curves by number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from matplotlib.axes import Axes

from specact.lab.report.style import Style, style_of
from specact.lab.rollout.methods import METHODS

_STYLES = tuple(map(style_of, METHODS))


def series(number: int) -> Style:
    """The style of a curve that is no method: the methods' styles, in their order."""
    return _STYLES[number % len(_STYLES)]


def label_settings(axes: Axes, strengths: Sequence[float], lever: str) -> None:
    """Settings as equidistant ticks, from the baseline to the strongest."""
    axes.set_xticks(range(len(strengths)), [f"{strength:g}" for strength in strengths])
    axes.set_xlabel(f"{lever}, from the baseline to the strongest setting")


def stem(*parts: object) -> str:
    """Part of a file name."""
    text = "-".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
    # A link may be a path.
    return re.sub(r"[^\w.+=-]+", "-", text)
