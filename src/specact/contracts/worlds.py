"""The contracts of an environment and of a robot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specact.contracts.policies import Named, expect, expect_array, same
from specact.errors import ContractError, ObservationError
from specact.observation import ObservationHistory
from specact.pair import Pair
from specact.robot.loop import Robot, stop

if TYPE_CHECKING:
    from specact.lab.envs.task import Task


def check_robot(robot: Robot, pair: Pair[Any], action: NDArray[np.float32]) -> None:
    """Checks a robot: that its observations fit a pair, that it accepts actions, and that it can be stopped.

    The robot may move: a harmless action ``[A]``, such as one that keeps the robot where it is, is sent three times,
    and the robot is stopped as a control loop stops it.
    """
    width, action = len(pair.units.centre), np.asarray(action, np.float32)
    numbers = f"{pair.name} has actions of {width} numbers"
    expect(action.shape == (width,), f"{numbers}, but the one to try has {action.shape}")
    for method in ("observe", "act"):
        expect(callable(getattr(robot, method, None)), f"a robot must have a method {method!r}")
    own_stop = getattr(robot, "stop", None)
    expect(own_stop is None or callable(own_stop), "stop must be a method, or absent")
    history = ObservationHistory(pair.observation)
    for _ in range(3):
        try:
            history.push(robot.observe())
        except ObservationError as error:
            raise ContractError(f"observe must give what {pair.name} needs: {error}") from error
        given = action.copy()
        robot.act(given)
        expect(np.array_equal(given, action), "act must not change the action that it is given")
    stop(robot, action)
    if own_stop is not None:
        # After an error beside the watchdog it is called again.
        own_stop()


def check_task(task: Task, *, steps: int = 100) -> None:
    """Checks an environment: its spaces, its determinism given a seed, the info, and the task's functions.

    It is played for so many steps, at most its own ``max_steps``, with random actions.
    """
    import gymnasium as gym  # imported here, because robots do not need it

    expect(0.0 < task.rate_hz < math.inf, f"rate_hz must be positive and finite, got {task.rate_hz}")
    expect(task.max_steps >= 1, f"max_steps must be at least 1, got {task.max_steps}")
    paced: dict[str, Any] = {} if task.pace is None else {"pace": 0.0}
    env, twin = (task.make(render_mode=None, **paced) for _ in range(2))
    try:
        spaces: Any = env.observation_space
        acts: Any = env.action_space
        expect(isinstance(spaces, gym.spaces.Dict), f"observation_space must be a gymnasium Dict, it is {spaces}")
        for name, space in spaces.spaces.items():
            text = name == "instruction" and isinstance(space, gym.spaces.Text)
            numbers = isinstance(space, gym.spaces.Box) and space.dtype == np.float32
            frames = isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)
            expect(
                numbers or frames or text,
                f"the observation {name!r} must be a Box, float32 or, for a camera, uint8 [H, W, 3], or Text where it "
                f"is the instruction; it is {space}",
            )
        vector = isinstance(acts, gym.spaces.Box) and acts.dtype == np.float32 and len(acts.shape) == 1
        expect(vector, f"action_space must be a Box, float32 [A]; it is {acts}")
        acts.seed(0)
        actions = [acts.sample() for _ in range(min(steps, task.max_steps))]
        episode = _play(env, actions)
        for other, where in ((env, "again"), (twin, "in a second env")):
            equal = same(episode, _play(other, actions))
            expect(equal, f"reset(seed=0) and the same actions must give the same episode {where}")
        _check_functions(task, env, episode[0], actions[0])
    finally:
        env.close()
        twin.close()


def _play(env: Any, actions: Sequence[NDArray[np.float32]]) -> list[Named]:
    """Runs an episode, checks every result, and returns its observations."""
    observation, info = env.reset(seed=0)
    success, score = _check_info(info, "reset", False, -math.inf)
    observations = [_check_observation(observation, env, "reset")]
    for action in actions:
        given = action.copy()
        observation, _, terminated, truncated, info = env.step(given)
        expect(np.array_equal(given, action), "step must not change the action that it is given")
        flags = all(isinstance(flag, bool | np.bool_) for flag in (terminated, truncated))
        expect(flags, f"step must say terminated and truncated as bool, got {terminated!r} and {truncated!r}")
        success, score = _check_info(info, "step", success, score)
        observations.append(_check_observation(observation, env, "step"))
        if terminated or truncated:
            break
    return observations


def _check_info(info: Any, where: str, success: bool, best: float) -> tuple[bool, float]:
    for name in ("success", "score"):
        expect(isinstance(info, dict) and name in info, f"the info of {where} must have {name!r}, got {info!r:.200}")
    reached, score = info["success"], info["score"]
    expect(isinstance(reached, bool | np.bool_), f"info['success'] must be bool, got {reached!r:.60}")
    expect(bool(reached) or not success, "info['success'] must stay true once it is: reached at any time")
    number = isinstance(score, int | float | np.number) and math.isfinite(score)
    expect(number, f"info['score'] must be a finite number, got {score!r:.60}")
    expect(score >= best, f"info['score'] must be the best so far; it fell from {best} to {score}")
    return bool(reached), float(score)


def _check_observation(observation: Any, env: Any, where: str) -> Named:
    spaces = env.observation_space.spaces
    names = sorted(observation) if isinstance(observation, dict) else observation
    expect(names == sorted(spaces), f"the observation of {where} must be a dict with {list(spaces)}; got {names!r:.99}")
    for name, space in spaces.items():
        value = observation[name]
        fits = value in space and (isinstance(value, str) or bool(np.isfinite(value).all()))
        expect(fits, f"the observation {name!r} of {where} must be finite and in {space}, got {value!r:.200}")
    return {name: np.array(value) for name, value in observation.items()}


def _check_functions(task: Task, env: Any, observation: Named, action: NDArray[np.float32]) -> None:
    expect(
        callable(task.features), "features must be a function Episodes -> Episodes; lambda episodes: episodes will do"
    )
    if task.hold is not None:
        last = action.copy()
        held = task.hold(last)
        expect(np.array_equal(last, action), "hold must not change the action that it is given")
        _check_action(held, env, "hold")
    if task.expert is not None:
        expert = task.expert(0)
        for method in ("reset", "act"):
            expect(callable(getattr(expert, method, None)), f"an expert must have a method {method!r}, taking the env")
        env.reset(seed=0)
        expert.reset(env)
        _check_action(expert.act(env), env, "the expert's act")
    if task.effector is not None:
        expect_array("the position of effector", task.effector(env), np.float64, (None,))
    if task.roll_forward is not None:
        _check_observation(task.roll_forward(observation, np.stack([action, action])), env, "roll_forward")


def _check_action(action: Any, env: Any, where: str) -> None:
    expect_array(f"the action of {where}", action, np.float32, env.action_space.shape)
    expect(action in env.action_space, f"{where} must give an action within the action space, got {action}")
