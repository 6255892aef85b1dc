"""Link models: steady links, an added delay, lost segments and outages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
from msgspec import Meta

from specact.errors import ConfigError
from specact.records import BelowOne, NotNegative, Positive, check_fields

SEGMENT_BYTES = 1448  # Ethernet's 1500 less 20 for IPv4 and 32 for TCP with timestamps
MAX_RTO_MS = 60_000.0


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
        own = self._serialisation_s(payload_bytes) + self.delay_ms / 2e3
        return own + self.link.delay(payload_bytes, up, at + own, rng)

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        own = self._serialisation_s(payload_bytes)
        return max(own, self.link.busy(payload_bytes, up, at + own + self.delay_ms / 2e3))

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
