"""What a window holds in a world that does not wait."""

from dataclasses import replace

import numpy as np
import pytest
from tests.lab.rollout.tape import PERIOD_S, TAPE, Prophet

from specact.lab.envs.robot import MovingWorld
from specact.lab.envs.task import Task
from specact.lab.rollout.episode import TimedRobot

ACTION = np.ones(1, np.float32)


def robot(window: int, task: Task = TAPE) -> TimedRobot:
    world = MovingWorld(task)
    world.reset(0)
    return TimedRobot(world, Prophet(window).spec.observation)


def times(sampler: TimedRobot) -> list[float]:
    return [round(float(time), 3) for time in sampler.window()["state"][:, 0]]


def test_a_robot_that_never_waits_sees_every_control_period() -> None:
    sampler = robot(3)
    seen = [times(sampler)]
    for _ in range(4):
        sampler.play(ACTION)
        seen.append(times(sampler))
    assert seen == [[0, 0, 0], [0, 0, 0.1], [0, 0.1, 0.2], [0.1, 0.2, 0.3], [0.2, 0.3, 0.4]]


def test_after_a_wait_it_is_the_observations_nearest_to_whole_periods_ago() -> None:
    sampler = robot(3)
    for _ in range(3):
        sampler.play(ACTION)
    sampler.sleep(0.13)  # samples at 0.3 and 0.4
    assert times(sampler) == [0.2, 0.3, 0.43]  # not the 0.4 that was seen last
    sampler.play(ACTION)
    assert times(sampler) == [0.3, 0.43, 0.53]


def test_a_long_wait_is_sampled_all_along() -> None:
    sampler = robot(3)
    sampler.sleep(0.53)
    assert times(sampler) == [0.3, 0.4, 0.53] and sampler.waited_s == pytest.approx(0.53)
    sampler.play(ACTION)
    assert sampler.waited_s == pytest.approx(0.53)


def test_waiting_ends_with_the_episode() -> None:
    sampler = robot(1)
    sampler.sleep(1e6)
    assert sampler.world.done and sampler.waited_s == pytest.approx(sampler.world.limit_s)


def test_rolled_forward_every_observation_is_of_as_many_actions_later() -> None:
    sampler = robot(3)
    for _ in range(4):
        sampler.play(ACTION)
    ahead = np.ones((2, 1), np.float32)
    rolled = sampler.window(ahead)["state"][:, 0]
    np.testing.assert_allclose(rolled, np.array([0.2, 0.3, 0.4]) + 2 * PERIOD_S, rtol=1e-6)
    np.testing.assert_allclose(sampler.window(ahead[:0])["state"][:, 0], [0.2, 0.3, 0.4], rtol=1e-6)


def test_rolled_forward_through_the_actions_that_followed() -> None:
    """Each observation through its own next two: those played since, then those still to run."""
    asked: list[list[float]] = []

    def noted(seen: object, actions: np.ndarray) -> dict[str, np.ndarray]:
        asked.append(actions[:, 0].tolist())
        return {"state": np.zeros(1, np.float32)}

    sampler = robot(3, replace(TAPE, roll_forward=noted))
    for value in range(4):
        sampler.play(np.full(1, value, np.float32))
    sampler.window(np.array([[10.0], [11.0]], np.float32))
    assert asked == [[2, 3], [3, 10], [10, 11]]
