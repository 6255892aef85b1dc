"""Links that replay recordings: measured round trips, and the delivery opportunities of Mahimahi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.records import NotNegative, check_fields
from specact.types import Floats

PACKET_BYTES = 1500
_ROUND_TRIP = "a number of milliseconds above 0 and at most 1e9"
_DELIVERY = "a whole number of milliseconds from 0 to 1e9, none smaller than the one before, the last above 0"


def read_series(path: Path, allowed: str, fits: Callable[[Floats], NDArray[np.bool_]]) -> Floats:
    """Reads a file with one number per line, float64 ``[n]``, n >= 1.

    Args:
        path: of the file.
        allowed: description of a valid line, for the error.
        fits: which numbers of a series are valid, bool ``[n]``.

    Raises:
        ConfigError: if the file cannot be read or is empty, or for the first invalid line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the recorded link {path}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"the recorded link {path} is empty; it needs at least one line, each {allowed}")
    values = np.array([_number(line) for line in lines])
    bad = np.flatnonzero(~fits(values))
    if len(bad):
        line = lines[bad[0]][:40].decode(errors="replace")
        raise ConfigError(f"{path}, line {bad[0] + 1}: {line!r} is not allowed; every line must be {allowed}")
    return values


def _number(line: bytes) -> float:
    try:
        return float(line) if b"_" not in line else np.nan  # NaN is invalid in every series
    except ValueError:
        return np.nan


def _series(values: ArrayLike, what: str, allowed: str, fits: Callable[[Floats], NDArray[np.bool_]]) -> Floats:
    """The values as a read-only array, checked."""
    found = np.array(values, dtype=np.float64)
    if found.ndim != 1 or not len(found) or not fits(found).all():
        raise ConfigError(f"{what} of a link must be a 1-D array, each value {allowed}")
    found.setflags(write=False)
    return found


@dataclass(frozen=True, eq=False)
class TraceLink:
    """A link that replays recorded round trips; each direction takes half of the current one.

    Recordings of round trips rarely contain timestamps. Without ``period_ms`` we assume that they were measured back to
    back, each request sent when the previous reply arrived: sample ``i`` is valid during
    ``[r_1 + .. + r_{i-1}, r_1 + .. + r_i)``, and a stall of 7 s lasts 7 s. With ``period_ms`` each sample is valid for
    one period, and a longer stall affects only messages sent within it. After the last sample the recording repeats.

    The delay does not depend on the size of a message: a recording contains the delays of its own messages. Add
    ``+rate=`` for larger ones.

    Attributes:
        rtt_ms: round trips [ms], float ``[n]``, each in (0, 1e9].
        period_ms: time between two samples [ms], or None for back to back.
        start_s: offset of time 0 within the recording [s].

    Source: the format is that of the recordings of networked telerobots by Gago-Benitez, Fernandez-Madrigal and
    Cruz-Martin (Sensors 14(2), 2014), one value in ms per line. Their metadata list path, software and bytes, but no
    period. The longest has 741,735 values with a sum of 24.4 h, consistent with a day of back-to-back measurements.
    """

    rtt_ms: Floats
    period_ms: Annotated[float, Meta(ge=1e-6, le=1e9)] | None = None
    start_s: NotNegative = 0.0
    _ends_ns: NDArray[np.float64] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        rtts = _series(self.rtt_ms, "round trips", _ROUND_TRIP, _possible_round_trips)
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


def read_round_trips(path: Path) -> Floats:
    """Reads round trips [ms] from a file with one per line, see :func:`read_series`."""
    return read_series(path, _ROUND_TRIP, _possible_round_trips)


def _possible_round_trips(rtts: Floats) -> NDArray[np.bool_]:
    return (rtts > 0.0) & (rtts <= 1e9)


@dataclass(frozen=True, eq=False)
class MahimahiLink:
    """A link that sends packets only at recorded delivery opportunities.

    Each entry of a trace is one opportunity to send 1500 bytes. A message of ``n`` bytes has left at the
    ``ceil(n / 1500)``-th opportunity from ``at`` on (an empty one takes one), and arrives ``way_ms`` later. After the
    last entry the trace repeats, with the time of that entry as the new time 0. Unused opportunities are lost.

    Attributes:
        up, down: times of the opportunities [ms], integers ``[n]``, >= 0, non-decreasing, the last above 0.
        way_ms: one-way propagation delay [ms]. Traces contain none: with 0, an idle fast link has no delay.
        start_s: offset of time 0 within both traces [s].

    Source: Netravali et al., "Mahimahi: Accurate Record-and-Replay for HTTP", USENIX ATC 2015. Deviation:
    messages never share a packet, each uses its own opportunities.
    """

    up: NDArray[np.int64]
    down: NDArray[np.int64]
    way_ms: NotNegative = 0.0
    start_s: NotNegative = 0.0

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            trace = _series(getattr(self, name), f"the {name} trace", _DELIVERY, _possible_deliveries)
            object.__setattr__(self, name, trace.astype(np.int64))
        check_fields(self)

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        return self._departure(payload_bytes, up, at) + self.way_ms / 1e3

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


def read_deliveries(path: Path) -> NDArray[np.int64]:
    """Reads the delivery opportunities [ms] of a mahimahi trace, see :func:`read_series`."""
    return read_series(path, _DELIVERY, _possible_deliveries).astype(np.int64)


def _possible_deliveries(moments: Floats) -> NDArray[np.bool_]:
    fits: NDArray[np.bool_] = (moments >= 0.0) & (moments <= 1e9) & (np.floor(moments) == moments)
    fits[1:] &= ~(moments[1:] < moments[:-1])
    fits[-1] &= moments[-1] > 0.0
    return fits
