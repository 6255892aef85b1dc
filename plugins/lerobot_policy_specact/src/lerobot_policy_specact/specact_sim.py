"""``--robot.type=specact_sim``: specact's simulated robots, which need no hardware."""

from __future__ import annotations

import logging
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from lerobot.robots import Robot

from lerobot_policy_specact.config_specact_sim import SpecactSimConfig
from specact.errors import ConfigError, MissingExtraError, unknown_name
from specact.observation import Field

if TYPE_CHECKING:
    from specact.lab.envs.robot import SimulatedRobot
    from specact.lab.envs.task import Task

_ACTION = "action"
# LeRobot passes on numbers whose names end so, and takes "state." and "action." from the beginning of a name.
_SUFFIX = ".pos"
_IMAGE = "image."

_logger = logging.getLogger(__name__)


class SpecactSim(Robot):
    """One episode of an environment: the world moves one step per action, and stands still when the episode is over.

    Numbers are ``NAME_INDEX.pos``, which LeRobot makes one ``observation.state`` of, in the order of their names;
    cameras have the name of the observation, without ``image.``.

    Args:
        config: the options.

    Raises:
        SpecactError: if there is no such environment, or it does not show what is wanted.
    """

    config_class = SpecactSimConfig
    name = "specact_sim"

    def __init__(self, config: SpecactSimConfig) -> None:
        super().__init__(config)
        self._config = config
        self._robot: SimulatedRobot | None = None

    @cached_property
    def _task(self) -> Task:
        try:
            from specact.lab.envs import load_task
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "gymnasium", "sim") from error
        task = load_task(self._config.env)
        for name in self._config.frames.keys() - set(task.cameras):
            raise unknown_name(f"camera of {task.name}", name, task.cameras)
        frames = {name: Field((height, width, 3), "uint8") for name, (height, width) in self._config.frames.items()}
        return task.seeing(frames)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """What is shown, and the action; by name, in its order."""
        shapes, sees = self._task.shapes(), self._config.sees
        for name in sees or ():
            if name not in shapes:
                raise unknown_name(f"observation of {self._config.env}", name, shapes.keys() - {_ACTION})
        return {name: shape for name, shape in shapes.items() if sees is None or name in (*sees, _ACTION)}

    @property
    def observation_features(self) -> dict[str, Any]:
        """``float`` for each number, and the shape of each camera's frames."""
        found: dict[str, Any] = {}
        for name, shape in self._shapes.items():
            if name != _ACTION:
                found |= {_camera(name): shape} if len(shape) == 3 else dict.fromkeys(_numbers(name, shape), float)
        return found

    @property
    def action_features(self) -> dict[str, Any]:
        """``float`` for each number of an action."""
        return dict.fromkeys(_numbers(_ACTION, self._shapes[_ACTION]), float)

    @property
    def is_connected(self) -> bool:
        """Whether the episode has begun."""
        return self._robot is not None

    def connect(self, calibrate: bool = True) -> None:
        """Begins the episode."""
        from specact.lab.envs.robot import SimulatedRobot
        from specact.lab.rollout.rollout import episode_seed

        self._robot = SimulatedRobot(self._task)
        self._robot.start(episode_seed(self._config.seed, self._config.episode, self._task))

    @property
    def is_calibrated(self) -> bool:
        """Always."""
        return True

    def calibrate(self) -> None:
        """Nothing."""

    def configure(self) -> None:
        """Nothing."""

    def get_observation(self) -> dict[str, Any]:
        """What the environment shows now."""
        seen, found = self._begun.observe(), dict[str, Any]()
        for name, shape in self._shapes.items():
            if name == _ACTION:
                continue
            if len(shape) == 3:
                found[_camera(name)] = seen[name]
            else:
                found |= dict(zip(_numbers(name, shape), np.ravel(seen[name]).tolist(), strict=True))
        return found

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """Moves the world by one step, unless the episode is over."""
        robot, names = self._begun, list(self.action_features)
        if action.keys() != set(names):
            raise ConfigError(
                f"an action of {self._config.env} is {', '.join(names)}, got {', '.join(action)}; a simulated robot "
                "cannot return to where it was: --return_to_initial_position=false"
            )
        if not robot.done:
            robot.act(np.array([action[name] for name in names], np.float32))
            if robot.done:
                self._tell()
        return action

    def disconnect(self) -> None:
        """Ends the episode."""
        robot = self._begun
        if not robot.done:
            self._tell()
        self._robot = None
        robot.close()

    @property
    def _begun(self) -> SimulatedRobot:
        if self._robot is None:
            raise ConfigError("the simulated robot is not connected; call connect() first")
        return self._robot

    def _tell(self) -> None:
        robot = self._begun
        _logger.info(
            "%s, seed %d, episode %d: %s after %d steps, score %r", self._config.env, self._config.seed,
            self._config.episode, "success" if robot.success else "no success", robot.steps, robot.score,
        )  # fmt: skip


def _numbers(name: str, shape: tuple[int, ...]) -> list[str]:
    return [f"{name.replace('.', '_')}_{index}{_SUFFIX}" for index in range(math.prod(shape))]


def _camera(name: str) -> str:
    return name.removeprefix(_IMAGE)
