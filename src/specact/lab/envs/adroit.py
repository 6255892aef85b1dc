"""Adroit relocate: a hand with 24 joints on a moving arm picks up a ball and carries it to a target in the air.

``AdroitHandRelocate-v1`` of gymnasium-robotics (Rajeswaran et al. 2018). Ball and target are random in every episode.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import farama_notifications  # type: ignore[import-untyped, unused-ignore]
import gymnasium as gym
import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.lab.data.episodes import Episodes
from specact.lab.envs.cameras import rendered
from specact.lab.envs.task import Begun, Stepped, Task, TickingEnv, check_widths

# On import gymnasium-robotics prints a note about the dense rewards of Adroit, which are not used here.
farama_notifications.notifications.pop("gymnasium_robotics", None)
_relocate = import_module("gymnasium_robotics.envs.adroit_hand.adroit_relocate")

MAX_STEPS = 200
RATE_HZ = 100.0
SUCCESS_STEPS = 25  # more than this many steps with the ball at its target, as in Rajeswaran et al. 2018
WIDTH = 39
ACTIONS = 30
BOUND = 100.0  # [rad or m], far outside anything reachable; finite, so that the spaces can be checked and sampled


def observe(raw: ArrayLike) -> NDArray[np.float32]:
    """The observation ``state``, the simulator's own ``[..., 39]`` as float32.

    Arm (3 m, 3 rad) and hand joints (24 rad), then three differences of positions [m]: palm - ball, palm - target,
    ball - target. It contains no velocities.
    """
    return np.asarray(np.clip(np.asarray(raw), -BOUND, BOUND), dtype=np.float32)


def features(episodes: Episodes) -> Episodes:
    """Converts recorded relocate demonstrations: the same observations as float32, actions clipped to [-1, 1].

    Args:
        episodes: ``state`` ``[N, 39]`` the simulator's observation, ``action`` ``[N, 30]``.

    Raises:
        DataError: for other widths; note that other tasks of Adroit have observations of the same width.
    """
    check_widths("relocate", episodes, WIDTH, ACTIONS, "pass AdroitHandRelocate-v1's own observations")
    action = np.clip(episodes.action, -1.0, 1.0).astype(np.float32)
    return episodes.with_numbers(action, state=observe(episodes.numbers("state")))


class Relocate(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """AdroitHandRelocate-v1.

    Observation: ``{"state": float32 [39]}``, see :func:`observe`. Action: float32 ``[30]`` in [-1, 1], joint position
    targets scaled to each actuator's range, held for 10 ms.
    Reward: 1 on a step with the ball at its target (within 0.1 m), else 0. ``info``: ``score`` the number of such steps
    so far, ``success`` whether that is more than 25. Never terminates; truncated after 200 steps (2 s).
    """

    metadata: ClassVar[dict[str, Any]] = TickingEnv.metadata  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Dict({"state": gym.spaces.Box(-BOUND, BOUND, (WIDTH,), np.float32)})
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
        self._sim = _relocate.AdroitHandRelocateEnv(render_mode=render_mode)
        self._steps = 0
        self._there = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Random positions of ball and target, given by the seed; the hand always starts in the same pose."""
        super().reset(seed=seed)
        raw, _ = self._sim.reset(seed=seed)
        self._steps, self._there = 0, 0
        return {"state": observe(raw)}, self._info()

    def step(self, action: NDArray[np.float32]) -> Stepped:
        raw, _, _, _, info = self._sim.step(np.asarray(action, dtype=np.float64))
        success = bool(info["success"])
        self._steps += 1
        self._there += success
        return {"state": observe(raw)}, float(success), False, self._steps >= MAX_STEPS, self._info()

    def render(self) -> NDArray[np.uint8] | None:
        return None if self.render_mode is None else rendered(self._sim)

    def close(self) -> None:
        self._sim.close()

    def _info(self) -> dict[str, Any]:
        return {"score": float(self._there), "success": self._there > SUCCESS_STEPS}


TASK = Task(
    name="relocate",
    make=Relocate,
    rate_hz=RATE_HZ,
    max_steps=MAX_STEPS,
    score="steps with the ball at its target so far, 0 to 200; success above 25",
    features=features,
    hold=lambda last: last,
)
