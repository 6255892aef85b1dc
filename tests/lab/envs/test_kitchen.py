"""Kitchen: the environment keeps Gymnasium's contract, and recorded actions do the recorded chains."""

from dataclasses import replace

import numpy as np
import pytest
from tests.lab.envs.demonstrations import recorded

pytest.importorskip("gymnasium_robotics")
pytest.importorskip("mujoco")

from gymnasium_robotics.envs.franka_kitchen.kitchen_env import OBS_ELEMENT_GOALS, OBS_ELEMENT_INDICES

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.kitchen import SUBTASKS, Kitchen, completed, current, features, objects, observe, one_hot


@pytest.fixture(scope="module")
def env() -> Kitchen:
    return Kitchen()


def test_positions_are_the_simulators_and_velocities_are_left_out(env: Kitchen) -> None:
    seen, _ = env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(5):
        seen, *_ = env.step(env.action_space.sample())
    assert np.array_equal(seen["state"], observe(env.raw))
    np.testing.assert_allclose(seen["state"], env._sim.data.qpos, atol=0.03)  # the observation's own noise
    assert np.abs(env.raw[9:18]).max() > 0.1


def test_completion_is_the_simulators_own(env: Kitchen) -> None:
    env.reset(seed=0)
    for number, name in enumerate(SUBTASKS):
        env._sim.data.qpos[OBS_ELEMENT_INDICES[name]] = OBS_ELEMENT_GOALS[name]
        here = completed(env._sim.data.qpos[9:])
        achieved = {task: env._sim.data.qpos[places] for task, places in OBS_ELEMENT_INDICES.items()}
        env._sim.compute_reward(achieved, env._sim.goal, {})
        assert {SUBTASKS[i] for i in np.flatnonzero(here)} == set(env._sim.step_task_completions)
        assert here.tolist() == [index <= number for index in range(7)]
    done = np.zeros((4, 7), dtype=bool)
    done[1, 3] = done[2, [3, 5]] = done[3, [3, 5, 0, 6]] = True
    done[1, 0] = True  # before its turn
    assert current([3, 0, 5, 6], done).tolist() == [3, 5, 0, 6]


def test_chains_are_drawn_from_the_seed_and_can_be_given(env: Kitchen) -> None:
    chains = [env.reset(seed=seed)[1]["chain"] for seed in (1, 1, 2, 3)]
    assert chains[0] == chains[1] and len(set(chains)) == 3
    seen, info = env.reset(seed=1, options={"chain": [6, 0, 5, 4]})
    assert info == {"score": 0.0, "success": False, "chain": (6, 0, 5, 4)}
    assert seen["goal"].tolist() == one_hot(6).tolist()
    for wrong in ([1, 2, 3], [1, 1, 2, 3], [1, 2, 3, 7]):
        with pytest.raises(ConfigError, match="subtask"):
            env.reset(options={"chain": wrong})


def test_unknown_subtasks_are_refused() -> None:
    goal = np.array([[2], [2], [5]], np.float32)
    seen = {"state": np.zeros((3, 59), np.float32), "goal": goal}
    blank = Episodes(seen, np.zeros((3, 9), np.float32), np.array([3]))
    with pytest.raises(DataError, match="subtask"):
        features(blank.only("state"))
    for wrong in (np.full((3, 1), 7, np.float32), np.full((3, 1), 0.5, np.float32), np.zeros((3, 7), np.float32)):
        with pytest.raises(DataError, match="subtask"):
            features(replace(blank, observation=dict(blank.observation) | {"goal": wrong}))


def test_every_recorded_segment_ends_with_the_subtask_of_its_number() -> None:
    episodes, arrays = recorded("kitchen/kitchen_4chain_noise_injected.npz")
    done = completed(objects(episodes.numbers("state")))
    goal = features(episodes).numbers("goal")
    assert goal is not None
    for steps, chain in zip(episodes.slices(), arrays["sequence"], strict=True):
        numbers = arrays["current_subtask"][steps]
        assert list(dict.fromkeys(numbers.tolist())) == chain.tolist()
        for number in chain:
            first = int(done[steps, number].argmax())
            assert done[steps, number].any() and numbers[first] == number  # completed in its own segment
        ours = goal[steps].argmax(axis=1)
        assert list(dict.fromkeys(ours.tolist())) == chain.tolist()
        assert not done[steps][:, sorted(set(range(7)) - set(chain.tolist()))].any()


def test_replay_with_the_recorded_seed_is_exact(env: Kitchen) -> None:
    episodes, arrays = recorded("kitchen/kitchen_4chain.npz")
    converted = features(episodes)
    for index, steps in list(enumerate(converted.slices()))[:2]:
        seen, info = env.reset(seed=int(arrays["seed"][index]), options={"chain": arrays["sequence"][index]})
        scores, terminated = [info["score"]], False
        for row in range(steps.start, steps.stop):
            np.testing.assert_allclose(seen["state"], converted.numbers("state")[row], atol=1e-3)
            np.testing.assert_array_equal(seen["goal"], converted.numbers("goal")[row])
            seen, reward, terminated, truncated, info = env.step(converted.action[row])
            scores.append(info["score"])
            assert reward == scores[-1] - scores[-2] and not truncated
            if terminated:
                break
        assert terminated and info["success"] and sorted(set(scores)) == [0, 1, 2, 3, 4]
