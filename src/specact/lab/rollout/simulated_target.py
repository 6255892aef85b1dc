"""The target at the far end of a simulated link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specact.clock import Clock
from specact.families.chunks.policy import ChunkSpec
from specact.families.codes.spec import CodePolicy, PolicySpec
from specact.lab.rollout.history import NOW_S
from specact.links.model import Link, round_trip
from specact.types import OffloadTimes, Window
from specact.verifiers import Answer


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
    def of_codes(cls, link: Link, spec: PolicySpec, rng: np.random.Generator) -> Route:
        """The observation window up; distribution and offsets down."""
        down = spec.codebooks * spec.codes * (1 + spec.chunk * spec.actions)
        return cls(link, _window_bytes(spec), 4 * down, rng)

    @classmethod
    def of_chunks(cls, link: Link, spec: ChunkSpec, rng: np.random.Generator) -> Route:
        """The observation window up; a chunk of actions down."""
        return cls(link, _window_bytes(spec), 4 * spec.chunk * spec.actions, rng)

    def round_trip_s(self, at: float) -> float:
        """Seconds on the link for a request that leaves at ``at`` [s] and its reply."""
        return round_trip(self.link, self.up_bytes, self.down_bytes, at, self.rng)

    def latency(self, inference_s: float) -> Callable[[float], float]:
        """What a policy at the other end takes, link included, given when it is asked [s]: for ``run_episode``."""
        return lambda at: self.round_trip_s(at) + inference_s


@dataclass
class _Ahead:
    """A request that left ahead: for which window, when, and how long the link takes with it, once that is drawn."""

    window: Window
    left: float
    network: float | None = None


class FarTarget:
    """A :class:`~specact.verifiers.Target` over a route; a request that left ahead runs beside the draft's inference.

    Args:
        policy: the target.
        route: to it.
        clock: on which the caller waits.
        target_s: what the target's inference takes [s].
    """

    def __init__(self, policy: CodePolicy, route: Route, clock: Clock, target_s: float) -> None:
        self._policy, self._route, self._clock, self._target_s = policy, route, clock, target_s
        self._ahead: _Ahead | None = None

    def prefetch(self, window: Window) -> bool:
        self._ahead = _Ahead(window, self._clock.now())
        return True

    def pending(self, window: Window) -> bool:
        ahead = self._ahead
        if ahead is None or ahead.window is not window:
            return False
        return self._clock.now() + NOW_S < ahead.left + self._network(ahead) + self._target_s

    def ask(self, window: Window) -> Answer:
        now = self._clock.now()
        ahead = self._ahead if self._ahead is not None and self._ahead.window is window else _Ahead(window, now)
        network = self._network(ahead)
        took = network + self._target_s
        waited = max(0.0, ahead.left + took - now)
        self._clock.sleep(waited)
        share = waited / took if took > 0.0 else 0.0
        times = OffloadTimes(network=share * network, target=share * self._target_s)
        return Answer(self._policy.infer(window), times)

    def _network(self, ahead: _Ahead) -> float:
        """Time on the link; drawn when it is first looked at, since nobody may ever ask."""
        if ahead.network is None:
            ahead.network = self._route.round_trip_s(ahead.left)
        return ahead.network


def _window_bytes(spec: PolicySpec | ChunkSpec) -> int:
    return 4 * (spec.window * spec.state + spec.goal)
