"""How a method looks in every figure: a colour on light and on dark ground, and a marker for those who see no colour.

The colours are from the schemes of Okabe & Ito (2008) and Tol (2021), which stay apart under the common kinds of
colour blindness; some are darkened to be readable as thin lines on white.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """Colours as lower-case ``#rrggbb``, and a marker of Matplotlib."""

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


def style_of(method: str) -> Style:
    """The same for the same name, always."""
    return _METHODS.get(method) or _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]


def dark_rules() -> str:
    """CSS that gives a figure, drawn for white paper, its colours on dark ground."""
    styles = (INK, MUTED, RULE, GROUND, *_METHODS.values(), *_SPARE)
    return "".join(
        f'svg [{what}="{style.light}"]{{{what}:{style.dark}}}' for style in styles for what in ("fill", "stroke")
    )
