"""A goal on the move: how it moves, what of it is seen, and that the expert leads it."""

import numpy as np
import pytest

pytest.importorskip("mujoco")

from gymnasium.utils.env_checker import check_env

from specact.errors import ConfigError
from specact.lab.data.generate import generate
from specact.lab.envs import load_task
from specact.lab.envs.ball import GOAL_RADIUS, HALF_SIZE, BallEnv, BallExpert, roll_forward

TASK = load_task("ball-chase")
STILL = np.zeros(2, np.float32)


def succeeds(env: BallEnv, seed: int, leads: bool = True) -> bool:
    env.reset(seed=seed)
    expert = BallExpert(seed)
    expert.reset(env)
    for _ in range(TASK.max_steps):
        if not leads:
            env.goal_velocity = np.zeros(2)  # only what the expert is told; success is judged with a fresh measurement
        _, _, terminated, _, info = env.step(expert.act(env))
        if terminated:
            break
    return bool(info["success"])


@pytest.mark.filterwarnings("error")
def test_follows_the_gymnasium_protocol() -> None:
    check_env(TASK.make(), skip_render_check=True)


def test_the_goal_goes_round_at_its_pace() -> None:
    env = BallEnv(pace=0.06)
    env.reset(seed=3)
    goals = [env.goal]
    for _ in range(40):
        env.step(STILL)
        goals.append(env.goal)
    path = np.array(goals)
    radius = np.hypot(*path.T)
    np.testing.assert_allclose(radius, radius[0])
    turned = np.unwrap(np.arctan2(path[:, 1], path[:, 0]))
    np.testing.assert_allclose(np.abs(np.diff(turned)) * radius[0] * TASK.rate_hz, 0.06)
    assert np.hypot(*env.goal_velocity) == pytest.approx(0.06)


def test_it_goes_either_way() -> None:
    env, ways = BallEnv(pace=0.06), set()
    for seed in range(20):  # all the same with probability 2e-6, were the seeds free
        env.reset(seed=seed)
        ways.add(float(np.sign(env.goal[0] * env.goal_velocity[1] - env.goal[1] * env.goal_velocity[0])))
    assert ways == {-1.0, 1.0}


def test_an_episode_begins_the_same_at_every_pace() -> None:
    starts = []
    for pace in (0.0, 0.05, None):
        env = BallEnv(pace=pace)
        seen, _ = env.reset(seed=8)
        starts.append(np.concatenate([seen["state"], seen["goal"]]))
    assert np.array_equal(starts[0], starts[1]) and np.array_equal(starts[0], starts[2])


def test_without_a_pace_every_episode_draws_its_own() -> None:
    env = TASK.make()
    paces = []
    for seed in range(50):
        env.reset(seed=seed)
        paces.append(float(np.hypot(*env.unwrapped.goal_velocity)))  # type: ignore[attr-defined]
    assert min(paces) < 0.02 and 0.08 < max(paces) < 0.1
    env.reset(seed=7)
    assert np.hypot(*env.unwrapped.goal_velocity) == pytest.approx(paces[7])  # type: ignore[attr-defined]


def test_the_goals_motion_is_part_of_the_state() -> None:
    chase, ball = TASK.make(pace=0.08), load_task("ball").make(pace=0.08)
    seen, other = chase.reset(seed=5)[0], ball.reset(seed=5)[0]
    for _ in range(10):
        assert set(seen) == {"state"} and seen["state"].shape == (12,)
        assert np.array_equal(seen["state"][:10], np.concatenate([other["state"], other["goal"]]))
        before = seen["state"]
        seen, other = chase.step(STILL)[0], ball.step(STILL)[0]
        moved = (seen["state"][8:10] - before[8:10]) * HALF_SIZE * TASK.rate_hz
        np.testing.assert_allclose(moved, 0.25 * (seen["state"][10:] + before[10:]), atol=2e-4)


@pytest.mark.parametrize("pace", [0.0, 0.05, 0.1])
def test_the_expert_catches_it(pace: float) -> None:
    # At least 10 of 12. 450 of 450 put the true rate above 0.993; even there chance alone fails with probability 1e-4.
    env = BallEnv(pace=pace)
    assert sum(succeeds(env, seed) for seed in range(12)) >= 10


def test_an_expert_that_does_not_lead_does_not() -> None:
    # At most 4 of 12. None of 72 puts the true rate below 0.04; even there chance alone fails with probability 1e-4.
    env = BallEnv(pace=0.1)
    assert sum(succeeds(env, seed, leads=False) for seed in range(12)) <= 4


def test_a_ball_at_rest_where_the_goal_passes_has_not_caught_it() -> None:
    """What counts is the speed relative to the goal: at 0.05 m/s, a resting ball is too fast by 0.01."""
    env = BallEnv(pace=0.05)
    env.reset(seed=0)
    held = 0
    for _ in range(60):
        env.data.qpos[2:4] = env.goal
        env.data.qvel[:] = 0.0
        env.settle()
        held = max(held, env._held)
        env.run(env.ticks)
    assert held == 0 and np.hypot(*(env.goal - env.position)) < GOAL_RADIUS


def test_demonstrations_have_no_goal_beside_the_state() -> None:
    made = generate(TASK, 3, seed=0, noise=0.5)
    assert list(made.episodes.observation) == ["state"]
    assert made.episodes.numbers("state").shape[1] == 12
    assert len(made.episodes) == 3


def test_a_pace_is_a_speed() -> None:
    for pace in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="a speed of at least 0 m/s"):
            BallEnv(pace=pace)


def test_rolling_forward_moves_the_plate_and_nothing_else() -> None:
    """The plate is where the model has it within a tenth of what it moved; the ball and the goal are left alone."""
    env, rng = BallEnv(pace=0.05, goal_in_state=True), np.random.default_rng(0)
    rolled_off, stayed_off = [], []
    for seed in range(10):
        seen, _ = env.reset(seed=seed)
        for _ in range(4):
            seen = env.step(rng.uniform(-1, 1, 2).astype(np.float32))[0]
        ahead = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        rolled = roll_forward(seen, ahead)["state"]
        assert np.array_equal(rolled[[0, 1, 2, 3, 8, 9, 10, 11]], seen["state"][[0, 1, 2, 3, 8, 9, 10, 11]])
        assert np.array_equal(roll_forward(seen, ahead[:0])["state"], seen["state"])
        for action in ahead:
            truth = env.step(action)[0]["state"]
        rolled_off.append(np.abs(rolled[4:6] - truth[4:6]).mean())
        stayed_off.append(np.abs(seen["state"][4:6] - truth[4:6]).mean())
    assert np.mean(rolled_off) < 0.1 * np.mean(stayed_off)
