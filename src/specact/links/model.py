"""What a link between device and server is: a model of how long a message is on the way."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Link(Protocol):
    """A model of a link with two directions, ``up`` (to the server) and down. It remembers nothing.

    In virtual time :meth:`delay` says everything, since a robot has one request under way at a time. A stream of
    messages, as in :mod:`~specact.links.shaper`, also needs :meth:`busy`: a message waits for those ahead of it.
    """

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        """How long until a message has arrived at the other end, on a link that is idle.

        Args:
            payload_bytes: size of the message, >= 0.
            up: direction.
            at: when its last byte is handed over, in seconds since the link came up, >= 0.
            rng: decides what is random about it.

        Returns:
            Seconds, finite, >= 0.
        """
        ...

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        """How long a message handed over at ``at`` occupies its direction, so that a next one cannot enter.

        Returns:
            Seconds, finite, >= 0: what a finite rate, or a link that stands still, contributes to :meth:`delay`.
        """
        ...


def round_trip(link: Link, up_bytes: int, down_bytes: int, at: float, rng: np.random.Generator) -> float:
    """Seconds on the link for a request sent at ``at`` and its reply, which starts down when the request arrived."""
    up = link.delay(up_bytes, True, at, rng)
    return up + link.delay(down_bytes, False, at + up, rng)


def mean_round_trip_ms(link: Link, seconds: float = 60.0, samples: int = 300) -> float:
    """Mean round trip of empty messages sent evenly over the link's first ``seconds`` [ms]."""
    rng = np.random.default_rng(0)
    taken = [round_trip(link, 0, 0, at, rng) for at in np.linspace(0.0, seconds, samples).tolist()]
    return float(1e3 * np.mean(taken))
