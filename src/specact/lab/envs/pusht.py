"""PushT: a round agent pushes a T-shaped block onto a fixed outline (gym-pusht, Chi et al. 2023).

With a pace the block lies on a belt that carries it along at that speed, in a direction of its own in every episode;
the outline stays. A policy that takes its time finds the block elsewhere.

Demonstrations and environment go through the same two functions, :func:`observe` and :func:`displacement`, so that
what a policy is trained on is what it meets.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeVar, cast

import gymnasium as gym
import numpy as np
from gym_pusht.envs.pusht import PushTEnv, pymunk_to_shapely  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.task import Seen, Task

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
TICK_S = 0.01  # gym-pusht's physics
TICKS = 10  # in a control period
STIFFNESS, DAMPING = 100.0, 20.0  # with which gym-pusht's agent follows its target [1/s^2], [1/s]
STEADY = 3.717  # velocity of an agent that repeats a displacement, over that displacement [1/s]
WIDTH = 26
FRAME_PX = 96  # height and width of a camera frame, as in the recorded demonstrations
BOUND = 4.0  # no two points of the arena are this many half widths apart; only a block squeezed out of it is cut

Axis = TypeVar("Axis", float, NDArray[np.float64])


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


def position(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """The observation ``agent`` ``[..., 2]``: the agent's part of ``state``, which a robot knows without seeing."""
    return state[..., :2].copy()


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
            Camera frames pass through; other observations are left out.

    Raises:
        DataError: if the widths are others.
    """
    state = episodes.numbers("state")
    if state.shape[1] != 5 or episodes.action.shape[1] != 2:
        raise DataError(
            f"PushT demonstrations have state width 5 (agent x, y, block x, y, block angle) and action width 2 (target "
            f"x, y), got {state.shape[1]} and {episodes.action.shape[1]}; pass them as recorded, in pixels"
        )
    return episodes.with_numbers(displacement(episodes.action, state[:, :2]), state=observe(state))


class PushT(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """gym-pusht seen through :func:`observe`, driven by displacements.

    Observation: ``{"state": float32 [26]}``, with ``frames`` also ``image``, the scene from above, uint8
    ``[96, 96, 3]``, and ``agent``, its position as in ``state``, float32 ``[2]``. Action: float32 ``[2]`` in [-1, 1],
    the displacement from the agent's present position to its target in units of 128 px; the target is kept within the
    arena.
    ``info``: ``coverage`` [0..1] now, ``score`` the largest so far, ``success`` whether that is above 0.85.
    The episode terminates above a coverage of 0.95, as gym-pusht's does, and is truncated after 300 steps (30 s).

    :meth:`step` is :meth:`command`, :meth:`run` for a control period, :meth:`settle` and :meth:`look`, for worlds in
    which a command may come at another moment (:class:`~specact.lab.envs.moving.Ticking`).

    Args:
        render_mode: None or ``rgb_array``.
        pace: speed of the belt under the block [px/s], >= 0.
        frames: whether to look through the camera as well; drawing a frame takes longer than the physics of a step.

    Attributes:
        belt: its velocity ``[2]`` [px/s].
        tick_s: a tick of the physics [s].
        ticks: in a control period.

    Raises:
        ConfigError: for a pace that is not a number >= 0.
    """

    tick_s = TICK_S
    ticks = TICKS

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": int(RATE_HZ)}  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None, pace: float = 0.0, frames: bool = False) -> None:
        if not 0.0 <= pace < math.inf:
            raise ConfigError(f"the pace of PushT's belt must be a speed of at least 0 px/s, got {pace}")
        self.render_mode = render_mode
        self._pace, self.belt, self._frames = pace, (0.0, 0.0), frames
        spaces: dict[str, gym.Space[Any]] = {"state": gym.spaces.Box(-BOUND, BOUND, (WIDTH,), np.float32)}
        if frames:
            spaces["image"] = gym.spaces.Box(0, 255, (FRAME_PX, FRAME_PX, 3), np.uint8)
            spaces["agent"] = gym.spaces.Box(-BOUND, BOUND, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(spaces)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._sim = PushTEnv(obs_type="state", render_mode=render_mode)
        self._target: tuple[float, float] = (0.0, 0.0)
        self._goal: Any = None
        self._best = 0.0
        self._steps = 0

    @property
    def raw(self) -> NDArray[np.float64]:
        """The simulator's state ``[5]``, as recorded in demonstrations: pixels and radians."""
        raw: NDArray[np.float64] = self._sim.get_obs()
        return raw

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Start at random, or with ``options={"state": raw}`` at a recorded state ``[5]``."""
        super().reset(seed=seed)
        self._sim.reset(seed=seed)
        if options and "state" in options:
            self._place(np.asarray(options["state"], dtype=np.float64))
        heading = self.np_random.uniform(-math.pi, math.pi)  # of this environment's own stream, not gym-pusht's
        self.belt = self._pace * math.cos(heading), self._pace * math.sin(heading)
        self._best, self._steps = 0.0, 0
        return self.look(), self._info(self._coverage())

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Move towards the target for a tenth of a second; the reward is gym-pusht's."""
        self.command(action)
        self.run(TICKS)
        reward, terminated, truncated, info = self.settle()
        return self.look(), reward, terminated, truncated, info

    def command(self, action: NDArray[np.float32]) -> None:
        """Set the agent's target, from where the agent is now."""
        away = ACTION_SCALE_PX * np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
        x, y = np.clip(self.raw[:2] + away, 0.0, ARENA_PX).tolist()
        self._sim._last_action = self._target = x, y

    def run(self, ticks: int) -> None:
        """Let the physics go on, as gym-pusht's step does."""
        sim, (x, y), (east, south) = self._sim, self._target, self.belt
        for _ in range(ticks):
            (at_x, at_y), (to_x, to_y) = sim.agent.position, sim.agent.velocity
            sim.agent.velocity = _pulled(at_x, to_x, x), _pulled(at_y, to_y, y)
            if self._pace:
                # Contacts lose all velocity within a tick (gym-pusht's damping is 0), so this adds up to nothing.
                along, down = sim.block.velocity
                sim.block.velocity = along + east, down + south
            sim.space.step(TICK_S)

    def settle(self) -> tuple[float, bool, bool, dict[str, Any]]:
        """End a control period: how much of the goal is covered?"""
        coverage = self._coverage()
        self._steps += 1
        reward = min(max(coverage / self._sim.success_threshold, 0.0), 1.0)
        return reward, coverage > self._sim.success_threshold, self._steps >= MAX_STEPS, self._info(coverage)

    def look(self) -> dict[str, NDArray[Any]]:
        """The current observation."""
        state = observe(self.raw)
        if not self._frames:
            return {"state": state}
        # gym-pusht's own, which it renders only in its render modes.
        image = self._sim._get_img(self._sim._draw(), FRAME_PX, FRAME_PX)
        return {"state": state, "image": image, "agent": position(state)}

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
        if self._frames:  # shapes are drawn where they were at the last tick
            for body in (self._sim.block, self._sim.agent):
                self._sim.space.reindex_shapes_for_body(body)

    def _coverage(self) -> float:
        """As gym-pusht's own, but with the goal, which never moves, built once, and parts always in one order.

        gym-pusht takes the parts from a set, so that the last bit depends on where in memory they happen to be.
        """
        sim, parts = self._sim, self._sim._block_shapes
        if self._goal is None:
            self._goal = pymunk_to_shapely(sim.get_goal_pose_body(sim.goal_pose), parts)
        return float(self._goal.intersection(pymunk_to_shapely(sim.block, parts)).area / self._goal.area)

    def _info(self, coverage: float) -> dict[str, Any]:
        self._best = max(self._best, coverage)
        return {"coverage": coverage, "score": self._best, "success": self._best > SUCCESS_COVERAGE}


def roll_forward(seen: Seen, actions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """The observation with the agent where it will be after ``actions`` ``[m, 2]``, a tenth of a second each.

    The agent follows its targets exactly as in the simulator; its velocity at the start, which is not observed, is
    what it would be had the first action been going on for long.
    """
    state = seen["state"].astype(np.float64)
    at, block = HALF_PX + HALF_PX * state[0:2], GOAL_XY_PX + HALF_PX * state[2:4]
    angle = math.atan2(state[4], state[5]) + GOAL_ANGLE_RAD
    moves = ACTION_SCALE_PX * np.clip(actions.astype(np.float64), -1.0, 1.0)
    velocity = STEADY * moves[:1].sum(axis=0)
    for move in moves:
        target = np.clip(at + move, 0.0, ARENA_PX)
        for _ in range(TICKS):
            velocity = _pulled(at, velocity, target)
            at = at + velocity * TICK_S
    return {**seen, "state": observe([*at, *block, angle])}


def agent(env: gym.Env[Any, Any]) -> NDArray[np.float64]:
    """The agent's position ``[2]`` [px]: what the robot moves."""
    return cast(PushT, env.unwrapped).raw[:2]


def _pulled(position: Axis, velocity: Axis, target: Axis) -> Axis:
    """The agent's velocity a tick later [px/s], along one axis or several."""
    return velocity + (STIFFNESS * (target - position) + DAMPING * (0.0 - velocity)) * TICK_S


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
    pace="speed of the belt that carries the block [px/s]",
    hold=np.zeros_like,
    still=("hold", "neutral"),
    effector=agent,
    roll_forward=roll_forward,
)
