"""How a method looks in every figure: a colour on light and on dark ground, and a marker for those who see no colour.

The colours are from the schemes of Okabe & Ito (2008) and Tol (2021), which stay apart under the common kinds of
colour blindness; some are darkened to be readable as thin lines on white.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """Colours as lower-case ``#rrggbb``, and a marker of Matplotlib."""

    light: str
    dark: str
    marker: str


INK = Look("#1b222b", "#e4e9ee", "")
MUTED = Look("#586372", "#9ba6b2", "")
RULE = Look("#dfe3e8", "#2d3640", "")
GROUND = Look("#ffffff", "#191f26", "")

_METHODS = {
    "draft": Look("#4477aa", "#7fb0e0", "v"),
    "head_draft": Look("#3f6f5f", "#86bfa9", ">"),
    "target": Look("#117733", "#4fbf76", "^"),
    "target_on_device": Look("#5a8f00", "#a4d44a", "d"),
    "hybrid": Look("#aa3377", "#e07ab3", "s"),
    "random": Look("#77787b", "#a9abb0", "X"),
    "plain_random": Look("#a08c7d", "#cdbcae", "."),
    "random_learned": Look("#8a7f9c", "#b9afcb", "H"),
    "head_random": Look("#b0607a", "#dc97ac", "8"),
    "adahi": Look("#d55e00", "#f08a3c", "o"),
    "gated_target": Look("#8f8f2b", "#c9c95e", "<"),
    "uncertainty": Look("#1f97b5", "#66ccee", "D"),
    "learned": Look("#332288", "#9d8df0", "P"),
    "learned_action": Look("#996d00", "#e0b04a", "p"),
    "oracle": Look("#000001", "#fffffe", "*"),
    "oracle_action": Look("#882256", "#d0789f", "h"),
}
# As sweeps call them.
_METHODS |= {"head as draft": _METHODS["head_draft"], "target on device": _METHODS["target_on_device"]}
# For methods that come later.
_SPARE = (Look("#44aa99", "#6fd0c0", "d"), Look("#cc6677", "#e898a5", ">"), Look("#5d4e9c", "#a99be0", "8"))


def look_of(method: str) -> Look:
    """The same for the same name, always."""
    return _METHODS.get(method) or _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]


def dark_rules() -> str:
    """CSS that gives a figure, drawn for white paper, its colours on dark ground."""
    looks = (INK, MUTED, RULE, GROUND, *_METHODS.values(), *_SPARE)
    return "".join(
        f'svg [{what}="{look.light}"]{{{what}:{look.dark}}}' for look in looks for what in ("fill", "stroke")
    )
