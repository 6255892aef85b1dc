"""``--env.type=specact``: specact's environments in lerobot-eval, for policies of every type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig

_IMAGE = "image."
Frames = dict[str, list[int]]


@EnvConfig.register_subclass("specact")
@dataclass
class SpecactEnvConfig(EnvConfig):
    """An environment of specact's: that of ``specact eval``, with the initial states of its benchmark if it has some.

    Attributes:
        task: its name, such as pusht or libero-spatial, of which every task is run, or NAME/TASK.
        frames: cameras that are drawn, by the name of the observation: height and width.
    """

    task: str = "pusht"
    frames: Frames = field(default_factory=dict)

    def __post_init__(self) -> None:
        task = _task(self.task, self.frames)
        self.fps, self._parts = round(task.rate_hz), [f"{self.task}/{part}" for part in task.tasks] or [self.task]
        for name, shape in task.shapes().items():
            camera, action = _is_camera(name), name == "action"
            kind = FeatureType.ACTION if action else FeatureType.VISUAL if camera else FeatureType.STATE
            self.features[name] = PolicyFeature(kind, shape)
            self.features_map[name] = name if action else f"observation.{name.replace(_IMAGE, 'images.')}"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Nothing: Gymnasium's registry does not know it."""
        return {}

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, Any]]:
        """So many environments for each of the tasks."""
        vector = partial(AsyncVectorEnv, context="forkserver") if use_async_envs and n_envs > 1 else SyncVectorEnv
        made = [vector([partial(_Seen, part, self.frames)] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
                for part in self._parts]  # fmt: skip
        return {self.task: dict(enumerate(made))}


class _Seen(gym.Wrapper[Any, Any, Any, Any]):
    """An environment in LeRobot's terms."""

    def __init__(self, name: str, frames: Frames) -> None:
        task = _task(name, frames)
        super().__init__(gym.wrappers.TimeLimit(task.make(render_mode="rgb_array"), task.max_steps))
        self._max_episode_steps, self._states = task.max_steps, task.states
        self.task, self.task_description = name, ""
        self.metadata = {**self.env.metadata, "render_fps": round(task.rate_hz)}
        shown: Any = self.env.observation_space
        self.observation_space = gym.spaces.Dict(_named(dict(shown), gym.spaces.Dict))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seen, info = self.env.reset(seed=seed % self._states if self._states and seed is not None else seed)
        self.task_description = seen.get("instruction", "")
        return _named(seen), info | {"is_success": info["success"]}

    def step(self, action: Any) -> Any:
        seen, reward, terminated, truncated, info = self.env.step(action)
        return _named(seen), reward, terminated, truncated, info | {"is_success": info["success"]}


def _named(seen: dict[str, Any], cameras: Callable[[Any], Any] = dict) -> dict[str, Any]:
    """LeRobot makes ``observation.state`` of ``agent_pos``, and ``observation.NAME`` of what it does not know."""
    frames = {name.removeprefix(_IMAGE): value for name, value in seen.items() if _is_camera(name)}
    others = {name: value for name, value in seen.items() if not _is_camera(name) and name != "instruction"}
    named = {"agent_pos" if name == "state" else name: value for name, value in others.items()}
    return named | ({"pixels": frames["image"] if "image" in frames else cameras(frames)} if frames else {})


def _is_camera(name: str) -> bool:
    return name.partition(".")[0] == "image"


def _task(name: str, frames: Frames) -> Any:
    from specact.lab.envs import evaluated, load_task
    from specact.observation import Field

    fields = {camera: Field((*size, 3), "uint8") for camera, size in frames.items()}
    return load_task(evaluated(name)).seeing(fields)
