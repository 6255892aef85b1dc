"""Faults of a link: lost segments and outages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specact.errors import ConfigError
from specact.links.model import Link

SEGMENT_BYTES = 1448  # Ethernet's 1500 less 20 for IPv4 and 32 for TCP with timestamps
MAX_RTO_MS = 60_000.0


@dataclass(frozen=True)
class LossyLink:
    """A link under TCP that loses each 1448-byte segment, and each retransmission, with the same probability.

    TCP turns loss into delay. A segment lost ``k`` times in a row arrives ``rto (1 + 2 + .. + 2^(k-1))`` later, where
    each wait is at most 60 s. A message is complete when its last segment has arrived, so the largest delay counts.

    Source: RFC 6298: the timer doubles with every retransmission (5.5) and may have an upper bound of at least 60 s
    (2.5). The RFC requires at least 1 s (2.4); Linux uses 200 ms, our default. Not modelled: the part of the timer that
    depends on the measured round trip; fast retransmit and tail loss probes, which need later segments or
    acknowledgements and so seldom help a short request; and the smaller congestion window after a loss. Requests of a
    few segments are realistic; longer messages are too slow where fast retransmit would have helped, and too fast where
    the window would have shrunk.

    Attributes:
        link: the link for segments that are not lost.
        loss: probability that a segment is lost, in [0, 1).
        rto_ms: first retransmission timeout [ms], > 0.

    Raises:
        ConfigError: for a value outside its range.
    """

    link: Link
    loss: float
    rto_ms: float = 200.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.loss < 1.0:
            raise ConfigError(f"loss is the probability that a segment is lost and must lie in [0, 1), got {self.loss}")
        if not 0.0 < self.rto_ms <= MAX_RTO_MS:
            raise ConfigError(f"the retransmission timeout must lie in (0, {MAX_RTO_MS:g}] ms, got {self.rto_ms}")

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """See :class:`~specact.links.model.Link`; draws what ``link`` draws, then one number per segment."""
        plain = self.link.delay(payload_bytes, up, at, rng)
        segments = max(1, math.ceil(payload_bytes / SEGMENT_BYTES))
        losses = int(rng.geometric(1.0 - self.loss, size=segments).max()) - 1
        return plain + self._retransmissions_ms(losses) / 1e3

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """See :class:`~specact.links.model.Link`; waiting for a retransmission timer does not occupy the link."""
        return self.link.busy(payload_bytes, up, at)

    def _retransmissions_ms(self, losses: int) -> float:
        doubling = min(losses, int(math.log2(MAX_RTO_MS / self.rto_ms)) + 1)
        return self.rto_ms * (2.0**doubling - 1.0) + (losses - doubling) * MAX_RTO_MS


@dataclass(frozen=True)
class OutageLink:
    """A link with outages: messages in flight are delayed, new ones wait.

    Attributes:
        link: the link between outages.
        outages: (start, duration) of each [s], start >= 0 and duration > 0, in any order; they may overlap.

    Raises:
        ConfigError: for a value outside its range.
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
        """See :class:`~specact.links.model.Link`; draws what ``link`` draws."""
        free = self._pass(at, 0.0)
        return self._pass(free, self.link.delay(payload_bytes, up, free, rng)) - at

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """See :class:`~specact.links.model.Link`."""
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
