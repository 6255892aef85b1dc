"""Replay of measured round trips."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.links.series import read_series
from specact.types import Floats

_ALLOWED = "a number of milliseconds above 0 and at most 1e9"


@dataclass(frozen=True, eq=False)
class TraceLink:
    """A link whose round trip at any moment is the measured one of that moment; half of it each way.

    Recordings of round trips rarely say when each was taken. Without ``period_ms`` they are taken as measured back to
    back, each request sent when the reply before it was there: sample ``i`` then stands for the time
    ``[r_1 + .. + r_{i-1}, r_1 + .. + r_i)``, and a stall of 7 s lasts 7 s. With ``period_ms`` each stands for one
    period, and a longer stall touches only the messages sent within it. After the last sample comes the first.

    Size counts for nothing: a recording holds what its own messages took; add ``+rate=`` for larger ones.

    Attributes:
        rtt_ms: round trips [ms], float ``[n]``, each in (0, 1e9].
        period_ms: time between two samples [ms], > 0, or None for back to back.
        start_s: where in the recording time 0 lies [s], >= 0.

    Raises:
        ConfigError: for a value outside its range.

    Source: the recordings this was made for are those of networked telerobots by Gago-Benitez, Fernandez-Madrigal and
    Cruz-Martin (Sensors 14(2), 2014), one value in ms a line. Their metadata name path, software and bytes, but no
    period; the longest one, 741,735 values, adds up to 24.4 h, as back to back over a day would.
    """

    rtt_ms: Floats
    period_ms: float | None = None
    start_s: float = 0.0
    _ends_ns: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rtts = np.array(self.rtt_ms, dtype=np.float64)
        if rtts.ndim != 1 or not len(rtts) or not _possible(rtts).all():
            raise ConfigError(f"round trips of a link must be a row of numbers, each {_ALLOWED}")
        if self.period_ms is not None and not 1e-6 <= self.period_ms <= 1e9:
            raise ConfigError(f"the period of recorded round trips must lie in [1e-6, 1e9] ms, got {self.period_ms}")
        if not 0.0 <= self.start_s < math.inf:
            raise ConfigError(f"the start in a recorded link must be a finite number of s >= 0, got {self.start_s}")
        rtts.setflags(write=False)
        object.__setattr__(self, "rtt_ms", rtts)
        # Whole nanoseconds, exact in float64 for the first 104 days: a moment belongs to one sample, never to a gap.
        lengths = rtts if self.period_ms is None else np.full(len(rtts), self.period_ms)
        object.__setattr__(self, "_ends_ns", np.cumsum(np.maximum(np.round(lengths * 1e6), 1.0)))

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """See :class:`~specact.links.model.Link`; nothing is drawn."""
        phase = round((at + self.start_s) * 1e9) % self._ends_ns[-1]
        return float(self.rtt_ms[np.searchsorted(self._ends_ns, phase, side="right")]) / 2e3

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """See :class:`~specact.links.model.Link`; a recording of round trips knows no rate."""
        return 0.0


def read_round_trips(path: Path) -> Floats:
    """Round trips [ms] from a file with one a line, float64 ``[n]``.

    Raises:
        ConfigError: for an empty file, or a line that is not a number in (0, 1e9].
    """
    return read_series(path, _ALLOWED, _possible)


def _possible(rtts: Floats) -> NDArray[np.bool_]:
    return (rtts > 0.0) & (rtts <= 1e9)
