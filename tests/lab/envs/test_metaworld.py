"""The suite metaworld: seeds decide, the arm's own state tells nothing of the scene, goals are there, cameras see."""

from collections.abc import Sequence

import numpy as np
import pytest
from tests.tiny import renders

pytest.importorskip("metaworld")

from specact.lab.envs import load_task
from specact.lab.envs.metaworld import INSTRUCTIONS, SCENE, TASK, Expert, MetaWorld
from specact.observation import Field

NAMES = tuple(INSTRUCTIONS)


@pytest.fixture(scope="module")
def env() -> MetaWorld:
    return MetaWorld()


@pytest.mark.parametrize("number", range(10), ids=NAMES)
def test_objects_or_goals_differ_and_the_state_does_not_tell_them(env: MetaWorld, number: int) -> None:
    states, scenes, alone = [], [], MetaWorld(tasks=(NAMES[number],))
    assert len(set(INSTRUCTIONS.values())) == 10
    for seed in range(number, 40, 10):
        seen, info = env.reset(seed=seed)
        assert info == {"success": False, "score": 0.0, "task": NAMES[number]}
        assert seen.keys() == {"state", "instruction"} and seen["instruction"] == INSTRUCTIONS[NAMES[number]]
        assert np.array_equal(alone.reset(seed=seed)[0]["state"], seen["state"])
        assert np.array_equal(alone.raw, env.raw) and alone.task == env.task == info["task"]
        # Meta-World hides the goal by default, in the reset and by other means in the steps.
        goal = env.raw[-3:]
        alone.step(np.zeros(4, np.float32))
        assert np.array_equal(alone.raw[-3:], goal) and np.abs(goal).max() > 0.05
        states.append(seen["state"])
        scenes.append(np.concatenate([env.raw[4:18], env.raw[-3:]]))
    assert np.ptp(states, axis=0).max() < 1e-3  # the arm starts alike
    assert len(np.unique(np.round(scenes, 4), axis=0)) == 4


def test_the_experts_succeed(env: MetaWorld) -> None:
    won = dict.fromkeys(NAMES, 0)
    for seed in range(20):
        expert = Expert(0)
        env.reset(seed=1000 + seed)
        for _ in range(TASK.max_steps):
            _, reward, terminated, truncated, info = env.step(expert.act(env))
            assert info["success"] == terminated == bool(reward) == bool(info["score"])
            if terminated or truncated:
                break
        won[env.task] += info["success"]
    assert sum(won.values()) >= 17 and sorted(won.values())[1] >= 1, won


def test_an_action_lasts_50_ms_and_is_held(env: MetaWorld) -> None:
    env.reset(seed=0)
    before, start = env._sim.data.time, env._sim.data.mocap_pos[0].copy()
    seen, *_ = env.step(np.array([1.0, 0.0, -0.5, 0.0], np.float32))
    assert env._sim.data.time - before == pytest.approx(1.0 / TASK.rate_hz)
    np.testing.assert_allclose(env._sim.data.mocap_pos[0] - start, [0.04, 0.0, -0.02], atol=1e-9)
    np.testing.assert_allclose(seen["state"], env.raw[:4], atol=1e-6)


def test_the_scene_is_observed_only_on_request(env: MetaWorld) -> None:
    wanted = TASK.seeing({SCENE: Field((17,))}).make()
    assert isinstance(wanted, MetaWorld) and SCENE not in env.reset(seed=1)[0]
    seen, _ = wanted.reset(seed=1)
    assert wanted.observation_space.contains(seen)
    np.testing.assert_allclose(seen[SCENE], np.concatenate([wanted.raw[4:18], wanted.raw[-3:]]), atol=1e-6)
    puck = wanted._sim.data.body("obj").xpos
    np.testing.assert_allclose(seen[SCENE][:3], puck, atol=1e-3)
    np.testing.assert_allclose(seen[SCENE][-3:], wanted._sim._target_pos, atol=1e-6)


@renders
@pytest.mark.parametrize(("name", "moving"), [("metaworld", ("image.gripper",)), ("kitchen", ())])
def test_frames_of_the_size_asked_for_follow_the_arm_and_repeat_with_the_seed(name: str, moving: Sequence[str]) -> None:
    task = load_task(name)
    env = task.seeing({camera: Field((48, 64, 3), "uint8") for camera in task.cameras}).make()
    first, _ = env.reset(seed=0)
    assert env.observation_space.contains(first)
    kept = {camera: first[camera].copy() for camera in task.cameras}
    assert all(frame.shape == (48, 64, 3) and frame.dtype == np.uint8 and frame.std() > 10 for frame in kept.values())
    for _ in range(5):
        later, *_ = env.step(np.eye(1, len(env.action_space.sample()), dtype=np.float32)[0])
    for camera, frame in kept.items():  # the arm before the scene, or the whole scene
        changed = (later[camera] != frame).any(axis=-1).mean()
        assert changed > 0.5 if camera in moving else 0.0 < changed < 0.25
    repeat, _ = env.reset(seed=0)
    for camera, frame in kept.items():  # no buffer is used twice
        assert np.array_equal(first[camera], frame) and np.array_equal(repeat[camera], frame)
    env.close()
