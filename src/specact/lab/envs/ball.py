"""Plate and ball: tilt a plate so that the ball on it rolls around a pillar and comes to rest on a goal.

The pillar stands in the middle and lies between start and goal, so a demonstration passes it on the left or on the
right. The plate has no rim: a ball that rolls over the edge is lost and ends the episode as a failure.

With a pace the goal moves at that speed on a circle around the pillar, one way or the other. The ball then has to come
to rest *on the goal*: what counts is its speed relative to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from math import cos, exp, sin
from typing import Any, cast

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.lab.envs.cameras import Renderer, drawing
from specact.lab.envs.task import Begun, Seen, Settled, Task, TickingEnv

Vector = NDArray[np.float64]

HALF_SIZE = 0.4  # plate, centre to edge [m]
PILLAR_RADIUS = 0.1  # [m]
BALL_RADIUS = 0.02  # [m]
MAX_TILT = 0.15  # per axis [rad]
GOAL_RADIUS = 0.02  # distance of the ball's centre below which it is on the goal [m]
SLOW = 0.04  # speed relative to the goal below which the ball counts as resting [m/s]
HOLD_STEPS = 10  # control steps on the goal that make a success: 0.5 s
RATE_HZ = 20.0
MAX_STEPS = 160
PACES = (0.0, 0.1)  # range of a random pace [m/s]
SERVO_RATE = 20.0  # of the plate's servos [rad/s]

_SUBSTEPS = 10
_SPEED_SCALE = 0.5  # [m/s], scales velocities to about [-1, 1]
_TILT_RATE_SCALE = 1.5  # [rad/s]
_LIMIT = 4.0  # bound of scaled observations, at which sensors saturate

# Of the expert.
_ROLLING = 5 / 7 * 9.81  # acceleration of a solid ball per rad of tilt [m/s^2]
_SERVO_LAG = 0.1  # of the plate's tilt behind its command [s]
_CLEARANCE = 0.06  # between the ball's and the pillar's surface [m]
_CLEAR_OFFSET = 0.5  # sine of the angle at the pillar between the ball and the point opposite the goal

# The tilt axes are chosen such that a positive tilt rolls the ball towards positive x (first) and y (second).
# Servos: 0.2 kg m^2 and 20 rad/s, critically damped, so the plate lags its command by about 0.1 s.
# The goal's site is off centre because MuJoCo does not move a site that was compiled at its body's origin.
# The pillar has priority and no friction; otherwise a spinning ball climbs it.
_XML = f"""
<mujoco model="ball">
  <option timestep="{1 / RATE_HZ / _SUBSTEPS}" integrator="implicitfast"/>
  <visual><global offwidth="640" offheight="640"/><headlight ambient="0.3 0.3 0.3" diffuse="0.3 0.3 0.3"/></visual>
  <asset><texture name="sky" type="skybox" builtin="flat" rgb1="0.95 0.95 0.96" width="64" height="64"/></asset>
  <worldbody>
    <light pos="0.4 -0.6 1.6" dir="-0.25 0.35 -1" diffuse="0.5 0.5 0.5"/>
    <camera name="view" pos="0 -0.72 0.98" xyaxes="1 0 0 0 0.81 0.59"/>
    <body name="plate">
      <joint name="tilt_x" axis="0 1 0" armature="0.2"/>
      <joint name="tilt_y" axis="-1 0 0" armature="0.2"/>
      <geom type="box" size="{HALF_SIZE} {HALF_SIZE} 0.005" pos="0 0 -0.005" mass="0.5" rgba="0.75 0.79 0.84 1"/>
      <geom type="cylinder" size="{PILLAR_RADIUS} 0.03" pos="0 0 0.03" mass="0.1" condim="1" priority="1"
            rgba="0.35 0.4 0.5 1"/>
      <site name="goal" type="cylinder" size="{GOAL_RADIUS} 0.001" pos="0.2 0 0" rgba="0.15 0.65 0.35 1"/>
    </body>
    <body name="ball">
      <freejoint/>
      <geom type="sphere" size="{BALL_RADIUS}" mass="0.02" condim="3" friction="1 0 0" rgba="0.9 0.35 0.15 1"/>
    </body>
  </worldbody>
  <actuator>
    <position joint="tilt_x" kp="80" kv="8"/>
    <position joint="tilt_y" kp="80" kv="8"/>
  </actuator>
</mujoco>
"""


class BallEnv(TickingEnv):
    """The plate-and-ball environment; the module describes the task.

    Observation: ``state`` float32 ``[8]`` = ball position (2) / HALF_SIZE, ball velocity (2) / 0.5 m/s, tilt (2) /
    MAX_TILT, tilt rate (2) / 1.5 rad/s, all in the plate's frame; ``goal`` float32 ``[2]`` / HALF_SIZE. With
    ``goal_in_state`` there is no ``goal``; ``state`` ``[12]`` ends with its position and velocity, scaled alike.
    Action: float32 ``[2]`` in [-1, 1], the commanded tilt towards x and y as a fraction of MAX_TILT; held for 50 ms.
    Reward: 1 on the step that succeeds, else 0. ``score`` is the success; with ``graded`` how nearly the ball rested on
    the goal: the largest mean over HOLD_STEPS of min(1, GOAL_RADIUS / distance) min(1, SLOW / speed), both relative to
    the goal; it is 1 on success. Ends on success or when the ball leaves the plate. ``pace`` is the speed of the goal
    [m/s]; None draws it for every episode, uniformly from :data:`PACES`. Attributes, float64 ``[2]`` in the plate's
    frame [m, rad, s]: ``position``, ``velocity``, ``tilt``, ``tilt_rate``, ``goal``, ``goal_velocity``.
    """

    tick_s = 1 / RATE_HZ / _SUBSTEPS
    ticks = _SUBSTEPS

    def __init__(
        self,
        render_mode: str | None = None,
        pace: float | None = 0.0,
        goal_in_state: bool = False,
        graded: bool = False,
    ) -> None:
        if pace is not None and not 0.0 <= pace < np.inf:
            raise ConfigError(f"the pace of the ball's goal must be a speed of at least 0 m/s, got {pace}")
        self.render_mode = render_mode
        self._pace, self._goal_in_state, self._graded = pace, goal_in_state, graded
        seen: dict[str, spaces.Space[Any]] = {
            "state": spaces.Box(-_LIMIT, _LIMIT, (12 if goal_in_state else 8,), np.float32)
        }
        if not goal_in_state:
            seen["goal"] = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict(seen)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.model = mujoco.MjModel.from_xml_string(_XML)
        self.data = mujoco.MjData(self.model)
        self.goal = self.goal_velocity = np.zeros(2)
        self._renderer: Renderer | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Ball near the edge at low speed, goal roughly opposite behind the pillar, plate level."""
        super().reset(seed=seed)
        random = self.np_random
        angle = random.uniform(-np.pi, np.pi)
        across = angle + np.pi + random.uniform(-0.35, 0.35)
        start = random.uniform(0.26, 0.34) * np.array([cos(angle), sin(angle)])
        radius = random.uniform(0.18, 0.34)
        velocity = random.uniform(-0.05, 0.05, 2)
        # Drawn last, the sense of rotation before the pace, so that an episode begins the same at every pace.
        sense = random.choice([-1.0, 1.0])
        self._orbit = radius, across, sense * (random.uniform(*PACES) if self._pace is None else self._pace)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[2:5] = *start, BALL_RADIUS
        self.data.qvel[2:4] = velocity
        self.data.qvel[5:7] = -velocity[1] / BALL_RADIUS, velocity[0] / BALL_RADIUS  # it rolls from the start
        self._held = 0
        self._success = False
        self._near: deque[float] = deque([0.0] * HOLD_STEPS, HOLD_STEPS)
        self._nearest = 0.0
        return self.look(), self._info()

    def command(self, action: NDArray[np.float32]) -> None:
        self.data.ctrl[:] = np.clip(action, -1.0, 1.0) * MAX_TILT

    def run(self, ticks: int) -> None:
        mujoco.mj_step(self.model, self.data, nstep=ticks)

    def settle(self) -> Settled:
        self._measure()
        (x, y), (vx, vy), (goal_x, goal_y) = self.position, self.velocity - self.goal_velocity, self.goal
        resting = (x - goal_x) ** 2 + (y - goal_y) ** 2 < GOAL_RADIUS**2 and vx * vx + vy * vy < SLOW**2
        self._held = self._held + 1 if resting else 0
        near = GOAL_RADIUS / max(GOAL_RADIUS, float(np.hypot(x - goal_x, y - goal_y)))
        self._near.append(near * SLOW / max(SLOW, float(np.hypot(vx, vy))))
        self._nearest = max(self._nearest, sum(self._near) / HOLD_STEPS)
        self._success = self._success or self._held >= HOLD_STEPS
        lost = max(abs(x), abs(y)) > HALF_SIZE
        return float(self._success), bool(self._success or lost), False, self._info()

    def look(self) -> dict[str, NDArray[np.float32]]:
        self._measure()
        return self._observation()

    def render(self) -> NDArray[np.uint8] | None:
        if self.render_mode is None:
            return None
        if self._renderer is None:
            with drawing():
                self._renderer = Renderer(self.model, 480, 480)
        self.model.site("goal").pos[:2] = self.goal
        mujoco.mj_kinematics(self.model, self.data)  # not mj_forward: that would change the next step's last bits
        mujoco.mj_camlight(self.model, self.data)
        self._renderer.update_scene(self.data, camera="view")
        frame: NDArray[np.uint8] = self._renderer.render()
        return frame

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _measure(self) -> None:
        """The ball in the plate's frame: ``p = R^T x`` and ``v = R^T x' - w x p``, with ``R = Ry(a) Rx(-b)``."""
        a, b, x, y, z = self.data.qpos[:5].tolist()
        a_rate, b_rate, vx, vy, vz = self.data.qvel[:5].tolist()
        ca, sa, cb, sb = cos(a), sin(a), cos(b), sin(b)
        x, z = ca * x - sa * z, sa * x + ca * z
        y, z = cb * y - sb * z, sb * y + cb * z
        vx, vz = ca * vx - sa * vz, sa * vx + ca * vz
        vy = cb * vy - sb * vz
        wx, wy, wz = -b_rate, a_rate * cb, a_rate * sb
        self.position = np.array([x, y])
        self.velocity = np.array([vx - (wy * z - wz * y), vy - (wz * x - wx * z)])
        self.tilt = np.array([a, b])
        self.tilt_rate = np.array([a_rate, b_rate])
        radius, start, speed = self._orbit
        angle = start + speed / radius * self.data.time
        outward = np.array([cos(angle), sin(angle)])
        self.goal, self.goal_velocity = radius * outward, speed * np.array([-outward[1], outward[0]])

    def _observation(self) -> dict[str, NDArray[np.float32]]:
        state = np.empty(12 if self._goal_in_state else 8, np.float32)
        state[:2] = self.position / HALF_SIZE
        state[2:4] = self.velocity / _SPEED_SCALE
        state[4:6] = self.tilt / MAX_TILT
        state[6:8] = self.tilt_rate / _TILT_RATE_SCALE
        if not self._goal_in_state:
            return {"state": state.clip(-_LIMIT, _LIMIT), "goal": (self.goal / HALF_SIZE).astype(np.float32)}
        state[8:10] = self.goal / HALF_SIZE
        state[10:] = self.goal_velocity / _SPEED_SCALE
        return {"state": state.clip(-_LIMIT, _LIMIT)}

    def _info(self) -> dict[str, Any]:
        return {"success": self._success, "score": self._nearest if self._graded else float(self._success)}


def follow(position: Vector, velocity: Vector, target: Vector, rate: float, seconds: float) -> tuple[Vector, Vector]:
    """Position and velocity after so many seconds of ``x'' = rate^2 (target - x) - 2 rate x'``.

    A critically damped servo with a constant target and this undamped natural frequency [rad/s]; ``[D]`` each.
    """
    away = position - target
    push = velocity + rate * away
    decay = exp(-rate * seconds)
    return target + (away + push * seconds) * decay, (velocity - rate * push * seconds) * decay


def roll_forward(seen: Seen, actions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Predicts tilt and tilt rate after ``actions`` ``[m, 2]``, 50 ms each; the rest of the observation is unchanged.

    The model is a critically damped servo with 20 rad/s; the plate's inertia makes it slightly slower.
    """
    state = seen["state"].astype(np.float64)
    tilt, rate = state[4:6] * MAX_TILT, state[6:8] * _TILT_RATE_SCALE
    for action in np.clip(actions.astype(np.float64), -1.0, 1.0):
        tilt, rate = follow(tilt, rate, action * MAX_TILT, SERVO_RATE, 1 / RATE_HZ)
    state[4:6], state[6:8] = tilt / MAX_TILT, rate / _TILT_RATE_SCALE
    return {**seen, "state": state.clip(-_LIMIT, _LIMIT).astype(np.float32)}


def tilt(env: gym.Env[Any, Any]) -> NDArray[np.float64]:
    """The plate's tilt, float64 ``[2]`` [rad], which the robot moves."""
    return np.array(cast(BallEnv, env.unwrapped).data.qpos[:2])


class BallExpert:
    """Scripted expert: rolls the ball around the pillar on a side drawn once per episode, then to the goal.

    Where both ways are about equally good the side is drawn, else the state determines it: actions are bimodal at the
    decision and unimodal afterwards.

    It heads for the goal where the straight line is free, else along the tangent to a circle around the pillar; the
    speed falls with the square root of the remaining distance, and the tilt is proportional to the velocity error. For
    a moving goal the speed is relative to it, and its centripetal acceleration is fed forward.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._side = 1.0

    def reset(self, env: gym.Env[Any, Any]) -> None:
        """Draw the side for a new episode: +1 passes with the pillar on the left, -1 on the right."""
        self._side = float(self._random.choice([-1.0, 1.0]))

    def act(self, env: gym.Env[Any, Any]) -> NDArray[np.float32]:
        """The action for the environment's current state, float32 ``[2]`` in [-1, 1]."""
        plate = cast(BallEnv, env.unwrapped)
        # Predicted state after the servo's lag, to avoid overshoot.
        velocity = plate.velocity + _SERVO_LAG * _ROLLING * plate.tilt
        position = plate.position + _SERVO_LAG * plate.velocity
        goal = plate.goal + _SERVO_LAG * plate.goal_velocity
        heading, speed = self._heading(position, goal)
        wanted = speed * heading + plate.goal_velocity
        turning = -float(plate.goal_velocity @ plate.goal_velocity) / float(goal @ goal) * goal
        tilt = (4.0 * (wanted - velocity) + turning) / _ROLLING
        return np.clip(tilt / MAX_TILT, -1.0, 1.0).astype(np.float32)

    def _heading(self, position: Vector, goal: Vector) -> tuple[Vector, float]:
        """Unit vector of the desired velocity ``[2]``, and its magnitude [m/s]."""
        line = goal - position
        remaining = float(np.hypot(*line))
        along = line / max(remaining, 1e-9)
        out = float(np.hypot(*position))
        touching = PILLAR_RADIUS + BALL_RADIUS
        radius = touching + _CLEARANCE
        nearest = float(np.hypot(*(position + np.clip(-position @ along, 0.0, remaining) * along)))
        if nearest >= max(touching, min(radius, 0.95 * out, float(np.hypot(*goal)))):
            return along, min(0.5, float(np.sqrt(0.7 * remaining)), 2.5 * remaining)
        # A lateral offset from the pillar, seen from the goal, larger than any initial one determines the side.
        offset = float(goal[0] * position[1] - goal[1] * position[0]) / (out * float(np.hypot(*goal)))
        side = -np.sign(offset) if abs(offset) > _CLEAR_OFFSET else self._side
        inward = -position / out
        sine = min(radius / out, 1.0)
        drift = 2.0 * max(1.0 - out / radius, 0.0)  # inside the circle there is no tangent: go around and outwards
        heading = (np.sqrt(1 - sine**2) - drift) * inward - side * sine * np.array([-inward[1], inward[0]])
        return heading / np.hypot(*heading), 0.4


TASK = Task(
    name="ball",
    make=BallEnv,
    rate_hz=RATE_HZ,
    max_steps=MAX_STEPS,
    score="1 if the ball came to rest on the goal, else 0",
    features=lambda episodes: episodes,
    expert=BallExpert,
    pace="speed of the goal on a circle around the pillar [m/s]",
    hold=lambda last: last,
    effector=tilt,
    roll_forward=roll_forward,
)
CHASE = replace(
    TASK,
    name="ball-chase",
    make=partial(BallEnv, pace=None, goal_in_state=True, graded=True),
    score="how nearly the ball rested on the goal for 0.5 s, 0 to 1: the largest mean of min(1, radius of the goal / "
    "distance) min(1, 0.04 m/s / speed); 1 on success",
)
"""Plate and ball with a goal that moves, whose position and velocity are part of the state.

A bundle's goal is only the newest vector, without velocity. Without a pace every episode draws its own.
"""
