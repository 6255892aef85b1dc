"""Franka kitchen: a robot arm does four household subtasks in a given order (FrankaKitchen-v1, gymnasium-robotics).

The goal in the observation is the current subtask. It advances by the simulator's completion test, which a robot does
not have: results are those of a policy **with an oracle planner**. Demonstrations are labelled by the same test.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

import farama_notifications  # type: ignore[import-untyped, unused-ignore]
import gymnasium as gym
import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.cameras import Cameras, Sizes, free_camera, rendered
from specact.lab.envs.task import Begun, Settled, Task, TickingEnv, check_widths

# On import gymnasium-robotics prints a note about Adroit, which is not used here.
farama_notifications.notifications.pop("gymnasium_robotics", None)
_franka = import_module("gymnasium_robotics.envs.franka_kitchen.kitchen_env")
BONUS_THRESH: float = _franka.BONUS_THRESH
OBS_ELEMENT_GOALS: dict[str, NDArray[np.float64]] = _franka.OBS_ELEMENT_GOALS
OBS_ELEMENT_INDICES: dict[str, NDArray[np.int64]] = _franka.OBS_ELEMENT_INDICES

MAX_STEPS = 560  # the longest clean demonstration has 518
RATE_HZ = 12.5
CHAIN = 4  # subtasks in an episode
ROBOT = 9  # joints, including two gripper fingers; also the action width
RAW_WIDTH = 59  # robot positions 9 and velocities 9, objects' positions 21 and velocities 20
WIDTH = 30
BOUND = 100.0  # [rad or m] far outside anything reachable; finite, so that the spaces can be checked and sampled
# The view in which FrankaKitchen-v1 renders.
CAMERAS = {"image.scene": free_camera((-0.2, 0.5, 2.0), distance=2.2, azimuth=70.0, elevation=-35.0)}
# In the order of their numbers in the demonstrations.
SUBTASKS = (
    "microwave", "kettle", "slide cabinet", "light switch", "top burner", "bottom burner", "hinge cabinet",
)  # fmt: skip


def observe(raw: ArrayLike) -> NDArray[np.float32]:
    """The observation ``state``: positions only, float32 ``[..., 30]`` from the simulator's ``[..., 59]``.

    Robot joints (9; rad, gripper fingers m), then objects (21: burner knobs, light switch, cabinets, microwave in rad
    or m; the kettle's position [m] and quaternion). Not scaled. Velocities are left out, because a policy that observes
    them learns to repeat its last motion.
    """
    raw = np.asarray(raw)
    positions = np.concatenate([raw[..., :ROBOT], objects(raw)], axis=-1)
    return np.asarray(np.clip(positions, -BOUND, BOUND), dtype=np.float32)


def objects(raw: ArrayLike) -> NDArray[np.float64]:
    """The objects' positions ``[..., 21]`` in the simulator's observation ``[..., 59]``."""
    return np.asarray(raw)[..., 2 * ROBOT : 2 * ROBOT + WIDTH - ROBOT]


def completed(positions: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Which subtasks are complete: ``|position - goal| < 0.3``, the simulator's test, bool ``[..., 7]``.

    Args:
        positions: the objects' positions ``[..., 21]``.
    """
    distances = [
        np.linalg.norm(positions[..., OBS_ELEMENT_INDICES[name] - ROBOT] - OBS_ELEMENT_GOALS[name], axis=-1)
        for name in SUBTASKS
    ]
    return np.asarray(np.stack(distances, axis=-1) < BONUS_THRESH)


def current(chain: Sequence[int], done: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The current subtask: the first of the chain not yet completed, or its last one if all are; int64 ``[...]``.

    Args:
        chain: subtask numbers 0..6, all different, ``[C]``.
        done: whether each subtask was complete at any time so far, bool ``[..., 7]``.
    """
    left = ~done[..., list(chain)]
    place = np.where(left.any(axis=-1), left.argmax(axis=-1), len(chain) - 1)
    return np.asarray(chain, dtype=np.int64)[place]


def one_hot(subtask: ArrayLike) -> NDArray[np.float32]:
    """Subtask numbers 0..6 as the observation ``goal``, float32 ``[..., 7]``."""
    return np.eye(len(SUBTASKS), dtype=np.float32)[np.asarray(subtask, dtype=np.int64)]


def features(episodes: Episodes) -> Episodes:
    """Converts recorded demonstrations: ``state`` ``[N, 59]``, ``action`` ``[N, 9]``, ``goal`` ``[N, 1]``, the subtask.

    The recorded label changes only after the expert has let go and moved away, 30 to 110 steps after the subtask is
    complete. In the environment the goal changes earlier, so a policy trained on these labels would see goals that are
    out of distribution. So only the order of the subtasks is taken from the recording; each ends at its completion.

    Raises:
        DataError: for other widths, or an unknown subtask number.
    """
    state = episodes.numbers("state")
    advice = "pass the environment's own observation, positions and velocities"
    check_widths("kitchen", episodes, RAW_WIDTH, ROBOT, advice)
    numbers = episodes.numbers("goal") if "goal" in episodes.observation else np.zeros((0, 0), np.float32)
    if numbers.shape != (episodes.steps, 1) or not np.isin(numbers, range(len(SUBTASKS))).all():
        got = f"shape {numbers.shape}, values {np.min(numbers)} to {np.max(numbers)}" if numbers.size else "none"
        raise DataError(
            f"kitchen demonstrations need the number of the current subtask, 0 to {len(SUBTASKS) - 1}, as goal "
            f"[steps, 1]; got {got}"
        )
    goal = np.empty(episodes.steps, dtype=np.int64)
    for steps in episodes.slices():
        order = numbers[steps, 0].astype(np.int64)
        chain = [int(number) for number in dict.fromkeys(order.tolist())]
        done = np.logical_or.accumulate(completed(objects(state[steps])), axis=0)
        goal[steps] = current(chain, done)
    action = np.clip(episodes.action, -1.0, 1.0).astype(np.float32)
    return episodes.with_numbers(action, state=observe(state), goal=one_hot(goal))


class Kitchen(TickingEnv):
    """FrankaKitchen-v1 with a chain of four of its seven subtasks; ``raw`` ``[59]`` is the simulator's observation.

    Observation: ``state`` float32 ``[30]``, see :func:`observe`; ``goal`` float32 ``[7]``, the current subtask one-hot;
    on request ``image.scene``. **The goal comes from an oracle planner**: it advances to the next subtask of the chain
    at the step at which the simulator's completion test holds. One that is completed before its turn counts and is
    skipped; one that is undone later still counts. Action: float32 ``[9]`` in [-1, 1], joint velocities, scaled by
    FrankaKitchen-v1, held for 80 ms. Reward: number of subtasks of the chain completed in this step. ``info``:
    ``score``, subtasks of the chain completed so far (0..4), ``success`` whether all are, ``chain`` their numbers.
    Terminates on success; truncated after 560 steps (45 s). ``frames`` are height and width by name of the cameras.
    """

    tick_s = 1.0 / RATE_HZ

    def __init__(self, render_mode: str | None = None, frames: Sizes = MappingProxyType({})) -> None:
        self.render_mode, self._frames = render_mode, frames
        kinds = len(SUBTASKS)
        self.observation_space = gym.spaces.Dict(
            {
                "state": gym.spaces.Box(-BOUND, BOUND, (WIDTH,), np.float32),
                "goal": gym.spaces.Box(0.0, 1.0, (kinds,), np.float32),
                **{name: gym.spaces.Box(0, 255, (*size, 3), np.uint8) for name, size in frames.items()},
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ROBOT,), np.float32)
        self._sim = _franka.KitchenEnv(
            terminate_on_tasks_completed=False, remove_task_when_completed=False, render_mode=render_mode
        )
        self._cameras = Cameras(self._sim.model, CAMERAS)
        self._chain: tuple[int, ...] = tuple(range(CHAIN))
        self._done = np.zeros(kinds, dtype=np.bool_)
        self._steps, self._rewarded = 0, 0
        self._action = np.zeros(ROBOT)
        self.raw: NDArray[np.float64] = np.zeros(RAW_WIDTH)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Starts with a random chain (uniform over ordered choices), or with ``options={"chain": [numbers]}``.

        Raises:
            ConfigError: for a chain that is not four different subtask numbers.
        """
        super().reset(seed=seed)
        drawn = self.np_random.permutation(len(SUBTASKS))[:CHAIN]
        chain = tuple(int(number) for number in (options or {}).get("chain", drawn))
        if len(set(chain)) != CHAIN or len(chain) != CHAIN or not set(chain) <= set(range(len(SUBTASKS))):
            allowed = f"0 to {len(SUBTASKS) - 1}"
            raise ConfigError(f"a chain must be {CHAIN} different subtask numbers from {allowed}, got {chain}")
        self._chain, self._steps = chain, 0
        self._done[:] = False
        observation, _ = self._sim.reset(seed=seed)
        self._update(observation)
        self._rewarded = self._score()
        return self.look(), self._info()

    def command(self, action: NDArray[np.float32]) -> None:
        self._action = np.asarray(action, dtype=np.float64)

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            observation, *_ = self._sim.step(self._action)
            self._update(observation)

    def settle(self) -> Settled:
        self._steps += 1
        score, before = self._score(), self._rewarded
        self._rewarded = score
        return float(score - before), score == CHAIN, self._steps >= MAX_STEPS, self._info()

    def look(self) -> dict[str, NDArray[Any]]:
        seen = self._cameras.look(self._sim.data, self._frames)
        return {"state": observe(self.raw), "goal": one_hot(current(self._chain, self._done)), **seen}

    def render(self) -> NDArray[np.uint8] | None:
        return None if self.render_mode is None else rendered(self._sim)

    def close(self) -> None:
        self._cameras.close()
        self._sim.close()

    def _update(self, observation: dict[str, Any]) -> None:
        self.raw = observation["observation"]
        # The true positions, as in the simulator's test; those in the observation are noisy.
        self._done |= completed(self._sim.data.qpos[ROBOT:])

    def _score(self) -> int:
        return int(self._done[list(self._chain)].sum())

    def _info(self) -> dict[str, Any]:
        score = self._score()
        return {"score": float(score), "success": score == CHAIN, "chain": self._chain}


TASK = Task(
    name="kitchen",
    make=Kitchen,
    rate_hz=RATE_HZ,
    max_steps=MAX_STEPS,
    score="subtasks of the chain completed so far, 0 to 4; the chain is advanced by an oracle",
    features=features,
    hold=np.zeros_like,
    cameras=tuple(CAMERAS),
)
