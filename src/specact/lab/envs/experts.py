"""Scripted experts for ball and swarm, with deliberately multimodal actions.

Where two ways around an obstacle are about equally good, the side is drawn at random per episode; else the state
determines it. So actions are bimodal at the decision and unimodal afterwards.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from specact.lab.envs import ball, swarm
from specact.lab.envs.ball import BallEnv
from specact.lab.envs.swarm import SwarmEnv

_ROLLING = 5 / 7 * 9.81  # acceleration of a solid ball per rad of tilt [m/s^2]
_SERVO_LAG = 0.1  # of the plate's tilt behind its command [s]
_CLEARANCE = 0.06  # between the ball's and the pillar's surface that the ball expert aims for [m]
_CLEAR_OFFSET = 0.5  # sine of the angle at the pillar between the ball and the point opposite the goal
_SEPARATION = 0.3  # distance between drone centres that the swarm expert aims for [m]
_CLEAR_MISS = 0.1  # a predicted miss of at least this distance determines the side on which drones pass [m]


def _left(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Vectors ``[..., 2]`` turned left by 90 degrees."""
    return np.stack([-vector[..., 1], vector[..., 0]], axis=-1)


class BallExpert:
    """Rolls the ball around the pillar on a side drawn once per episode, then to the goal, and tracks it.

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
        return np.clip(tilt / ball.MAX_TILT, -1.0, 1.0).astype(np.float32)

    def _heading(self, position: NDArray[np.float64], goal: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """Unit vector of the desired velocity ``[2]``, and its magnitude [m/s]."""
        line = goal - position
        remaining = float(np.hypot(*line))
        along = line / max(remaining, 1e-9)
        out = float(np.hypot(*position))
        touching = ball.PILLAR_RADIUS + ball.BALL_RADIUS
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
        heading = (np.sqrt(1 - sine**2) - drift) * inward - side * sine * _left(inward)
        return heading / np.hypot(*heading), 0.4


class SwarmExpert:
    """Flies each drone to its target; pairs on a collision course pass on a side drawn per pair and episode.

    For each pair it predicts the miss, the signed distance of the closest approach. Where this is too small both evade
    sideways, to the side of the predicted miss if that is unambiguous, else to the drawn side.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._side = np.zeros((0, 0))

    def reset(self, env: gym.Env[Any, Any]) -> None:
        """Draw the side of each pair for a new episode."""
        drones = cast(SwarmEnv, env.unwrapped).drones
        sides = np.triu(self._random.choice([-1.0, 1.0], (drones, drones)), 1)
        self._side = sides + sides.T

    def act(self, env: gym.Env[Any, Any]) -> NDArray[np.float32]:
        """The action for the environment's current state, float32 ``[2 N]`` in [-1, 1]."""
        plane = cast(SwarmEnv, env.unwrapped)
        line = plane.target - plane.position
        remaining = np.linalg.norm(line, axis=1, keepdims=True)
        speed = np.minimum(np.minimum(0.8, np.sqrt(2 * 0.6 * remaining)), 2.0 * remaining)
        wanted = speed * line / np.maximum(remaining, 1e-9)
        wanted = wanted + self._avoidance(plane.position, 0.5 * (plane.velocity + wanted))
        push = 4.0 * (wanted - plane.velocity) + swarm.DRAG * plane.velocity
        action: NDArray[np.float32] = np.clip(push / swarm.ACCELERATION, -1.0, 1.0).astype(np.float32).ravel()
        return action

    def _avoidance(self, position: NDArray[np.float64], velocity: NDArray[np.float64]) -> NDArray[np.float64]:
        """Velocity added to each drone ``[N, 2]`` [m/s] so that no pair comes closer than ``_SEPARATION``."""
        between = position[None] - position[:, None]  # from i to j, [N, N, 2]
        closing = velocity[:, None] - velocity[None]
        distance = np.maximum(np.linalg.norm(between, axis=2), 1e-9)
        speed = np.maximum(np.linalg.norm(closing, axis=2), 1e-9)
        until = np.einsum("ijk,ijk->ij", between, closing) / speed**2  # time to the closest approach [s]
        miss = np.einsum("ijk,ijk->ij", _left(between), closing) / speed  # > 0: j is passed on the right of i
        urgent = (until > 0) & (until < 2.0) & (np.abs(miss) < _SEPARATION) & (speed > 0.05)
        side = np.where(np.abs(miss) > _CLEAR_MISS, np.sign(miss), self._side)
        sideways = side[..., None] * _left(between) / distance[..., None]
        need = np.where(urgent, (_SEPARATION - side * miss) / np.maximum(until, 0.3), 0.0)
        crowded = np.clip((_SEPARATION - distance) / _SEPARATION, 0.0, None) * (distance > 1e-6)
        repulsion = -between / distance[..., None]
        added: NDArray[np.float64] = (0.5 * need[..., None] * sideways + 1.5 * crowded[..., None] * repulsion).sum(
            axis=1
        )
        return added
