"""A simulated robot steps as its environment does; a world that moves means by a delay exactly what a delay means."""

from dataclasses import replace
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("gym_pusht")

from specact.errors import ConfigError
from specact.lab.envs import load_task
from specact.lab.envs.ball import BallEnv
from specact.lab.envs.cameras import Cameras
from specact.lab.envs.robot import MovingWorld, SimulatedRobot, play
from specact.lab.envs.swarm import SwarmEnv
from specact.lab.envs.task import Idle, Task
from specact.observation import Field, ObservationHistory, ObservationSpec

BALL, PUSHT = load_task("ball"), load_task("pusht")
SWARM = load_task("swarm")  # can be stopped between control periods only
STILL = np.zeros(2, np.float32)
IDLES: tuple[Idle, ...] = get_args(Idle)
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


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert np.array_equal(value, second[key]), key


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


# --- the moving world ---


def world_of(task: Task, idle: Idle = "hold", pace: float = 0.0, seed: int = 0) -> MovingWorld:
    world = MovingWorld(task, idle=idle, pace=pace)
    world.reset(seed)
    return world


def actions(count: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.3, 0.3, (count, width)).astype(np.float32)


@pytest.mark.parametrize(("task", "pace"), [(BALL, 0.0), (BALL, 0.05), (PUSHT, 0.0), (PUSHT, 20.0), (SWARM, 0.0)])
def test_without_delay_it_is_the_plain_environment_bit_for_bit(task: Any, pace: float) -> None:
    world, plain = world_of(task, pace=pace, seed=4), task.make(**({"pace": pace} if task.pace else {}))
    seen, info = plain.reset(seed=4)
    for step, action in enumerate(actions(60, plain.action_space.shape[0], 0)):
        assert world.now == pytest.approx(step / task.rate_hz)
        assert all(np.array_equal(world.observe()[key], value) for key, value in seen.items())
        assert (world.success, world.score) == (info["success"], info["score"])
        world.advance(1 / task.rate_hz, action)
        seen, _, terminated, truncated, info = plain.step(action)
        assert world.done == (terminated or truncated or info["success"])
        if world.done:
            break


def test_a_delay_is_so_many_ticks_of_the_last_command() -> None:
    """A loop that waits 35 ms before each action, written out on the bare simulator."""
    world, without, plain, run = world_of(BALL, seed=1), world_of(BALL, seed=1), BallEnv(), 0
    plain.reset(seed=1)
    plain.command(STILL)
    for action in actions(30, 2, 1):
        assert np.array_equal(world.observe()["state"], plain.look()["state"])
        world.advance(0.035, None)
        world.advance(0.05, action)
        without.advance(0.05, action)
        for ticks, command in ((7, None), (10, action)):  # of 5 ms
            if command is not None:
                plain.command(command)
            for _ in range(ticks):
                plain.run(1)
                run += 1
                if run % 10 == 0:
                    plain.settle()
    assert world.now == pytest.approx(30 * 0.085)
    assert not np.array_equal(without.observe()["state"], world.observe()["state"])


def idle_ticks(delay_ticks: float, count: int) -> int:
    """Control periods of the swarm that ran without an action, of ``count`` actions each ``delay_ticks`` late."""
    world, commanded = world_of(replace(SWARM, max_steps=10_000)), list[bool]()
    step = world.env.step

    def taped(action: np.ndarray) -> Any:
        commanded.append(bool(action.any()))
        return step(action)

    world.env.step = taped  # type: ignore[method-assign]
    for _ in range(count):
        world.advance(delay_ticks * world.period_s, None)
        world.advance(world.period_s, np.full(10, 0.01, np.float32))
    assert len(commanded) == round(count * (1 + delay_ticks))
    return commanded.count(False)


def test_delays_below_a_tick_add_up_to_what_they_are_and_a_single_one_is_rounded() -> None:
    """Rounding each of them by itself would give 0 or 40 idle periods in place of 4, 12, ..."""
    for delay in (0.1, 0.3, 0.9, 1.4):
        assert abs(idle_ticks(delay, 40) - 40 * delay) <= 1
    assert [idle_ticks(delay, 1) for delay in (0.0, 0.4, 0.6, 1.4, 1.6)] == [0, 0, 1, 1, 2]


def test_holding_stays_and_continuing_arrives() -> None:
    """A target 128 px to the right, and the robot's next action half a period late: it goes on, or it stops."""
    went = {}
    for idle in IDLES:
        world = world_of(PUSHT, idle)
        env: Any = world.env
        env.reset(seed=0, options={"state": [100.0, 450.0, 300.0, 150.0, 0.0]})
        world.advance(0.1, np.array([1.0, 0.0], np.float32))
        begun = env.raw[0]
        world.advance(1.0, None)
        went[idle] = env.raw[0] - begun
    assert went["last"] == pytest.approx(100.0 + 128.0 - begun, abs=1.0)
    # It brakes from 374 px/s with a time constant of 0.1 s.
    assert 0.0 < went["hold"] < 20.0 and went["neutral"] == went["hold"]


def test_an_environment_of_whole_periods_goes_on_under_the_last_action_or_the_holding_one() -> None:
    end = {}
    for idle, then in (("hold", 0.0), ("last", 0.3), ("neutral", 0.0)):
        world, plain = world_of(SWARM, idle, seed=3), SwarmEnv()  # type: ignore[arg-type]
        plain.reset(seed=3)
        world.advance(0.2, np.full(10, 0.3, np.float32))
        world.advance(0.3, None)
        for level in (0.3, 0.3, then, then, then):
            plain.step(np.full(10, level, np.float32))
        end[idle] = plain.position
        assert np.array_equal(world.env.unwrapped.position, plain.position)  # type: ignore[attr-defined]
    assert not np.array_equal(end["hold"], end["last"])


def test_a_world_is_static_only_where_it_stands_still_while_the_robot_waits() -> None:
    """PushT does under its holding action; on ball no way to idle stops a ball that rolls."""
    assert [MovingWorld(PUSHT, idle=idle).static for idle in IDLES] == [True, False, True]
    assert not MovingWorld(PUSHT, pace=20.0).static
    assert not any(MovingWorld(task, idle=idle).static for task in (BALL, SWARM) for idle in IDLES)


def test_at_the_end_time_stops() -> None:
    world = MovingWorld(BALL)
    assert world.done
    world.reset(0)
    world.advance(100.0, np.ones(2, np.float32))  # over the edge
    ended, state = world.now, world.observe()["state"]
    assert (world.done, world.success) == (True, False) and ended < world.limit_s == 8.0
    assert ended * 20 == pytest.approx(round(ended * 20))
    world.advance(1.0, STILL)
    assert world.now == ended and np.array_equal(world.observe()["state"], state)
    world.reset(0)
    assert not world.done and world.now == 0.0
    world = world_of(replace(BALL, max_steps=7))
    world.advance(0.34, None)
    assert not world.done
    world.advance(0.02, None)
    assert world.done and world.now == pytest.approx(0.35) == world.limit_s


def test_success_ends_an_episode_and_motion_is_what_the_robot_moves() -> None:
    assert BALL.expert is not None
    world, expert, tilts = world_of(BALL), BALL.expert(0), list[np.ndarray]()
    expert.reset(world.env)
    env: Any = world.env
    while not world.done:
        tilts.append(env.tilt)
        world.advance(0.05, expert.act(world.env))
    assert world.success and world.now == pytest.approx(len(tilts) / 20) and world.now < world.limit_s
    assert np.array_equal(world.motion(), [*tilts, env.tilt])


def test_what_a_task_does_not_define_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="'hold'"):
        MovingWorld(BALL, idle="holt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'swarm'.*'last'"):
        MovingWorld(replace(SWARM, hold=None))
    with pytest.raises(ConfigError, match=r"'swarm'.*0\.5"):
        MovingWorld(SWARM, pace=0.5)
    with pytest.raises(ConfigError, match="'swarm'"):
        world_of(replace(SWARM, effector=None)).motion()
    with pytest.raises(ValueError, match=r"-0\.1"):
        world_of(BALL).advance(-0.1, None)
