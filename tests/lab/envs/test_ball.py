"""Plate and ball, with a goal that rests or goes round: physics, what is observed, and the expert."""

from typing import cast

import numpy as np
import pytest

pytest.importorskip("mujoco")

from specact.errors import ConfigError
from specact.lab.envs import ball, load_task
from specact.lab.envs.ball import TASK, BallEnv, BallExpert

CHASE = load_task("ball-chase")
STILL = np.zeros(2, np.float32)


def run(env: BallEnv, env_seed: int, expert_seed: int, leads: bool = True) -> tuple[np.ndarray, bool, float]:
    """Positions of the ball, success, and the angle by which it went around the pillar [rad]."""
    env.reset(seed=env_seed)
    expert = BallExpert(expert_seed)
    expert.reset(env)
    path = [env.position]
    for _ in range(TASK.max_steps):
        if not leads:
            env.goal_velocity = np.zeros(2)  # only what the expert is told; success is judged with a fresh measurement
        _, _, terminated, _, info = env.step(expert.act(env))
        path.append(env.position)
        if terminated:
            break
    angle = np.unwrap(np.arctan2([p[1] for p in path], [p[0] for p in path]))
    return np.array(path), info["success"], float(angle[-1] - angle[0])


@pytest.mark.parametrize(("axis", "sign"), [(0, -1.0), (1, 1.0)])
def test_ball_rolls_downhill_as_a_solid_sphere(axis: int, sign: float) -> None:
    env = BallEnv()
    env.reset(seed=0)
    env.data.qpos[2:4] = 0.25 * (-sign if axis == 0 else 1), 0.25 * (-sign if axis == 1 else 1)
    env.data.qvel[:] = 0
    action = np.zeros(2, np.float32)
    action[axis] = 0.5 * sign
    for _ in range(8):
        env.step(action)
    before, place = env.velocity[axis], env.position[axis]
    for _ in range(4):
        env.step(action)
    assert (env.position[axis] - place) / 0.2 == pytest.approx(0.5 * (env.velocity[axis] + before), rel=0.05)
    expected = 5 / 7 * 9.81 * np.sin(env.tilt[axis])
    assert (env.velocity[axis] - before) / 0.2 == pytest.approx(expected, rel=0.02)
    assert env.tilt[axis] == pytest.approx(0.5 * sign * ball.MAX_TILT, rel=0.05)


def test_pillar_stops_the_ball_and_over_the_edge_it_is_lost() -> None:
    env, nearest = BallEnv(), np.inf
    env.reset(seed=0)
    for _ in range(100):
        env.step((-4 * env.position).clip(-1, 1).astype(np.float32))
        nearest = min(nearest, float(np.hypot(*env.position)))
    assert nearest == pytest.approx(ball.PILLAR_RADIUS + ball.BALL_RADIUS, abs=0.003)
    env.reset(seed=0)
    ends = (env.step(np.ones(2, np.float32)) for _ in range(100))
    _, reward, _, _, info = next(end for end in ends if end[2])
    assert not info["success"] and info["score"] == reward == 0.0
    assert np.abs(env.position).max() > ball.HALF_SIZE


def test_the_goal_goes_round_at_its_pace_either_way() -> None:
    env, senses = BallEnv(pace=0.06), set()
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
    for seed in range(10):
        env.reset(seed=seed)
        senses.add(float(np.sign(env.goal[0] * env.goal_velocity[1] - env.goal[1] * env.goal_velocity[0])))
    assert senses == {-1.0, 1.0}


def test_an_episode_begins_the_same_at_every_pace_and_without_one_draws_its_own() -> None:
    starts = [np.concatenate(list(BallEnv(pace=pace).reset(seed=8)[0].values())) for pace in (0.0, 0.05, None)]
    assert np.array_equal(starts[0], starts[1]) and np.array_equal(starts[0], starts[2])
    env, paces = BallEnv(pace=None), []
    for seed in (*range(30), 7):
        env.reset(seed=seed)
        paces.append(float(np.hypot(*env.goal_velocity)))
    assert min(paces) < 0.03 and 0.07 < max(paces) < 0.1 and paces[-1] == pytest.approx(paces[7])
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=str(wrong)):
            BallEnv(pace=wrong)


def test_in_a_chase_the_goals_motion_is_part_of_the_state() -> None:
    chase, plain = CHASE.make(pace=0.08), TASK.make(pace=0.08)
    seen, reference = chase.reset(seed=5)[0], plain.reset(seed=5)[0]
    for _ in range(10):
        assert set(seen) == {"state"} and seen["state"].shape == (12,)
        assert np.array_equal(seen["state"][:10], np.concatenate([reference["state"], reference["goal"]]))
        before = seen["state"]
        seen, reference = chase.step(STILL)[0], plain.step(STILL)[0]
        moved = (seen["state"][8:10] - before[8:10]) * ball.HALF_SIZE * TASK.rate_hz
        np.testing.assert_allclose(moved, 0.25 * (seen["state"][10:] + before[10:]), atol=2e-4)


def test_a_ball_at_rest_where_the_goal_passes_has_not_caught_it() -> None:
    """What counts is the speed relative to the goal: at 0.05 m/s, a resting ball is too fast by 0.01."""
    assert ball.SLOW < 0.05
    for pace, caught in ((0.05, False), (0.0, True)):
        env = BallEnv(pace=pace)
        env.reset(seed=0)
        for _ in range(60):
            env.data.qpos[2:4] = env.goal
            env.data.qvel[:] = 0.0
            info = env.settle()[3]
            env.run(env.ticks)
        assert info["success"] == caught and np.hypot(*(env.goal - env.position)) < ball.GOAL_RADIUS


def test_a_chase_is_graded_by_how_nearly_the_ball_rested_on_the_goal() -> None:
    scores = {}
    for name, away, pace in (("far", 0.2, 0.0), ("near", 0.04, 0.0), ("too fast", 0.0, 0.08), ("on it", 0.0, 0.0)):
        env = cast(BallEnv, CHASE.make(pace=pace))
        env.reset(seed=0)
        for _ in range(ball.HOLD_STEPS):
            env.data.qpos[2:4], env.data.qvel[:] = env.goal + np.array([0.0, away]), 0.0
            *_, info = env.step(STILL)
        scores[name] = info["score"], info["success"]
    assert scores == {
        "far": (pytest.approx(0.1, abs=0.01), False),
        "near": (pytest.approx(0.5, abs=0.01), False),
        "too fast": (pytest.approx(0.5, abs=0.02), False),
        "on it": (1.0, True),
    }
    # To pass the goal is not to stay.
    env.reset(seed=0)
    env.data.qpos[2:4], env.data.qvel[:] = env.goal, 0.0
    *_, info = env.step(STILL)
    assert info["score"] == pytest.approx(1.0 / ball.HOLD_STEPS, rel=0.01) and not info["success"]
    assert BallEnv().reset(seed=0)[1]["score"] == 0.0, "the ball's own score is its success"


def test_the_expert_succeeds_briskly_and_passes_on_both_sides_from_the_same_start() -> None:
    env = BallEnv()
    results = [run(env, seed, seed) for seed in range(12)]
    assert sum(success for _, success, _ in results) >= 10
    assert 40 <= np.mean([len(path) for path, _, _ in results]) <= 100
    turns = np.array([run(env, 0, seed)[2] for seed in range(10)])
    assert (turns > 2).any() and (turns < -2).any()
    assert (np.abs(turns) > 2).all()  # each goes clearly around: no flip-flopping in front of the pillar


@pytest.mark.parametrize(("pace", "leads"), [(0.1, True), (0.1, False)])
def test_the_expert_catches_a_moving_goal_by_leading(pace: float, leads: bool) -> None:
    env = BallEnv(pace=pace)
    won = sum(run(env, seed, seed, leads)[1] for seed in range(8))
    assert won >= 6 if leads else won <= 3


def test_rolling_forward_moves_the_plate_and_nothing_else() -> None:
    """The plate is where the model has it within a tenth of what it moved; the ball and the goal are left alone."""
    env, rng = BallEnv(pace=0.05, goal_in_state=True), np.random.default_rng(0)
    rolled_off, stayed_off, others = [], [], [0, 1, 2, 3, 8, 9, 10, 11]
    for seed in range(5):
        seen, _ = env.reset(seed=seed)
        for _ in range(4):
            seen = env.step(rng.uniform(-1, 1, 2).astype(np.float32))[0]
        ahead = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        rolled = ball.roll_forward(seen, ahead)["state"]
        assert np.array_equal(rolled[others], seen["state"][others])
        assert np.array_equal(ball.roll_forward(seen, ahead[:0])["state"], seen["state"])
        for action in ahead:
            truth = env.step(action)[0]["state"]
        rolled_off.append(np.abs(rolled[4:6] - truth[4:6]).mean())
        stayed_off.append(np.abs(seen["state"][4:6] - truth[4:6]).mean())
    assert np.mean(rolled_off) < 0.1 * np.mean(stayed_off)
