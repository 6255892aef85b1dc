"""PushT: a round agent pushes a T-shaped block onto a fixed outline (gym-pusht, Chi et al. 2023).

With a pace the block lies on a belt that moves it at that speed, in a random direction per episode; the outline does
not move. So the block moves during a slow inference.

Demonstrations and environment use the same functions, :func:`observe` and :func:`displacement`, so that policies are
trained on the observations and actions of the environment.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import cv2
import gymnasium as gym
import numpy as np
import pygame
from gym_pusht.envs.pusht import PushTEnv, pymunk_to_shapely  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.task import Begun, Seen, Settled, Task, TickingEnv, check_widths

MAX_STEPS = 300
RATE_HZ = 10.0
SUCCESS_COVERAGE = 0.85  # demonstrations end at 0.90 on average; with gym-pusht's 0.95 nearly all would fail
ACTION_SCALE_PX = 128.0  # only 6 of the 25,650 recorded displacements are longer along an axis
ARENA_PX = 512.0
GOAL_XY_PX = np.array([256.0, 256.0])
GOAL_ANGLE_RAD = math.pi / 4
# Both ends of the bar, the end of the stem, and their junction, in the block's frame.
KEYPOINTS_PX = np.array([[-60.0, 15.0], [60.0, 15.0], [0.0, 120.0], [0.0, 30.0]])
HALF_PX = ARENA_PX / 2
TICK_S = 0.01  # gym-pusht's physics
TICKS = 10  # in a control period
STIFFNESS, DAMPING = 100.0, 20.0  # with which gym-pusht's agent follows its target [1/s^2], [1/s]
STEADY = 3.717  # stationary velocity of an agent that repeats a displacement, divided by the displacement [1/s]
WIDTH = 26
FRAME_PX = 96  # height and width of a camera frame, as in the recorded demonstrations
REACH_PX = 180.0  # maximum distance of agent and block in random scenes with both close to each other
BOUND = 4.0  # [half widths], above all distances in the arena; clips only a block squeezed out of it

Axis = TypeVar("Axis", float, NDArray[np.float64])


def observe(raw: ArrayLike) -> NDArray[np.float32]:
    """The observation ``state`` from the simulator's state; lengths are divided by half the arena's width.

    Columns: agent relative to the arena's centre (2); block relative to its goal position (2); sine and cosine of the
    block's angle relative to its goal angle (2); agent in the block's frame (2); goal position in the block's frame
    (2); from the agent to each keypoint of the T (4 x 2); from each keypoint to its goal position (4 x 2). Velocities
    are left out, because a policy that observes them learns to repeat its last motion. ``raw`` ``[..., 5]`` is agent x,
    y, block x, y [px, 0..512] and block angle [rad, any turn]. Returns float32 ``[..., 26]``, nearly all in [-1, 1],
    clipped at :data:`BOUND`.
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
    """The observation ``agent`` ``[..., 2]``: the agent's part of ``state``, its proprioception."""
    return state[..., :2].copy()


def displacement(target_px: ArrayLike, agent_px: ArrayLike) -> NDArray[np.float32]:
    """The action for a target: ``(target - agent) / 128 px``, clipped to [-1, 1], float32 ``[..., 2]``.

    Args:
        target_px: the agent's target [px], ``[..., 2]``.
        agent_px: the agent's position at the same step [px], ``[..., 2]``, also within a chunk.
    """
    away = np.asarray(target_px, dtype=np.float64) - np.asarray(agent_px, dtype=np.float64)
    return np.asarray(np.clip(away / ACTION_SCALE_PX, -1.0, 1.0), dtype=np.float32)


def features(episodes: Episodes) -> Episodes:
    """Converts recorded PushT demonstrations to the environment's observations and actions.

    Args:
        episodes: ``state`` ``[N, 5]``, the input of :func:`observe`, ``action`` ``[N, 2]`` the agent's target [px].
            Camera frames pass through; other observations are left out.

    Raises:
        DataError: for other widths.
    """
    advice = "pass agent x, y, block x, y and angle, and the target x, y, as recorded, in pixels"
    check_widths("PushT", episodes, 5, 2, advice)
    state = episodes.numbers("state")
    return episodes.with_numbers(displacement(episodes.action, state[:, :2]), state=observe(state))


class PushT(TickingEnv):
    """gym-pusht with the observations of :func:`observe` and displacements as actions.

    Observation: ``state`` float32 ``[26]``; with ``frames`` also ``image``, the scene from above ``[96, 96, 3]``, and
    ``agent``, the agent's position as in ``state``. Action: float32 ``[2]`` in [-1, 1], the displacement from the
    agent's position to its target in units of 128 px, held for 0.1 s; the target is clipped to the arena.
    Reward: gym-pusht's, coverage / 0.95, at most 1. ``info``: ``coverage`` the covered share of the goal, ``score`` the
    largest so far, ``success`` whether that is above 0.85. Terminates above a coverage of 0.95, as gym-pusht does;
    truncated after 300 steps (30 s). ``pace`` is the speed of the belt under the block [px/s], ``belt`` its velocity.
    """

    tick_s = TICK_S
    ticks = TICKS

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

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Starts in a random state, or with ``options={"state": raw}`` in a recorded one, ``[5]``."""
        super().reset(seed=seed)
        self._sim.reset(seed=seed)
        if options and "state" in options:
            self._place(np.asarray(options["state"], dtype=np.float64))
        heading = self.np_random.uniform(-math.pi, math.pi)  # from this environment's random stream, not gym-pusht's
        self.belt = self._pace * math.cos(heading), self._pace * math.sin(heading)
        self._best, self._steps = 0.0, 0
        return self.look(), self._info(self._coverage())

    def command(self, action: NDArray[np.float32]) -> None:
        away = ACTION_SCALE_PX * np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
        x, y = np.clip(self.raw[:2] + away, 0.0, ARENA_PX).tolist()
        self._sim._last_action = self._target = x, y

    def run(self, ticks: int) -> None:
        sim, (x, y), (east, south) = self._sim, self._target, self.belt
        for _ in range(ticks):
            (at_x, at_y), (to_x, to_y) = sim.agent.position, sim.agent.velocity
            sim.agent.velocity = _next_velocity(at_x, to_x, x), _next_velocity(at_y, to_y, y)
            if self._pace:
                # gym-pusht's damping of 0 removes all velocity in each time step, so the belt's does not accumulate.
                along, down = sim.block.velocity
                sim.block.velocity = along + east, down + south
            sim.space.step(TICK_S)

    def settle(self) -> Settled:
        coverage = self._coverage()
        self._steps += 1
        reward = min(max(coverage / self._sim.success_threshold, 0.0), 1.0)
        return reward, coverage > self._sim.success_threshold, self._steps >= MAX_STEPS, self._info(coverage)

    def look(self) -> dict[str, NDArray[Any]]:
        state = observe(self.raw)
        if not self._frames:
            return {"state": state}
        return {"state": state, "image": _frame(self._sim._draw()), "agent": position(state)}

    def render(self) -> NDArray[np.uint8] | None:
        return self._sim.render() if self.render_mode else None

    def close(self) -> None:
        self._sim.close()

    def _place(self, raw: NDArray[np.float64]) -> None:
        # Rotating the block moves its origin about its centre of mass, so the angle is set first. gym-pusht's
        # "reset_to_state" sets it last and so reaches another state. Before that, agent and block are separated to
        # remove contacts of the random start.
        self._sim.reset(options={"reset_to_state": [50.0, 50.0, 256.0, 256.0, 0.0]})
        self._sim.block.angle = float(raw[4])
        self._sim.block.position = float(raw[2]), float(raw[3])
        self._sim.agent.position = float(raw[0]), float(raw[1])
        if self._frames:  # shapes are drawn at their positions of the last time step
            for body in (self._sim.block, self._sim.agent):
                self._sim.space.reindex_shapes_for_body(body)

    def _coverage(self) -> float:
        """gym-pusht's coverage, but with the constant goal built once, and the block's parts in a fixed order.

        gym-pusht iterates over a set of parts, so that the last bit depends on their addresses in memory.
        """
        sim, parts = self._sim, self._sim._block_shapes
        if self._goal is None:
            self._goal = pymunk_to_shapely(sim.get_goal_pose_body(sim.goal_pose), parts)
        return float(self._goal.intersection(pymunk_to_shapely(sim.block, parts)).area / self._goal.area)

    def _info(self, coverage: float) -> dict[str, Any]:
        self._best = max(self._best, coverage)
        return {"coverage": coverage, "score": self._best, "success": self._best > SUCCESS_COVERAGE}


def roll_forward(seen: Seen, actions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Predicts the agent's position after ``actions`` ``[m, 2]``, 0.1 s each; the block is unchanged.

    The model of the agent is the simulator's. Its initial velocity is not observed; we use the stationary velocity
    under the first action.
    """
    state = seen["state"].astype(np.float64)
    at, block = HALF_PX + HALF_PX * state[0:2], GOAL_XY_PX + HALF_PX * state[2:4]
    angle = math.atan2(state[4], state[5]) + GOAL_ANGLE_RAD
    moves = ACTION_SCALE_PX * np.clip(actions.astype(np.float64), -1.0, 1.0)
    velocity = STEADY * moves[:1].sum(axis=0)
    for move in moves:
        target = np.clip(at + move, 0.0, ARENA_PX)
        for _ in range(TICKS):
            velocity = _next_velocity(at, velocity, target)
            at = at + velocity * TICK_S
    return {**seen, "state": observe([*at, *block, angle])}


def agent(env: gym.Env[Any, Any]) -> NDArray[np.float64]:
    """The agent's position, float64 ``[2]`` [px]."""
    return cast(PushT, env.unwrapped).raw[:2]


def _next_velocity(position: Axis, velocity: Axis, target: Axis) -> Axis:
    """The agent's velocity after a time step [px/s], along one axis or several."""
    return velocity + (STIFFNESS * (target - position) + DAMPING * (0.0 - velocity)) * TICK_S


def _frame(screen: pygame.Surface) -> NDArray[np.uint8]:
    """A frame from gym-pusht's drawing, which is private because there is no public one without a render mode.

    Its own conversion to an array gives the same pixels and takes longer: it sorts the colours of the larger picture.
    """
    red_green_blue = [shift // 8 for shift in screen.get_shifts()[:3]]
    pixels = np.frombuffer(screen.get_buffer().raw, np.uint8).reshape(screen.get_height(), -1, screen.get_bytesize())
    return np.ascontiguousarray(cv2.resize(pixels, (FRAME_PX, FRAME_PX))[..., red_green_blue], np.uint8)


def _rotate(points: NDArray[np.float64], angle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points ``[..., 2]`` rotated by ``angle`` ``[...]`` [rad]."""
    sine, cosine = np.sin(angle), np.cos(angle)
    x, y = points[..., 0], points[..., 1]
    return np.stack([cosine * x - sine * y, sine * x + cosine * y], axis=-1)


def camera_features(episodes: Episodes) -> Episodes:
    """Converts recorded PushT demonstrations, as :func:`features`."""
    fitted = features(episodes)
    agent = position(fitted.numbers("state"))
    return replace(fitted, observation={**fitted.observation, "agent": agent})


def camera_roll_forward(seen: Seen, actions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """As :func:`roll_forward`; the frame stays as it was."""
    rolled = roll_forward(seen, actions)
    return {**rolled, "agent": position(rolled["state"])}


def scenes(number: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Observations of random scenes: agent and block anywhere, half of them close to each other."""
    env = PushT(frames=True)
    seen = []
    for _ in range(number):
        agent, block = rng.uniform(15.0, 497.0, 2), rng.uniform(50.0, 462.0, 2)
        angle = rng.uniform(-math.pi, math.pi)
        if rng.random() < 0.5:
            distance, heading = rng.uniform(20.0, REACH_PX), rng.uniform(-math.pi, math.pi)
            agent = np.clip(block + distance * np.array([math.cos(heading), math.sin(heading)]), 15.0, 497.0)
        seen.append(env.reset(seed=0, options={"state": [*agent, *block, angle]})[0])
    env.close()
    return {name: np.stack([observation[name] for observation in seen]) for name in seen[0]}


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

CAMERA = replace(
    TASK,
    name="pusht-camera",
    make=partial(PushT, frames=True),
    features=camera_features,
    roll_forward=camera_roll_forward,
    scenes=scenes,
)
"""PushT with frames and the agent's position besides the state, for policies without the state."""
