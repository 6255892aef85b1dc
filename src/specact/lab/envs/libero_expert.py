"""Scripted experts of LIBERO: a closed loop of phases that grasps an object and puts it where the task wants it.

They see the simulator's poses, need no camera, and start again when the object slips. An action is proportional to the
distance to the phase's goal, so the expert's own actions after a disturbance lead back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Literal, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

RATE_HZ = 20.0
GAIN = 12.0  # action per metre
TURNING = 2.0  # action per radian
MOST_TURNING = 0.6
LOST_M = 0.03  # [m], so far from where it was held in the hand an object has slipped
STALLED_MPS = 0.015  # [m/s], a hand slower than this has met something
STRAIGHT_RAD, BENT_RAD = -0.45, -0.8  # [rad], of the elbow: it has to bend, and has bent enough
CLOSED_MPS = 0.01  # [m/s], fingers slower than this have closed around something
OPEN_M = 0.06  # [m], the gripper is open
PALM = (0.037, 0.115)  # [m], half of the palm across and along the fingers' axis
PALM_HEIGHT = 0.035  # [m], of the palm's lower side above the point between the fingers
SHIFTS = (0.0, 0.015, -0.015, 0.023, -0.023, 0.03, -0.03)  # [m]
OPEN, SHUT = -1.0, 1.0
TILTED = np.array([[np.cos(0.5), 0.0, np.sin(0.5)], [0.0, 1.0, 0.0], [-np.sin(0.5), 0.0, np.cos(0.5)]])


class Phase(Enum):
    """What the expert does now, in this order."""

    APPROACH = auto()
    CLOSE = auto()
    LIFT = auto()
    CARRY = auto()
    LOWER = auto()
    RELEASE = auto()


@dataclass(frozen=True)
class Grasp:
    """How to grasp and put down an object; lengths in metres.

    ``at`` the middle of its top, or its rim on one ``side``; ``along`` the world's axis in which the fingers close;
    ``depth`` of the finger tips below its top; ``hover`` above the grasp before the descent; ``lift`` from where it
    lay; ``carry`` and ``drop``, heights of its origin above the target while moving there and when released; ``speed``
    of the lift, 1 is full; ``centre`` a site above which it is brought first, as in a drawer.
    """

    at: Literal["rim", "top"]
    along: Literal["x", "y"] = "y"
    side: Literal[-1, 1] = 1
    depth: float | None = None
    hover: float = 0.12
    lift: float = 0.06
    carry: float = 0.07
    drop: float = 0.012
    speed: float = 1.0
    centre: str | None = None


BOWL = Grasp("rim", depth=0.02)
GROCERY = Grasp("top", hover=0.10, carry=0.24, drop=0.08)
_BOWL_ON = "pick_up_the_black_bowl_{}_and_place_it_on_the_plate"
# A stretched arm stalls, and so does a folded one: far bowls are grasped at the near rim, and all carried low.
GRASPS = {
    _BOWL_ON.format("between_the_plate_and_the_ramekin"): replace(BOWL, side=-1),
    _BOWL_ON.format("next_to_the_ramekin"): replace(BOWL, along="x"),
    _BOWL_ON.format("from_table_center"): replace(BOWL, along="x"),
    _BOWL_ON.format("on_the_cookie_box"): replace(BOWL, along="x"),
    _BOWL_ON.format("in_the_top_drawer_of_the_wooden_cabinet"): Grasp(
        "rim", along="x", depth=0.02, hover=0.08, lift=0.11, speed=0.5, centre="wooden_cabinet_1_top_region"
    ),
    _BOWL_ON.format("on_the_ramekin"): replace(BOWL, along="x"),
    _BOWL_ON.format("next_to_the_cookie_box"): replace(BOWL, along="x"),
    _BOWL_ON.format("on_the_stove"): BOWL,
    _BOWL_ON.format("next_to_the_plate"): replace(BOWL, along="x"),
    _BOWL_ON.format("on_the_wooden_cabinet"): replace(BOWL, along="x"),
    **{
        f"pick_up_the_{name}_and_place_it_in_the_basket": GROCERY
        for name in (
            *("alphabet_soup", "cream_cheese", "salad_dressing", "bbq_sauce", "ketchup"),
            *("tomato_sauce", "butter", "milk", "chocolate_pudding", "orange_juice"),
        )
    },
    "put_the_bowl_on_the_stove": replace(BOWL, along="x", drop=0.02),
    "put_the_wine_bottle_on_top_of_the_cabinet": Grasp("top", carry=0.05, drop=0.015),
    "put_the_bowl_on_top_of_the_cabinet": replace(BOWL, along="x", carry=0.06, drop=0.02),
    "put_the_cream_cheese_in_the_bowl": Grasp("top", hover=0.10, carry=0.10, drop=0.05),
    "put_the_bowl_on_the_plate": replace(BOWL, along="x"),
    "put_the_wine_bottle_on_the_rack": Grasp("top", carry=0.12, drop=0.06),
}


def up(height: float) -> Vector:
    """A step up, ``[3]``."""
    return np.array([0.0, 0.0, height])


class Scene:
    """Poses in LIBERO's environment of one task [m]."""

    def __init__(self, simulator: Any) -> None:
        self._data, self._model = simulator.sim.data._data, simulator.sim.model._model
        self._bodies: dict[str, int] = simulator.obj_body_id
        self._robot = simulator.robots[0]
        self.object, self.target = simulator.obj_of_interest[:2]
        self.others = [name for name in simulator.objects_dict if name != self.object]

    @property
    def hand(self) -> Vector:
        """Position of the point between the finger tips, ``[3]``."""
        return np.array(self._data.site_xpos[self._robot.eef_site_id])

    @property
    def rotation(self) -> Vector:
        """The gripper's axes as columns, ``[3, 3]``: that in which the fingers close, across it, and ahead."""
        return np.array(self._data.site_xmat[self._robot.eef_site_id]).reshape(3, 3)

    def arm(self) -> tuple[float, Vector]:
        """Angle of the elbow [rad], 0 when the arm is straight, and the direction from its wrist to its shoulder."""
        joints = self._data.xanchor[self._robot._ref_joint_indexes]
        back = joints[1] - joints[5]
        return float(self._data.qpos[self._robot._ref_joint_pos_indexes[3]]), back / np.linalg.norm(back)

    @property
    def held(self) -> Vector:
        """Position of the object in the frame of the hand, ``[3]``."""
        return np.asarray(self.rotation.T @ (self.position(self.object) - self.hand))

    def fingers(self) -> tuple[float, float]:
        """Distance of the fingers [m], and how fast it changes [m/s]."""
        left, right = self._data.qpos[self._robot._ref_gripper_joint_pos_indexes]
        speeds = self._data.qvel[self._robot._ref_gripper_joint_vel_indexes]
        return float(left - right), float(np.abs(speeds).max())

    def position(self, name: str) -> Vector:
        """Of an object's origin, or of a region's upper side, ``[3]``."""
        if name in self._bodies:
            return np.array(self._data.xpos[self._bodies[name]])
        site = self._data.site(name)
        height = float(self._model.site_size[site.id][2])
        return np.asarray(site.xpos + up(height if height < 0.1 else 0.0))  # a tall region has no upper side

    def box(self, name: str) -> tuple[Vector, Vector]:
        """The corners of the box, parallel to the world's axes, around what collides of an object, ``[3]`` each."""
        model, data = self._model, self._data
        mask = model.body_rootid[model.geom_bodyid] == self._bodies[name]
        solid = mask & ((model.geom_contype > 0) | (model.geom_conaffinity > 0))
        axes = data.geom_xmat[solid].reshape(-1, 3, 3)
        centres, halves = np.split(model.geom_aabb[solid], 2, axis=1)
        middle = data.geom_xpos[solid] + np.einsum("gij,gj->gi", axes, centres)
        half = np.einsum("gij,gj->gi", np.abs(axes), halves)
        return (middle - half).min(axis=0), (middle + half).max(axis=0)


class Expert:
    """Approaches, closes, lifts, carries, lowers and releases. Deterministic; sees the simulator's poses."""

    tasks = tuple(GRASPS)

    def __init__(self, seed: int) -> None:
        self._grasp, self._scene = BOWL, cast(Scene, None)

    def reset(self, env: gym.Env[Any, Any]) -> None:
        """Chooses the grasp of the environment's current ``task``, one of :attr:`tasks`."""
        world: Any = env.unwrapped
        self._grasp, self._scene = GRASPS[world.task], Scene(world.sim)
        self._offset = self._find_grasp()
        self._trim = np.zeros(2)
        self._last, self._held = self._scene.hand, self._scene.held
        self._straight = False
        self._lay = 0.0  # height at which the object lay
        self._enter(Phase.APPROACH)

    def act(self, env: gym.Env[Any, Any]) -> NDArray[np.float32]:
        """The action in the current state, float32 ``[7]`` in [-1, 1]."""
        scene, hand = self._scene, self._scene.hand
        self._steps += 1
        self._speed, self._last = RATE_HZ * float(np.linalg.norm(hand - self._last)), hand
        lost = float(np.linalg.norm(scene.held - self._held)) > LOST_M
        if lost and self._phase in (Phase.LIFT, Phase.CARRY, Phase.LOWER):
            self._enter(Phase.APPROACH)
        goal, gripper = self._reach() if self._phase in (Phase.APPROACH, Phase.CLOSE) else self._deliver()
        elbow, back = scene.arm()
        self._straight = elbow > (BENT_RAD if self._straight else STRAIGHT_RAD)
        error = goal - hand
        # The controller has a steady error under load, which a small integral removes.
        near = float(np.linalg.norm(error[:2])) < 0.03
        self._trim = np.clip(self._trim + 0.5 * error[:2], -0.3, 0.3) if near else np.zeros(2)
        move = GAIN * error + np.append(self._trim, 0.0)
        fastest = self._grasp.speed if self._phase is Phase.LIFT else 1.0
        move *= min(1.0, fastest / max(float(np.abs(move).max()), 1e-9))
        wanted = self._wanted_rotation()
        if self._straight:
            # The controller cannot bend a straight arm by pulling, but by tilting the hand it moves the wrist back.
            move, wanted = 0.2 * back, TILTED @ wanted
        turn = 0.5 * np.cross(scene.rotation, wanted, axis=0).sum(axis=1)
        turn = np.clip(TURNING * turn, -MOST_TURNING, MOST_TURNING)
        return np.asarray(np.clip(np.concatenate([move, turn, [gripper]]), -1.0, 1.0), np.float32)

    def _reach(self) -> tuple[Vector, float]:
        """Above the object, down to the grasp, and closing around it."""
        scene, grasp = self._scene, self._grasp_point()
        if self._phase is Phase.CLOSE:
            if self._steps > 4 and scene.fingers()[1] < CLOSED_MPS:
                self._held = scene.held
                self._enter(Phase.LIFT)
            return grasp, SHUT
        gap = scene.hand - grasp
        beside = float(np.linalg.norm(gap[:2]))
        patient = self._steps < 60
        near = 0.012 if patient else 0.022
        if beside > 0.06 or self._turned() > 0.15 or (beside > near and gap[2] < 0.04):
            goal = grasp + up(self._grasp.hover)
        else:
            goal = grasp + up(0.0 if beside < near else 0.05)
        if beside > 0.06 and gap[2] < 0.6 * self._grasp.hover:  # rise before moving sideways
            goal[:2] = scene.hand[:2]
        if beside < near + 0.003 and scene.fingers()[0] > OPEN_M and gap[2] < (0.008 if patient else 0.02):
            self._lay = float(scene.position(scene.object)[2])
            self._enter(Phase.CLOSE)
        return goal, OPEN

    def _deliver(self) -> tuple[Vector, float]:
        """Up, over the target, down and open; goals of the hand follow from those of the object it holds."""
        scene, hand, grasp = self._scene, self._scene.hand, self._grasp
        thing, target = scene.position(scene.object), scene.position(scene.target)
        target[2] += grasp.drop
        above = hand - thing
        final = target + above
        beside = float(np.linalg.norm((target - thing)[:2]))
        height = max(target[2] + 0.02, target[2] - grasp.drop + grasp.carry)
        if self._phase is Phase.LIFT or beside > 0.1:
            height = max(height, self._lay + grasp.lift)
        over = np.array([final[0], final[1], height + above[2]])
        match self._phase:
            case Phase.LIFT:
                if hand[2] >= over[2] - 0.03:
                    self._enter(Phase.CARRY)
                elif grasp.centre is not None and self._steps <= 10:
                    sideways = (scene.position(grasp.centre) - thing)[:2]
                    return hand + np.append(np.clip(sideways, -0.02, 0.02), 0.0), SHUT
                else:
                    return np.array([hand[0], hand[1], over[2]]), SHUT
            case Phase.CARRY if beside < (0.012 if self._steps <= 60 else 0.03) and self._turned() < 0.2:
                self._enter(Phase.LOWER)
            case Phase.LOWER if beside > 0.03:
                self._enter(Phase.CARRY)
            case Phase.LOWER if thing[2] - target[2] < 0.006 or (self._steps > 6 and self._speed < STALLED_MPS):
                self._enter(Phase.RELEASE)
            case Phase.RELEASE if self._steps > 14:
                self._enter(Phase.APPROACH)
        if self._phase is Phase.RELEASE or self._phase is Phase.APPROACH:
            return hand + up(0.0 if self._steps < 6 else 0.05), OPEN
        return (final if self._phase is Phase.LOWER else over), SHUT

    def _enter(self, phase: Phase) -> None:
        self._phase, self._steps = phase, 0

    def _turned(self) -> float:
        """Angle between the wanted rotation of the hand and its own [rad]."""
        cosine = (np.trace(self._scene.rotation.T @ self._wanted_rotation()) - 1.0) / 2.0
        return float(np.arccos(np.clip(cosine, -1.0, 1.0)))

    def _grasp_point(self) -> Vector:
        return self._scene.position(self._scene.object) + self._offset

    def _wanted_rotation(self) -> Vector:
        """Ahead is down, and the fingers close along the world's y axis, or x."""
        down = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
        return down if self._grasp.along == "y" else np.array([[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, -1.0]])

    def _find_grasp(self) -> Vector:
        """The grasp relative to the object's origin, ``[3]``."""
        scene, grasp = self._scene, self._grasp
        origin = scene.position(scene.object)
        low, high = scene.box(scene.object)
        if grasp.at == "rim":
            axis = np.array([0.0, 1.0, 0.0] if grasp.along == "y" else [-1.0, 0.0, 0.0])
            offset = grasp.side * ((high - low)[1] / 2 - 0.006) * axis
            offset[2] = high[2] - origin[2] - (0.012 if grasp.depth is None else grasp.depth)
            return np.asarray(offset)
        point = (low + high) / 2
        point[2] = high[2] - (min((high - low)[2] / 2, 0.035) if grasp.depth is None else grasp.depth)
        # Where the palm would meet a taller neighbour, the grasp moves a little across the fingers' axis.
        tall = [box for box in map(scene.box, scene.others) if box[1][2] > point[2] + PALM_HEIGHT]
        for shift in SHIFTS:
            moved = point + np.array([shift, 0.0, 0.0])
            away = [np.abs(np.clip(moved, *box) - moved)[:2] > PALM for box in tall]
            if all(beyond.any() for beyond in away):
                return np.asarray(moved - origin)
        return np.asarray(point - origin)
