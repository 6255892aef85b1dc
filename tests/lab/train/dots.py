"""White dots on black frames, and where they are: as demonstrations, and as a task whose random scenes show them."""

from typing import Any

import gymnasium as gym
import numpy as np

from specact.lab.data.episodes import Episodes
from specact.lab.envs.task import Task


def dots(number: int, seed: int = 0) -> dict[str, np.ndarray]:
    """``image`` uint8 ``[number, 32, 32, 3]`` and ``place`` float32 ``[number, 2]``, row and column within [-1, 1]."""
    place = np.random.default_rng(seed).integers(4, 28, (number, 2))
    image = np.zeros((number, 32, 32, 3), np.uint8)
    for frame, (row, column) in zip(image, place, strict=True):
        frame[row - 3 : row + 4, column - 3 : column + 4] = 255
    return {"image": image, "place": ((place - 16) / 12).astype(np.float32)}


def demonstrations() -> Episodes:
    """Ten episodes of actions that point to the dot."""
    seen = dots(200)
    return Episodes(seen, seen["place"].copy(), np.arange(20, 201, 20), rate_hz=10.0)


class Dots(gym.Env[dict[str, Any], np.ndarray]):
    """Shows another dot after every action."""

    def __init__(self, render_mode: str | None = None) -> None:
        place = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(
            {"image": gym.spaces.Box(0, 255, (32, 32, 3), np.uint8), "place": place}
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._shown()

    def step(self, action: np.ndarray) -> Any:
        observation, info = self._shown()
        return observation, 0.0, False, False, info

    def _shown(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        shown = dots(1, int(self.np_random.integers(2**31)))
        return {name: values[0] for name, values in shown.items()}, {"success": False, "score": 0.0}


TASK = Task(
    name="dots",
    make=Dots,
    rate_hz=10.0,
    max_steps=10,
    score="none",
    features=lambda episodes: episodes,
    scenes=lambda number, rng: dots(number, int(rng.integers(1000))),
)
