"""Replay of recorded packet delivery opportunities, as mahimahi's ``mm-link`` does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.links.series import read_series
from specact.types import Floats

PACKET_BYTES = 1500
_ALLOWED = "a whole number of milliseconds from 0 to 1e9, none smaller than the one before, the last above 0"


@dataclass(frozen=True, eq=False)
class MahimahiLink:
    """A link whose packets leave only at recorded moments.

    Each entry of a trace is one opportunity to send 1500 bytes; a message of ``n`` bytes has left at the
    ``ceil(n / 1500)``-th opportunity from ``at`` on (an empty one takes one), and arrives ``way_ms`` later. After the
    last entry the trace begins again, that entry being the new time 0. An opportunity nobody waits for is lost.

    Attributes:
        up, down: moments of the opportunities [ms], whole numbers ``[n]`` that never go back, the last above 0.
        way_ms: propagation delay each way [ms], >= 0. Traces hold none: without it an idle fast link takes no time.
        start_s: where in both traces time 0 lies [s], >= 0.

    Raises:
        ConfigError: for a value outside its range.

    Source: Netravali et al., "Mahimahi: Accurate Record-and-Replay for HTTP", USENIX ATC 2015. We deviate where
    several messages would share one packet: each takes opportunities of its own.
    """

    up: NDArray[np.int64]
    down: NDArray[np.int64]
    way_ms: float = 0.0
    start_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            trace: ArrayLike = getattr(self, name)
            moments = np.array(trace, dtype=np.float64)
            if moments.ndim != 1 or not len(moments) or not _possible(moments).all():
                raise ConfigError(f"the {name} trace of a link must be a row of numbers, each {_ALLOWED}")
            whole = moments.astype(np.int64)
            whole.setflags(write=False)
            object.__setattr__(self, name, whole)
        for name in ("way_ms", "start_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} of a link must be a finite number >= 0, got {getattr(self, name)}")

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """See :class:`~specact.links.model.Link`; nothing is drawn."""
        return self._departure(payload_bytes, up, at) + self.way_ms / 1e3

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """See :class:`~specact.links.model.Link`; a next message gets the opportunities after those of this one.

        Where a trace has several in one millisecond, those that this message leaves over are lost.
        """
        return self._departure(payload_bytes, up, at) + 1e-9

    def _departure(self, payload_bytes: int, up: bool, at: float) -> float:
        """Seconds from ``at`` to the opportunity the last packet uses; in whole nanoseconds, so that ties are exact."""
        trace = self.up if up else self.down
        now, period = round((at + self.start_s) * 1e9), int(trace[-1]) * 1_000_000
        laps = max(0, -(-now // period) - 1)  # so that the last opportunity of a lap still belongs to it
        first = int(np.searchsorted(trace, -(-(now - laps * period) // 1_000_000)))
        last = first + max(1, -(-payload_bytes // PACKET_BYTES)) - 1
        more, entry = divmod(last, len(trace))
        return ((laps + more) * period + int(trace[entry]) * 1_000_000 - now) / 1e9


def read_deliveries(path: Path) -> NDArray[np.int64]:
    """The delivery opportunities [ms] of a mahimahi trace, int64 ``[n]``.

    Raises:
        ConfigError: for an empty file, or a line that is not a whole number >= 0, goes back, or ends the file at 0.
    """
    return read_series(path, _ALLOWED, _possible).astype(np.int64)


def _possible(moments: Floats) -> NDArray[np.bool_]:
    fits: NDArray[np.bool_] = (moments >= 0.0) & (moments <= 1e9) & (np.floor(moments) == moments)
    fits[1:] &= ~(moments[1:] < moments[:-1])
    fits[-1] &= moments[-1] > 0.0
    return fits
