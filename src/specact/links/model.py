"""Link models: steady links, an added delay, lost segments, outages; and replay of recordings (RTTs, Mahimahi)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.records import BelowOne, NotNegative, Positive, check_fields
from specact.types import Floats

SEGMENT_BYTES = 1448  # Ethernet's 1500 less 20 for IPv4 and 32 for TCP with timestamps
MAX_RTO_MS = 60_000.0
PACKET_BYTES = 1500  # of a delivery opportunity


@runtime_checkable
class Link(Protocol):
    """A stateless model of a link with two directions, ``up`` (to the server) and down.

    In virtual time :meth:`delay` is sufficient, because a robot has one request in flight at a time. A stream of
    messages, as in :mod:`~specact.links.shaper`, also needs :meth:`busy`: messages wait for the ones ahead of them.
    """

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """Delay [s], finite, of a message handed over ``at`` seconds after the start of a link that is idle."""
        ...

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """How long [s] it keeps its direction occupied: the part that is due to a finite rate or an outage."""
        ...


def round_trip(link: Link, up_bytes: int, down_bytes: int, at: float, rng: np.random.Generator) -> float:
    """Time on the link [s] of a request sent at ``at`` [s] and its reply, which is sent when the request arrives."""
    up = link.delay(up_bytes, True, at, rng)
    return up + link.delay(down_bytes, False, at + up, rng)


class _Checked:
    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SteadyLink(_Checked):
    """Normally distributed delays and a finite rate: one way ``max(m / 2, N(m, s)) + 8 bytes / rate``.

    ``m`` is half the round trip and ``s = jitter / sqrt(2)``, so that a round trip of two independent ways has the
    given mean and standard deviation. The lower bound changes both by less than 4 % of the jitter if the jitter is at
    most a fifth of the round trip. Real links have longer tails: if they matter, replay a recording.

    Attributes:
        rtt_ms, jitter_ms: mean and standard deviation of the round trip of an empty message [ms].
        up_mbit_s, down_mbit_s: rate of each direction [Mbit/s].
    """

    rtt_ms: NotNegative
    jitter_ms: NotNegative
    up_mbit_s: Positive
    down_mbit_s: Positive

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        way_ms = max(self.rtt_ms / 4.0, rng.normal(self.rtt_ms / 2.0, self.jitter_ms / math.sqrt(2.0)))
        return way_ms / 1e3 + self.busy(payload_bytes, up, at)

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        return payload_bytes * 8e-6 / (self.up_mbit_s if up else self.down_mbit_s)


@dataclass(frozen=True)
class AddedDelay(_Checked):
    """A delay, a rate, or both, in front of a link: store and forward, with its own serialisation time.

    Attributes:
        link: behind it.
        delay_ms: added to a round trip [ms]; half of it each way.
        rate_mbit_s: in each direction [Mbit/s].
    """

    link: Link
    delay_ms: NotNegative = 0.0
    rate_mbit_s: Positive | None = None

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        added_s = self._serialisation_s(payload_bytes) + self.delay_ms / 2e3
        return added_s + self.link.delay(payload_bytes, up, at + added_s, rng)

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        busy_s = self._serialisation_s(payload_bytes)
        return max(busy_s, self.link.busy(payload_bytes, up, at + busy_s + self.delay_ms / 2e3))

    def _serialisation_s(self, payload_bytes: int) -> float:
        return payload_bytes * 8e-6 / self.rate_mbit_s if self.rate_mbit_s else 0.0


@dataclass(frozen=True)
class LossyLink(_Checked):
    """A link under TCP that loses each 1448-byte segment, and each retransmission, with the same probability.

    A segment lost ``k`` times in a row arrives ``rto (1 + 2 + .. + 2^(k-1))`` later, each wait at most 60 s; the latest
    segment completes a message (RFC 6298, 2.5 and 5.5; Linux begins with 200 ms). Not modelled: timers from measured
    round trips, fast retransmit, tail loss probes, the smaller congestion window.

    Attributes:
        link: for segments that are not lost.
        loss: probability that a segment is lost.
        rto_ms: first retransmission timeout [ms].
    """

    link: Link
    loss: BelowOne
    rto_ms: Annotated[float, Meta(gt=0, le=MAX_RTO_MS)] = 200.0

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """Draws what ``link`` draws, then one number per segment."""
        plain = self.link.delay(payload_bytes, up, at, rng)
        segments = max(1, math.ceil(payload_bytes / SEGMENT_BYTES))
        losses = int(rng.geometric(1.0 - self.loss, size=segments).max()) - 1
        doubling = min(losses, int(math.log2(MAX_RTO_MS / self.rto_ms)) + 1)
        return plain + (self.rto_ms * (2.0**doubling - 1.0) + (losses - doubling) * MAX_RTO_MS) / 1e3

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        return self.link.busy(payload_bytes, up, at)


@dataclass(frozen=True)
class OutageLink:
    """A link with outages: messages in flight are delayed, new ones wait.

    Attributes:
        link: between outages.
        outages: (start, duration) of each [s], in any order; they may overlap.
    """

    link: Link
    outages: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        for start, duration in self.outages:
            if not (0.0 <= start < math.inf and 0.0 < duration < math.inf):
                raise ConfigError(
                    f"an outage needs a start >= 0 s and a duration > 0 s, both finite, got {start} and {duration}"
                )
        object.__setattr__(self, "outages", tuple(sorted(self.outages)))

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        free = self._pass(at, 0.0)
        return self._pass(free, self.link.delay(payload_bytes, up, free, rng)) - at

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        free = self._pass(at, 0.0)
        return self._pass(free, self.link.busy(payload_bytes, up, free)) - at

    def _pass(self, at: float, needed: float) -> float:
        """When ``needed`` seconds outside of outages have passed since ``at``."""
        for start, duration in self.outages:
            if start > at + needed or (start == at + needed and needed):
                break
            if start + duration > at:
                needed -= max(0.0, start - at)
                at = start + duration
        return at + needed


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


def load_recording(paths: Sequence[str], period_ms: float | None, start_s: float) -> Link:
    """The link of one file of round trips, or of two of delivery opportunities, up and down.

    Raises:
        ConfigError: if one cannot be used.
    """
    series = [read_series(Path(path)) for path in paths]
    try:
        if len(paths) == 1:
            return TraceLink(series[0], period_ms, start_s)
        return MahimahiLink(series[0], series[1], start_s)
    except ConfigError as error:
        raise ConfigError(f"{' and '.join(paths)}: {error}") from None
