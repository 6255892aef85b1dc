"""The target at the far end of a simulated link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from specact.clock import Clock
from specact.execution.schedule import NOW_S
from specact.links.model import Link, round_trip
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import OffloadTimes
from specact.verification import Answer, Pending, TargetPolicy
from specact.wire.dialect import Dialect
from specact.wire.sizes import array_bytes

A = TypeVar("A")


@dataclass(frozen=True)
class Route:
    """A link, and what crosses it for one inference, as float32.

    Attributes:
        link: the link.
        up_bytes, down_bytes: sizes of request and reply.
        rng: decides what is random about the link.
    """

    link: Link
    up_bytes: int
    down_bytes: int
    rng: np.random.Generator

    @classmethod
    def of(cls, link: Link, dialect: Dialect, rng: np.random.Generator) -> Route:
        """What the family's requests and replies hold crosses the link, without any message around it."""
        return cls(link, *array_bytes(dialect), rng)

    def round_trip_s(self, at: float) -> float:
        """Seconds on the link for a request that leaves at ``at`` [s] and its reply."""
        return round_trip(self.link, self.up_bytes, self.down_bytes, at, self.rng)

    def latency(self, inference_s: float) -> Callable[[float], float]:
        """What a policy at the other end takes, link included, given when it is asked [s]: for ``run_episode``."""
        return lambda at: self.round_trip_s(at) + inference_s


@dataclass
class _Ahead:
    """A request that left ahead: for which step, when, and how long the link takes with it, once that is drawn."""

    address: StepAddress
    left: float
    network: float | None = None


class SimulatedTarget(Generic[A]):
    """A :class:`~specact.verification.Target` over a route; what left ahead runs beside the draft's inference.

    Args:
        policy: the target.
        route: to it.
        clock: on which the caller waits.
        target_s: what the target's inference takes [s].
    """

    def __init__(self, policy: TargetPolicy[A], route: Route, clock: Clock, target_s: float) -> None:
        self._policy, self._route, self._clock, self._target_s = policy, route, clock, target_s
        self._ahead: _Ahead | None = None

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """See :class:`~specact.verification.Target`; it always leaves."""
        self._ahead = _Ahead(address, self._clock.now())
        return True

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`~specact.verification.Target`; never misses."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.address != address:
            ahead = _Ahead(address, self._clock.now())
        return _Travelling(self, window, ahead)

    def network_s(self, ahead: _Ahead) -> float:
        """Time on the link; drawn when it is first looked at, since nobody may ever ask."""
        if ahead.network is None:
            ahead.network = self._route.round_trip_s(ahead.left)
        return ahead.network

    def left_s(self, ahead: _Ahead) -> float:
        """How long its answer still takes [s]; negative where it has been there for a while."""
        return ahead.left + self.network_s(ahead) + self._target_s - self._clock.now()

    def arrive(self, window: Window, ahead: _Ahead) -> Answer[A]:
        """Waits for the answer; each stage counts with the share of it that was still waited for."""
        network, waited = self.network_s(ahead), max(0.0, self.left_s(ahead))
        took = network + self._target_s
        self._clock.sleep(waited)
        share = waited / took if took > 0.0 else 0.0
        times = OffloadTimes(network=share * network, target=share * self._target_s)
        return Answer(self._policy.answer(window, ahead.address), times)


@dataclass(frozen=True)
class _Travelling(Generic[A]):
    """A request to a simulated target."""

    target: SimulatedTarget[A]
    window: Window
    ahead: _Ahead

    def done(self) -> bool:
        return self.target.left_s(self.ahead) <= NOW_S

    def result(self) -> Answer[A]:
        return self.target.arrive(self.window, self.ahead)
