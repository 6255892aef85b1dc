"""A target behind a simulated link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from specact.execution.schedule import NOW_S
from specact.links.model import Link, round_trip
from specact.observation import Window
from specact.pair import Answer, Pending, TargetPolicy
from specact.rng import StepAddress
from specact.types import Clock, OffloadTimes
from specact.wire.exchange import Contract

A = TypeVar("A")


@dataclass(frozen=True)
class Route:
    """A link, and the payload of one inference, as float32.

    Attributes:
        link: the link.
        up_bytes, down_bytes: sizes of request and reply.
        rng: for the link's randomness.
    """

    link: Link
    up_bytes: int
    down_bytes: int
    rng: np.random.Generator

    @classmethod
    def of(cls, link: Link, contract: Contract, rng: np.random.Generator) -> Route:
        """The route of a family's requests and replies, counting arrays without message overhead."""
        return cls(link, *contract.array_bytes, rng)

    def round_trip_s(self, at: float) -> float:
        """Seconds on the link for a request that leaves at ``at`` [s] and its reply."""
        return round_trip(self.link, self.up_bytes, self.down_bytes, at, self.rng)

    def latency(self, inference_s: float) -> Callable[[float], float]:
        """The latency of a remote policy, link included, as a function of the request's time [s]."""
        return lambda at: self.round_trip_s(at) + inference_s


class SimulatedTarget(Generic[A]):
    """A :class:`~specact.pair.Target` over a route; it never misses.

    Args:
        policy: the target.
        route: to it.
        clock: on which the caller waits.
        target_s: time of the target's inference [s].
    """

    def __init__(self, policy: TargetPolicy[A], route: Route, clock: Clock, target_s: float) -> None:
        self._policy, self._route, self._clock, self._target_s = policy, route, clock, target_s

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`~specact.pair.Target`."""
        clock, sent_at = self._clock, self._clock.now()
        network = self._route.round_trip_s(sent_at)
        took = network + self._target_s

        def result() -> Answer[A]:
            # Each stage counts with the share of its time that was waited for. An answer that is there takes no time,
            # not even a rounding error of it, in which a world would move.
            remaining = sent_at + took - clock.now()
            waited = remaining if remaining > NOW_S else 0.0
            clock.sleep(waited)
            share = waited / took if took > 0.0 else 0.0
            times = OffloadTimes(network=share * network, target=share * self._target_s)
            return Answer(self._policy.answer(window, address), times)

        return Pending(result, lambda: sent_at + took - clock.now() <= NOW_S)
