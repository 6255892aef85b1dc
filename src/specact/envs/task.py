"""A task: an environment, and how demonstrations are brought into its terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from specact.data.episodes import Episodes


@dataclass(frozen=True)
class Task:
    """An environment with everything evaluation and training need to know of it.

    The environment's observation is a dict of float32 arrays: ``state`` ``[O]`` and, for goal-conditioned tasks,
    ``goal`` ``[D]``. Its actions are a float32 :class:`gymnasium.spaces.Box` ``[A]``. The ``info`` of every ``reset``
    and ``step`` holds ``success`` (bool: reached at any time so far) and ``score`` (float: the best so far).

    Attributes:
        name: the name used on the command line.
        make: builds the environment; keyword ``render_mode`` is ``None`` or ``"rgb_array"``.
        rate_hz: control rate [Hz].
        max_steps: control steps after which an episode is truncated.
        score: what ``info["score"]`` measures, in words.
        features: brings raw demonstrations, as a reader returns them, into the environment's observations and actions.
        expert: builds a scripted expert from a seed, for tasks that have one: ``expert(seed).act(env) -> action``.
    """

    name: str
    make: Callable[..., gym.Env[Any, Any]]
    rate_hz: float
    max_steps: int
    score: str
    features: Callable[[Episodes], Episodes]
    expert: Callable[[int], Any] | None = None
