"""A task: an environment, and the conversion of demonstrations to its observations and actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError, unknown_name
from specact.lab.data.episodes import Episodes
from specact.observation import Field

Seen = Mapping[str, NDArray[np.float32]]
# The robot's behaviour without an action, see :class:`specact.lab.envs.robot.MovingWorld`.
Idle = Literal["hold", "last", "neutral"]
# What Gymnasium's ``reset`` and ``step`` return, the latter also without the observation.
Begun = tuple[dict[str, Any], dict[str, Any]]
Settled = tuple[float, bool, bool, dict[str, Any]]
Stepped = tuple[dict[str, Any], float, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """An environment, with the information that evaluation and training need.

    The environment's observation is a dict: float32 arrays, such as ``state`` ``[O]`` and, for goal-conditioned tasks,
    ``goal`` ``[D]``; uint8 ``[H, W, 3]`` for a camera; and optionally ``instruction``, a text. Its actions are a
    float32 :class:`gymnasium.spaces.Box` ``[A]``. The ``info`` of every ``reset`` and ``step`` holds ``success`` (bool:
    reached at any time so far), ``score`` (float: the best so far), and in a suite ``task``, the current one's name.
    ``make`` has the keyword ``render_mode``, None or ``"rgb_array"``; with ``pace`` also ``pace``, the world's own rate
    of change, >= 0; with ``cameras`` also ``frames``, height and width by name of those to render; with ``tasks`` also
    ``tasks``, those to run; with ``privileged`` also ``privileged``, whether those are observed.
    """

    name: str  # on the command line
    make: Callable[..., gym.Env[Any, Any]]
    rate_hz: float
    max_steps: int  # control steps after which an episode is truncated
    score: str  # description of ``info["score"]``
    # Converts demonstrations, as a reader returns them, to the environment's terms; camera frames pass through.
    features: Callable[[Episodes], Episodes]
    expert: Callable[[int], Any] | None = None  # builds a scripted expert from a seed: ``expert(seed).act(env)``
    pace: str | None = None  # unit of the pace; None for a world in which only the robot moves things
    # The action under which the robot keeps its state, given the last one (zeros before the first): zeros for
    # velocities and displacements, the last action for positions. None if undefined, as of the following.
    hold: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None
    # The idle modes under which, at pace 0, the world comes to rest; a ball rolls on even over a level plate.
    still: tuple[Idle, ...] = ()
    effector: Callable[[gym.Env[Any, Any]], NDArray[np.float64]] | None = None  # position of the end effector ``[D]``
    # The observation after the actions ``[m, A]``: the robot's own state by a model, everything else unchanged.
    roll_forward: Callable[[Seen, NDArray[np.float32]], dict[str, NDArray[np.float32]]] | None = None
    # Observations of random scenes ``[number, ...]`` by name, to train image encoders: ``scenes(number, rng)``.
    scenes: Callable[[int, np.random.Generator], dict[str, NDArray[Any]]] | None = None
    cameras: tuple[str, ...] = ()  # observations that are rendered only on request, see :meth:`seeing`
    # ``privileged.*``, observations on request that only a simulator can make, such as the positions of objects: for
    # training, and as an upper bound of what cameras can show.
    privileged: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()  # of a suite, by name; the environment's seed modulo their number selects one
    # Of a benchmark with initial states of its own: the task that begins in these, seed k in state k, and there their
    # number. Evaluations take them in turn; nothing is trained or chosen on them.
    benchmark: Task | None = None
    states: int = 0

    def seeing(self, fields: Mapping[str, Field]) -> Task:
        """The task with those of its :attr:`cameras`, in their size, and :attr:`privileged` among these fields.

        Rendering takes longer than physics, so an environment renders only the cameras that are needed.
        """
        frames = {name: fields[name].shape[:2] for name in self.cameras if name in fields}
        options: dict[str, Any] = {"frames": frames} if frames else {}
        if not fields.keys().isdisjoint(self.privileged):
            options["privileged"] = True
        return replace(self, make=partial(self.make, **options)) if options else self

    def only(self, name: str) -> Task:
        """One task of the suite.

        Raises:
            ConfigError: if there is none of this name.
        """
        if name not in self.tasks:
            raise unknown_name(f"task of {self.name}", name, self.tasks)
        make, states = partial(self.make, tasks=(name,)), self.states // len(self.tasks)
        return replace(self, name=f"{self.name}/{name}", make=make, tasks=(), states=states)

    def start(self, drawn: int, episode: int) -> int:
        """The environment's seed for an episode: the drawn one; in a suite the next that selects the episode's task."""
        if self.states:
            return episode % self.states
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


def check_widths(task: str, episodes: Episodes, state: int, action: int, advice: str) -> None:
    """Raises a DataError for demonstrations whose state or action has another width."""
    widths = episodes.numbers("state").shape[1], episodes.action.shape[1]
    if widths != (state, action):
        raise DataError(
            f"{task} demonstrations have state width {state} and action width {action}, got {widths[0]} and "
            f"{widths[1]}; {advice}"
        )


class TickingEnv(gym.Env[dict[str, Any], NDArray[np.float32]], ABC):
    """An environment whose ``step`` calls its methods in order: its physics can be stopped within a control period.

    Its observations are computed on request. Rendering a camera frame takes longer than the physics of a step, and a
    policy that executes chunks needs few of them.

    Attributes:
        tick_s: the physics' time step [s].
        ticks: their number in a control period.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}  # type: ignore[misc]
    tick_s: float
    ticks = 1

    @abstractmethod
    def command(self, action: NDArray[np.float32]) -> None:
        """Sets the current action, ``[A]``."""

    @abstractmethod
    def run(self, ticks: int) -> None:
        """Advances the physics."""

    @abstractmethod
    def settle(self) -> Settled:
        """Ends a control period; returns what Gymnasium's ``step`` returns after the observation."""

    @abstractmethod
    def look(self) -> dict[str, Any]:
        """The current observation."""

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Advances by a control period."""
        self.command(action)
        self.run(self.ticks)
        settled = self.settle()
        return self.look(), *settled


def as_ticking(env: gym.Env[Any, Any], rate_hz: float) -> TickingEnv:
    """The environment itself where it is a :class:`TickingEnv`; any other, or a wrapped one, with one tick a period."""
    ticking = hasattr(env, "settle") and env.unwrapped is env
    return cast(TickingEnv, env) if ticking else _WholePeriods(env, rate_hz)


class _WholePeriods(TickingEnv):
    """Any Gymnasium environment, whose observations come with its steps."""

    def __init__(self, env: gym.Env[Any, Any], rate_hz: float) -> None:
        self._env, self.tick_s = env, 1.0 / rate_hz

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
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

    def look(self) -> dict[str, Any]:
        return cast(dict[str, Any], self._seen)

    def close(self) -> None:
        self._env.close()
