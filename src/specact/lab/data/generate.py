"""Demonstrations made by a scripted expert, and the file they are kept in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes, concatenate
from specact.lab.data.fit import in_terms_of
from specact.lab.data.readers import read
from specact.lab.envs.task import Task

_BURST_EVERY = 20  # mean number of calm steps between two bursts of noise
_BURST_STEPS = (3, 8)  # shortest and longest burst
_MOST_TRIES = 10  # episodes tried per episode wanted before giving up


@dataclass(frozen=True)
class Generated:
    """What :func:`generate` made.

    Attributes:
        episodes: the demonstrations kept, all of them successful.
        tried: how many episodes the expert was given to get them, so its success rate is ``len(episodes) / tried``.
    """

    episodes: Episodes
    tried: int


def generate(
    task: Task, episodes: int, seed: int, noise: float, progress: Callable[[int], None] | None = None
) -> Generated:
    """Let the task's expert demonstrate until ``episodes`` episodes have succeeded; failed ones are dropped.

    With noise, the expert is disturbed as in DART (Laskey et al. 2017): in short bursts the action *executed* is the
    expert's plus a constant offset, while the action *recorded* stays the expert's own. The demonstrations then also
    show how to recover. Unlike DART the noise is not fitted to a learner's error, and comes in bursts.

    Args:
        task: a task with an expert.
        episodes: how many successful episodes to keep, at least 1.
        seed: of everything random here. Episode k depends on the seed and k only.
        noise: standard deviation of a burst's offset, in units of the action; 0 for none. 0.5 is strong.
        progress: called with the number of episodes kept so far after each one kept.

    Raises:
        ConfigError: if the task has no expert, or a number is out of range.
        DataError: if the expert fails nearly always.
    """
    if task.expert is None:
        raise ConfigError(f"task {task.name!r} has no scripted expert; train on recorded demonstrations instead")
    if episodes < 1 or not 0 <= noise < math.inf:
        raise ConfigError(f"episodes must be at least 1 and noise at least 0 and finite, got {episodes} and {noise}")
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    env = task.make(render_mode=None)
    kept: list[tuple[list[Any], list[Any], list[Any]]] = []
    tried = 0
    try:
        while len(kept) < episodes:
            if tried >= _MOST_TRIES * episodes:
                raise DataError(
                    f"the expert of {task.name!r} succeeded in only {len(kept)} of {tried} episodes; "
                    f"use less noise than {noise}"
                )
            steps, success = _episode(task, env, np.random.default_rng([seed, tried]), noise)
            tried += 1
            if success:
                kept.append(steps)
                if progress is not None:
                    progress(len(kept))
    finally:
        env.close()
    state, action = (np.concatenate([steps[part] for steps in kept]).astype(np.float32) for part in range(2))
    seen = [goal for *_, goals in kept for goal in goals]
    goal = np.array(seen, dtype=np.float32) if seen else None
    ends = np.cumsum([len(steps[0]) for steps in kept]).astype(np.int64)
    return Generated(Episodes(state=state, action=action, goal=goal, ends=ends, rate_hz=task.rate_hz), tried)


def demonstrations(
    task: Task,
    files: Sequence[Path],
    episodes: int,
    noise: float,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Episodes:
    """A recipe's demonstrations in the environment's terms: read from files, or else made by the task's expert.

    Args:
        task: whose terms.
        files: recordings, one after the other; empty to let the expert make ``episodes`` of them.
        episodes, noise, seed, progress: see :func:`generate`.

    Raises:
        DataError: if they cannot be read, are not finite or do not fit the task.
    """
    if files:
        return concatenate([in_terms_of(task, read(file), str(file)) for file in files])
    made = generate(task, episodes, seed, noise, progress).episodes
    return in_terms_of(task, made, f"what the expert of {task.name!r} demonstrated")


def save(path: str | os.PathLike[str], episodes: Episodes) -> None:
    """Write demonstrations as an .npz with ``state, action, goal, episode_ends, rate_hz``; float32, ends int64.

    What is None is left out. The file appears whole or not at all.

    Raises:
        DataError: if it cannot be written.
    """
    path = Path(path)
    fields: dict[str, Any] = {
        "state": episodes.state,
        "action": episodes.action,
        "goal": episodes.goal,
        "episode_ends": episodes.ends,
        "rate_hz": None if episodes.rate_hz is None else np.float32(episodes.rate_hz),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                np.savez_compressed(file, **{name: value for name, value in fields.items() if value is not None})
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write demonstrations to {str(path)!r}: {error.strerror or error}") from error


def _episode(
    task: Task, env: gym.Env[Any, Any], random: np.random.Generator, noise: float
) -> tuple[tuple[list[Any], list[Any], list[Any]], bool]:
    """One episode: the states, actions and goals of its steps, and whether it succeeded."""
    assert task.expert is not None
    env_seed, expert_seed = random.integers(2**31, size=2).tolist()
    observation, info = env.reset(seed=env_seed)
    expert = task.expert(expert_seed)
    expert.reset(env)
    states, actions, goals = [], [], []
    offset: NDArray[np.float64] = np.zeros(env.action_space.shape or ())
    burst = 0  # steps left
    for _ in range(task.max_steps):
        if burst > 0:
            burst -= 1
        elif noise > 0 and random.random() < 1 / _BURST_EVERY:
            offset = random.normal(0.0, noise, offset.shape)
            burst = int(random.integers(*_BURST_STEPS, endpoint=True))
        action = expert.act(env)
        states.append(observation["state"])
        actions.append(action)
        if "goal" in observation:
            goals.append(observation["goal"])
        executed = np.clip(action + offset, -1.0, 1.0).astype(np.float32) if burst > 0 else action
        observation, _, terminated, truncated, info = env.step(executed)
        if terminated or truncated:
            break
    return (states, actions, goals), bool(info["success"])
