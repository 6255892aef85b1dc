"""Links that replay recordings: measured round trips, and the delivery opportunities of Mahimahi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.records import NotNegative, check_fields
from specact.types import Floats

PACKET_BYTES = 1500


def read_series(path: Path) -> Floats:
    """Reads a file with one number per line, float64 ``[n]``, n >= 1; NaN for a line that is no number.

    Raises:
        ConfigError: if the file cannot be read or is empty.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the recorded link {path}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"the recorded link {path} is empty; it needs at least one line, each a number")
    return np.array([_number(line) for line in lines])


def _number(line: bytes) -> float:
    try:
        return float(line) if b"_" not in line else np.nan
    except ValueError:
        return np.nan


def _series(values: ArrayLike, allowed: str, fits: Callable[[Floats], NDArray[np.bool_]]) -> Floats:
    """The values as a read-only array, float64 ``[n]``; ConfigError names the line of one that is not allowed."""
    series = np.array(values, dtype=np.float64)
    if series.ndim != 1 or not len(series):
        raise ConfigError(f"a recording is a 1-D array, each value {allowed}")
    if len(bad := np.flatnonzero(~fits(series))):
        raise ConfigError(f"line {bad[0] + 1} of a recording must be {allowed}, got {series[bad[0]]}")
    series.setflags(write=False)
    return series


@dataclass(frozen=True, eq=False)
class TraceLink:
    """A link that replays recorded round trips; each direction takes half of the current one.

    Without ``period_ms`` sample ``i`` is valid during ``[r_1 + .. + r_{i-1}, r_1 + .. + r_i)``, as if measured back to
    back like the recordings of Gago-Benitez et al. (Sensors 14(2), 2014); with it, for one period. Then the recording
    repeats. The delay does not depend on the size of a message; add ``+rate=`` for that.

    Attributes:
        rtt_ms: round trips [ms], float ``[n]``, each in (0, 1e9].
        period_ms: time between two samples [ms], or None for back to back.
        start_s: offset of time 0 within the recording [s].
    """

    rtt_ms: Floats
    period_ms: Annotated[float, Meta(ge=1e-6, le=1e9)] | None = None
    start_s: NotNegative = 0.0
    _ends_ns: NDArray[np.float64] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        allowed = "a number of milliseconds above 0 and at most 1e9"
        rtts = _series(self.rtt_ms, allowed, lambda rtts: (rtts > 0.0) & (rtts <= 1e9))
        object.__setattr__(self, "rtt_ms", rtts)
        check_fields(self)
        # Whole nanoseconds, exact in float64 for 104 days, so that each time belongs to exactly one sample.
        lengths = rtts if self.period_ms is None else np.full(len(rtts), self.period_ms)
        object.__setattr__(self, "_ends_ns", np.cumsum(np.maximum(np.round(lengths * 1e6), 1.0)))

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        assert self._ends_ns is not None
        phase = round((at + self.start_s) * 1e9) % self._ends_ns[-1]
        return float(self.rtt_ms[np.searchsorted(self._ends_ns, phase, side="right")]) / 2e3

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        return 0.0


@dataclass(frozen=True, eq=False)
class MahimahiLink:
    """A link that sends packets only at recorded delivery opportunities.

    Each entry of a trace is one opportunity to send 1500 bytes. A message of ``n`` bytes arrives at the
    ``ceil(n / 1500)``-th opportunity from ``at`` on; an empty one takes one. After the last entry the trace repeats,
    with the time of that entry as the new time 0. Unused opportunities are lost, and messages never share one, unlike
    in Netravali et al., "Mahimahi: Accurate Record-and-Replay for HTTP", USENIX ATC 2015.

    Attributes:
        up, down: times of the opportunities [ms], integers ``[n]``, >= 0, non-decreasing, the last above 0.
        start_s: offset of time 0 within both traces [s].
    """

    up: NDArray[Any]
    down: NDArray[Any]
    start_s: NotNegative = 0.0

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            allowed = "a whole number of milliseconds from 0 to 1e9, none smaller than the one before, the last above 0"
            object.__setattr__(self, name, _series(getattr(self, name), allowed, _are_deliveries).astype(np.int64))
        check_fields(self)

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        return self._departure(payload_bytes, up, at)

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        # The next message uses later opportunities; others within this one's last millisecond are lost.
        return self._departure(payload_bytes, up, at) + 1e-9

    def _departure(self, payload_bytes: int, up: bool, at: float) -> float:
        """Seconds from ``at`` to the last packet's opportunity; in whole nanoseconds, so that ties are exact."""
        trace = self.up if up else self.down
        now, period = round((at + self.start_s) * 1e9), int(trace[-1]) * 1_000_000
        laps = max(0, -(-now // period) - 1)  # the last opportunity of a repetition belongs to it
        first = int(np.searchsorted(trace, -(-(now - laps * period) // 1_000_000)))
        last = first + max(1, -(-payload_bytes // PACKET_BYTES)) - 1
        more, entry = divmod(last, len(trace))
        return ((laps + more) * period + int(trace[entry]) * 1_000_000 - now) / 1e9


def _are_deliveries(moments: Floats) -> NDArray[np.bool_]:
    fits: NDArray[np.bool_] = (moments >= 0.0) & (moments <= 1e9) & (np.floor(moments) == moments)
    fits[1:] &= ~(moments[1:] < moments[:-1])
    fits[-1] &= moments[-1] > 0.0
    return fits
