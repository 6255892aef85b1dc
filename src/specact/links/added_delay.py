"""One more hop in front of a link."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specact.errors import ConfigError
from specact.links.model import Link


@dataclass(frozen=True)
class AddedDelay:
    """A hop that every message passes before the link in either direction: a slow rate, a long way, or both.

    The hop stores a message, then forwards it, so that its ``8 bytes / rate`` adds to the link's own.

    Attributes:
        link: what comes behind.
        delay_ms: what the hop adds to a round trip [ms], >= 0; half of it each way.
        rate_mbit_s: its rate in each direction [Mbit/s], > 0, infinity allowed.

    Raises:
        ConfigError: for a value outside its range.
    """

    link: Link
    delay_ms: float = 0.0
    rate_mbit_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.delay_ms < math.inf:
            raise ConfigError(f"the delay added to a link must be a finite number of ms >= 0, got {self.delay_ms}")
        if not self.rate_mbit_s > 0.0:
            raise ConfigError(f"the rate of a link must be above 0 Mbit/s, got {self.rate_mbit_s}")

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """See :class:`~specact.links.model.Link`; draws what ``link`` draws."""
        own = self._sending(payload_bytes) + self.delay_ms / 2e3
        return own + self.link.delay(payload_bytes, up, at + own, rng)

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """See :class:`~specact.links.model.Link`; the slower of the two sets the pace."""
        own = self._sending(payload_bytes)
        return max(own, self.link.busy(payload_bytes, up, at + own + self.delay_ms / 2e3))

    def _sending(self, payload_bytes: int) -> float:
        return payload_bytes * 8.0 / (self.rate_mbit_s * 1e6)
