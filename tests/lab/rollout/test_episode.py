"""Chunks in a world that goes on: TISED's equations on the world's own clock, each action at its time, and windows."""

from dataclasses import astuple, replace
from math import nan

import numpy as np
import pytest
from tests.lab.rollout.tape import CHUNK, IDLE, PERIOD_S, TAPE, Prophet, Tape

from specact.errors import ConfigError
from specact.execution.schedule import Execution, Kind
from specact.lab.envs.robot import MovingWorld
from specact.lab.envs.task import Task
from specact.lab.rollout.episode import Episode, TimedRobot, jerk, path_length, run_episode
from specact.lab.tised.equations import age_s, chunk_s, exact_task_s

CASES = [(4, 0, 0.05), (4, 2, 0.2), (4, 2, 0.33), (4, 4, 0.33), (8, 3, 0.71), (1, 1, 0.25)]


def run(
    kind: Kind, execute: int, overlap: int, latency_s: float, limit_s: float, policy: Prophet | None = None
) -> tuple[Episode, list[float], Tape]:
    """The episode, when its inferences began, and the tape."""
    world = MovingWorld(replace(TAPE, max_steps=round(limit_s / PERIOD_S)))
    began: list[float] = []

    def latency(at: float) -> float:
        began.append(at)
        return latency_s

    how = Execution(kind, execute, overlap)
    episode = run_episode(world, policy or Prophet(), how, latency, start=0, seed=0, episode=3)
    assert isinstance(world.env, Tape)
    return episode, began, world.env


def stale(tape: Tape) -> list[float]:
    """How long after the moment that it is for each action ran [s]."""
    return [at - meant for at, meant in tape.commands[1:] if meant != IDLE]


@pytest.mark.parametrize(("execute", "overlap", "latency_s"), CASES)
def test_a_chunk_takes_what_equation_3_says_and_observations_age_while_the_stall_shrinks(
    execute: int, overlap: int, latency_s: float
) -> None:
    for kind in ("append", "roll_forward"):
        episode, began, _ = run(kind, execute, overlap, latency_s, 20.0)
        expected_s = float(chunk_s(latency_s, PERIOD_S, execute, overlap=overlap))
        # From the second on: the first has no chunk before it to hide behind, and the one after begins with it.
        np.testing.assert_allclose(np.diff(began)[1:], expected_s, rtol=1e-9)
        age = float(age_s(latency_s, PERIOD_S, overlap=overlap))
        # The first chunk waited for nothing but its own inference.
        assert episode.age_s == pytest.approx(age + (latency_s - age) / episode.chunks)
        assert episode.inference_s == pytest.approx(latency_s)
        if overlap * PERIOD_S >= latency_s:
            assert episode.stall_s == pytest.approx(latency_s), "only the first inference cannot be hidden"
    if not overlap:
        episode, began, _ = run("synchronous", execute, 0, latency_s, 20.0)
        np.testing.assert_allclose(np.diff(began), latency_s + execute * PERIOD_S, rtol=1e-9)
        assert episode.age_s == pytest.approx(latency_s)


@pytest.mark.parametrize(("execute", "overlap", "late"), [(4, 0, 1), (4, 2, 2), (4, 2, 5), (8, 3, 7)])
def test_an_episode_of_n_chunks_takes_what_equation_4_says(execute: int, overlap: int, late: int) -> None:
    """With a time limit at the very end of the sixth chunk six ran, and five with one that much earlier."""
    chunks, latency_s = 6, late * PERIOD_S
    total = float(exact_task_s(chunks, latency_s, PERIOD_S, execute, overlap=overlap))
    episode, _, tape = run("append", execute, overlap, latency_s, total)
    assert episode.chunks == chunks and episode.task_s == pytest.approx(total) == episode.limit_s
    assert sum(action != IDLE for _, action in tape.commands[1:]) == chunks * execute
    assert episode.stall_s == pytest.approx(total - chunks * execute * PERIOD_S)
    assert run("append", execute, overlap, latency_s, total - execute * PERIOD_S)[0].chunks == chunks - 1


@pytest.mark.parametrize("latency_s", [0.0, 0.05, 0.2, 0.33])
def test_naive_actions_are_stale_by_the_age_and_rolled_forward_ones_are_not(latency_s: float) -> None:
    np.testing.assert_allclose(stale(run("append", 4, 2, latency_s, 20.0)[2])[4:], max(latency_s, 0.2), atol=2e-3)
    if np.isclose(latency_s % PERIOD_S, 0.0):
        np.testing.assert_allclose(stale(run("roll_forward", 4, 2, latency_s, 20.0)[2])[4:], 0.0, atol=2e-3)


@pytest.mark.parametrize("kind", ["aligned", "rtc"])
@pytest.mark.parametrize("latency_s", [0.0, 0.05, 0.2, 0.61])
def test_aligned_actions_are_for_the_time_at_which_they_run(kind: Kind, latency_s: float) -> None:
    """To half a period: where the robot had to wait, the actions' times and the robot's are not in step."""
    episode, began, tape = run(kind, CHUNK, 3, latency_s, 20.0, Prophet(inpaints=True))
    in_step = latency_s <= 0.3 and np.isclose(latency_s % PERIOD_S, 0.0)
    np.testing.assert_allclose(stale(tape), 0.0, atol=2e-3 if in_step else 0.052)
    if latency_s <= 0.3:
        # A new inference when 3 of the 8 are left, 5 actions after the observation.
        np.testing.assert_allclose(np.diff(began)[1:], 0.5, rtol=1e-9)
        assert episode.stall_s == pytest.approx(latency_s)


def test_a_chunk_that_is_past_when_it_arrives_leaves_the_robot_standing() -> None:
    episode, _, tape = run("aligned", 4, 2, 0.5, 5.0)
    assert all(action == IDLE for _, action in tape.commands[1:])
    assert episode.chunks == 0 and episode.stall_s == pytest.approx(5.0)
    assert np.isnan(episode.age_s)


def test_inpainting_alone_is_told_what_the_old_chunk_says_of_the_same_moments() -> None:
    policy = Prophet(inpaints=True)
    _, began, _ = run("rtc", CHUNK, 3, 0.2, 5.0, policy)
    assert policy.told[0] is None
    for at, told in zip(began[1:], policy.told[1:], strict=True):
        assert told is not None
        np.testing.assert_allclose(told.actions[:3, 0], at + PERIOD_S * np.arange(3), atol=2e-3)
        # Two actions run before the chunk is there, the third fades, of the rest the old chunk knows nothing.
        assert told.weights[:2].tolist() == [1.0, 1.0] and 0.0 < told.weights[2] < 1.0
        assert not told.weights[3:].any()
    for kind in ("synchronous", "append", "aligned", "roll_forward"):
        policy = Prophet(inpaints=True)
        run(kind, 4, 0, 0.1, 3.0, policy)
        assert set(policy.told) == {None}


def test_seams_are_measured_on_what_is_played() -> None:
    """A synchronous robot waits two periods for a chunk, so that its first action is three periods after the last."""
    episode = run("synchronous", 4, 0, 0.2, 5.0)[0]
    assert episode.seam_step == pytest.approx(0.3, abs=2e-3)
    # The third difference around a jump by two periods more than usual.
    assert episode.seam_jerk == pytest.approx(2 * 0.2 / PERIOD_S**3, rel=0.02)
    assert run("aligned", CHUNK, 3, 0.2, 5.0)[0].seam_step == pytest.approx(PERIOD_S, abs=2e-3)


def test_a_constant_latency_may_be_a_number_of_at_least_zero() -> None:
    world = MovingWorld(replace(TAPE, max_steps=30))
    episode = run_episode(world, Prophet(), Execution("append", 4, 2), 0.15, start=0, seed=0, episode=3)
    undefined = [episode.jerk, episode.path, episode.sent]
    assert astuple(episode)[:9] == astuple(run("append", 4, 2, 0.15, 3.0)[0])[:9]
    assert (episode.episode, episode.success, episode.score) == (3, False, 0.0)
    assert np.isnan(undefined).all()
    for wrong in (-0.1, nan):
        with pytest.raises(ConfigError, match="at least 0 s, got"):
            run("append", 4, 2, wrong, 1.0)


# --- windows ---

ACTION = np.ones(1, np.float32)


def robot(window: int, task: Task = TAPE) -> TimedRobot:
    world = MovingWorld(task)
    world.reset(0)
    return TimedRobot(world, Prophet(window).spec.observation)


def times(timed: TimedRobot, ahead: np.ndarray | None = None) -> list[float]:
    return [round(float(time), 3) for time in timed.window(ahead)["state"][:, 0]]


def test_a_window_is_of_control_periods_also_after_a_wait() -> None:
    timed = robot(3)
    seen = [times(timed)]
    for _ in range(3):
        timed.play(ACTION)
        seen.append(times(timed))
    assert seen == [[0, 0, 0], [0, 0, 0.1], [0, 0.1, 0.2], [0.1, 0.2, 0.3]]
    timed.sleep(0.13)  # samples at 0.3 and 0.4
    assert times(timed) == [0.2, 0.3, 0.43]  # not the 0.4 that was seen last
    timed.play(ACTION)
    assert times(timed) == [0.3, 0.43, 0.53] and timed.waited_s == pytest.approx(0.13)
    timed.sleep(1e6)
    assert timed.world.done and timed.now() == pytest.approx(timed.world.limit_s), "waiting ends with the episode"
    # Four actions between two inferences, so nothing is seen but observations a period apart.
    policy = Prophet(window=3)
    run("append", 4, 1, 0.1, 5.0, policy)
    for window in policy.windows[1:]:
        np.testing.assert_allclose(np.diff(window), PERIOD_S, rtol=1e-3)


def test_rolled_forward_every_observation_goes_through_the_actions_that_followed() -> None:
    """Each through its own next two: those played since, then those still to run."""
    rolls: list[list[float]] = []

    def noted(seen: object, actions: np.ndarray) -> dict[str, np.ndarray]:
        rolls.append(actions[:, 0].tolist())
        return {"state": np.zeros(1, np.float32)}

    plain, noting = robot(3), robot(3, replace(TAPE, roll_forward=noted))
    for value in range(4):
        for timed in (plain, noting):
            timed.play(np.full(1, value, np.float32))
    ahead = np.array([[10.0], [11.0]], np.float32)
    assert times(plain, ahead) == [0.4, 0.5, 0.6] and times(plain, ahead[:0]) == [0.2, 0.3, 0.4]
    noting.window(ahead)
    assert rolls == [[2, 3], [3, 10], [10, 11]]


# --- motion ---


def test_jerk_is_the_mean_norm_of_the_third_difference_over_the_period_cubed() -> None:
    t = 0.25 * np.arange(9)
    # Of a cubic, x = 2 t^3, y = -t^3, it is exact: (12, -6) per s^3.
    assert jerk(np.stack([2 * t**3, -(t**3)], axis=1), 0.25) == pytest.approx(np.hypot(12.0, 6.0))
    assert jerk(np.stack([t**2, 3 * t], axis=1), 0.25) == pytest.approx(0.0, abs=1e-12)
    # The mean of norms, not the norm of means: a motion that shakes to and fro has jerk.
    assert jerk(np.array([[0.0], [1.0], [0.0], [1.0], [0.0], [1.0], [0.0]]), 1.0) == 4.0
    assert all(np.isnan(jerk(np.zeros((rows, 2)), 0.1)) for rows in (0, 1, 3))
    assert path_length(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])) == 10.0
    assert path_length(np.zeros((1, 2))) == path_length(np.zeros((0, 2))) == 0.0
