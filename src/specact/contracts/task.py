"""The contract of an environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specact.contracts.expectations import call, expect, expect_array, outline, same
from specact.observation import Field

if TYPE_CHECKING:
    from specact.lab.envs.task import Task


def check_task(task: Task, *, seed: int = 0, steps: int = 100) -> None:
    """Checks an environment: its spaces, its determinism given a seed, the info, and the task's functions.

    Args:
        task: the environment.
        seed: of the test episode and its random actions.
        steps: maximum number of steps of that episode; ``max_steps`` also limits it.

    Raises:
        ContractError: for the first violation of :class:`~specact.lab.envs.task.Task`.
    """
    import gymnasium as gym  # imported here, because robots do not need it

    expect(0.0 < task.rate_hz < math.inf, f"rate_hz must be positive and finite, got {task.rate_hz}")
    expect(task.max_steps >= 1, f"max_steps must be at least 1, got {task.max_steps}")
    paced: dict[str, Any] = {} if task.pace is None else {"pace": 0.0}
    env, twin = (call("make", task.make, render_mode=None, **paced) for _ in range(2))
    try:
        seen, acts = env.observation_space, env.action_space
        expect(isinstance(seen, gym.spaces.Dict), f"observation_space must be a gymnasium Dict, it is {seen}")
        for name, space in seen.spaces.items():
            text = name == "instruction" and isinstance(space, gym.spaces.Text)
            numbers = isinstance(space, gym.spaces.Box) and space.dtype == np.float32
            frames = isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)
            expect(
                numbers or frames or text,
                f"the observation {name!r} must be a Box, float32 or, for a camera, uint8 [H, W, 3], or Text where it "
                f"is the instruction; it is {space}",
            )
        expect(
            isinstance(acts, gym.spaces.Box) and acts.dtype == np.float32 and len(acts.shape) == 1,
            f"action_space must be a Box, float32 [A]; it is {acts}",
        )
        actions = _actions(acts, seed, min(steps, task.max_steps))
        episode = _play(env, seed, actions)
        for other, where in ((env, "again"), (twin, "in a second env")):
            again = same(episode, _play(other, seed, actions))
            expect(again, f"reset(seed={seed}) and the same actions must give the same episode {where}")
        _check_functions(task, env, acts, episode[0], actions[0])
        _check_cameras(task)
    finally:
        env.close()
        twin.close()


def _play(env: Any, seed: int, actions: Sequence[NDArray[np.float32]]) -> list[dict[str, NDArray[Any]]]:
    """Runs an episode, checks every result, and returns its observations."""
    observation, info = call("reset", env.reset, seed=seed, values=2)
    success, score = _check_info(info, "reset", success=False, score=-math.inf)
    observations = [_check_observation(observation, env.observation_space, "reset")]
    for action in actions:
        given = action.copy()
        observation, _, terminated, truncated, info = call("step", env.step, given, values=5)
        expect(np.array_equal(given, action), "step must not change the action that it is given")
        expect(
            all(isinstance(flag, bool | np.bool_) for flag in (terminated, truncated)),
            f"step must say terminated and truncated as bool, got {terminated!r} and {truncated!r}",
        )
        success, score = _check_info(info, "step", success=success, score=score)
        observations.append(_check_observation(observation, env.observation_space, "step"))
        if terminated or truncated:
            break
    return observations


def _check_info(info: Any, where: str, *, success: bool, score: float) -> tuple[bool, float]:
    for name in ("success", "score"):
        expect(isinstance(info, dict) and name in info, f"the info of {where} must have {name!r}, got {info!r:.200}")
    expect(isinstance(info["success"], bool | np.bool_), f"info['success'] must be bool, got {info['success']!r:.60}")
    expect(bool(info["success"]) or not success, "info['success'] must stay true once it is: reached at any time")
    try:
        found = float(info["score"])
    except (TypeError, ValueError):
        found = math.nan
    expect(math.isfinite(found), f"info['score'] must be a finite number, got {info['score']!r:.60}")
    expect(found >= score, f"info['score'] must be the best so far; it fell from {score} to {found}")
    return bool(info["success"]), found


def _check_observation(observation: Any, spaces: Any, where: str) -> dict[str, NDArray[Any]]:
    expect(
        isinstance(observation, dict) and observation.keys() == spaces.spaces.keys(),
        f"the observation of {where} must be a dict with {', '.join(spaces.spaces)}; got {outline(observation)}",
    )
    for name, space in spaces.spaces.items():
        value = observation[name]
        if name == "instruction" and not space.shape:
            expect(space.contains(value), f"the instruction of {where} must be a text of {space}, got {value!r:.60}")
            continue
        expect_array(f"the observation {name!r} of {where}", value, space.dtype, space.shape)
    return {name: np.array(value) for name, value in observation.items()}


def _check_cameras(task: Task) -> None:
    """Checks the spaces of requested frames, without rendering."""
    if not task.cameras:
        return
    fields = {name: Field((48, 64, 3), "uint8") for name in task.cameras}
    env = call("make", task.seeing(fields).make, render_mode=None)
    try:
        for name, field in fields.items():
            space = env.observation_space.spaces.get(name)
            expect(
                space is not None and space.dtype == np.uint8 and space.shape == field.shape,
                f"make(frames={{{name!r}: (48, 64)}}) must give frames uint8 [48, 64, 3], got the space {space}",
            )
    finally:
        env.close()


def _check_functions(
    task: Task, env: Any, acts: Any, observation: dict[str, NDArray[Any]], action: NDArray[np.float32]
) -> None:
    expect(
        callable(task.features), "features must be a function Episodes -> Episodes; lambda episodes: episodes will do"
    )
    if task.hold is not None:
        last = action.copy()
        held = call("hold", task.hold, last)
        expect(np.array_equal(last, action), "hold must not change the action that it is given")
        _check_action(held, acts, "hold")
    if task.expert is not None:
        expert = call("expert", task.expert, 0)
        for method in ("reset", "act"):
            expect(callable(getattr(expert, method, None)), f"an expert must have a method {method!r}, taking the env")
        env.reset(seed=0)
        call("the expert's reset", expert.reset, env)
        _check_action(call("the expert's act", expert.act, env), acts, "the expert's act")
    if task.effector is not None:
        place = call("effector", task.effector, env)
        expect_array("the position of effector", place, np.float64, (None,))
    if task.roll_forward is not None:
        rolled = call("roll_forward", task.roll_forward, observation, np.stack([action, action]))
        _check_observation(rolled, env.observation_space, "roll_forward")


def _check_action(action: Any, acts: Any, where: str) -> None:
    expect_array(f"the action of {where}", action, np.float32, acts.shape)
    expect(acts.contains(action), f"{where} must give an action within the action space, got {action}")


def _actions(space: Any, seed: int, count: int) -> list[NDArray[np.float32]]:
    """Uniform random actions: within 1 of a single finite bound, and in [-1, 1] without bounds."""
    rng = np.random.default_rng(seed)
    low = np.where(np.isfinite(space.low), space.low, np.where(np.isfinite(space.high), space.high - 1.0, -1.0))
    high = np.where(np.isfinite(space.high), space.high, np.where(np.isfinite(space.low), space.low + 1.0, 1.0))
    return [rng.uniform(low, high).astype(np.float32).clip(space.low, space.high) for _ in range(max(1, count))]
