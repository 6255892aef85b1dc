"""What a window holds in a world that does not wait."""

from dataclasses import replace

import numpy as np
import pytest
from tests.lab.rollout.tape import PERIOD_S, TAPE, Prophet

from specact.lab.envs.moving import MovingWorld
from specact.lab.envs.task import Task
from specact.lab.rollout.history import Senses

ACTION = np.ones(1, np.float32)


def robot(window: int, task: Task = TAPE) -> Senses:
    world = MovingWorld(task)
    world.reset(0)
    return Senses(world, Prophet(window).spec.observation)


def times(senses: Senses) -> list[float]:
    return [round(float(time), 3) for time in senses.window()["state"][:, 0]]


def test_a_robot_that_never_waits_sees_every_control_period() -> None:
    senses = robot(3)
    seen = [times(senses)]
    for _ in range(4):
        senses.play(ACTION)
        seen.append(times(senses))
    assert seen == [[0, 0, 0], [0, 0, 0.1], [0, 0.1, 0.2], [0.1, 0.2, 0.3], [0.2, 0.3, 0.4]]


def test_after_a_wait_it_is_the_observations_nearest_to_whole_periods_ago() -> None:
    senses = robot(3)
    for _ in range(3):
        senses.play(ACTION)
    senses.wait(0.13)  # samples at 0.3 and 0.4
    assert times(senses) == [0.2, 0.3, 0.43]  # not the 0.4 that was seen last
    senses.play(ACTION)
    assert times(senses) == [0.3, 0.43, 0.53]


def test_a_long_wait_is_sampled_all_along() -> None:
    senses = robot(3)
    senses.wait(0.53)
    assert times(senses) == [0.3, 0.4, 0.53] and senses.waited_s == pytest.approx(0.53)
    senses.play(ACTION)
    assert senses.waited_s == pytest.approx(0.53)


def test_waiting_ends_with_the_episode() -> None:
    senses = robot(1)
    senses.wait(1e6)
    assert senses.world.done and senses.waited_s == pytest.approx(senses.world.limit_s)


def test_rolled_forward_every_observation_is_of_as_many_actions_later() -> None:
    senses = robot(3)
    for _ in range(4):
        senses.play(ACTION)
    ahead = np.ones((2, 1), np.float32)
    rolled = senses.window(ahead)["state"][:, 0]
    np.testing.assert_allclose(rolled, np.array([0.2, 0.3, 0.4]) + 2 * PERIOD_S, rtol=1e-6)
    np.testing.assert_allclose(senses.window(ahead[:0])["state"][:, 0], [0.2, 0.3, 0.4], rtol=1e-6)


def test_rolled_forward_through_the_actions_that_followed() -> None:
    """Each observation through its own next two: those played since, then those still to run."""
    asked: list[list[float]] = []

    def noted(seen: object, actions: np.ndarray) -> dict[str, np.ndarray]:
        asked.append(actions[:, 0].tolist())
        return {"state": np.zeros(1, np.float32)}

    senses = robot(3, replace(TAPE, roll_forward=noted))
    for value in range(4):
        senses.play(np.full(1, value, np.float32))
    senses.window(np.array([[10.0], [11.0]], np.float32))
    assert asked == [[2, 3], [3, 10], [10, 11]]
