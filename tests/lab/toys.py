"""A suite of two small tasks with instructions and a camera that needs no renderer, and a pair of policies for it."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from specact.families.chunks.pair import ChunkParts, PairSpec
from specact.families.chunks.policy import Chunk
from specact.families.chunks.sources import Inputs, chunk_policy
from specact.lab.envs.task import Task
from specact.observation import Field
from specact.types import ActionUnits

SIDES = {"left": np.array([-0.8, 0.0]), "right": np.array([0.8, 0.0])}
GAIN = 0.125  # of an action on the place; a power of two, so that sums are exact enough


class Hand(gym.Env[Any, Any]):
    """A hand in a plane that has to go to one side. ``state`` is where it is; where to is in the instruction."""

    def __init__(
        self, render_mode: str | None = None, frames: Mapping[str, tuple[int, int]] | None = None,
        tasks: Sequence[str] = tuple(SIDES),
    ) -> None:  # fmt: skip
        self._frames, self._tasks = frames or {}, tasks
        self.observation_space = gym.spaces.Dict({
            "state": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "instruction": gym.spaces.Text(20, charset=string.ascii_lowercase + " "),
            **{name: gym.spaces.Box(0, 255, (*size, 3), np.uint8) for name, size in self._frames.items()},
        })  # fmt: skip
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.place, self.task, self._success = np.zeros(2), tasks[0], False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.task = self._tasks[(seed or 0) % len(self._tasks)]
        self.place, self._success = self.np_random.uniform(-0.5, 0.5, 2), False
        return self._observation(), self._info()

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = self.place + GAIN * np.asarray(action, np.float64)
        self._success = self._success or bool(np.linalg.norm(self.place - SIDES[self.task]) < 0.1)
        return self._observation(), 0.0, self._success, False, self._info()

    def _observation(self) -> dict[str, Any]:
        seen = {}
        for name, (height, width) in self._frames.items():
            seen[name] = np.zeros((height, width, 3), np.uint8)
            row, column = ((np.clip(self.place, -1, 1) + 1) / 2 * (height - 1, width - 1)).astype(int)
            seen[name][row, column] = (255, 100, 7)
        return {"state": self.place.astype(np.float32), "instruction": f"go {self.task}", **seen}

    def _info(self) -> dict[str, Any]:
        return {"success": self._success, "score": float(self._success), "task": self.task}


def wanted(place: NDArray[np.floating[Any]], task: str) -> NDArray[np.float32]:
    """What the expert does: straight to the side."""
    return np.clip(4.0 * (SIDES[task] - place.astype(np.float64)), -1.0, 1.0).astype(np.float32)


class Expert:
    def __init__(self, seed: int) -> None:
        pass

    def reset(self, env: Any) -> None:
        pass

    def act(self, env: Any) -> NDArray[np.float32]:
        return wanted(env.unwrapped.place.astype(np.float32), env.unwrapped.task)


SUITE = Task(
    name=f"{__name__}:SUITE", make=Hand, rate_hz=20.0, max_steps=60, score="success",
    features=lambda episodes: episodes, expert=Expert, hold=np.zeros_like, cameras=("image.top",), tasks=tuple(SIDES),
)  # fmt: skip
HOPELESS = replace(SUITE, max_steps=1)


@chunk_policy(observation={"state": (2,)}, chunk=2, actions=2, rate_hz=20.0)
def blind(inputs: Inputs) -> Chunk:
    """Always left."""
    return np.repeat(np.array([[[-1.0, 0.0]]]), len(inputs["state"]), axis=0).repeat(2, axis=1)


@chunk_policy(
    observation={"state": (2,), "image.top": Field((10, 12, 3), "uint8", 0)}, chunk=2, actions=2, rate_hz=20.0,
    instruction=True,
)  # fmt: skip
def seeing(inputs: Inputs, instruction: Sequence[str]) -> Chunk:
    """As told, as long as it sees the hand."""
    lit = inputs["image.top"].any(axis=(1, 2, 3))
    actions = [
        wanted(place, text.removeprefix("go ")) * sees
        for place, text, sees in zip(inputs["state"][:, -1], instruction, lit, strict=True)
    ]
    return np.repeat(np.stack(actions)[:, None], 2, axis=1)


UNITS = ActionUnits.of_range(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
pair = ChunkParts("hand", blind, UNITS, PairSpec(seeing.spec, execute=2), lambda: seeing, fingerprint="hand").pair()
