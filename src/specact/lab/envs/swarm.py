"""Swarm: drones in a walled plane that have to pass each other on the way to their targets.

Each drone is a double integrator with drag, ``v' = ACCELERATION * action - DRAG * v``. Drones are discs with inelastic,
frictional contacts: on contact the normal component of the relative velocity becomes zero and the tangential one is
halved. So collisions cost time, and head-on drones stop. The side on which two drones pass is free, so demonstrations
have many modes.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from specact.lab.envs.task import Begun, Stepped, Task, TickingEnv

HALF_SIZE = 1.2  # arena, centre to wall [m]
RADIUS = 0.1  # of a drone [m]
ACCELERATION = 1.5  # at full command, per axis [m/s^2]
DRAG = 0.5  # [1/s]
OVERLAP = 1e-3  # by which two drones may be closer than touching at the end of a control step [m]
SLIP = 0.5  # share of the tangential relative velocity that remains on contact
TARGET_RADIUS = 0.05  # drone centre to target [m]
SLOW = 0.1  # speed below which a drone counts as hovering [m/s]
HOLD_STEPS = 5  # control steps with all drones on target that make a success: 0.5 s
RATE_HZ = 10.0
MAX_STEPS = 120

_SUBSTEPS = 5
_SWEEPS = 100  # maximum passes over overlapping pairs; a crowd that still overlaps keeps its previous positions
_DT = 1 / RATE_HZ / _SUBSTEPS  # [s]
_SPEED_SCALE = 1.0  # [m/s], brings velocities to about [-1, 1]
_LIMIT = 4.0  # bound of scaled observations, above any reachable speed
_MIN_GAP = 4 * RADIUS  # minimum distance between starts, and between targets [m]
_MIN_TRIP = 0.8  # minimum distance from start to target [m]

# Of the expert.
_SEPARATION = 0.3  # distance between drone centres that it aims for [m]
_CLEAR_MISS = 0.1  # a predicted miss of at least this distance determines the side on which drones pass [m]

Array = NDArray[np.float64]


class SwarmEnv(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """The swarm environment with N drones; see the module for the task.

    Observation: ``state`` float32 ``[4 N]`` = positions ``[N, 2]`` / HALF_SIZE, then velocities ``[N, 2]`` / 1 m/s;
    ``goal`` float32 ``[2 N]`` = targets / HALF_SIZE. Action: float32 ``[2 N]`` in [-1, 1], the acceleration of each
    drone as a fraction of ACCELERATION, held for 100 ms. Reward: 1 on the step that succeeds, else 0. Ends on success:
    all drones on target and slow, for 0.5 s. Attributes, float64 ``[N, 2]`` [m, s]: ``position``, ``velocity``,
    ``target``.
    """

    metadata: ClassVar[dict[str, Any]] = TickingEnv.metadata  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None, drones: int = 5) -> None:
        self.render_mode = render_mode
        self.drones = drones
        self.observation_space = spaces.Dict(
            {
                "state": spaces.Box(-_LIMIT, _LIMIT, (4 * drones,), np.float32),
                "goal": spaces.Box(-1.0, 1.0, (2 * drones,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (2 * drones,), np.float32)
        self.position = self.velocity = self.target = np.zeros((drones, 2))
        self._pairs = np.triu_indices(drones, 1)
        self._rows = np.stack(self._pairs, axis=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Drones at rest at random places, targets at random places at least 0.8 m from their drone."""
        super().reset(seed=seed)
        self.position = self._sample_positions(np.full((self.drones, 2), np.inf))
        self.target = self._sample_positions(self.position)
        self.velocity = np.zeros((self.drones, 2))
        self._held = 0
        self._success = False
        return self._observation(), self._info()

    def step(self, action: NDArray[np.float32]) -> Stepped:
        push = ACCELERATION * np.clip(np.asarray(action, np.float64).reshape(self.drones, 2), -1.0, 1.0)
        for _ in range(_SUBSTEPS):
            self.velocity = self.velocity + _DT * (push - DRAG * self.velocity)
            before, self.position = self.position, self.position + _DT * self.velocity
            self._collide()
            if not self._separate():
                self.position = before
        distance = np.linalg.norm(self.position - self.target, axis=1).max()
        arrived = distance < TARGET_RADIUS and np.linalg.norm(self.velocity, axis=1).max() < SLOW
        self._held = self._held + 1 if arrived else 0
        self._success = self._success or self._held >= HOLD_STEPS
        return self._observation(), float(self._success), self._success, False, self._info()

    def render(self) -> NDArray[np.uint8] | None:
        """A frame, uint8 ``[360, 360, 3]``: drones as discs, targets as rings of the same colour; or None."""
        if self.render_mode is None:
            return None
        size = 360
        axis = (np.arange(size) + 0.5) / size * 2 * HALF_SIZE - HALF_SIZE
        pixel = 2 * HALF_SIZE / size
        image = np.full((size, size, 3), 244.0)
        hue = 2 * np.pi * np.arange(self.drones) / self.drones
        colours = 128 + 95 * np.cos(hue[:, None] - np.array([0.0, 2.1, 4.2]))
        shapes = [(spot, RADIUS, colour, True) for spot, colour in zip(self.target, colours, strict=True)]
        shapes += [(spot, RADIUS, colour, False) for spot, colour in zip(self.position, colours, strict=True)]
        for spot, radius, colour, ring in shapes:
            distance = np.hypot(axis[None, :] - spot[0], -axis[:, None] - spot[1])
            edge = np.abs(distance - radius) - 2 * pixel if ring else distance - radius
            cover = np.clip(0.5 - edge / pixel, 0.0, 1.0)[..., None]
            image += cover * (colour - image)
        return image.astype(np.uint8)

    def _sample_positions(self, avoid: Array) -> Array:
        """Random positions ``[N, 2]`` [m], ``_MIN_GAP`` from each other, ``_MIN_TRIP`` from their row of ``avoid``."""
        while True:
            positions = self.np_random.uniform(-HALF_SIZE + 1.5 * RADIUS, HALF_SIZE - 1.5 * RADIUS, (self.drones, 2))
            gaps = np.linalg.norm((positions[:, None] - positions[None])[self._pairs], axis=1)
            if gaps.min() > _MIN_GAP and np.linalg.norm(positions - avoid, axis=1).min() > _MIN_TRIP:
                return positions

    def _collide(self) -> None:
        """Resolves contacts one pair at a time, which cannot add energy; all pairs at once could."""
        for i, j in self._closer_than(2 * RADIUS):
            apart = self.position[j] - self.position[i]  # again, because an earlier pair may have moved them
            closing = self.velocity[i] - self.velocity[j]
            if apart @ closing > 0:
                along = apart / _length(apart)
                kept = SLIP * (closing - (closing @ along) * along)
                mean = 0.5 * (self.velocity[i] + self.velocity[j])
                self.velocity[i], self.velocity[j] = mean + 0.5 * kept, mean - 0.5 * kept
            self._push_apart(i, j)
        inside = HALF_SIZE - RADIUS
        self.velocity[(np.abs(self.position) > inside) & (self.position * self.velocity > 0)] = 0.0
        np.clip(self.position, -inside, inside, out=self.position)

    def _separate(self) -> bool:
        """Separates drones that separating others has pushed together; False if some still overlap at the end."""
        for _ in range(_SWEEPS):
            pairs = self._closer_than(2 * RADIUS - OVERLAP)
            if not len(pairs):
                return True
            for i, j in pairs:
                self._push_apart(i, j)
            np.clip(self.position, RADIUS - HALF_SIZE, HALF_SIZE - RADIUS, out=self.position)
        return False

    def _closer_than(self, distance: float) -> NDArray[np.intp]:
        """The pairs of drones whose centres are closer than ``distance`` [m], ``[P, 2]``."""
        between = self.position[self._pairs[1]] - self.position[self._pairs[0]]
        close = np.einsum("ij,ij->i", between, between) < distance**2
        return self._rows.compress(close, axis=0)

    def _push_apart(self, i: int, j: int) -> None:
        """Moves two overlapping drones apart until they touch, both by the same distance."""
        apart = self.position[j] - self.position[i]
        distance = _length(apart)
        shift = max(RADIUS - 0.5 * distance, 0.0) * apart / distance
        self.position[i] -= shift
        self.position[j] += shift

    def _observation(self) -> dict[str, NDArray[np.float32]]:
        state = np.concatenate([self.position.ravel() / HALF_SIZE, self.velocity.ravel() / _SPEED_SCALE])
        goal = self.target.ravel() / HALF_SIZE
        return {"state": state.astype(np.float32), "goal": goal.astype(np.float32)}

    def _info(self) -> dict[str, Any]:
        return {"success": self._success, "score": float(self._success)}


def _length(vector: Array) -> float:
    """The length of a vector, at least 1e-9, so that one can divide by it."""
    return max(float(np.hypot(*vector)), 1e-9)


def _left(vector: Array) -> Array:
    """Vectors ``[..., 2]`` turned left by 90 degrees."""
    return np.stack([-vector[..., 1], vector[..., 0]], axis=-1)


class SwarmExpert:
    """Scripted expert: flies each drone to its target; pairs on a collision course pass on a side drawn per pair.

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
        push = 4.0 * (wanted - plane.velocity) + DRAG * plane.velocity
        action: NDArray[np.float32] = np.clip(push / ACCELERATION, -1.0, 1.0).astype(np.float32).ravel()
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


TASK = Task(
    name="swarm",
    make=SwarmEnv,
    rate_hz=RATE_HZ,
    max_steps=MAX_STEPS,
    score="1 if all drones came to rest on their targets, else 0",
    features=lambda episodes: episodes,
    expert=SwarmExpert,
    hold=np.zeros_like,  # drag slows the drones; an acceleration cannot stop one at once
    effector=lambda env: cast(SwarmEnv, env.unwrapped).position.ravel().copy(),
)
