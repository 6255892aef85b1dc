"""PushT: the environment keeps Gymnasium's contract, and recorded actions reproduce recorded episodes."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gym_pusht")

from gymnasium.utils.env_checker import check_env

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.pusht import ACTION_SCALE_PX, SUCCESS_COVERAGE, TASK, PushT, displacement, features, observe

DATA = Path(os.environ.get("SPECACT_DATA", Path(__file__).parents[4] / "shared" / "data"))
FILE = DATA / "pusht" / "pusht_state.npz"


@pytest.fixture(scope="module")
def recorded() -> Episodes:
    if not FILE.exists():
        pytest.skip(f"no PushT demonstrations at {FILE}; set SPECACT_DATA to the folder that holds pusht/")
    with np.load(FILE) as arrays:
        return Episodes({"state": arrays["state"]}, arrays["action"], arrays["episode_ends"], rate_hz=10.0)


def drift(env: PushT, states: np.ndarray, actions: np.ndarray) -> tuple[float, float]:
    """Largest distance [px] along an axis from the recording under these actions, and the best coverage."""
    env.reset(seed=0, options={"state": states[0]})
    worst, info = 0.0, {"score": 0.0}
    for state, action in zip(states, actions, strict=True):
        worst = max(worst, float(np.abs(env.raw[:4] - state[:4]).max()))
        *_, info = env.step(action)
    return worst, info["score"]


@pytest.mark.filterwarnings("error")
def test_keeps_gymnasiums_contract() -> None:
    check_env(TASK.make(), skip_render_check=True)


def test_same_seed_same_episode() -> None:
    first, second = PushT(), PushT()
    assert np.array_equal(first.reset(seed=3)[0]["state"], second.reset(seed=3)[0]["state"])
    assert not np.array_equal(first.reset(seed=4)[0]["state"], second.reset(seed=3)[0]["state"])


def test_at_the_goal_pose_the_observation_says_so() -> None:
    state = observe([256.0, 256.0, 256.0, 256.0, np.pi / 4])
    np.testing.assert_allclose(state[:10], [0, 0, 0, 0, 0, 1, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(state[18:], 0.0, atol=1e-6)


def test_whole_turns_change_nothing() -> None:
    raw = np.array([100.0, 200.0, 300.0, 150.0, 1.0])
    np.testing.assert_allclose(observe(raw), observe(raw + np.array([0, 0, 0, 0, 2 * np.pi])), atol=1e-6)


def test_block_frame_and_keypoints_turn_with_the_block() -> None:
    # Agent 60 px along the bar of a T turned by a quarter: that is along the world's y.
    state = observe([200.0, 260.0, 200.0, 200.0, np.pi / 2]) * 256
    np.testing.assert_allclose(state[6:8], [60.0, 0.0], atol=1e-4)
    np.testing.assert_allclose(state[14:16], [-120.0, -60.0], atol=1e-4)  # stem's end


def test_environment_observes_through_the_same_function() -> None:
    env = PushT()
    seen, info = env.reset(seed=0)
    assert np.array_equal(seen["state"], observe(env.raw))
    seen, _, _, _, info = env.step(np.array([0.5, -0.5], np.float32))
    assert np.array_equal(seen["state"], observe(env.raw))
    assert set(info) == {"coverage", "score", "success"}


def test_success_and_score_remember_the_best() -> None:
    env = PushT()
    _, info = env.reset(seed=0, options={"state": [80.0, 80.0, 256.0, 256.0, np.pi / 4 + 0.05]})
    assert info["success"] and SUCCESS_COVERAGE < info["score"] <= 1
    env._sim.block.position = 150.0, 380.0
    *_, info = env.step(np.zeros(2, np.float32))
    assert info["coverage"] < 0.5 and info["success"] and info["score"] > SUCCESS_COVERAGE
    _, info = env.reset(seed=1)
    assert not info["success"]


def test_at_the_goal_terminates_and_after_the_last_step_truncates() -> None:
    env, still = PushT(), np.zeros(2, np.float32)
    env.reset(seed=0, options={"state": [80.0, 80.0, 256.0, 256.0, np.pi / 4]})
    assert env.step(still)[2]
    env.reset(seed=0)
    ends = [env.step(still)[3] for _ in range(TASK.max_steps)]
    assert ends[-1] and not any(ends[:-1])


def test_renders() -> None:
    env = TASK.make(render_mode="rgb_array")
    env.reset(seed=0)
    image = env.render()
    assert isinstance(image, np.ndarray)
    assert image.dtype == np.uint8 and image.shape == (680, 680, 3) and image.std() > 0
    assert PushT().render() is None


def test_refuses_other_widths() -> None:
    good = Episodes({"state": np.zeros((3, 5), np.float32)}, np.zeros((3, 2), np.float32), np.array([3]))
    assert features(good).numbers("state").shape == (3, 26)
    with pytest.raises(DataError, match=r"state width 5.*got 20 and 2"):
        features(replace(good, observation={"state": np.zeros((3, 20), np.float32)}))
    with pytest.raises(DataError, match="got 5 and 3"):
        features(replace(good, action=np.zeros((3, 3), np.float32)))


def test_images_pass_through_untouched() -> None:
    image = np.zeros((3, 4, 4, 3), np.uint8)
    seen: dict[str, np.ndarray] = {"state": np.zeros((3, 5), np.float32), "image": image}
    episodes = Episodes(seen, np.zeros((3, 2), np.float32), np.array([3]))
    assert np.array_equal(features(episodes).frames("image"), image)


def test_hardly_any_recorded_action_is_cut(recorded: Episodes) -> None:
    away = np.abs(recorded.action - recorded.numbers("state")[:, :2]).max(axis=1) / ACTION_SCALE_PX
    assert np.mean(away > 1) < 0.0005
    converted = features(recorded)
    assert np.abs(converted.numbers("state")).max() < 2 and np.abs(converted.action).max() <= 1


def test_converted_actions_reproduce_recorded_episodes(recorded: Episodes) -> None:
    converted, env = features(recorded), PushT()
    for steps in list(recorded.slices())[:12]:
        worst, score = drift(env, recorded.numbers("state")[steps], converted.action[steps])
        assert worst < 1.0
        assert score > 0.8


def test_displacements_from_the_start_of_a_chunk_do_not(recorded: Episodes) -> None:
    env, chunk = PushT(), 4
    worsts = []
    for steps in list(recorded.slices())[:5]:
        states = recorded.numbers("state")[steps]
        starts = (np.arange(len(states)) // chunk) * chunk
        wrong = displacement(recorded.action[steps], states[starts, :2])
        worsts.append(drift(env, states, wrong)[0])
    assert min(worsts) > 10.0
