"""A task: an environment, and how demonstrations are brought into its terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from specact.errors import unknown_name
from specact.lab.data.episodes import Episodes
from specact.observation import Field

Seen = Mapping[str, NDArray[np.float32]]
# What a robot does while it has no action to play, see :class:`specact.lab.envs.moving.MovingWorld`.
Idle = Literal["hold", "last", "neutral"]


@dataclass(frozen=True)
class Task:
    """An environment with everything evaluation and training need to know of it.

    The environment's observation is a dict: float32 arrays, such as ``state`` ``[O]`` and, for goal-conditioned tasks,
    ``goal`` ``[D]``; uint8 ``[H, W, 3]`` for a camera; and ``instruction``, a text, where there is one. Its actions are
    a float32 :class:`gymnasium.spaces.Box` ``[A]``.
    The ``info`` of every ``reset`` and ``step`` holds ``success`` (bool: reached at any time so far) and ``score``
    (float: the best so far); in a suite also ``task``, the name of the present one.

    Attributes:
        name: the name used on the command line.
        make: builds the environment; keyword ``render_mode`` is ``None`` or ``"rgb_array"``, and where ``pace`` is
            said, keyword ``pace`` is how fast the world changes by itself, >= 0. Where there are ``cameras``, keyword
            ``frames`` is height and width by name of those that are looked through; where there are ``tasks``, keyword
            ``tasks`` is those that come up.
        rate_hz: control rate [Hz].
        max_steps: control steps after which an episode is truncated.
        score: what ``info["score"]`` measures, in words.
        features: brings raw demonstrations, as a reader returns them, into the environment's observations and actions;
            camera frames pass through.
        expert: builds a scripted expert from a seed, for tasks that have one: ``expert(seed).act(env) -> action``.
        pace: what a pace is measured in, in words; None for a world in which nothing moves but what the robot moves.
        hold: the action after which the robot stays as it is, given the last one ``[A]`` (zeros before the first);
            None where nobody has said. Zeros for velocities and displacements, the last action for positions.
        still: the ways to idle under which, at pace 0, the world soon stands still. Under the others something goes on
            moving while the robot waits: a ball rolls on even over a level plate.
        effector: where that which the robot moves is, ``effector(env)`` float64 ``[D]``; its jerk and path are the
            robot's. None where nobody has said.
        roll_forward: what the robot would see if it had run the actions ``[m, A]`` after an observation and nothing
            else had moved: its own state carried forward by a model of the robot, everything else as it was. None
            where there is no such model.
        scenes: observations of random scenes ``[number, ...]`` by name, for image encoders to learn from:
            ``scenes(number, rng)``. None where nobody has written it.
        cameras: names of the observations that are drawn only where they are asked for, see :meth:`seeing`.
        tasks: of a suite, by name. The environment's seed decides which comes up: the one at its remainder.
    """

    name: str
    make: Callable[..., gym.Env[Any, Any]]
    rate_hz: float
    max_steps: int
    score: str
    features: Callable[[Episodes], Episodes]
    expert: Callable[[int], Any] | None = None
    pace: str | None = None
    hold: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None
    still: tuple[Idle, ...] = ()
    effector: Callable[[gym.Env[Any, Any]], NDArray[np.float64]] | None = None
    roll_forward: Callable[[Seen, NDArray[np.float32]], dict[str, NDArray[np.float32]]] | None = None
    scenes: Callable[[int, np.random.Generator], dict[str, NDArray[Any]]] | None = None
    cameras: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def seeing(self, fields: Mapping[str, Field]) -> Task:
        """The same, looked at through those of its :attr:`cameras` that are among these fields, in their size.

        Drawing takes longer than physics, so an environment draws what somebody looks at, and nothing else.
        """
        frames = {name: fields[name].shape[:2] for name in self.cameras if name in fields}
        return replace(self, make=partial(self.make, frames=frames)) if frames else self

    def only(self, name: str) -> Task:
        """One task of the suite.

        Raises:
            ConfigError: if there is none of this name.
        """
        if name not in self.tasks:
            raise unknown_name(f"task of {self.name}", name, self.tasks)
        return replace(self, name=f"{self.name}/{name}", make=partial(self.make, tasks=(name,)), tasks=())

    def start(self, drawn: int, episode: int) -> int:
        """The environment's seed for an episode: the one drawn; in a suite the next at which it is the task's turn."""
        return drawn + (episode - drawn) % len(self.tasks) if self.tasks else drawn

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of an ``action`` and of every observation, by name: ``(n,)`` for numbers, ``(H, W, 3)`` for a camera."""
        env = self.make(render_mode=None)
        try:
            observation, action = env.observation_space, env.action_space
        finally:
            env.close()
        assert isinstance(observation, gym.spaces.Dict)
        spaces = {"action": action, **observation.spaces}
        return {name: tuple(space.shape) for name, space in sorted(spaces.items()) if space.shape}
