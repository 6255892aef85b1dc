"""A simulated robot whose world does not wait, and a device with a share of one core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from specact.errors import ConfigError, SpecactError
from specact.lab.device import device_share
from specact.lab.envs import load_task
from specact.lab.envs.live import LiveRobot
from specact.lab.envs.robot import SimulatedRobot
from specact.observation import Field, ObservationSpec, vectors

SEES = vectors(1, state=8)
# So long that whoever answers an observation at once is in time on a busy machine, too.
SLOW_S = 0.3


@pytest.fixture
def robot() -> Iterator[LiveRobot]:
    made = LiveRobot("ball", SEES, SLOW_S)
    yield made
    made.close()


def test_time_goes_on_without_actions(robot: LiveRobot) -> None:
    robot.start(3)
    seen = [robot.observe() for _ in range(4)]
    assert [robot.last.steps, robot.last.held] == [3, 3]
    assert not np.array_equal(seen[0]["state"], seen[3]["state"]), "the ball rolls on"
    assert robot.outcome["success"] is False and not robot.done


def test_with_an_action_in_every_period_it_is_the_world_that_waits(robot: LiveRobot) -> None:
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (4, 2)).astype(np.float32)
    other = SimulatedRobot(load_task("ball"))
    other.start(5)
    robot.start(5)
    for action in actions:
        np.testing.assert_array_equal(robot.observe()["state"], other.observe()["state"])
        robot.act(action)
        other.act(action)
    np.testing.assert_array_equal(robot.observe()["state"], other.observe()["state"])
    assert [robot.last.steps, robot.last.held] == [4, 0]


def test_before_the_first_start_no_episode_runs(robot: LiveRobot) -> None:
    assert robot.done and robot.outcome["success"] is False


def test_an_episode_can_be_left_for_another(robot: LiveRobot) -> None:
    robot.start(1)
    first = robot.observe()["state"]
    robot.observe()
    robot.start(2)
    assert robot.last.steps == 0
    assert not np.array_equal(robot.observe()["state"], first)
    robot.start(1)
    np.testing.assert_array_equal(robot.observe()["state"], first)


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
    with pytest.raises(SpecactError, match="does not answer"):
        watch()


def test_a_robot_that_nobody_knows_how_to_hold_is_refused() -> None:
    sees = ObservationSpec({"image": Field((32, 32, 3), "uint8")})
    with pytest.raises(ConfigError, match="--live"):
        LiveRobot("tests.lab.train.dots:TASK", sees)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share of one core"), device_share(share):
        pass


BUSY = """
import os, time
from specact.lab.device import device_share
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
    assert float(share) < 0.15
    assert left_behind == "0"
