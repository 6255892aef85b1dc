"""When the bytes of a stream are due at the other end of a link."""

from __future__ import annotations

import numpy as np

from specact.links.model import Link


class Pacer:
    """One direction of one connection: messages enter one after the other and leave in the order they came.

    A message that comes while the link is still :meth:`~specact.links.model.Link.busy` with those before it waits
    until they are through; one that would overtake, by jitter, arrives together with the one before it.

    Args:
        link: the model.
        up: direction.
        start: the moment that is time 0 of the link [s].
        rng: of this direction; what the model draws, message by message.
    """

    def __init__(self, link: Link, up: bool, start: float, rng: np.random.Generator) -> None:
        self._link, self._up, self._start, self._rng = link, up, start, rng
        self._free = self._due = start

    def due(self, payload_bytes: int, now: float) -> float:
        """When a message handed over ``now`` has arrived, on the clock of ``start`` [s]; never before ``now``."""
        entry = max(now, self._free)
        at = entry - self._start
        self._free = entry + self._link.busy(payload_bytes, self._up, at)
        self._due = max(self._due, entry + self._link.delay(payload_bytes, self._up, at, self._rng))
        return self._due
