"""Environments that separate acting from observing, and an adapter for all others."""

from __future__ import annotations

from typing import Any, Protocol, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Seen = dict[str, NDArray[np.float32]]
Settled = tuple[float, bool, bool, dict[str, Any]]
# What Gymnasium's ``reset`` and ``step`` return.
Begun = tuple[dict[str, Any], dict[str, Any]]
Stepped = tuple[dict[str, Any], float, bool, bool, dict[str, Any]]


class Ticking(Protocol):
    """An environment whose ``step`` calls these in order: its physics can be stopped within a control period.

    Its observations are computed on request. Rendering a camera frame takes longer than the physics of a step, and a
    policy that executes chunks needs few of them.

    Attributes:
        tick_s: the physics' time step [s].
        ticks: their number in a control period.
    """

    tick_s: float
    ticks: int

    def reset(self, *, seed: int | None = None) -> tuple[Seen, dict[str, Any]]:
        """As Gymnasium's."""
        ...

    def command(self, action: NDArray[np.float32]) -> None:
        """Sets the current action, ``[A]``."""
        ...

    def run(self, ticks: int) -> None:
        """Advances the physics."""
        ...

    def settle(self) -> Settled:
        """Ends a control period; returns what Gymnasium's ``step`` returns after the observation."""
        ...

    def look(self) -> Seen:
        """The current observation."""
        ...

    def close(self) -> None:
        """As Gymnasium's."""
        ...


class TickingEnv(gym.Env[dict[str, Any], NDArray[np.float32]], Ticking):
    """Base of :class:`Ticking` environments, whose commands can change within a control period."""

    ticks = 1

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Advances by a control period."""
        self.command(action)
        self.run(self.ticks)
        settled = self.settle()
        return self.look(), *settled


def as_ticking(env: gym.Env[Any, Any], rate_hz: float) -> Ticking:
    """The environment itself where it is :class:`Ticking`; any other, or a wrapped one, as :class:`WholePeriods`.

    Args:
        env: the environment.
        rate_hz: its control rate [Hz].
    """
    return cast(Ticking, env) if hasattr(env, "settle") and env.unwrapped is env else WholePeriods(env, rate_hz)


class WholePeriods:
    """Any Gymnasium environment as a :class:`Ticking` one, with one tick in a control period.

    Args:
        env: the environment.
        rate_hz: its control rate [Hz].
    """

    ticks = 1

    def __init__(self, env: gym.Env[Any, Any], rate_hz: float) -> None:
        self._env, self.tick_s = env, 1.0 / rate_hz
        self._seen: Seen = {}

    def reset(self, *, seed: int | None = None) -> tuple[Seen, dict[str, Any]]:
        self._seen, info = self._env.reset(seed=seed)
        return self._seen, info

    def command(self, action: NDArray[np.float32]) -> None:
        self._action = action

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self._seen, reward, terminated, truncated, info = self._env.step(self._action)
            self._settled = float(reward), terminated, truncated, info

    def settle(self) -> Settled:
        return self._settled

    def look(self) -> Seen:
        return self._seen

    def close(self) -> None:
        self._env.close()
