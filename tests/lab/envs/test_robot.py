"""The simulated robot acts as its environment's ``step`` does, and renders only what is observed."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from tests.tiny import needs_bundle

from specact.lab.rollout.methods import load_method

pytest.importorskip("mujoco")

from specact import load_pair
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.envs.cameras import Cameras
from specact.lab.envs.robot import SimulatedRobot, play
from specact.lab.envs.task import Task
from specact.lab.rollout.rollout import Shard, run_shard
from specact.observation import Field, ObservationHistory, ObservationSpec

FRAMES = {"image.corner2": Field((8, 8, 3), "uint8")}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The simulator's time of every rendering; frames are blank, so that no renderer is needed."""
    times: list[float] = []

    def look(self: Cameras, data: Any, sizes: dict[str, tuple[int, int]]) -> dict[str, Any]:
        times.append(float(data.time))
        return {name: np.zeros((*size, 3), np.uint8) for name, size in sizes.items()}

    monkeypatch.setattr(Cameras, "look", look)
    return times


@pytest.mark.parametrize("name", ["ball", "pusht", "pusht-camera", "kitchen", "metaworld", "peg", "swarm"])
def test_the_robot_sees_what_the_environments_step_returns(name: str) -> None:
    task = load_task(name)
    robot, env = SimulatedRobot(task), task.make()
    assert robot.done and robot.observe() is None
    for seed in (3, 4):
        robot.start(seed)
        seen, info = env.reset(seed=seed)
        env.action_space.seed(seed)
        for _ in range(12):
            assert_same(robot.observe(), seen)
            assert (robot.success, robot.score) == (info["success"], info["score"])
            action = env.action_space.sample()
            robot.act(action)
            seen, _, terminated, truncated, info = env.step(action)
            assert robot.done == (terminated or truncated)
        assert_same(robot.observe(), seen)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert np.array_equal(value, other[key]), key


@pytest.mark.parametrize(("history", "rendered"), [(1, 1), (2, 4)])
def test_cameras_are_rendered_once_for_each_observation_and_within_a_chunk_only_for_a_history(
    looks: list[float], history: int, rendered: int
) -> None:
    robot = SimulatedRobot(load_task("metaworld").seeing(FRAMES))
    robot.start(0)
    window = ObservationHistory(ObservationSpec({"image.corner2": Field((8, 8, 3), "uint8", history)}))
    window.push(robot.observe())
    assert robot.observe() is robot.observe() and len(looks) == 1
    play(robot, window, np.zeros((4, 4), np.float32))
    assert len(looks) == rendered
    assert robot.observe()["image.corner2"].shape == (8, 8, 3)
    assert robot.observe() is robot.observe() and len(looks) == rendered + 1 and looks == sorted(looks)


def test_rollouts_render_at_inferences_only(looks: list[float]) -> None:
    needs_bundle("metaworld")
    bundle = load_pair("metaworld")
    assert bundle.execute > 1 and bundle.observation.history == 1
    outcomes, table = run_shard(Shard.of(bundle, "metaworld", load_method("draft"), GateSettings("never"), (0, 1), 0))
    assert len(looks) == len(table["episode"]) < sum(outcome.steps for outcome in outcomes)


class Dark(gym.ObservationWrapper[dict[str, Any], Any, dict[str, Any]]):
    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {name: np.zeros_like(value) for name, value in observation.items()}


def test_a_wrappers_observations_are_its_own() -> None:
    task = load_task("ball")
    wrapped = Task("dark", lambda **options: Dark(task.make(**options)), task.rate_hz, 5, task.score, task.features)
    robot = SimulatedRobot(wrapped)
    robot.start(0)
    for _ in range(5):
        assert not robot.done
        assert not any(value.any() for value in robot.observe().values())
        robot.act(np.ones(2, np.float32))
    assert robot.done
