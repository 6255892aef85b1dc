"""Links that replay recordings: measured round trips, and the delivery opportunities of Mahimahi."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.types import Floats


def read_series(path: Path, allowed: str, fits: Callable[[Floats], NDArray[np.bool_]]) -> Floats:
    """The numbers of a file, one a line.

    Args:
        path: of the file.
        allowed: what a line has to be, in words, for the error.
        fits: which numbers of a series are allowed, bool ``[n]``.

    Returns:
        float64 ``[n]``, n >= 1, read-only.

    Raises:
        ConfigError: if the file cannot be read or is empty, or for the first line that is not as it has to be.
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
    values.setflags(write=False)
    return values


def _number(line: bytes) -> float:
    try:
        return float(line) if b"_" not in line else np.nan  # which fits no series
    except ValueError:
        return np.nan


_ALLOWED_ROUND_TRIP = "a number of milliseconds above 0 and at most 1e9"


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
        if rtts.ndim != 1 or not len(rtts) or not _possible_round_trips(rtts).all():
            raise ConfigError(f"round trips of a link must be a row of numbers, each {_ALLOWED_ROUND_TRIP}")
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
    return read_series(path, _ALLOWED_ROUND_TRIP, _possible_round_trips)


def _possible_round_trips(rtts: Floats) -> NDArray[np.bool_]:
    return (rtts > 0.0) & (rtts <= 1e9)


PACKET_BYTES = 1500
_ALLOWED_DELIVERY = "a whole number of milliseconds from 0 to 1e9, none smaller than the one before, the last above 0"


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
            if moments.ndim != 1 or not len(moments) or not _possible_deliveries(moments).all():
                raise ConfigError(f"the {name} trace of a link must be a row of numbers, each {_ALLOWED_DELIVERY}")
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
    return read_series(path, _ALLOWED_DELIVERY, _possible_deliveries).astype(np.int64)


def _possible_deliveries(moments: Floats) -> NDArray[np.bool_]:
    fits: NDArray[np.bool_] = (moments >= 0.0) & (moments <= 1e9) & (np.floor(moments) == moments)
    fits[1:] &= ~(moments[1:] < moments[:-1])
    fits[-1] &= moments[-1] > 0.0
    return fits
