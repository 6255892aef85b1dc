"""The moving world: without delay the plain environment, with delay exactly what a delay means."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("gym_pusht")

from specact.errors import ConfigError
from specact.lab.envs import load_task
from specact.lab.envs.ball import BallEnv
from specact.lab.envs.robot import MovingWorld
from specact.lab.envs.swarm import SwarmEnv
from specact.lab.envs.task import Idle, Task

BALL, PUSHT = load_task("ball"), load_task("pusht")
SWARM = load_task("swarm")  # can be stopped between control periods only
STILL = np.zeros(2, np.float32)
IDLES: tuple[Idle, ...] = get_args(Idle)


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
    # On ball holding repeats the last action, and neutral levels the plate at once.
    worlds = {idle: world_of(BALL, idle) for idle in IDLES}
    for moving in worlds.values():
        moving.advance(0.2, np.array([0.8, -0.4], np.float32))
        moving.advance(0.3, None)
    assert np.array_equal(worlds["hold"].observe()["state"], worlds["last"].observe()["state"])
    tilt = {idle: np.abs(moving.motion()[-1]).max() for idle, moving in worlds.items()}
    assert tilt["neutral"] < 0.05 * tilt["last"]


def went_on(task: Task, idle: Idle, action: list[float]) -> float:
    """How far what is seen went within .2 s after .3 s of waiting, over how far in the .3 s of acting before."""
    world = world_of(task, idle)
    seen = [world.observe()["state"]]
    for seconds, commanded in ((0.3, action), (0.3, None), (0.2, None)):
        world.advance(seconds, None if commanded is None else np.array(commanded, np.float32))
        seen.append(world.observe()["state"])
    assert not world.done
    # A position and its velocity at least: of the ball, or of the pusher.
    return float(np.abs(seen[3] - seen[2])[:4].max() / np.abs(seen[1] - seen[0])[:4].max())


def test_a_world_is_static_only_where_it_stands_still_while_the_robot_waits() -> None:
    """PushT does under its holding action; on ball no way to idle stops a ball that rolls."""
    assert [MovingWorld(PUSHT, idle=idle).static for idle in IDLES] == [True, False, True]
    assert not MovingWorld(PUSHT, pace=20.0).static
    for idle in IDLES:
        assert not MovingWorld(BALL, idle=idle).static and not MovingWorld(SWARM, idle=idle).static
        assert went_on(BALL, idle, [-0.4, 0.0]) > 0.1
    assert max(went_on(PUSHT, idle, [0.5, 0.5]) for idle in PUSHT.still) < 0.05


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
