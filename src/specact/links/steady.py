"""A link whose distribution does not change with time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specact.errors import ConfigError


@dataclass(frozen=True)
class SteadyLink:
    """Normally distributed delays and a finite rate: one way ``max(m / 2, N(m, s)) + 8 bytes / rate``.

    ``m`` is half the round trip and ``s = jitter / sqrt(2)``, so that a round trip of two independent ways has the
    wanted mean and standard deviation. The floor keeps delays possible; it moves mean and deviation by less than 4 %
    of the jitter as long as the jitter is at most a fifth of the round trip. Real links have longer tails: where
    these matter, replay a measured one (:class:`~specact.links.trace.TraceLink`).

    Attributes:
        rtt_ms: mean round trip of an empty message [ms], >= 0.
        jitter_ms: its standard deviation [ms], >= 0.
        up_mbit_s, down_mbit_s: rate of each direction [Mbit/s], > 0, infinity allowed.

    Raises:
        ConfigError: for a value outside its range.
    """

    rtt_ms: float
    jitter_ms: float
    up_mbit_s: float
    down_mbit_s: float

    def __post_init__(self) -> None:
        for name in ("rtt_ms", "jitter_ms"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{name} of a link must be a finite number of milliseconds >= 0, got {value}")
        for name in ("up_mbit_s", "down_mbit_s"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name} of a link must be above 0 Mbit/s, got {getattr(self, name)}")

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """See :class:`~specact.links.model.Link`; draws one normal number."""
        way_ms = max(self.rtt_ms / 4.0, rng.normal(self.rtt_ms / 2.0, self.jitter_ms / math.sqrt(2.0)))
        return way_ms / 1e3 + self.busy(payload_bytes, up, at)

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """See :class:`~specact.links.model.Link`; the time of serialisation."""
        return payload_bytes * 8.0 / ((self.up_mbit_s if up else self.down_mbit_s) * 1e6)
