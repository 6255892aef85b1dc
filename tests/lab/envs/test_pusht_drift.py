"""PushT on a belt: the block is carried along, and without a pace nothing has changed."""

import numpy as np
import pytest

pytest.importorskip("gym_pusht")

from gym_pusht.envs.pusht import PushTEnv

from specact.errors import ConfigError
from specact.lab.envs.pusht import ACTION_SCALE_PX, ARENA_PX, PushT, roll_forward

STILL = np.zeros(2, np.float32)
MIDDLE = [40.0, 40.0, 256.0, 256.0, 0.3]


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


def test_the_block_drifts_at_the_pace_in_one_direction_and_the_agent_does_not() -> None:
    env = PushT(pace=15.0)
    env.reset(seed=0, options={"state": MIDDLE})
    before = env.raw
    for _ in range(20):
        env.step(STILL)
    moved = env.raw - before
    np.testing.assert_allclose(moved[2:4], 2.0 * np.array(env.belt), rtol=0.02)
    assert np.hypot(*env.belt) == pytest.approx(15.0)
    assert moved[4] == 0.0 and np.array_equal(moved[:2], [0.0, 0.0])


def test_every_episode_has_a_direction_of_its_own() -> None:
    env, belts = PushT(pace=15.0), []
    for seed in (0, 1, 0):
        env.reset(seed=seed)
        belts.append(env.belt)
    assert belts[0] == belts[2] != belts[1]


def test_an_episode_begins_the_same_at_every_pace() -> None:
    assert np.array_equal(PushT(pace=30.0).reset(seed=2)[0]["state"], PushT().reset(seed=2)[0]["state"])


def test_walls_stop_the_block() -> None:
    env = PushT(pace=60.0)
    env.reset(seed=0, options={"state": MIDDLE})
    for _ in range(100):
        env.step(STILL)
    assert (env.raw[2:4] > -20).all() and (env.raw[2:4] < 532).all()


def test_a_pace_is_a_speed() -> None:
    with pytest.raises(ConfigError, match=r"a speed of at least 0 px/s, got -1"):
        PushT(pace=-1.0)


def test_rolling_forward_moves_the_agent_and_nothing_else() -> None:
    env, rng = PushT(), np.random.default_rng(0)
    off = []
    for seed in range(8):
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
