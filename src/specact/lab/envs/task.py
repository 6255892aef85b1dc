"""A task: an environment, and the conversion of demonstrations to its observations and actions."""

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
# The robot's behaviour without an action, see :class:`specact.lab.envs.moving.MovingWorld`.
Idle = Literal["hold", "last", "neutral"]


@dataclass(frozen=True)
class Task:
    """An environment, with the information that evaluation and training need.

    The environment's observation is a dict: float32 arrays, such as ``state`` ``[O]`` and, for goal-conditioned tasks,
    ``goal`` ``[D]``; uint8 ``[H, W, 3]`` for a camera; and optionally ``instruction``, a text. Its actions are a
    float32 :class:`gymnasium.spaces.Box` ``[A]``.
    The ``info`` of every ``reset`` and ``step`` holds ``success`` (bool: reached at any time so far) and ``score``
    (float: the best so far); in a suite also ``task``, the name of the current one.

    Attributes:
        name: the name used on the command line.
        make: builds the environment; keyword ``render_mode`` is ``None`` or ``"rgb_array"``. With ``pace``, keyword
            ``pace`` is the world's own rate of change, >= 0. With ``cameras``, keyword ``frames`` is height and width
            by name of the cameras to render; with ``tasks``, keyword ``tasks`` is the tasks to run; with
            ``privileged``, keyword ``privileged`` is whether those are observed.
        rate_hz: control rate [Hz].
        max_steps: control steps after which an episode is truncated.
        score: description of ``info["score"]``.
        features: converts raw demonstrations, as a reader returns them, to the environment's observations and actions;
            camera frames pass through.
        expert: builds a scripted expert from a seed, for tasks that have one: ``expert(seed).act(env) -> action``.
        pace: unit of the pace; None for a world in which only the robot moves things.
        hold: the action under which the robot keeps its state, given the last one ``[A]`` (zeros before the first);
            None if undefined. Zeros for velocities and displacements, the last action for positions.
        still: the idle modes under which, at pace 0, the world comes to rest. Under the others something goes on
            moving while the robot waits: a ball rolls on even over a level plate.
        effector: position of the end effector, ``effector(env)`` float64 ``[D]``, for jerk and path length. None if
            undefined.
        roll_forward: predicts the observation after the actions ``[m, A]``: the robot's own state by a model of the
            robot, everything else unchanged. None without such a model.
        scenes: observations of random scenes ``[number, ...]`` by name, to train image encoders:
            ``scenes(number, rng)``. None if undefined.
        cameras: names of the observations that are rendered only on request, see :meth:`seeing`.
        privileged: names, ``privileged.*``, of the observations that only a simulator can make, such as the positions
            of objects; on request, see :meth:`seeing`. For training, and as an upper bound of what cameras can show.
        tasks: of a suite, by name. The environment's seed modulo their number selects one.
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
    privileged: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def seeing(self, fields: Mapping[str, Field]) -> Task:
        """The task with those of its :attr:`cameras`, in their size, and :attr:`privileged` among these fields.

        Rendering takes longer than physics, so an environment renders only the cameras that are needed.
        """
        frames = {name: fields[name].shape[:2] for name in self.cameras if name in fields}
        asked: dict[str, Any] = {"frames": frames} if frames else {}
        if not fields.keys().isdisjoint(self.privileged):
            asked["privileged"] = True
        return replace(self, make=partial(self.make, **asked)) if asked else self

    def only(self, name: str) -> Task:
        """One task of the suite.

        Raises:
            ConfigError: if there is none of this name.
        """
        if name not in self.tasks:
            raise unknown_name(f"task of {self.name}", name, self.tasks)
        return replace(self, name=f"{self.name}/{name}", make=partial(self.make, tasks=(name,)), tasks=())

    def start(self, drawn: int, episode: int) -> int:
        """The environment's seed for an episode: the drawn one; in a suite the next that selects the episode's task."""
        return drawn + (episode - drawn) % len(self.tasks) if self.tasks else drawn

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of ``action`` and of every observation, by name: ``(n,)`` for numbers, ``(H, W, 3)`` for a camera."""
        env = self.make(render_mode=None)
        try:
            observation, action = env.observation_space, env.action_space
        finally:
            env.close()
        assert isinstance(observation, gym.spaces.Dict)
        spaces = {"action": action, **observation.spaces}
        return {name: tuple(space.shape) for name, space in sorted(spaces.items()) if space.shape}
