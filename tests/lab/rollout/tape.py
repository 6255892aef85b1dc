"""A world that is nothing but a tape: it shows its time, and keeps which action was commanded when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from specact.families.chunks.policy import ChunkSpec, Inpainting
from specact.lab.envs.task import Seen, Task
from specact.observation import Window, vectors

RATE_HZ = 10.0
PERIOD_S = 1 / RATE_HZ
CHUNK = 8


class Tape(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """Its state ``[1]`` is its time [s]; an action ``[1]`` is whatever one likes; nothing ever succeeds."""

    tick_s = 0.001
    ticks = 100

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Dict({"state": spaces.Box(0, 1e6, (1,), np.float32)})
        self.action_space = spaces.Box(-1e6, 1e6, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        super().reset(seed=seed)
        self.ran = 0
        self.commands: list[tuple[float, float]] = []
        return self.look(), {"success": False, "score": 0.0}

    def command(self, action: NDArray[np.float32]) -> None:
        self.commands.append((self.ran * self.tick_s, float(action[0])))

    def run(self, ticks: int) -> None:
        self.ran += ticks

    def settle(self) -> tuple[float, bool, bool, dict[str, Any]]:
        return 0.0, False, False, {"success": False, "score": 0.0}

    def look(self) -> dict[str, NDArray[np.float32]]:
        return {"state": np.array([self.ran * self.tick_s], np.float32)}


def _later(seen: Seen, actions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """The robot of this world is its clock."""
    return {"state": seen["state"] + np.float32(len(actions) * PERIOD_S)}


IDLE = -1.0
TAPE = Task(
    "tape", Tape, RATE_HZ, 1000, "nothing", lambda episodes: episodes, hold=lambda last: np.full_like(last, IDLE),
    roll_forward=_later,
)  # fmt: skip


class Prophet:
    """A chunk policy whose actions say the time they are meant for, reckoned from the newest observation.

    Args:
        window: observations it looks at.
        inpaints: whether it takes inpainting; it keeps what it got, and the windows it saw.
    """

    def __init__(self, window: int = 1, inpaints: bool = False) -> None:
        self.spec = ChunkSpec(vectors(window, state=1), chunk=CHUNK, actions=1, rate_hz=RATE_HZ)
        self.inpaints = inpaints
        self.told: list[Inpainting | None] = []
        self.windows: list[NDArray[np.float32]] = []

    def infer(
        self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None
    ) -> NDArray[np.float32]:
        self.told.append(inpainting)
        self.windows.append(window["state"][:, 0])
        return np.asarray(window["state"][-1:] + PERIOD_S * np.arange(CHUNK)[:, None], np.float32)

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> list[NDArray[np.float32]]:
        return [self.infer(window, rng) for window, rng in zip(windows, rngs, strict=True)]
