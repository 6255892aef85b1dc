"""Adroit relocate: starts come from the seed, recorded starts are met exactly and recorded actions carry the ball."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium_robotics")
pytest.importorskip("mujoco")

from gymnasium.utils.env_checker import check_env

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.adroit import SUCCESS_STEPS, TASK, Relocate, features, observe

DATA = Path(os.environ.get("SPECACT_DATA", Path(__file__).parents[4] / "shared" / "data"))
FILE = DATA / "adroit" / "relocate_expert.npz"


@pytest.fixture(scope="module")
def recorded() -> tuple[Episodes, dict[str, np.ndarray]]:
    if not FILE.exists():
        pytest.skip(f"no Adroit demonstrations at {FILE}; set SPECACT_DATA to the folder that holds adroit/")
    with np.load(FILE) as file:
        arrays = dict(file)
    return Episodes({"state": arrays["obs"]}, arrays["action"], arrays["episode_ends"]), arrays


@pytest.fixture(scope="module")
def env() -> Relocate:
    return Relocate()


def rollout(env: Relocate, seed: int) -> np.ndarray:
    """Observations under the same 60 actions, ``[61, 39]``."""
    actions = np.random.default_rng(0).uniform(-1, 1, (60, 30)).astype(np.float32)
    seen = [env.reset(seed=seed)[0]["state"]]
    seen += [env.step(action)[0]["state"] for action in actions]
    return np.array(seen)


@pytest.mark.filterwarnings("error")
def test_keeps_gymnasiums_contract() -> None:
    check_env(TASK.make(), skip_render_check=True)


def test_the_seed_decides_everything(env: Relocate) -> None:
    first = rollout(env, 5)
    other = rollout(env, 6)
    assert np.array_equal(rollout(env, 5), first)
    assert np.array_equal(rollout(Relocate(), 5), first)
    assert np.array_equal(other[0, :30], first[0, :30])  # the hand starts alike,
    assert np.abs(other[0, 36:] - first[0, 36:]).min() > 1e-3  # ball and target do not


def test_observation_is_the_simulators_own(env: Relocate) -> None:
    env.reset(seed=0)
    env.action_space.seed(0)
    seen, *_ = env.step(env.action_space.sample())
    raw = env._sim._get_obs()
    assert np.array_equal(seen["state"], observe(raw))
    np.testing.assert_allclose(seen["state"], raw, atol=1e-6)  # and nothing is cut


def test_score_counts_the_steps_at_the_target(env: Relocate) -> None:
    _, info = env.reset(seed=0)
    assert info == {"score": 0.0, "success": False}
    still = np.zeros(30, np.float32)
    assert env.step(still)[1] == 0.0
    env._sim.model.site_pos[env._sim.target_obj_site_id] = env._sim.data.xpos[env._sim.obj_body_id]
    for count in range(1, SUCCESS_STEPS + 2):
        _, reward, terminated, truncated, info = env.step(still)
        assert reward == 1.0 and not terminated and not truncated
        assert info == {"score": float(count), "success": count > SUCCESS_STEPS}
    assert env.reset(seed=0)[1] == {"score": 0.0, "success": False}


def test_truncates_after_the_last_step(env: Relocate) -> None:
    env.reset(seed=0)
    still = np.zeros(30, np.float32)
    ends = [env.step(still)[3] for _ in range(TASK.max_steps)]
    assert ends[-1] and not any(ends[:-1])


def test_refuses_other_widths() -> None:
    good = Episodes({"state": np.zeros((3, 39), np.float32)}, np.full((3, 30), 1.5, np.float32), np.array([3]))
    assert features(good).numbers("state").shape == (3, 39) and features(good).action.max() == 1.0
    with pytest.raises(DataError, match=r"state width 39 and action width 30, got 39 and 28"):
        features(replace(good, action=np.zeros((3, 28), np.float32)))
    with pytest.raises(DataError, match="got 59 and 30"):
        features(replace(good, observation={"state": np.zeros((3, 59), np.float32)}))


def test_recorded_actions_do_again_what_was_recorded(
    env: Relocate, recorded: tuple[Episodes, dict[str, np.ndarray]]
) -> None:
    """The start is met exactly; contacts make a replay drift by a few centimetres, and the ball still gets there."""
    episodes, arrays = recorded
    converted = features(episodes)
    for index, steps in list(enumerate(episodes.slices()))[:5]:
        seen, info = env.reset(seed=int(arrays["seed"][index]))
        np.testing.assert_allclose(seen["state"], converted.numbers("state")[steps.start], atol=1e-6)
        for row in range(steps.start, steps.stop):
            if row < steps.start + 20:  # its fingers rub against each other, but it has not touched the ball
                np.testing.assert_allclose(seen["state"], converted.numbers("state")[row], atol=0.1)
            seen, _, _, _, info = env.step(converted.action[row])
        assert info["success"]
        assert info["score"] == pytest.approx(arrays["success"][steps].sum(), abs=10)
