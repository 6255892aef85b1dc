"""A point on a line that is told which way to go, and two cameras that look at it."""

from typing import Any

import gymnasium as gym
import numpy as np

from specact.lab.envs.task import Task

WAYS = {"go to the left": -1.0, "go to the right": 1.0}


class Told(gym.Env[dict[str, Any], np.ndarray]):
    """Success is to arrive at 1 on the side that was told; the instruction alone says which one that is."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "state": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
                "image.front": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
                "image.top": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
                "instruction": gym.spaces.Text(32),
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.told, self.way = list(WAYS.items())[self.np_random.integers(2)]
        self.place, self.height = self.np_random.uniform(-0.5, 0.5, 2)
        return self._seen(), self._info()

    def step(self, action: np.ndarray) -> Any:
        self.place += 0.2 * float(np.clip(action[0], -1.0, 1.0))
        return self._seen(), 0.0, bool(abs(self.place) >= 1.0), False, self._info()

    def _seen(self) -> dict[str, Any]:
        frame = np.zeros((16, 16, 3), np.uint8)
        row, column = (int(np.clip(8 + 6 * value, 1, 14)) for value in (self.height, self.place))
        frame[row - 1 : row + 2, column - 1 : column + 2] = 255
        return {
            "state": np.array([self.place, self.height], np.float32),
            "image.front": frame,
            "image.top": frame.transpose(1, 0, 2).copy(),
            "instruction": self.told,
        }

    def _info(self) -> dict[str, Any]:
        return {"success": bool(self.way * self.place >= 1.0), "score": float(self.way * self.place)}


class Expert:
    """Goes where it is told to, faster where it is high up."""

    def __init__(self, seed: int) -> None:
        """Nothing about it is random."""

    def reset(self, env: gym.Env[Any, Any]) -> None:
        """It has no state."""

    def act(self, env: gym.Env[Any, Any]) -> np.ndarray:
        told = env.unwrapped
        assert isinstance(told, Told)
        return np.array([told.way * (0.75 + 0.5 * told.height)], np.float32)


TASK = Task(
    name="told", make=Told, rate_hz=10.0, max_steps=30, score="how far it went the right way",
    features=lambda episodes: episodes, expert=Expert,
)  # fmt: skip
