"""Adroit relocate: recorded starts are met exactly and recorded actions carry the ball."""

import numpy as np
import pytest
from tests.lab.envs.demonstrations import recorded

pytest.importorskip("gymnasium_robotics")
pytest.importorskip("mujoco")

from specact.lab.envs.adroit import SUCCESS_STEPS, Relocate, features, observe


def test_observation_is_the_simulators_own_and_the_score_counts_the_steps_at_the_target() -> None:
    env, still = Relocate(), np.zeros(30, np.float32)
    assert env.reset(seed=0)[1] == {"score": 0.0, "success": False}
    seen, reward, *_ = env.step(still)
    raw = env._sim._get_obs()
    assert reward == 0.0 and np.array_equal(seen["state"], observe(raw))
    np.testing.assert_allclose(seen["state"], raw, atol=1e-6)  # and nothing is cut
    env._sim.model.site_pos[env._sim.target_obj_site_id] = env._sim.data.xpos[env._sim.obj_body_id]
    for count in range(1, SUCCESS_STEPS + 2):
        _, reward, terminated, truncated, info = env.step(still)
        assert reward == 1.0 and not terminated and not truncated
        assert info == {"score": float(count), "success": count > SUCCESS_STEPS}
    assert env.reset(seed=0)[1] == {"score": 0.0, "success": False}


def test_recorded_actions_do_again_what_was_recorded() -> None:
    """The start is met exactly; contacts make a replay drift by a few centimetres, and the ball still gets there."""
    episodes, arrays = recorded("adroit/relocate_expert.npz")
    env, converted = Relocate(), features(episodes)
    assert np.abs(converted.action).max() <= 1.0
    for index, steps in list(enumerate(episodes.slices()))[:5]:
        seen, info = env.reset(seed=int(arrays["seed"][index]))
        np.testing.assert_allclose(seen["state"], converted.numbers("state")[steps.start], atol=1e-6)
        for row in range(steps.start, steps.stop):
            if row < steps.start + 20:  # its fingers rub against each other, but it has not touched the ball
                np.testing.assert_allclose(seen["state"], converted.numbers("state")[row], atol=0.1)
            seen, _, _, _, info = env.step(converted.action[row])
        assert info["success"]
        assert info["score"] == pytest.approx(arrays["success"][steps].sum(), abs=10)
