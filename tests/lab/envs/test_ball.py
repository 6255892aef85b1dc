"""The plate-and-ball environment and its expert."""

import os

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from specact.lab.envs.ball import BALL_RADIUS, HALF_SIZE, MAX_TILT, PILLAR_RADIUS, TASK, BallEnv, BallExpert


def run(env: BallEnv, env_seed: int, expert_seed: int) -> tuple[np.ndarray, bool, float]:
    """Positions of the ball, success, and the angle by which it went around the pillar [rad]."""
    env.reset(seed=env_seed)
    expert = BallExpert(expert_seed)
    expert.reset(env)
    path = [env.position]
    for _ in range(TASK.max_steps):
        _, _, terminated, _, info = env.step(expert.act(env))
        path.append(env.position)
        if terminated:
            break
    angle = np.unwrap(np.arctan2([p[1] for p in path], [p[0] for p in path]))
    return np.array(path), info["success"], float(angle[-1] - angle[0])


@pytest.mark.filterwarnings("error")
def test_follows_the_gymnasium_protocol() -> None:
    check_env(BallEnv(), skip_render_check=True)


def test_same_seed_gives_the_same_episode_bit_for_bit() -> None:
    used = BallEnv()
    run(used, 1, 0)
    first, second = run(used, 5, 7)[0], run(BallEnv(), 5, 7)[0]
    np.testing.assert_array_equal(first, second)


def test_expert_succeeds_briskly() -> None:
    # At least 25 of 30. 130 of 130 put the true rate above 0.977; even there chance alone fails with probability 1e-4.
    env = BallEnv()
    results = [run(env, seed, seed) for seed in range(30)]
    assert sum(success for _, success, _ in results) >= 25
    assert 40 <= np.mean([len(path) for path, _, _ in results]) <= 100


def test_expert_passes_on_both_sides_from_the_same_start() -> None:
    # 20 draws of a fair side are all the same with probability 2e-6.
    env = BallEnv()
    turns = np.array([run(env, 0, seed)[2] for seed in range(20)])
    assert (turns > 2).any() and (turns < -2).any()
    assert (np.abs(turns) > 2).all()  # each goes clearly around: no flip-flopping in front of the pillar


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_ball_rolls_downhill_as_a_solid_sphere(axis: int, sign: float) -> None:
    env = BallEnv()
    env.reset(seed=0)
    env.data.qpos[2:4] = 0.25 * (-sign if axis == 0 else 1), 0.25 * (-sign if axis == 1 else 1)
    env.data.qvel[:] = 0
    action = np.zeros(2, np.float32)
    action[axis] = 0.5 * sign
    for _ in range(8):
        env.step(action)
    before = env.velocity[axis]
    for _ in range(4):
        env.step(action)
    expected = 5 / 7 * 9.81 * np.sin(env.tilt[axis])
    assert (env.velocity[axis] - before) / 0.2 == pytest.approx(expected, rel=0.02)
    assert env.tilt[axis] == pytest.approx(0.5 * sign * MAX_TILT, rel=0.05)


def test_velocity_is_the_derivative_of_position() -> None:
    env = BallEnv()
    env.reset(seed=3)
    expert = BallExpert(0)
    path, speed = [], []
    for _ in range(30):
        env.step(expert.act(env))
        path.append(env.position)
        speed.append(env.velocity)
    mean = 0.5 * (np.array(speed)[1:] + np.array(speed)[:-1])
    assert np.abs(np.diff(path, axis=0) * TASK.rate_hz - mean)[8:].max() < 0.02


def test_pillar_stops_the_ball() -> None:
    env = BallEnv()
    env.reset(seed=0)
    nearest = np.inf
    for _ in range(100):
        env.step((-4 * env.position).clip(-1, 1).astype(np.float32))
        nearest = min(nearest, float(np.hypot(*env.position)))
    assert PILLAR_RADIUS + BALL_RADIUS - 0.003 < nearest < PILLAR_RADIUS + BALL_RADIUS + 0.003


def test_a_ball_over_the_edge_is_lost() -> None:
    env = BallEnv()
    env.reset(seed=0)
    for _ in range(100):
        _, reward, terminated, _, info = env.step(np.ones(2, np.float32))
        if terminated:
            break
    assert terminated and not info["success"] and info["score"] == 0.0 and reward == 0.0
    assert np.abs(env.position).max() > HALF_SIZE


def test_doing_nothing_does_not_succeed() -> None:
    env = BallEnv()
    for seed in range(5):
        env.reset(seed=seed)
        assert not any(env.step(np.zeros(2, np.float32))[4]["success"] for _ in range(TASK.max_steps))


def test_needs_no_opengl_without_render_mode() -> None:
    env = BallEnv()
    env.reset(seed=0)
    assert env.render() is None


@pytest.mark.skipif(os.environ.get("MUJOCO_GL") not in ("egl", "osmesa"), reason="needs MUJOCO_GL=egl or osmesa")
def test_frames_show_ball_and_goal_and_leave_the_physics_alone() -> None:
    shown, hidden = BallEnv(render_mode="rgb_array"), BallEnv()
    action = np.array([0.2, -0.1], np.float32)
    for env in (shown, hidden):
        env.reset(seed=4)
        for _ in range(5):
            env.step(action)
            frame = env.render()
            if env is shown:
                assert frame is not None and frame.shape == (480, 480, 3) and frame.dtype == np.uint8
                red, green, blue = frame.astype(int).transpose(2, 0, 1)
                assert np.sum(red > green + 60) > 50  # the ball
                assert np.sum((green > red + 40) & (green > blue + 20)) > 50  # the goal
    np.testing.assert_array_equal(shown.data.qpos, hidden.data.qpos)
    shown.close()
