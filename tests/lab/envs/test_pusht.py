"""PushT, with a camera and on a belt: what is observed, gym-pusht's own step and frames, and recorded episodes."""

import numpy as np
import pytest
from tests.lab.envs.demonstrations import recorded

pytest.importorskip("gym_pusht")

from gym_pusht.envs.pusht import PushTEnv

from specact.errors import ConfigError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.pusht import (
    ACTION_SCALE_PX,
    ARENA_PX,
    CAMERA,
    TASK,
    PushT,
    displacement,
    features,
    observe,
    roll_forward,
    scenes,
)

STILL = np.zeros(2, np.float32)
MIDDLE = [40.0, 40.0, 256.0, 256.0, 0.3]
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)


def test_at_the_goal_pose_the_observation_says_so_and_whole_turns_change_nothing() -> None:
    state = observe([256.0, 256.0, 256.0, 256.0, np.pi / 4])
    np.testing.assert_allclose(state[:10], [0, 0, 0, 0, 0, 1, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(state[18:], 0.0, atol=1e-6)
    raw = np.array([100.0, 200.0, 300.0, 150.0, 1.0])
    np.testing.assert_allclose(observe(raw), observe(raw + np.array([0, 0, 0, 0, 2 * np.pi])), atol=1e-6)


def test_block_frame_and_keypoints_turn_with_the_block() -> None:
    # Agent 60 px along the bar of a T turned by a quarter: that is along the world's y.
    state = observe([200.0, 260.0, 200.0, 200.0, np.pi / 2]) * 256
    np.testing.assert_allclose(state[6:8], [60.0, 0.0], atol=1e-4)
    np.testing.assert_allclose(state[14:16], [-120.0, -60.0], atol=1e-4)  # stem's end


def test_success_and_score_remember_the_best_until_a_reset() -> None:
    env = PushT(pace=200.0)
    seen, info = env.reset(seed=0, options={"state": [80.0, 80.0, 256.0, 256.0, np.pi / 4 + 0.05]})
    assert np.array_equal(seen["state"], observe(env.raw))
    assert info["success"] and 0.85 < info["score"] <= 1
    for _ in range(5):
        seen, *_, info = env.step(STILL)  # the belt carries the block away
    assert np.array_equal(seen["state"], observe(env.raw))
    assert info["coverage"] < 0.5 and info["success"] and info["score"] > 0.85
    assert not env.reset(seed=1)[1]["success"]
    env.reset(seed=0, options={"state": [80.0, 80.0, 256.0, 256.0, np.pi / 4]})
    assert PushT.settle(env)[1], "terminated at the goal"


def test_without_a_pace_it_is_gym_pushts_own_step_bit_for_bit() -> None:
    """Coverage up to the last bit, which in gym-pusht depends on memory addresses."""
    ours, theirs, rng = PushT(), PushTEnv(obs_type="state"), np.random.default_rng(0)
    ours.reset(seed=1)
    theirs.reset(seed=1)
    pushed = ours.raw[2:]
    for _ in range(60):
        # Towards the block and about it, so that there is contact.
        away = np.clip((ours.raw[2:4] - ours.raw[:2]) / ACTION_SCALE_PX + rng.normal(0, 0.4, 2), -1, 1)
        action = away.astype(np.float32)
        target = np.clip(ours.raw[:2] + ACTION_SCALE_PX * action.astype(np.float64), 0.0, ARENA_PX)
        _, reward, terminated, _, info = ours.step(action)
        raw, their_reward, their_end, _, their_info = theirs.step(target)
        assert np.array_equal(ours.raw, raw) and terminated == their_end
        assert (info["coverage"], reward) == pytest.approx((their_info["coverage"], their_reward), abs=1e-12)
    assert np.abs(ours.raw[2:] - pushed).max() > 10.0, "nothing was pushed, so nothing was tested"


def test_the_block_drifts_at_the_pace_in_a_direction_of_the_episode_up_to_a_wall() -> None:
    env, belts = PushT(pace=15.0), []
    for seed in (0, 1, 0):
        env.reset(seed=seed, options={"state": MIDDLE})
        belts.append(env.belt)
    assert belts[0] == belts[2] != belts[1] and np.hypot(*env.belt) == pytest.approx(15.0)
    before = env.raw
    for _ in range(20):
        env.step(STILL)
    moved = env.raw - before
    np.testing.assert_allclose(moved[2:4], 2.0 * np.array(env.belt), rtol=0.02)
    assert moved[4] == 0.0 and np.array_equal(moved[:2], [0.0, 0.0])
    assert np.array_equal(PushT(pace=30.0).reset(seed=2)[0]["state"], PushT().reset(seed=2)[0]["state"])
    with pytest.raises(ConfigError, match="-1"):
        PushT(pace=-1.0)


def test_rolling_forward_moves_the_agent_and_nothing_else() -> None:
    env, rng, off = PushT(), np.random.default_rng(0), []
    for seed in range(4):
        env.reset(seed=seed, options={"state": [100.0, 400.0, 330.0, 150.0, seed]})
        steady = rng.uniform(-0.2, 0.2, 2).astype(np.float32)
        for _ in range(4):
            seen = env.step(steady)[0]
        ahead = (steady + rng.uniform(-0.05, 0.05, (3, 2))).astype(np.float32)
        rolled = roll_forward(seen, ahead)["state"]
        np.testing.assert_allclose(rolled[2:6], seen["state"][2:6], atol=1e-6)
        for action in ahead:
            truth = env.step(action)[0]["state"]
        assert np.abs(truth - seen["state"])[:2].max() > 0.01
        # The block was not touched, so every column has to fit.
        off.append(np.abs(rolled - truth).max() / np.abs(truth - seen["state"]).max())
        np.testing.assert_allclose(roll_forward(seen, ahead[:0])["state"], seen["state"], atol=1e-6)
    # What is left is the velocity at the start, which is not observed and taken for steady.
    assert np.mean(off) < 0.05


def drift(env: PushT, states: np.ndarray, actions: np.ndarray) -> tuple[float, float]:
    """Largest distance [px] along an axis from the recording under these actions, and the best coverage."""
    env.reset(seed=0, options={"state": states[0]})
    worst, info = 0.0, {"score": 0.0}
    for state, action in zip(states, actions, strict=True):
        worst = max(worst, float(np.abs(env.raw[:4] - state[:4]).max()))
        *_, info = env.step(action)
    return worst, info["score"]


def test_converted_actions_reproduce_recorded_episodes_and_others_do_not() -> None:
    episodes, _ = recorded("pusht/pusht_state.npz")
    away = np.abs(episodes.action - episodes.numbers("state")[:, :2]).max(axis=1) / ACTION_SCALE_PX
    assert np.mean(away > 1) < 0.0005, "hardly any action is cut"
    converted, env, wrong = features(episodes), PushT(), list[float]()
    assert np.abs(converted.numbers("state")).max() < 2 and np.abs(converted.action).max() <= 1
    for steps in list(episodes.slices())[:4]:
        states = episodes.numbers("state")[steps]
        worst, score = drift(env, states, converted.action[steps])
        assert worst < 1.0 and score > 0.8
        starts = (np.arange(len(states)) // 4) * 4  # displacements from the start of a chunk
        wrong.append(drift(env, states, displacement(episodes.action[steps], states[starts, :2]))[0])
    assert min(wrong) > 10.0


def test_a_camera_sees_pushts_episodes_as_gym_pusht_shows_them() -> None:
    camera, plain = CAMERA.make(), TASK.make()
    theirs = PushTEnv(obs_type="pixels", render_mode="rgb_array")
    seen, known, wanted = camera.reset(seed=3)[0], plain.reset(seed=3)[0], theirs.reset(seed=3)[0]
    for action in ACTIONS:
        assert set(seen) == {"state", "image", "agent"} and set(known) == {"state"}
        assert np.array_equal(seen["state"], known["state"]) and np.array_equal(seen["agent"], seen["state"][:2])
        assert np.array_equal(seen["image"], wanted)
        agent = camera.unwrapped.raw[:2]  # type: ignore[attr-defined]
        wanted = theirs.step(np.clip(agent + ACTION_SCALE_PX * action.astype(np.float64), 0.0, ARENA_PX))[0]
        seen, known = camera.step(action)[0], plain.step(action)[0]


def test_a_frame_shows_the_state_that_an_episode_is_started_in() -> None:
    """As recorded, but for single pixels where an edge falls between two of them."""
    (episodes, _), env = recorded("pusht/pusht_cchi_v7_replay.zarr"), CAMERA.make()
    for step in (0, 1000, 20_000):
        seen, _ = env.reset(seed=0, options={"state": episodes.numbers("state")[step]})
        away = np.abs(seen["image"].astype(int) - episodes.frames("image")[step]).max(-1)
        assert (away > 30).sum() < 30 and away.mean() < 0.5  # another pose changes hundreds of pixels


def test_demonstrations_and_predictions_have_the_agents_position_and_keep_their_frames() -> None:
    raw = np.array([[100.0, 200.0, 300.0, 150.0, 1.0]] * 3, np.float32)
    image = np.arange(3 * 48, dtype=np.uint8).reshape(3, 4, 4, 3)
    made = Episodes({"state": raw, "image": image}, np.zeros((3, 2), np.float32), np.array([3]))
    fitted = CAMERA.features(made)
    assert np.array_equal(fitted.numbers("agent"), fitted.numbers("state")[:, :2])
    assert np.array_equal(np.asarray(fitted.frames("image")), image)
    seen, _ = CAMERA.make().reset(seed=0)
    assert CAMERA.roll_forward is not None
    rolled = CAMERA.roll_forward(seen, ACTIONS[:3])
    assert np.array_equal(rolled["agent"], rolled["state"][:2])
    assert not np.array_equal(rolled["agent"], seen["agent"]) and np.array_equal(rolled["image"], seen["image"])


def test_scenes_show_what_they_say_and_depend_on_their_generator_alone() -> None:
    made, repeat, others = (scenes(4, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert made["image"].shape == (4, 96, 96, 3) and made["image"].dtype == np.uint8 and made["state"].shape == (4, 26)
    for name, values in made.items():
        assert np.array_equal(values, repeat[name]) and not np.array_equal(values, others[name])
    blue = (made["image"] == [65, 105, 225]).all(-1)  # the agent's colour
    for seen, state in zip(blue, made["state"], strict=True):
        row, column = np.argwhere(seen).mean(0)
        expected = (state[:2] + 1) * 48  # of 96 pixels, x first
        assert abs(column - expected[0]) < 2 and abs(row - expected[1]) < 2
