"""The suite metaworld: seeds decide, the arm's own state tells nothing of the scene, goals are there, cameras see."""

import os

import numpy as np
import pytest

pytest.importorskip("metaworld")

from specact.lab.envs import load_task
from specact.lab.envs.metaworld import INSTRUCTIONS, SCENE, TASK, Expert, MetaWorld
from specact.observation import Field

draws = pytest.mark.skipif(
    os.environ.get("MUJOCO_GL") not in ("egl", "osmesa"), reason="needs a renderer: set MUJOCO_GL to egl or osmesa"
)
NAMES = tuple(INSTRUCTIONS)
FIXED, MOVING = "image.corner2", "image.gripper"


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
        states.append(seen["state"])
        scenes.append(np.concatenate([env.raw[4:18], env.raw[-3:]]))
    assert np.ptp(states, axis=0).max() < 1e-3  # the arm starts alike
    assert len(np.unique(np.round(scenes, 4), axis=0)) == 4


@pytest.mark.parametrize("name", ["reach-v3", "push-v3", "pick-place-v3", "peg-insert-side-v3"])
def test_the_goal_is_there_and_stays(env: MetaWorld, name: str) -> None:
    """Meta-World hides it from the experts by default, in the reset and by other means in the steps."""
    env.reset(seed=NAMES.index(name))
    goal = env.raw[-3:]
    assert np.abs(goal).max() > 0.05
    for _ in range(3):
        env.step(np.zeros(4, np.float32))
        np.testing.assert_array_equal(env.raw[-3:], goal)


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


@draws
@pytest.mark.parametrize("size", [(48, 64)])
def test_frames_of_the_size_asked_for_follow_the_arm_and_repeat_with_the_seed(size: tuple[int, int]) -> None:
    env = TASK.seeing({FIXED: Field((*size, 3), "uint8"), MOVING: Field((*size, 3), "uint8")}).make()
    first, _ = env.reset(seed=0)
    assert env.observation_space.contains(first)
    kept = {name: first[name].copy() for name in (FIXED, MOVING)}
    assert all(frame.shape == (*size, 3) and frame.dtype == np.uint8 and frame.std() > 10 for frame in kept.values())
    for _ in range(5):
        later, *_ = env.step(np.array([1.0, 0.0, 0.0, 0.0], np.float32))
    changed = {name: (later[name] != kept[name]).any(axis=-1).mean() for name in kept}
    assert 0.0 < changed[FIXED] < 0.25 and changed[MOVING] > 0.5  # the arm before the scene, and the whole scene
    again, _ = env.reset(seed=0)
    for name, frame in kept.items():  # no buffer is used twice
        assert np.array_equal(first[name], frame) and np.array_equal(again[name], frame)
    env.close()


@draws
def test_the_kitchen_has_a_camera() -> None:
    env = load_task("kitchen").seeing({"image.scene": Field((64, 96, 3), "uint8")}).make()
    seen, _ = env.reset(seed=0)
    assert env.observation_space.contains(seen) and seen["image.scene"].std() > 10
    still = seen["image.scene"]
    for _ in range(5):
        seen, *_ = env.step(np.ones(9, np.float32))
    assert 0 < (seen["image.scene"] != still).any(axis=-1).mean() < 0.6
    env.close()
