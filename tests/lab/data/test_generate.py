"""Generated demonstrations: they replay, they are all successful, and they are saved whole or not at all."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from specact.errors import ConfigError, DataError
from specact.lab.data.generate import generate, save
from specact.lab.envs import ball, swarm
from specact.lab.envs.task import Task

TASKS = [ball.TASK, swarm.TASK]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_generated_episodes_replay_to_success(task: Task) -> None:
    made = generate(task, episodes=3, seed=4, noise=0.0)
    assert len(made.episodes) == 3
    env, tries = task.make(), itertools.count()
    for steps in made.episodes.slices():
        # A try that failed, which is rare, has no episode.
        for number in itertools.islice(tries, made.tried):
            env_seed = int(np.random.default_rng([4, number]).integers(2**31, size=2)[0])
            observation, info = env.reset(seed=env_seed)
            if np.array_equal(observation["state"], made.episodes.numbers("state")[steps.start]):
                break
        for state, action in zip(made.episodes.numbers("state")[steps], made.episodes.action[steps], strict=True):
            assert not info["success"]
            np.testing.assert_array_equal(observation["state"], state)
            observation, _, _, _, info = env.step(action)
        assert info["success"] and info["score"] == 1.0


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_noise_disturbs_the_states_but_not_the_recorded_actions(task: Task) -> None:
    calm, noisy = (generate(task, 5, seed=0, noise=noise).episodes for noise in (0.0, 0.5))
    assert noisy.steps > calm.steps  # recovering takes time
    assert np.abs(noisy.action).max() <= 1.0
    # The expert's action is a function of state and side: on the first state it is the same, noise or not.
    np.testing.assert_array_equal(noisy.action[0], calm.action[0])


def test_is_reproducible_and_reports_progress() -> None:
    seen: list[int] = []
    first = generate(ball.TASK, 3, seed=1, noise=0.3, progress=seen.append)
    second = generate(ball.TASK, 3, seed=1, noise=0.3)
    np.testing.assert_array_equal(first.episodes.action, second.episodes.action)
    assert seen == [1, 2, 3]
    assert first.episodes.rate_hz == ball.TASK.rate_hz


def test_failed_episodes_are_dropped_and_counted() -> None:
    task = dataclasses.replace(ball.TASK, max_steps=61)  # about half of the episodes take longer
    made = generate(task, 5, seed=0, noise=0.0)
    assert made.tried > 5 == len(made.episodes)
    assert np.diff(made.episodes.ends, prepend=0).max() <= 61


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="no scripted expert"):
        generate(dataclasses.replace(ball.TASK, expert=None), 1, seed=0, noise=0.0)
    with pytest.raises(ConfigError, match="at least"):
        generate(ball.TASK, 0, seed=0, noise=0.0)
    with pytest.raises(DataError, match="only 0 of 10"):
        generate(dataclasses.replace(ball.TASK, max_steps=5), 1, seed=0, noise=0.0)


def test_saves_what_was_made(tmp_path: Path) -> None:
    episodes = generate(swarm.TASK, 2, seed=0, noise=0.2).episodes
    save(tmp_path / "swarm.npz", episodes)
    with np.load(tmp_path / "swarm.npz") as file:
        assert sorted(file) == ["action", "episode_ends", "goal", "rate_hz", "state"]
        for name in ("state", "action", "goal"):
            assert file[name].dtype == np.float32
            wanted = episodes.action if name == "action" else episodes.numbers(name)
            np.testing.assert_array_equal(file[name], wanted)
        np.testing.assert_array_equal(file["episode_ends"], episodes.ends)
        assert file["rate_hz"] == 10.0
    assert [path.name for path in tmp_path.iterdir()] == ["swarm.npz"]


def test_a_failed_save_names_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    episodes = generate(swarm.TASK, 1, seed=0, noise=0.0).episodes
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="taken"):
        save(tmp_path / "taken", episodes)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
