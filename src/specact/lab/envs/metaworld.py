"""Meta-World's MT10 with two cameras: ten tasks of one robot arm, specified by an instruction (Yu et al. 2019).

``metaworld`` is the suite, ``metaworld/reach-v3`` one of its tasks. The seed modulo ten selects an episode's task, and
the positions of objects and goal. Policies observe the arm's state, camera frames and an instruction; objects and goals
are visible only in the frames. Goals have Meta-World's marker, two pixels wide in a frame of 64 pixels.
"""

from __future__ import annotations

import string
import warnings
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, cast

import gymnasium as gym
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP
from numpy.typing import NDArray

from specact.lab.data.episodes import Episodes
from specact.lab.envs.cameras import Camera, Cameras, Sizes
from specact.lab.envs.task import Begun, Settled, Task, TickingEnv, check_widths

RATE_HZ = 20.0
REPEAT = 4  # simulation steps per action; Meta-World runs at 80 Hz
MAX_STEPS = 100
WIDTH = 4
ACTIONS = 4
BOUND = 10.0  # [m], far outside anything reachable; finite, so that the spaces can be checked and sampled
SCENE_PX = 480
SCENE, SCENE_NUMBERS = "privileged.scene", 17
INSTRUCTIONS = {
    "reach-v3": "reach the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and hold it at the goal",
    "door-open-v3": "open the door",
    "drawer-open-v3": "open the drawer",
    "drawer-close-v3": "close the drawer",
    "button-press-topdown-v3": "press the button from above",
    "peg-insert-side-v3": "put the peg into the hole",
    "window-open-v3": "open the window",
    "window-close-v3": "close the window",
}
CAMERAS = {
    "image.corner2": Camera("corner2", turned=True),
    "image.gripper": Camera("gripperPOV"),  # moves with the gripper
}


def observe(raw: NDArray[np.float64]) -> NDArray[np.float32]:
    """The observation ``state``: hand position (3, m) and opening of the gripper (0..1), float32 ``[4]``.

    From the simulator's ``[39]``, which also contains the positions of objects and goal.
    """
    return np.asarray(np.clip(raw[:WIDTH], -BOUND, BOUND), dtype=np.float32)


def scene(raw: NDArray[np.float64]) -> NDArray[np.float32]:
    """The observation ``privileged.scene``, float32 ``[17]``, from the simulator's ``[39]``.

    Position [m] and quaternion of two objects (7 each; zeros where a task has none), and position of the goal [m] (3).
    """
    return np.asarray(np.clip(np.concatenate([raw[WIDTH:18], raw[-3:]]), -BOUND, BOUND), dtype=np.float32)


def features(episodes: Episodes) -> Episodes:
    """Checks demonstrations of the scripted experts, which need no conversion.

    Args:
        episodes: ``state`` ``[N, 4]`` and ``action`` ``[N, 4]`` at 20 Hz; everything else passes through.

    Raises:
        DataError: for other widths.
    """
    advice = f"make them, at {RATE_HZ:g} Hz, with specact data record --env metaworld"
    check_widths("metaworld", episodes, WIDTH, ACTIONS, advice)
    return episodes


class MetaWorld(TickingEnv):
    """Tasks of Meta-World at 20 Hz; a seed modulo their number selects one, ``task``.

    Observation: ``state`` float32 ``[4]``, see :func:`observe`; ``instruction``; on request ``image.corner2`` (fixed)
    and ``image.gripper`` (moving), and ``privileged.scene``, see :func:`scene`. Action: float32 ``[4]`` in [-1, 1], the
    gripper's displacement in units of 4 cm (3), and its effort (positive closes), held for four simulation steps.
    Reward: 1 on the step that succeeds, else 0. ``info``: ``success`` Meta-World's, at any step so far; ``score`` the
    same as a number; ``task``. Terminates on success; truncated after 100 steps (5 s). ``raw`` ``[39]`` is the
    simulator's observation with objects and goal, the input of the scripted experts. The simulator of a task is built
    when it is first selected, and kept: 30 MB, or 100 MB after rendering.
    """

    tick_s = 1.0 / RATE_HZ

    def __init__(
        self,
        render_mode: str | None = None,
        frames: Sizes = MappingProxyType({}),
        tasks: Sequence[str] = tuple(INSTRUCTIONS),
        privileged: bool = False,
    ) -> None:
        self.render_mode = render_mode
        self._frames, self._tasks, self._privileged = frames, tasks, privileged
        hidden = {SCENE: gym.spaces.Box(-BOUND, BOUND, (SCENE_NUMBERS,), np.float32)} if privileged else {}
        self.observation_space = gym.spaces.Dict(
            {
                "state": gym.spaces.Box(-BOUND, BOUND, (WIDTH,), np.float32),
                "instruction": gym.spaces.Text(64, charset=string.ascii_lowercase + " "),
                **hidden,
                **{name: gym.spaces.Box(0, 255, (*size, 3), np.uint8) for name, size in frames.items()},
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
        self._simulators: dict[str, tuple[Any, Cameras]] = {}
        self.task, self._steps, self._success = tasks[0], 0, False
        self._action = np.zeros(ACTIONS, np.float32)
        self.raw: NDArray[np.float64] = np.zeros(39)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Begins an episode: the seed selects the task and the positions; the arm always starts in the same pose."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self.task = self._tasks[drawn % len(self._tasks)]
        if self.task not in self._simulators:
            simulator = _simulator(self.task)
            self._simulators[self.task] = simulator, Cameras(simulator.model, CAMERAS)
        self._sim, self._cameras = self._simulators[self.task]
        self._sim.seed(drawn)  # its reset ignores seeds
        self.raw, _ = self._sim.reset()
        self._steps, self._success = 0, False
        return self.look(), self._info()

    def command(self, action: NDArray[np.float32]) -> None:
        self._action = np.clip(action, -1.0, 1.0)

    def run(self, ticks: int) -> None:
        for _ in range(ticks * REPEAT):
            self.raw, _, _, _, info = self._sim.step(self._action)
            self._success = self._success or bool(info["success"])
            if self._success:
                break

    def settle(self) -> Settled:
        self._steps += 1
        return float(self._success), self._success, self._steps >= MAX_STEPS, self._info()

    def look(self) -> dict[str, Any]:
        seen = self._cameras.look(self._sim.data, self._frames)
        hidden = {SCENE: scene(self.raw)} if self._privileged else {}
        return {"state": observe(self.raw), "instruction": INSTRUCTIONS[self.task], **hidden, **seen}

    def render(self) -> NDArray[np.uint8] | None:
        if self.render_mode is None:
            return None
        return self._cameras.look(self._sim.data, {"image.corner2": (SCENE_PX, SCENE_PX)})["image.corner2"]

    def close(self) -> None:
        for simulator, cameras in self._simulators.values():
            cameras.close()
            simulator.close()

    def _info(self) -> dict[str, Any]:
        return {"score": float(self._success), "success": self._success, "task": self.task}


def _simulator(task: str) -> Any:
    """Meta-World's environment of this task, with a random goal per seed, visible in the observation."""
    simulator: Any = ALL_V3_ENVIRONMENTS[task]()
    simulator._set_task_called = True
    simulator._freeze_rand_vec, simulator.seeded_rand_vec = False, True
    # The goal is hidden at construction, and steps clip it to the bounds cached then, that is, to zeros.
    simulator._partially_observable = False
    simulator.__dict__.pop("sawyer_observation_space", None)
    return simulator


def hold(last: NDArray[np.float32]) -> NDArray[np.float32]:
    """The action that keeps the arm's position and the gripper's effort, float32 ``[4]``."""
    return np.append(np.zeros_like(last[:3]), last[3:])


class Expert:
    """Meta-World's scripted policies, one per task. Deterministic; they observe the positions of objects and goal."""

    def __init__(self, seed: int) -> None:
        policies: dict[str, Any] = ENV_POLICY_MAP  # its hints name an abstract class
        self._policies = {task: policies[task]() for task in INSTRUCTIONS}

    def reset(self, env: gym.Env[Any, Any]) -> None:
        """Does nothing: the policies have no state."""

    def act(self, env: gym.Env[Any, Any]) -> NDArray[np.float32]:
        """The action for the environment's current ``task`` and ``raw`` state, float32 ``[4]`` in [-1, 1]."""
        world: Any = env.unwrapped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about every action that has to be clipped
            action = self._policies[world.task].get_action(world.raw)
        return np.asarray(np.clip(action, -1.0, 1.0), dtype=np.float32)


def effector(env: gym.Env[Any, Any]) -> NDArray[np.float64]:
    """Position of the hand, float64 ``[3]`` [m]."""
    return cast(MetaWorld, env.unwrapped).raw[:3].copy()


TASK = Task(
    name="metaworld",
    make=MetaWorld,
    rate_hz=RATE_HZ,
    max_steps=MAX_STEPS,
    score="success",
    features=features,
    expert=Expert,
    hold=hold,
    still=("hold",),
    effector=effector,
    cameras=tuple(CAMERAS),
    privileged=(SCENE,),
    tasks=tuple(INSTRUCTIONS),
)
