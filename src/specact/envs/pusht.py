"""PushT: a round agent pushes a T-shaped block onto a fixed outline (gym-pusht, Chi et al. 2023).

Demonstrations and environment go through the same two functions, :func:`observe` and :func:`displacement`, so that
what a policy is trained on is what it meets.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gym_pusht.envs.pusht import PushTEnv  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import ArrayLike, NDArray

from specact.data.episodes import Episodes
from specact.envs.task import Task
from specact.errors import DataError

MAX_STEPS = 300
RATE_HZ = 10.0
SUCCESS_COVERAGE = 0.85  # the demonstrations end at 0.90 on average; gym-pusht's own 0.95 fails nearly all of them
ACTION_SCALE_PX = 128.0  # 6 of the 25,650 recorded displacements are longer along an axis
ARENA_PX = 512.0
GOAL_XY_PX = np.array([256.0, 256.0])
GOAL_ANGLE_RAD = math.pi / 4
# Both ends of the bar, the end of the stem, and where they meet, in the block's own frame.
KEYPOINTS_PX = np.array([[-60.0, 15.0], [60.0, 15.0], [0.0, 120.0], [0.0, 30.0]])
HALF_PX = ARENA_PX / 2
WIDTH = 26
BOUND = 4.0  # no two points of the arena are this many half widths apart; only a block squeezed out of it is cut


def observe(raw: ArrayLike) -> NDArray[np.float32]:
    """The observation ``state`` from the simulator's state; lengths are divided by half the arena's width.

    Columns: agent relative to the arena's centre (2); block relative to its goal position (2); sine and cosine of the
    block's angle relative to its goal angle (2); agent in the block's frame (2); goal position in the block's frame
    (2); from the agent to each keypoint of the T (4 x 2); from each keypoint to where it should be (4 x 2).
    Velocities are left out, because a policy that sees them learns to repeat itself.

    Args:
        raw: agent x, y [px, 0..512], block x, y [px, 0..512], block angle [rad, any turn], ``[..., 5]``.

    Returns:
        float32 ``[..., 26]``, nearly all within [-1, 1], cut at :data:`BOUND`.
    """
    raw = np.asarray(raw, dtype=np.float64)
    agent, block, angle = raw[..., 0:2], raw[..., 2:4], raw[..., 4]
    keypoints = block[..., None, :] + _rotate(KEYPOINTS_PX, angle[..., None])
    wanted = GOAL_XY_PX + _rotate(KEYPOINTS_PX, np.asarray(GOAL_ANGLE_RAD))
    flat = (*raw.shape[:-1], 2 * len(KEYPOINTS_PX))
    turn = angle - GOAL_ANGLE_RAD
    lengths = [
        agent - HALF_PX,
        block - GOAL_XY_PX,
        _rotate(agent - block, -angle),
        _rotate(GOAL_XY_PX - block, -angle),
        (keypoints - agent[..., None, :]).reshape(flat),
        (wanted - keypoints).reshape(flat),
    ]
    columns = [length / HALF_PX for length in lengths]
    columns.insert(2, np.stack([np.sin(turn), np.cos(turn)], axis=-1))
    return np.asarray(np.clip(np.concatenate(columns, axis=-1), -BOUND, BOUND), dtype=np.float32)


def displacement(target_px: ArrayLike, agent_px: ArrayLike) -> NDArray[np.float32]:
    """The action that asks for a target: ``(target - agent) / 128 px``, cut to [-1, 1], float32 ``[..., 2]``.

    The agent's position is that of the same step, also within a chunk of actions executed open loop.
    """
    away = np.asarray(target_px, dtype=np.float64) - np.asarray(agent_px, dtype=np.float64)
    return np.asarray(np.clip(away / ACTION_SCALE_PX, -1.0, 1.0), dtype=np.float32)


def features(episodes: Episodes) -> Episodes:
    """Recorded PushT demonstrations in the environment's terms.

    Args:
        episodes: ``state`` ``[N, 5]`` as :func:`observe` takes it, ``action`` ``[N, 2]`` the agent's target [px].
            Images pass through untouched.

    Raises:
        DataError: if the widths are others.
    """
    if episodes.state.shape[1] != 5 or episodes.action.shape[1] != 2:
        raise DataError(
            f"PushT demonstrations have state width 5 (agent x, y, block x, y, block angle) and action width 2 (target "
            f"x, y), got {episodes.state.shape[1]} and {episodes.action.shape[1]}; pass them as recorded, in pixels"
        )
    return replace(
        episodes,
        state=observe(episodes.state),
        action=displacement(episodes.action, episodes.state[:, :2]),
        goal=None,
    )


class PushT(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """gym-pusht seen through :func:`observe`, driven by displacements.

    Observation: ``{"state": float32 [26]}``. Action: float32 ``[2]`` in [-1, 1], the displacement from the agent's
    present position to its target in units of 128 px; the target is kept within the arena.
    ``info``: ``coverage`` [0..1] now, ``score`` the largest so far, ``success`` whether that is above 0.85.
    The episode terminates above a coverage of 0.95, as gym-pusht's does, and is truncated after 300 steps (30 s).
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": int(RATE_HZ)}  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Dict({"state": gym.spaces.Box(-BOUND, BOUND, (WIDTH,), np.float32)})
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._sim = PushTEnv(obs_type="state", render_mode=render_mode)
        self._best = 0.0
        self._steps = 0

    @property
    def raw(self) -> NDArray[np.float64]:
        """The simulator's state ``[5]``, as recorded in demonstrations: pixels and radians."""
        raw: NDArray[np.float64] = self._sim.get_obs()
        return raw

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        """Start at random, or with ``options={"state": raw}`` at a recorded state ``[5]``."""
        super().reset(seed=seed)
        self._sim.reset(seed=seed)
        if options and "state" in options:
            self._place(np.asarray(options["state"], dtype=np.float64))
        self._best, self._steps = 0.0, 0
        return {"state": observe(self.raw)}, self._info(float(self._sim._get_coverage()))

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, NDArray[np.float32]], float, bool, bool, dict[str, Any]]:
        """Move towards the target for a tenth of a second; the reward is gym-pusht's."""
        away = ACTION_SCALE_PX * np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
        target = np.clip(self.raw[:2] + away, 0.0, ARENA_PX)
        raw, reward, terminated, _, info = self._sim.step(target)
        self._steps += 1
        truncated = self._steps >= MAX_STEPS
        return {"state": observe(raw)}, float(reward), bool(terminated), truncated, self._info(float(info["coverage"]))

    def render(self) -> NDArray[np.uint8] | None:
        """The scene, uint8 ``[680, 680, 3]``; None without a render mode."""
        return self._sim.render() if self.render_mode else None

    def close(self) -> None:
        self._sim.close()

    def _place(self, raw: NDArray[np.float64]) -> None:
        # Turning the block moves its origin about its centre of mass, so the angle comes first. gym-pusht's own
        # "reset_to_state" has it the other way round and arrives elsewhere. Away from each other before that, so that
        # no contact of the random start is left.
        self._sim.reset(options={"reset_to_state": [50.0, 50.0, 256.0, 256.0, 0.0]})
        self._sim.block.angle = float(raw[4])
        self._sim.block.position = float(raw[2]), float(raw[3])
        self._sim.agent.position = float(raw[0]), float(raw[1])

    def _info(self, coverage: float) -> dict[str, Any]:
        self._best = max(self._best, coverage)
        return {"coverage": coverage, "score": self._best, "success": self._best > SUCCESS_COVERAGE}


def _rotate(points: NDArray[np.float64], angle: NDArray[np.float64]) -> NDArray[np.float64]:
    sine, cosine = np.sin(angle), np.cos(angle)
    x, y = points[..., 0], points[..., 1]
    return np.stack([cosine * x - sine * y, sine * x + cosine * y], axis=-1)


TASK = Task(
    name="pusht",
    make=PushT,
    rate_hz=RATE_HZ,
    max_steps=MAX_STEPS,
    score="largest share of the goal covered by the block so far, 0 to 1; success above 0.85",
    features=features,
)
