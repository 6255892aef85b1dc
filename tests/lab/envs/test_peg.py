"""Meta-World's peg insertion: starts come from the seed and from MT1's range, recorded episodes repeat exactly."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("metaworld")

from gymnasium.utils.env_checker import check_env
from metaworld import MT1

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import generate
from specact.lab.envs.peg import START_HIGH, START_LOW, TASK, PegExpert, PegInsertSide, features, hole, observe

DATA = Path(os.environ.get("SPECACT_DATA", Path(__file__).parents[4] / "shared" / "data"))
FILE = DATA / "metaworld" / "peg-insert-side-v3.npz"
# The peg's orientation, now and before, is not observed.
TURNED = [7, 8, 9, 10, 25, 26, 27, 28]
# From where Meta-World puts peg and box to what its observation says of them, see its peg's and its box's sites.
SITES = np.array([0.03, 0.0, 0.01, 0.03, 0.0, 0.13])


@pytest.fixture(scope="module")
def recorded() -> Episodes:
    if not FILE.exists():
        pytest.skip(f"no Meta-World demonstrations at {FILE}; set SPECACT_DATA to the folder that holds metaworld/")
    with np.load(FILE) as arrays:
        return Episodes({"state": arrays["obs"]}, arrays["action"], arrays["episode_ends"])


@pytest.fixture(scope="module")
def env() -> PegInsertSide:
    return PegInsertSide()


def rollout(env: PegInsertSide, seed: int, steps: int = 100) -> np.ndarray:
    """What the simulator observes under the expert, ``[steps + 1, 39]``."""
    expert = PegExpert(0)
    env.reset(seed=seed)
    seen = [env.raw]
    for _ in range(steps):
        env.step(expert.act(env))
        seen.append(env.raw)
    return np.array(seen)


@pytest.mark.filterwarnings("error")
def test_keeps_gymnasiums_contract() -> None:
    check_env(TASK.make(), skip_render_check=True)


def test_the_seed_decides_everything(env: PegInsertSide) -> None:
    first = rollout(env, 5)
    other = rollout(env, 6)
    assert np.array_equal(rollout(env, 5), first)
    assert np.array_equal(rollout(PegInsertSide(), 5), first)
    assert np.abs(other[0] - first[0]).max() > 0.01


def test_starts_fill_the_range_that_meta_world_draws_from(env: PegInsertSide) -> None:
    assert np.array_equal(env._sim._random_reset_space.low, START_LOW)
    assert np.array_equal(env._sim._random_reset_space.high, START_HIGH)
    starts = []
    for seed in range(40):
        seen, info = env.reset(seed=seed)
        assert info == {"score": 0.0, "success": False}
        starts.append(np.concatenate([seen["state"][4:7], seen["goal"]]) - SITES)
    share = (np.array(starts) - START_LOW) / np.maximum(START_HIGH - START_LOW, 1e-9)
    varied = START_HIGH > START_LOW
    assert -1e-5 < share[:, varied].min() < 0.1 and 0.9 < share[:, varied].max() < 1 + 1e-5
    assert len(np.unique(share[:, varied].round(4), axis=0)) == 40


def test_mt1s_own_starts_are_among_ours_and_look_alike(env: PegInsertSide) -> None:
    benchmark = MT1("peg-insert-side-v3", seed=0)  # type: ignore[no-untyped-call]
    theirs = benchmark.train_classes["peg-insert-side-v3"]()
    for task in benchmark.train_tasks[:5]:
        start = pickle.loads(task.data)["rand_vec"]
        assert np.all(start >= START_LOW) and np.all(start <= START_HIGH)
        theirs.set_task(task)
        raw, _ = theirs.reset()
        env.reset(seed=0, options={"start": start})
        assert np.array_equal(np.delete(env.raw, TURNED), np.delete(raw, TURNED))
        _same_episode(env, theirs, raw)


def _same_episode(env: PegInsertSide, theirs: Any, raw: np.ndarray) -> None:
    """The expert's actions do the same in Meta-World's environment, bit for bit, until they have succeeded."""
    expert, info, best, start = PegExpert(0), {"success": 0.0}, 0.0, env._sim.distance()
    while not info["success"]:
        action = expert.act(env)
        seen, _, done, _, told = env.step(action)
        raw, *_, info = theirs.step(action)
        best = max(best, 1.0 - info["obj_to_target"] / start)
        assert np.array_equal(seen["state"], observe(raw)) and np.array_equal(seen["goal"], hole(raw))
        assert (done, told) == (bool(info["success"]), {"success": bool(info["success"]), "score": best})


def test_the_goal_is_visible_and_stays(env: PegInsertSide) -> None:
    seen, _ = env.reset(seed=3)
    start = seen["goal"]
    env.action_space.seed(0)
    np.testing.assert_allclose(start, env._sim.data.site("goal").xpos, atol=1e-6)
    for _ in range(5):
        seen, *_ = env.step(env.action_space.sample())
        assert np.array_equal(seen["goal"], start)
        assert np.array_equal(seen["state"], observe(env.raw))


def test_success_is_meta_worlds_and_ends_the_episode(env: PegInsertSide) -> None:
    env.reset(seed=1)
    expert, scores = PegExpert(0), [0.0]
    for _ in range(TASK.max_steps):
        _, reward, terminated, truncated, info = env.step(expert.act(env))
        scores.append(info["score"])
        close = env._sim.distance() <= 0.07
        assert info["success"] == terminated == close == bool(reward)
        if terminated:
            break
    assert terminated and not truncated
    assert scores == sorted(scores) and 0.6 < scores[-1] < 1


def test_truncates_after_the_last_step(env: PegInsertSide) -> None:
    env.reset(seed=0)
    still = np.zeros(4, np.float32)
    ends = [env.step(still)[3] for _ in range(TASK.max_steps)]
    assert ends[-1] and not any(ends[:-1])


def test_the_expert_demonstrates_in_the_environments_terms() -> None:
    made = generate(TASK, 4, seed=0, noise=0.3)
    assert made.tried <= 8
    assert made.episodes.numbers("state").shape[1] == 7 and made.episodes.action.shape[1] == 4
    assert made.episodes.numbers("goal").shape[1] == 3
    converted = features(made.episodes)
    assert np.array_equal(converted.numbers("state"), made.episodes.numbers("state"))
    assert np.array_equal(converted.action, made.episodes.action)


def test_refuses_other_widths_and_hidden_goals() -> None:
    raw = np.ones((3, 39), np.float32)
    good = Episodes({"state": raw}, np.zeros((3, 4), np.float32), np.array([3]))
    assert features(good).numbers("state").shape == (3, 7)
    with pytest.raises(DataError, match=r"either state width 39.*got action width 4, state width 18 and no goal"):
        features(replace(good, observation={"state": raw[:, :18]}))
    with pytest.raises(DataError, match="got action width 7, state width 39 and no goal"):
        features(replace(good, action=np.zeros((3, 7), np.float32)))
    with pytest.raises(DataError, match="got action width 4, state width 39 and goal width 3"):
        features(replace(good, observation={"state": raw, "goal": raw[:, :3]}))
    raw[1, -3:] = 0
    with pytest.raises(DataError, match="hidden"):
        features(good)


def test_recorded_starts_lie_in_range_and_replays_are_exact(env: PegInsertSide, recorded: Episodes) -> None:
    converted = features(recorded)
    for steps in list(recorded.slices())[:4]:
        start = (
            np.concatenate([recorded.numbers("state")[steps.start, 4:7], recorded.numbers("state")[steps.start, -3:]])
            - SITES
        )
        assert np.all(start > START_LOW - 1e-6) and np.all(start < START_HIGH + 1e-6)
        seen, info = env.reset(seed=0, options={"start": start})
        for row in range(steps.start, steps.stop):
            np.testing.assert_allclose(seen["state"], converted.numbers("state")[row], atol=1e-5)
            np.testing.assert_allclose(seen["goal"], converted.numbers("goal")[row], atol=1e-6)
            seen, _, terminated, _, info = env.step(converted.action[row])
            if terminated:
                break
        assert info["success"]


def test_the_expert_is_the_recordings(env: PegInsertSide, recorded: Episodes) -> None:
    assert np.array_equal(hole(recorded.numbers("state")), recorded.numbers("state")[:, -3:])
    expert = PegExpert(0)
    for row in range(0, 400, 7):
        env.raw = recorded.numbers("state")[row].astype(np.float64)
        np.testing.assert_allclose(expert.act(env), recorded.action[row], atol=1e-4)
