"""Link models: the interface, a steady link, and an added delay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specact.errors import ConfigError


class Link(Protocol):
    """A stateless model of a link with two directions, ``up`` (to the server) and down.

    In virtual time :meth:`delay` is sufficient, because a robot has one request in flight at a time. A stream of
    messages, as in :mod:`~specact.links.shaper`, also needs :meth:`busy`: messages wait for the ones ahead of them.
    """

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """Delay of a message on an idle link [s].

        Args:
            payload_bytes: size of the message, >= 0.
            up: direction.
            at: time at which its last byte is handed over, since the start of the link [s], >= 0.
            rng: random generator.

        Returns:
            Seconds, finite, >= 0.
        """
        ...

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """How long a message handed over at ``at`` occupies its direction, so that a next one cannot enter.

        Returns:
            Seconds, finite, >= 0: the part of :meth:`delay` that is due to a finite rate or an outage.
        """
        ...


def round_trip(link: Link, up_bytes: int, down_bytes: int, at: float, rng: np.random.Generator) -> float:
    """Time on the link [s] of a request sent at ``at`` [s] and its reply, which is sent when the request arrives."""
    up = link.delay(up_bytes, True, at, rng)
    return up + link.delay(down_bytes, False, at + up, rng)


def mean_round_trip_ms(link: Link, seconds: float = 60.0, samples: int = 300) -> float:
    """Mean round trip [ms] of empty messages sent at equal intervals over the link's first ``seconds``."""
    rng = np.random.default_rng(0)
    taken = [round_trip(link, 0, 0, at, rng) for at in np.linspace(0.0, seconds, samples).tolist()]
    return float(1e3 * np.mean(taken))


@dataclass(frozen=True)
class SteadyLink:
    """Normally distributed delays and a finite rate: one way ``max(m / 2, N(m, s)) + 8 bytes / rate``.

    ``m`` is half the round trip and ``s = jitter / sqrt(2)``, so that a round trip of two independent ways has the
    given mean and standard deviation. The lower bound excludes implausible delays; it changes mean and deviation by
    less than 4 % of the jitter if the jitter is at most a fifth of the round trip. Real links have longer tails: if
    they matter, replay a recording (:class:`~specact.links.recordings.TraceLink`).

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
        """See :class:`~specact.links.model.Link`; the serialisation time."""
        return payload_bytes * 8.0 / ((self.up_mbit_s if up else self.down_mbit_s) * 1e6)


@dataclass(frozen=True)
class AddedDelay:
    """A delay, a finite rate, or both, in front of a link, in either direction.

    Store and forward: its serialisation time ``8 bytes / rate`` is added to the link's own.

    Attributes:
        link: the link behind it.
        delay_ms: added to a round trip [ms], >= 0; half of it each way.
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
        own = self._serialisation_s(payload_bytes) + self.delay_ms / 2e3
        return own + self.link.delay(payload_bytes, up, at + own, rng)

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """See :class:`~specact.links.model.Link`; the longer of both serialisation times."""
        own = self._serialisation_s(payload_bytes)
        return max(own, self.link.busy(payload_bytes, up, at + own + self.delay_ms / 2e3))

    def _serialisation_s(self, payload_bytes: int) -> float:
        return payload_bytes * 8.0 / (self.rate_mbit_s * 1e6)
