"""A link between device and server, in virtual time: how long a request and its reply are on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specact.errors import unknown_name


class Link(Protocol):
    """Samples the time a round trip spends on the wire."""

    def round_trip(self, payload_bytes: int, rng: np.random.Generator) -> float:
        """Seconds for a request and reply of this many bytes together."""
        ...


@dataclass(frozen=True)
class SteadyLink:
    """A link with normally distributed round trips and a finite rate.

    Attributes:
        rtt_ms: mean round trip of an empty message [ms].
        jitter_ms: its standard deviation [ms].
        rate_mbit_s: rate of the slower direction [Mbit/s].
    """

    rtt_ms: float
    jitter_ms: float
    rate_mbit_s: float

    def round_trip(self, payload_bytes: int, rng: np.random.Generator) -> float:
        """See :class:`Link`; never below half the mean round trip."""
        rtt = max(self.rtt_ms / 2, rng.normal(self.rtt_ms, self.jitter_ms))
        return rtt / 1e3 + payload_bytes * 8 / (self.rate_mbit_s * 1e6)


# wifi-paper: what ADAHI's test bed measured on 802.11ac. loopback: target and draft on one machine.
LINKS: dict[str, SteadyLink] = {
    "wifi-paper": SteadyLink(rtt_ms=12.054, jitter_ms=0.302, rate_mbit_s=55.4),
    "loopback": SteadyLink(rtt_ms=0.0, jitter_ms=0.0, rate_mbit_s=1e6),
}


def load_link(name: str) -> SteadyLink:
    """The preset of this name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in LINKS:
        raise unknown_name("link", name, LINKS)
    return LINKS[name]
