"""A chunk policy on a robot: the same schedule as in the simulator, and every guarantee of the control loop."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.lab.rollout.tape import CHUNK, IDLE, PERIOD_S, TAPE, Prophet, Tape

from specact.errors import BundleError, ConfigError
from specact.execution.schedule import Execution, Kind
from specact.families.chunks.policy import Chunk, Inpainting
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.episode import run_episode
from specact.observation import Window
from specact.pair import Pending
from specact.rng import StepAddress
from specact.robot.chunks import (
    ActionRange,
    ChunkRunner,
    ChunkSource,
    Finished,
    Inference,
    InferenceThread,
    LocalSource,
)
from specact.robot.loop import Journal, Tick, run_loop
from specact.safety import EXECUTE_DRAFT, Fallback
from specact.types import Clock, Miss, OffloadTimes, VirtualClock

STILL = (IDLE,)


class Timed(Inference):
    """Inferences that take the given time of a clock, one after the other, then the last for ever."""

    def __init__(self, source: ChunkSource, clock: Any, *latencies: float) -> None:
        super().__init__(source)
        self._clock, self._latencies = clock, list(latencies)
        self.began: list[float] = []
        self._there_s = -np.inf

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Pending[Finished]:
        took = self._latencies.pop(0) if len(self._latencies) > 1 else self._latencies[0]
        self.began.append(self._clock.now())
        self._there_s = self._clock.now() + took
        finished = Finished(address, self.source.ask(window, address, inpainting), took)
        return Pending(lambda: finished, self._done)

    def _done(self) -> bool:
        return bool(self._there_s <= self._clock.now() + 1e-9)

    def wait(self, seconds: float) -> bool:
        self._clock.sleep(max(0.0, min(seconds, self._there_s - self._clock.now())))
        return self._done()


# ---- the schedule is the simulator's ---------------------------------------------------------------------------------


class Within(Clock):
    """A robot in a moving world, and the world's clock: while the loop sleeps, the world goes on under its action."""

    def __init__(self, world: MovingWorld) -> None:
        self._world, self._action = world, np.array(STILL, np.float32)

    def observe(self) -> dict[str, NDArray[np.float32]]:
        return dict(self._world.observe())

    def act(self, action: NDArray[np.float32]) -> None:
        self._action = action

    def roll_forward(self, observation: Any, actions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        assert TAPE.roll_forward is not None
        return TAPE.roll_forward(observation, actions)

    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.advance(seconds, self._action)


@pytest.mark.parametrize(
    ("kind", "execute", "overlap"),
    [
        ("synchronous", 4, 0), ("append", 4, 2), ("append", 4, 4), ("aligned", CHUNK, 3), ("aligned", 4, 2),
        ("rtc", CHUNK, 3), ("roll_forward", 4, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("latency_s", [0.0, 0.03, 0.12, 0.2, 0.33, 0.61])
def test_robot_and_simulator_play_the_same_actions_at_the_same_times(
    kind: Kind, execute: int, overlap: int, latency_s: float
) -> None:
    """And show the policy the same windows, and tell it the same of the chunk in play."""
    execution, task = Execution(kind, execute, overlap), replace(TAPE, max_steps=60)
    simulated, driven = Prophet(2, inpaints=True), Prophet(2, inpaints=True)
    world = MovingWorld(task)
    episode = run_episode(world, simulated, execution, latency_s, start=0, seed=0, episode=0)
    assert isinstance(world.env, Tape)
    wanted = [command for command in world.env.commands[1:] if command[1] != IDLE]

    world = MovingWorld(task)
    world.reset(0)
    robot = Within(world)
    runner = ChunkRunner(
        Timed(LocalSource(driven), robot, latency_s), execution, roll_forward=robot.roll_forward,
        idle="stop_action", fallback=Fallback(stop_action=STILL), clock=robot,
    )  # fmt: skip
    run_loop(robot, runner, PERIOD_S, robot, lambda: not world.done, lambda tick: None)
    assert isinstance(world.env, Tape)
    played = [command for command in world.env.commands[1:] if command[1] != IDLE]
    assert played == wanted
    assert np.array_equal(driven.windows, simulated.windows)
    assert len(driven.told) == len(simulated.told)
    for mine, theirs in zip(driven.told, simulated.told, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
        else:
            assert np.array_equal(mine.actions, theirs.actions) and np.array_equal(mine.weights, theirs.weights)
    assert runner.counts["chunks"] == episode.chunks
    if episode.chunks:
        assert runner.summary()["observation_age_ms"] == pytest.approx(1e3 * episode.age_s)


# ---- the control loop, in virtual time -------------------------------------------------------------------------------

PERIOD = 0.125  # powers of two: sums of them are exact


@dataclass
class Arm:
    """A robot that remembers what it was told when; its sensor fails where ``broken`` says so."""

    clock: VirtualClock
    broken: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.observed = 0
        self.moved: list[tuple[float, float]] = []

    def observe(self) -> Any:
        self.observed += 1
        return {"state": None if self.observed - 1 in self.broken else np.array([self.clock.now()])}

    def act(self, action: NDArray[np.float32]) -> None:
        self.moved.append((self.clock.now(), float(action[0])))


class Answers:
    """A policy whose chunk number i is ``10 i, 10 i + 1, ...``; None stands for an answer that is not finite."""

    inpaints = False

    def __init__(self, *answers: Miss | BaseException | None) -> None:
        self.spec = Prophet().spec
        self._answers = dict(enumerate(answers))
        self.requests = 0

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        self.requests += 1
        answer = self._answers.get(self.requests - 1)
        if isinstance(answer, BaseException):
            raise answer
        return answer or (10.0 * self.requests + np.arange(CHUNK)[:, None]).astype(np.float32)


def drive(
    arm: Arm, source: ChunkSource, execution: Execution, ticks: int, *latencies: float, **options: Any
) -> tuple[ChunkRunner, list[Tick]]:
    clock, noted = arm.clock, list[Tick]()
    runner = ChunkRunner(Timed(source, clock, *latencies), execution, period_s=PERIOD, clock=clock, **options)
    run_loop(arm, runner, PERIOD, clock, lambda: len(noted) < ticks and not runner.safety.stopped, noted.append)
    return runner, noted


def test_a_synchronous_robot_holds_its_last_action_while_it_thinks_and_goes_on_when_it_knows() -> None:
    arm = Arm(VirtualClock())
    runner, ticks = drive(arm, Answers(), Execution("synchronous", 2), 8, PERIOD / 4)
    quarter = PERIOD / 4
    # Before the first action nothing is sent; a tick begins as soon as the chunk is there.
    assert arm.moved == [
        (quarter, 10.0), (quarter + PERIOD, 11.0), (quarter + 2 * PERIOD, 11.0), (2 * quarter + 2 * PERIOD, 20.0),
        (2 * quarter + 3 * PERIOD, 21.0), (2 * quarter + 4 * PERIOD, 21.0), (3 * quarter + 4 * PERIOD, 30.0),
    ]  # fmt: skip
    assert runner.counts == {"inferences": 3, "chunks": 3, "idle": 3}
    assert all(tick.late_s == 0.0 for tick in ticks)


def test_without_an_answer_a_robot_that_can_stop_holds_its_last_action_until_it_is_too_old() -> None:
    """Then it stands still: by its stop action, for as long as there is no other; or by its own stop, for good."""

    class Stopping(Arm):
        def stop(self) -> None:
            self.moved.append((self.clock.now(), np.inf))

    aged = Fallback(max_chunk_age_ms=4e3 * PERIOD)
    for (kind, fallback), idle in itertools.product(
        ((Stopping, aged), (Stopping, EXECUTE_DRAFT), (Arm, replace(aged, stop_action=STILL)), (Arm, aged)),
        ("hold_last", "nothing"),
    ):
        arm, options = kind(VirtualClock()), {"deadline_s": 2 * PERIOD} if fallback is EXECUTE_DRAFT else {}
        shared = {"fallback": fallback, "idle": idle}
        runner, ticks = drive(arm, Answers(), Execution("synchronous", 2), 16, 0.0, 1e9, **options, **shared)
        times, done = zip(*arm.moved, strict=True)
        held = done.count(11.0)
        stands = [np.inf] if kind is Stopping else [IDLE] * (len(done) - 1 - held if fallback.stop_action else 0)
        assert [*done] == [10.0, *[11.0] * held, *stands]
        # With nothing to send, the last action stays in force for as long as it would be sent again.
        until = 7 if fallback is EXECUTE_DRAFT else 6
        assert held == (until - 1 if idle == "hold_last" else 1)
        assert times == tuple(k * PERIOD for k in (*range(1 + held), *range(until, until + len(stands))))
        assert runner.safety.stopped == (kind is Stopping) == (len(ticks) < 16)


def test_an_unusable_observation_holds_the_last_action_and_the_time_of_aligned_actions_goes_on() -> None:
    for execution, then in ((Execution("aligned", 6, 1), 14.0), (Execution("append", 6, 1), 13.0)):
        arm = Arm(VirtualClock(), frozenset({3}))
        _, ticks = drive(arm, Answers(), execution, 5, 0.0)
        assert [action for _, action in arm.moved] == [10, 11, 12, 12, then]
        assert [tick.unusable is not None for tick in ticks] == [False, False, False, True, False]


def test_a_model_of_the_robot_that_fails_stops_it_like_unusable_observations() -> None:
    arm = Arm(VirtualClock())
    options = {"roll_forward": lambda seen, actions: {"state": np.array([np.nan])}}
    fallback = Fallback(max_consecutive_misses=2, stop_action=STILL)
    runner, ticks = drive(arm, Answers(), Execution("roll_forward", 4, 2), 20, PERIOD, fallback=fallback, **options)
    assert runner.safety.stopped and sum(tick.unusable is not None for tick in ticks) == 3
    assert arm.moved[-1][1] == IDLE


LOST = Miss("overloaded", OffloadTimes())


def test_misses_are_counted_by_cause_and_the_next_control_step_asks_again() -> None:
    arm, source = Arm(VirtualClock()), Answers(None, LOST, Miss("invalid", OffloadTimes()))
    runner, _ = drive(arm, source, Execution("append", 2), 7, 0.0)
    assert [action for _, action in arm.moved] == [10, 11, 11, 11, 40, 41, 50]
    assert runner.summary()["missed"] == {"overloaded": 1, "invalid": 1} and runner.counts["inferences"] == 3


def test_an_inference_beyond_its_deadline_is_a_miss_and_its_chunk_is_not_used() -> None:
    arm = Arm(VirtualClock())
    runner, _ = drive(arm, Answers(), Execution("append", 2), 14, 0.0, 5 * PERIOD, 0.0, deadline_s=2 * PERIOD)
    # Chunk 2 comes after two deadlines; chunk 3 is asked for when it is there.
    assert [action for _, action in arm.moved][:9] == [10, 11, 11, 11, 11, 11, 11, 30, 31]
    assert runner.summary()["missed"] == {"deadline": 1}


def test_a_chunk_that_ends_between_two_control_steps_may_still_be_late() -> None:
    arm = Arm(VirtualClock())
    runner, _ = drive(arm, Answers(), Execution("append", 2), 8, 0.0, 1.8 * PERIOD, deadline_s=1.5 * PERIOD)
    assert runner.summary()["missed"].keys() == {"deadline"} and {action for _, action in arm.moved} == {10, 11}


def test_after_a_suspension_a_chunk_of_before_is_not_played() -> None:
    arm = Arm(VirtualClock())
    runner = ChunkRunner(Inference(Answers()), Execution("append", CHUNK), period_s=PERIOD, clock=arm.clock)
    played = list[NDArray[np.float32] | None]()
    for step in range(6):
        if step == 3:
            arm.clock.sleep(0.5 * PERIOD)
            runner.safety.expire()
        played.append(runner.act(arm.observe()))
        arm.clock.sleep(PERIOD)
    assert [None if action is None else int(action[0]) for action in played] == [10, 11, 12, 20, 21, 22]


def test_what_is_left_of_an_old_chunk_is_dropped() -> None:
    """The process is suspended after two ticks; when it wakes, it looks again before it moves."""

    class Suspended(Arm):
        def act(self, action: NDArray[np.float32]) -> None:
            super().act(action)
            self.clock.sleep(10.0 * (len(self.moved) == 2))

    for limit_ms, then in ((1e3, 20.0), (None, 12.0)):
        arm = Suspended(VirtualClock())
        drive(arm, Answers(), Execution("append", 6, 0), 3, 0.0, fallback=Fallback(max_chunk_age_ms=limit_ms))
        assert [action for _, action in arm.moved] == [10.0, 11.0, then]


def test_after_an_outage_only_a_chunk_of_a_later_observation_resumes() -> None:
    """The second chunk takes six periods. Held for three, the robot stands still, and then that chunk is too old.

    Without the bound it is played: what it was meant for is six periods ago.
    """
    bounded = [10, 11, 11, 11, 11, IDLE, IDLE, IDLE, 30, 31]
    for most, played in ((3, bounded), (None, [10, 11, 11, 11, 11, 11, 11, 11, 20, 21])):
        arm, fallback = Arm(VirtualClock()), Fallback(stop_action=STILL, max_consecutive_idle=most)
        execution, latencies = Execution("append", 2), (0.0, 6 * PERIOD, 0.0)
        runner, ticks = drive(arm, Answers(), execution, 10, *latencies, fallback=fallback)
        assert [action for _, action in arm.moved][:10] == played
        assert runner.summary()["missed"] == ({} if most is None else {"stale": 1})
        assert runner.safety.outages == (most is not None)
        assert runner.summary()["starved"] == {"inference": 6}
        assert [tick.starved_by for tick in ticks] == [*[""] * 2, *["inference"] * 6, *[""] * 2]
        assert [at for at, tick in enumerate(ticks) if tick.seam] == [0, 8]


def test_an_idle_period_is_counted_by_the_last_miss_before_it() -> None:
    arm, latencies = Arm(VirtualClock()), (0.0, 0.0, 2 * PERIOD)
    runner, _ = drive(arm, Answers(None, LOST), Execution("append", 2), 6, *latencies)
    assert [action for _, action in arm.moved][:6] == [10, 11, 11, 11, 11, 30]
    assert runner.summary()["starved"] == {"overloaded": 3} and runner.summary()["idle"] == 3


def test_the_next_chunk_continues_what_is_held_meanwhile() -> None:
    """Real-time chunking after the chunk has run out: the last command is the prefix, for as long as a reply takes."""
    for idle, committed in (("hold_last", 2), ("stop_action", 0)):
        arm, policy = Arm(VirtualClock()), Prophet(inpaints=True)
        fallback = Fallback(stop_action=STILL)
        drive(arm, LocalSource(policy), Execution("rtc", 4), 12, 2 * PERIOD, idle=idle, fallback=fallback)
        told, last = policy.told[1], arm.moved[3][1]
        assert policy.told[0] is None and told is not None
        assert told.committed[:, 0].tolist() == [last] * committed


def test_chunks_too_late_for_any_of_their_actions_are_misses() -> None:
    for execution, age_ms in ((Execution("aligned", 4, 3), None), (Execution("append", 4, 3), 5e3 * PERIOD)):
        arm, fallback = Arm(VirtualClock()), Fallback("execute_draft", 1, STILL, age_ms)
        runner, _ = drive(arm, Answers(), execution, 30, 0.0, 6 * PERIOD, fallback=fallback)
        assert runner.safety.stopped and runner.summary()["missed"] == {"deadline": 2}
        assert arm.moved[-1][1] == IDLE and runner.counts["chunks"] == 1
        # One that is of use in between begins the count anew.
        arm = Arm(VirtualClock())
        late_and_soon = (0.0, 6 * PERIOD, 0.0, 6 * PERIOD, 0.0)
        runner, _ = drive(arm, Answers(), execution, 30, *late_and_soon, fallback=fallback)
        assert not runner.safety.stopped and runner.summary()["missed"] == {"deadline": 2}


def test_a_robot_may_change_the_action_that_it_is_given() -> None:
    class InPlace(Arm):
        def act(self, action: NDArray[np.float32]) -> None:
            action *= 2.0
            super().act(action)

    plain, doubling = Arm(VirtualClock(), frozenset({3})), InPlace(VirtualClock(), frozenset({3}))
    for arm in (plain, doubling):
        drive(arm, Answers(), Execution("synchronous", 2), 8, PERIOD / 4)
    assert doubling.moved == [(at, 2.0 * action) for at, action in plain.moved]


# A library may raise what is no Exception; if that ended the thread alone, the last action would be held for ever.
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_an_error_of_the_policy_ends_the_loop_in_a_stop(error: type[BaseException]) -> None:
    arm = Arm(VirtualClock())
    with InferenceThread(Answers(None, error("out of memory"))) as inference:
        runner = ChunkRunner(inference, Execution("append", 2), period_s=PERIOD, fallback=Fallback(stop_action=STILL))
        with pytest.raises(RuntimeError, match="out of memory"):
            run_loop(arm, runner, PERIOD, arm.clock, lambda: True, lambda tick: None)
    assert arm.moved[-1][1] == IDLE


def test_another_episode_uses_nothing_of_the_last_one() -> None:
    arm = Arm(VirtualClock())
    source = Answers()
    runner = ChunkRunner(Timed(source, arm.clock, PERIOD), Execution("append", 4), period_s=PERIOD, clock=arm.clock)
    assert runner.act(arm.observe()) is None
    runner.reset(episode=1)
    # Of the chunk that was under way nothing is played, and the next is asked for when it is out of the way.
    for expected in (None, None, 20.0):
        action = runner.act(arm.observe())
        assert action is None if expected is None else action is not None and action[0] == expected
        arm.clock.sleep(PERIOD)
    assert source.requests == 2


# ---- inference beside the loop ---------------------------------------------------------------------------------------


class Held(Prophet):
    """A policy whose every inference waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Semaphore(1)

    def infer(
        self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None
    ) -> NDArray[np.float32]:
        assert self.go.acquire(timeout=60.0)
        return super().infer(window, rng, inpainting)


@pytest.mark.usefixtures("nothing_left")
def test_the_loop_goes_on_while_the_policy_thinks() -> None:
    policy, arm, noted = Held(), Arm(VirtualClock()), list[Tick]()
    with InferenceThread(LocalSource(policy)) as inference:
        runner = ChunkRunner(inference, Execution("append", 4, 4), period_s=0.01, clock=arm.clock)

        def proceed() -> bool:
            # The second inference is held for as long as the robot takes to play the first chunk and to idle.
            if len(noted) == 60:
                policy.go.release()
            return runner.counts["chunks"] < 2

        run_loop(arm, runner, 0.01, arm.clock, proceed, noted.append)
        policy.go.release()  # the third one
    assert runner.counts["chunks"] == 2 and runner.counts["idle"] > 40 and len(noted) > 60


def test_a_loop_may_wait_for_its_inferences() -> None:
    """Where the world waits as well nothing is idle but what was missed, as if inferences took no time."""
    runs = []
    for inline in (True, False):
        arm, source = Arm(VirtualClock()), Answers(None, Miss("deadline", OffloadTimes()))
        inference = Inference(source) if inline else Timed(source, arm.clock, 0.0)
        runner = ChunkRunner(inference, Execution("synchronous", 3), period_s=PERIOD, clock=arm.clock)
        played = []
        for _ in range(12):
            played.append(runner.act(arm.observe()))
            arm.clock.sleep(PERIOD)
        assert not runner.wait(60.0)
        runs.append((np.array(played).tolist(), dict(runner.counts)))
    assert runs[0] == runs[1] and runs[0][1]["deadline"] == runs[0][1]["idle"] == 1


# ---- what does not fit is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"execution": Execution("append", 9)}, "execute"),
        ({"execution": Execution("rtc", 4)}, "inpaint"),
        ({"execution": Execution("roll_forward", 4)}, "roll_forward"),
        ({"idle": "sleep"}, "idle"),
        ({"idle": "stop_action"}, "stop_action"),
        ({"fallback": Fallback(stop_action=(0.0,) * 2)}, "shape"),
        ({"deadline_s": 0.0}, "deadline_s"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], named: str) -> None:
    source = Timed(LocalSource(Prophet()), VirtualClock(), 0.0)
    with pytest.raises(ConfigError, match=named):
        ChunkRunner(source, **{"execution": Execution("append", 4)} | options)


@pytest.mark.parametrize(("first", "sent", "misses"), [(1.5, 1.0, {}), (1e30, None, {"invalid": 1})])
def test_a_chunk_far_outside_the_range_is_a_miss(first: float, sent: float | None, misses: dict[str, int]) -> None:
    arm, source = Arm(VirtualClock()), Prophet()
    source.infer = lambda *arguments: np.full((8, 1), first, np.float32)  # type: ignore[method-assign]
    inference, limits = Timed(LocalSource(source), arm.clock, 0.0), ActionRange([-1.0], [1.0])
    runner = ChunkRunner(inference, Execution("synchronous", 1), action_range=limits, clock=arm.clock)
    action = runner.act(arm.observe())
    assert (None if action is None else float(action[0])) == sent and runner.summary()["missed"] == misses


def test_an_answer_of_another_shape_or_that_is_not_finite_is_not_played() -> None:
    class Bad(Prophet):
        def __init__(self, answer: NDArray[np.float32]) -> None:
            super().__init__()
            self.answer = answer

        def infer(self, *arguments: object) -> NDArray[np.float32]:
            return self.answer

    window, address = Prophet().spec.observation.zeros(), StepAddress(0, 0, 0, 0)
    with pytest.raises(BundleError, match=r"shape \(8, 1\), it gave \(7, 1\)"):
        LocalSource(Bad(np.zeros((7, 1), np.float32))).ask(window, address)
    outcome = LocalSource(Bad(np.full((8, 1), np.nan, np.float32))).ask(window, address)
    assert isinstance(outcome, Miss) and outcome.cause == "invalid"


def test_the_summary_counts_what_there_was() -> None:
    arm, journal = Arm(VirtualClock()), Journal(PERIOD)
    runner, ticks = drive(arm, Answers(None, LOST), Execution("append", 2), 6, PERIOD)
    for tick in ticks:
        journal.note(tick)
    summary = journal.summary() | runner.summary()
    assert summary["periods"] == 6 and summary["inferences"] == 2 and summary["missed"] == {"overloaded": 1}
    assert summary["stood_still"] == summary["idle"] / 6 > 0.0
    assert summary["inference_ms"]["p50"] == pytest.approx(1e3 * PERIOD)
