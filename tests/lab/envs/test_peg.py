"""Meta-World's peg insertion: starts come from the seed and from MT1's range, recorded episodes repeat exactly."""

import pickle

import numpy as np
import pytest
from tests.lab.envs.demonstrations import recorded

pytest.importorskip("metaworld")

from metaworld import MT1

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import generate
from specact.lab.envs.metaworld import Expert
from specact.lab.envs.peg import REACHED, START_HIGH, START_LOW, TASK, PegInsertSide, features, hole, observe

# The peg's orientation, now and before, is not observed.
TURNED = [7, 8, 9, 10, 25, 26, 27, 28]
# From where Meta-World puts peg and box to what its observation says of them, see its peg's and its box's sites.
SITES = np.array([0.03, 0.0, 0.01, 0.03, 0.0, 0.13])


@pytest.fixture(scope="module")
def env() -> PegInsertSide:
    return PegInsertSide()


def test_starts_fill_the_range_that_meta_world_draws_from(env: PegInsertSide) -> None:
    starts = []
    for seed in range(20):
        seen, info = env.reset(seed=seed)
        assert info == {"score": 0.0, "success": False}
        starts.append(np.concatenate([seen["state"][4:7], seen["goal"]]) - SITES)
    share = (np.array(starts) - START_LOW) / np.maximum(START_HIGH - START_LOW, 1e-9)
    varied = START_HIGH > START_LOW
    assert -1e-5 < share[:, varied].min() < 0.2 and 0.8 < share[:, varied].max() < 1 + 1e-5
    assert len(np.unique(share[:, varied].round(4), axis=0)) == 20


def test_mt1s_own_episodes_are_the_same_bit_for_bit_until_success_ends_them(env: PegInsertSide) -> None:
    benchmark = MT1("peg-insert-side-v3", seed=0)  # type: ignore[no-untyped-call]
    theirs = benchmark.train_classes["peg-insert-side-v3"]()
    for task in benchmark.train_tasks[:2]:
        start = pickle.loads(task.data)["rand_vec"]
        assert np.all(start >= START_LOW) and np.all(start <= START_HIGH)
        theirs.set_task(task)
        raw, _ = theirs.reset()
        seen, _ = env.reset(seed=0, options={"start": start})
        assert np.array_equal(np.delete(env.raw, TURNED), np.delete(raw, TURNED))
        expert, success, scores, goal = Expert(0), False, [0.0], seen["goal"]
        while not success:
            action = expert.act(env)
            seen, reward, done, truncated, told = env.step(action)
            raw, *_, info = theirs.step(action)
            success = bool(info["success"])
            assert np.array_equal(seen["state"], observe(raw)) and np.array_equal(seen["state"], observe(env.raw))
            assert np.array_equal(seen["goal"], hole(raw)) and np.array_equal(seen["goal"], goal), "it stays"
            assert done == told["success"] == bool(reward) == success == (info["obj_to_target"] <= REACHED)
            assert not truncated
            scores.append(told["score"])
        assert scores == sorted(scores) and 0.6 < scores[-1] < 1


def test_the_expert_demonstrates_in_the_environments_terms_and_a_hidden_goal_is_refused() -> None:
    made = generate(TASK, 2, seed=0, noise=0.3)
    assert made.numbers("state").shape[1] == 7 and made.action.shape[1] == 4
    assert made.numbers("goal").shape[1] == 3
    converted = features(made)
    assert np.array_equal(converted.numbers("state"), made.numbers("state"))
    assert np.array_equal(converted.action, made.action)
    raw = np.ones((3, 39), np.float32)
    raw[1, -3:] = 0
    with pytest.raises(DataError, match="goal"):
        features(Episodes({"state": raw}, np.zeros((3, 4), np.float32), np.array([3])))


def test_recorded_starts_lie_in_range_and_replays_are_exact(env: PegInsertSide) -> None:
    episodes, _ = recorded("metaworld/peg-insert-side-v3.npz")
    converted, raw = features(episodes), episodes.numbers("state")
    assert np.array_equal(hole(raw), raw[:, -3:])
    for steps in list(episodes.slices())[:2]:
        start = np.concatenate([raw[steps.start, 4:7], raw[steps.start, -3:]]) - SITES
        assert np.all(start > START_LOW - 1e-6) and np.all(start < START_HIGH + 1e-6)
        seen, info = env.reset(seed=0, options={"start": start})
        for row in range(steps.start, steps.stop):
            np.testing.assert_allclose(seen["state"], converted.numbers("state")[row], atol=1e-5)
            np.testing.assert_allclose(seen["goal"], converted.numbers("goal")[row], atol=1e-6)
            seen, _, terminated, _, info = env.step(converted.action[row])
            if terminated:
                break
        assert info["success"]
    expert = Expert(0)
    for row in range(0, 400, 7):
        env.raw = raw[row].astype(np.float64)
        np.testing.assert_allclose(expert.act(env), episodes.action[row], atol=1e-4)
