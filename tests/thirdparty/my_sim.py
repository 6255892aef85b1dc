"""A simulator that is not specact's: a trolley on a table, which has to come to rest at a goal."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from specact.lab.envs.task import Task

RATE_HZ = 20.0


class Trolley(gym.Env[Any, Any]):
    """Actions are accelerations ``[2]``; the state is position and velocity ``[4]``."""

    observation_space = gym.spaces.Dict(
        {"state": gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), "goal": gym.spaces.Box(-1, 1, (2,), np.float32)}
    )
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.position = self.velocity = self.goal = np.zeros(2)
        self.success, self.nearest = False, np.inf

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-0.8, 0.8, (2, 2))
        self.velocity = np.zeros(2)
        self.success, self.nearest = False, np.inf
        return self._observation(), self._info()

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.velocity = 0.9 * self.velocity + 0.1 * np.clip(action, -1.0, 1.0)
        self.position = self.position + 0.2 * self.velocity
        return self._observation(), 0.0, self.success, False, self._info()

    def _observation(self) -> dict[str, NDArray[np.float32]]:
        state = np.concatenate([self.position, self.velocity])
        return {"state": state.astype(np.float32), "goal": self.goal.astype(np.float32)}

    def _info(self) -> dict[str, Any]:
        distance = float(np.linalg.norm(self.position - self.goal))
        self.nearest = min(self.nearest, distance)
        self.success = self.success or (distance < 0.1 and float(np.linalg.norm(self.velocity)) < 0.1)
        return {"success": self.success, "score": -self.nearest}


class Expert:
    """Makes demonstrations; a task whose demonstrations were recorded needs none."""

    def __init__(self, seed: int) -> None:
        pass

    def reset(self, env: Any) -> None:
        pass

    def act(self, env: Any) -> NDArray[np.float32]:
        trolley = env.unwrapped
        wanted = 4.0 * (trolley.goal - trolley.position) - 3.0 * trolley.velocity
        return np.asarray(np.clip(wanted, -1.0, 1.0), np.float32)


TASK = Task(
    name="trolley",
    make=Trolley,
    rate_hz=RATE_HZ,
    max_steps=100,
    score="minus the least distance from the goal",
    features=lambda episodes: episodes,
    expert=Expert,
)
