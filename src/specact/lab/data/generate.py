"""Demonstrations made by a scripted expert, and the file they are kept in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes, concatenate
from specact.lab.data.fit import as_recorded, in_terms_of
from specact.lab.data.readers import read
from specact.lab.data.sources import Sources
from specact.lab.envs.task import Task

_BURST_EVERY = 20  # mean number of calm steps between two bursts of noise
_BURST_STEPS = (3, 8)  # shortest and longest burst
MOST_TRIES = 10  # episodes tried per episode wanted before giving up


@dataclass(frozen=True)
class Demonstration:
    """One episode of an expert.

    Attributes:
        observations, actions: of its steps.
        disturbed: whether something else was done at a step than its action says.
        success: whether it succeeded.
    """

    observations: list[dict[str, Any]]
    actions: list[NDArray[np.float32]]
    disturbed: list[bool]
    success: bool

    def episode(self, rate_hz: float) -> Episodes:
        """The same as arrays."""
        first = self.observations[0]
        seen = {name: np.stack([each[name] for each in self.observations]) for name in first if name != "instruction"}
        return Episodes(
            # Camera frames stay as they are, everything else is a number.
            {name: array if array.dtype == np.uint8 else array.astype(np.float32) for name, array in seen.items()},
            np.stack(self.actions).astype(np.float32),
            np.array([len(self.actions)], np.int64),
            rate_hz,
            instructions=(first["instruction"],) if "instruction" in first else None,
            disturbed=np.array(self.disturbed),
        )


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
    show how to recover. Unlike DART the noise is not fitted to a learner's error, and comes in bursts. What follows a
    disturbed step is not what its action leads to, see :meth:`Episodes.followed`.

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
    check_generation(task, episodes, seed, noise)
    env = task.make(render_mode=None)
    kept: list[Demonstration] = []
    tried = 0
    try:
        while len(kept) < episodes:
            if tried >= MOST_TRIES * episodes:
                raise DataError(
                    f"the expert of {task.name!r} succeeded in only {len(kept)} of {tried} episodes; "
                    f"use less noise than {noise}"
                )
            shown = demonstrate(task, env, np.random.default_rng([seed, tried]), noise, tried)
            tried += 1
            if shown.success:
                kept.append(shown)
                if progress is not None:
                    progress(len(kept))
    finally:
        env.close()
    return Generated(concatenate([shown.episode(task.rate_hz) for shown in kept]), tried)


def demonstrations(
    task: Task | None,
    files: Sequence[Path],
    episodes: int,
    noise: float,
    seed: int,
    progress: Callable[[int], None] | None = None,
    *,
    sources: Sources = MappingProxyType({}),
    rate_hz: float | None = None,
) -> Episodes:
    """A recipe's demonstrations in the environment's terms: read from files, or else made by the task's expert.

    Args:
        task: whose terms; None for a robot that there is no environment for.
        files: recordings, one after the other; empty to let the expert make ``episodes`` of them.
        episodes, noise, seed, progress: see :func:`generate`.
        sources: which observations of the files, see :func:`~specact.lab.data.readers.read`.
        rate_hz: control rate where there is no task.

    Raises:
        DataError: if they cannot be read, are not finite or do not fit the task.
    """
    if task is None:
        assert files and rate_hz is not None, "a recipe without env has data and rate_hz"
        return concatenate([as_recorded(read(file, sources), rate_hz, str(file)) for file in files])
    if files:
        return concatenate([in_terms_of(task, read(file, sources), str(file)) for file in files])
    made = generate(task, episodes, seed, noise, progress).episodes
    return in_terms_of(task, made, f"what the expert of {task.name!r} demonstrated")


def save(path: str | os.PathLike[str], episodes: Episodes) -> None:
    """Write demonstrations as an .npz with the observations by name, ``action``, ``episode_ends`` and ``rate_hz``.

    Numbers are float32, camera frames uint8, ends int64; a rate that is None is left out, and so is what was disturbed.
    The file appears whole or not at all.

    Raises:
        DataError: if it cannot be written, or there are instructions.
    """
    path = Path(path)
    if episodes.instructions is not None:
        raise DataError("these demonstrations have instructions, which an .npz file does not hold; write a folder")
    fields: dict[str, Any] = {
        **{name: np.asarray(array) for name, array in episodes.observation.items()},
        "action": episodes.action,
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


def check_generation(task: Task, episodes: int, seed: int, noise: float) -> None:
    """Refuses what :func:`generate` cannot make.

    Raises:
        ConfigError: if the task has no expert, or a number is out of range.
    """
    if task.expert is None:
        raise ConfigError(f"task {task.name!r} has no scripted expert; train on recorded demonstrations instead")
    if episodes < 1 or not 0 <= noise < math.inf:
        raise ConfigError(f"episodes must be at least 1 and noise at least 0 and finite, got {episodes} and {noise}")
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")


def demonstrate(
    task: Task, env: gym.Env[Any, Any], random: np.random.Generator, noise: float, episode: int
) -> Demonstration:
    """One episode of the task's expert.

    Args:
        task: it has an expert.
        env: the task's.
        random: decides the start and everything else.
        noise: see :func:`generate`.
        episode: its number; in a suite the tasks take turns.
    """
    assert task.expert is not None
    env_seed, expert_seed = random.integers(2**31, size=2).tolist()
    observation, info = env.reset(seed=task.start(env_seed, episode))
    expert = task.expert(expert_seed)
    expert.reset(env)
    observations, actions, disturbed = [], [], []
    offset: NDArray[np.float64] = np.zeros(env.action_space.shape or ())
    burst = 0  # steps left
    for _ in range(task.max_steps):
        if burst > 0:
            burst -= 1
        elif noise > 0 and random.random() < 1 / _BURST_EVERY:
            offset = random.normal(0.0, noise, offset.shape)
            burst = int(random.integers(*_BURST_STEPS, endpoint=True))
        action = expert.act(env)
        observations.append(observation)
        actions.append(action)
        executed = np.clip(action + offset, -1.0, 1.0).astype(np.float32) if burst > 0 else action
        disturbed.append(not np.array_equal(executed, action))
        observation, _, terminated, truncated, info = env.step(executed)
        if terminated or truncated:
            break
    return Demonstration(observations, actions, disturbed, bool(info["success"]))
