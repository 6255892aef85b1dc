"""A simulated robot whose world does not wait, and a device with a share of one core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from specact.errors import ConfigError, SpecactError
from specact.lab.envs import load_task
from specact.lab.envs.live import LiveRobot
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.processes import device_share
from specact.observation import Field, ObservationSpec, vectors

SEES = vectors(1, state=8)
# So long that whoever answers an observation at once is in time on a busy machine, too.
SLOW_S = 0.3


@pytest.fixture
def robot() -> Iterator[LiveRobot]:
    made = LiveRobot("ball", SEES, SLOW_S)
    yield made
    made.close()


def test_time_goes_on_without_actions_and_an_episode_can_be_left_for_another(robot: LiveRobot) -> None:
    outcomes = [robot.outcome["success"]]
    assert robot.done, "before the first start"
    robot.start(3)
    seen = [robot.observe()["state"] for _ in range(4)]
    assert [robot.last.steps, robot.last.held] == [3, 3]
    assert not np.array_equal(seen[0], seen[3]), "the ball rolls on"
    outcomes.append(robot.outcome["success"])
    assert outcomes == [False, False] and not robot.done
    robot.start(2)
    assert robot.last.steps == 0 and not np.array_equal(robot.observe()["state"], seen[0])
    robot.start(3)
    np.testing.assert_array_equal(robot.observe()["state"], seen[0])


def test_with_an_action_in_every_period_it_is_the_world_that_waits(robot: LiveRobot) -> None:
    reference = SimulatedRobot(load_task("ball"))
    reference.start(5)
    robot.start(5)
    for action in np.random.default_rng(0).uniform(-1.0, 1.0, (4, 2)).astype(np.float32):
        np.testing.assert_array_equal(robot.observe()["state"], reference.observe()["state"])
        robot.act(action)
        reference.act(action)
    np.testing.assert_array_equal(robot.observe()["state"], reference.observe()["state"])
    assert [robot.last.steps, robot.last.held] == [4, 0]


def test_an_episode_ends_by_itself() -> None:
    robot = LiveRobot("ball", SEES, 0.001)
    try:
        robot.start(0)
        while not robot.done:
            robot.observe()
        assert 0 < robot.last.steps == robot.last.held <= robot.task.max_steps
        robot.observe()  # nobody waits for what will not come
    finally:
        robot.close()


def test_a_world_that_has_ended_is_told(robot: LiveRobot) -> None:
    def watch() -> None:
        while True:
            robot.observe()

    robot.start(0)
    robot._process.kill()
    with pytest.raises(SpecactError, match="answer"):
        watch()


def test_a_robot_that_nobody_knows_how_to_hold_and_a_share_that_is_none_are_refused() -> None:
    sees = ObservationSpec({"image": Field((32, 32, 3), "uint8")})
    with pytest.raises(ConfigError, match="--live"):
        LiveRobot("tests.lab.train.dots:TASK", sees)
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="share"), device_share(share):
            pass


BUSY = """
import os, time
from specact.lab.rollout.processes import device_share
def spent(share, seconds=0.3):
    with device_share(share):
        began, used = time.perf_counter(), time.process_time()
        while time.process_time() < used + seconds:
            pass
        return seconds / (time.perf_counter() - began)
print(spent(0.1), os.listdir("/sys/fs/cgroup").count(f"specact-{os.getpid()}"))
"""


def test_a_process_gets_no_more_than_its_share() -> None:
    """At most: a busy machine may give it less. Without a limit it would get up to ten times as much."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=False)
    if "right to make control groups" in done.stderr:
        pytest.skip("this machine gives no right to make control groups")
    assert done.returncode == 0, done.stderr
    share, left_behind = done.stdout.split()
    assert float(share) < 0.15 and left_behind == "0"
