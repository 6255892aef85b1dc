"""The control loop in virtual time, where every tick is exact."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from specact.bundle.manifest import Manifest
from specact.errors import ConfigError, ObservationError
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import ActionTokenizer, PolicySpec
from specact.families.codes.sampling import CodeDistribution
from specact.gates import Always, Gate, Never
from specact.interrupts import Interrupted
from specact.observation import Window, vectors
from specact.pair import Pending
from specact.policy import SpeculativePolicy
from specact.rng import StepAddress
from specact.robot.loop import Journal, Tick, run_loop
from specact.safety import Fallback
from specact.types import Cause, Miss, OffloadTimes, Outcome, Proposal, VirtualClock

# Powers of two: sums of them are exact, and so is every assertion.
PERIOD = 0.0625
QUICK = PERIOD / 8
SPEC = PolicySpec(
    draft=vectors(1, state=1), target=vectors(1, state=1), codebooks=1, codes=2, chunk=2, actions=1, execute=2,
    overlap="drop", temperature=1.0, rate_hz=16.0,
)  # fmt: skip


@dataclass
class Slow:
    """A draft that takes the given times, one inference after the other, then the last one for ever."""

    clock: VirtualClock
    delays: Sequence[float]

    def __post_init__(self) -> None:
        self._next = itertools.chain(self.delays, itertools.repeat(self.delays[-1]))

    def infer(self, window: Window) -> CodeDistribution:
        self.clock.sleep(next(self._next))
        offsets = np.full((1, 2, 2, 1), 0.001 * window["state"][-1, 0], np.float32)
        return CodeDistribution(np.array([[0.5, 0.5]]), offsets)


class Arm:
    """A robot that remembers when it was moved; it shows what it is told, one thing per tick and then the last."""

    def __init__(self, clock: VirtualClock, *shown: Any) -> None:
        self.clock, self.shown = clock, list(shown)
        self.moved: list[float] = []
        self.actions: list[float] = []

    def observe(self) -> Any:
        return self.shown.pop(0) if len(self.shown) > 1 else self.shown[0] if self.shown else GOOD * len(self.moved)

    def act(self, action: np.ndarray) -> None:
        assert action.shape == (1,)
        self.moved.append(self.clock.now())
        self.actions.append(float(action[0]))


GOOD, NAN, WIDE = np.array([1.0]), np.array([np.nan]), np.zeros(2)


class Missing:
    """A verifier that always misses, for these causes in turn, after as long."""

    def __init__(self, clock: VirtualClock, *causes: Cause, wait: float = 0.0) -> None:
        self._clock, self._causes, self._wait = clock, itertools.cycle(causes), wait

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        cause = next(self._causes)

        def result() -> Miss:
            self._clock.sleep(self._wait)
            return Miss(cause, OffloadTimes(network=self._wait))

        return Pending(result)


TABLE = np.array([[[0.1], [0.2]], [[-0.1], [-0.2]]], np.float32)
TOKENIZER = ActionTokenizer(np.zeros(1, np.float32), np.ones(1, np.float32), TABLE, "none", 2)


def policy_of(clock: VirtualClock, delays: Sequence[float], gate: Gate | None = None, **options: Any) -> Any:
    draft, target = cast(Any, Slow(clock, delays)), cast(Any, Slow(clock, [0.0]))
    unwritten = Manifest(format=2, name="test", env="", spec={}, fingerprints={"target": ""})
    pair = CodeParts(Path(), unwritten, SPEC, {}, TOKENIZER, draft, target)
    return SpeculativePolicy(pair.pair(), gate or Never(), clock=clock, **options)


def drive(arm: Arm, policy: SpeculativePolicy, ticks: int, clock: VirtualClock) -> tuple[list[Tick], list[float]]:
    """The ticks, and when each began."""
    began: list[float] = []

    def proceed() -> bool:
        if len(began) < ticks:
            began.append(clock.now())
            return True
        return False

    noted: list[Tick] = []
    run_loop(arm, policy, PERIOD, clock, proceed, noted.append)
    return noted, began


def summary_of(ticks: Sequence[Tick]) -> dict[str, Any]:
    journal = Journal(PERIOD)
    for tick in ticks:
        journal.note(tick)
    return journal.summary()


def test_the_robot_moves_once_a_period() -> None:
    clock = VirtualClock(100.0)
    arm = Arm(clock)
    ticks, began = drive(arm, policy_of(clock, [QUICK]), 8, clock)
    assert began == [100.0 + i * PERIOD for i in range(8)]
    # Every second tick infers, and its action comes as much later; the others play on from the chunk.
    assert arm.moved == [start + (QUICK if i % 2 == 0 else 0.0) for i, start in enumerate(began)]
    assert [tick.stall_s for tick in ticks] == [QUICK, 0.0] * 4
    assert [tick.record is not None for tick in ticks] == [True, False] * 4
    assert all(tick.late_s == 0.0 and tick.acted for tick in ticks)


def test_an_overrun_is_neither_made_up_for_nor_followed_by_a_burst() -> None:
    clock = VirtualClock()
    # The second inference, in tick 2, takes three and a half periods.
    ticks, began = drive(Arm(clock), policy_of(clock, [QUICK, 3.5 * PERIOD, QUICK]), 7, clock)
    late = 5.5 * PERIOD
    assert began == [0.0, PERIOD, 2 * PERIOD, late, late + PERIOD, late + 2 * PERIOD, late + 3 * PERIOD]
    # The tick after it begins two and a half periods after its time, and says so; those after it are on time again.
    assert [tick.late_s for tick in ticks] == [0.0, 0.0, 0.0, 2.5 * PERIOD, 0.0, 0.0, 0.0]


def test_a_stall_of_exactly_a_period_costs_no_tick() -> None:
    clock = VirtualClock()
    _, began = drive(Arm(clock), policy_of(clock, [PERIOD]), 5, clock)
    assert began == [i * PERIOD for i in range(5)]


AGED = Fallback(max_chunk_age_ms=3e3 * PERIOD)


# ---- observations that cannot be used -------------------------------------------------------------------------------


UNUSABLE = [(None, "absent"), ({"states": GOOD}, "missing"), ("north", "type"), (WIDE, "shape"), (NAN, "not_finite")]


@pytest.mark.parametrize(("shown", "cause"), UNUSABLE)
def test_an_observation_that_cannot_be_used_ends_the_loop_at_first_and_later_holds_the_last_action(
    shown: Any, cause: str
) -> None:
    clock = VirtualClock()
    first = Arm(clock, shown, GOOD)
    with pytest.raises(ObservationError) as caught:
        drive(first, policy_of(clock, [QUICK]), 4, clock)
    assert caught.value.cause == cause and first.moved == []
    clock = VirtualClock()
    arm = Arm(clock, GOOD, GOOD, GOOD, shown, GOOD, GOOD)
    ticks, began = drive(arm, policy_of(clock, [QUICK]), 6, clock)
    assert [tick.unusable is not None for tick in ticks] == [False, False, False, True, False, False]
    assert len(arm.moved) == 6 and arm.actions[3] == arm.actions[2]
    # The chunk goes on where it was.
    twin = Arm(VirtualClock(), GOOD)
    drive(twin, policy_of(twin.clock, [QUICK]), 5, twin.clock)
    assert arm.actions[:3] + arm.actions[4:] == twin.actions
    assert [tick.record is not None for tick in ticks] == [True, False, True, False, False, True]
    assert began == [i * PERIOD for i in range(6)]
    summary = summary_of(ticks)
    assert summary["unusable"] == {cause: 1} and summary["inferences"] == 3 and summary["missed"] == {}
    assert summary["stood_still"] == 1 / 6


STILL = (0.75,)


# ---- how it ends ----------------------------------------------------------------------------------------------------


class Stopping(Arm):
    """An arm that can stop by itself, if it does not fail at it."""

    def __init__(self, clock: VirtualClock, *shown: Any, fails: bool = False) -> None:
        super().__init__(clock, *shown)
        self.stops, self.fails = 0, fails

    def stop(self) -> None:
        self.stops += 1
        if self.fails:
            raise OSError("the brake is stuck")


def stopping_policy(clock: VirtualClock) -> SpeculativePolicy:
    policy: SpeculativePolicy = policy_of(clock, [QUICK], fallback=Fallback(stop_action=STILL))
    return policy


def broken_after(ticks: int, error: BaseException) -> Callable[[Tick], None]:
    """Something that raises in the given tick."""
    count = itertools.count(1)

    def note(tick: Tick) -> None:
        if next(count) == ticks:
            raise error

    return note


@pytest.mark.parametrize("error", [OSError("the cable is out"), KeyboardInterrupt(), SystemExit(3)])
def test_every_error_ends_in_the_stop_action(error: BaseException) -> None:
    clock = VirtualClock()
    arm = Arm(clock, GOOD)
    with pytest.raises(type(error)) as caught:
        run_loop(arm, stopping_policy(clock), PERIOD, clock, lambda: True, broken_after(3, error))
    assert caught.value is error
    assert len(arm.actions) == 4 and arm.actions[-1] == 0.75


def test_at_the_end_of_its_time_a_robot_stops_by_its_own_stop_or_the_stop_action_or_not_at_all() -> None:
    clock = VirtualClock()
    arm, bare_arm, stopping_arm = Arm(clock, GOOD), Arm(clock, GOOD), Stopping(clock, GOOD)
    drive(arm, stopping_policy(clock), 3, clock)
    drive(bare_arm, policy_of(clock, [QUICK]), 3, clock)
    drive(stopping_arm, stopping_policy(clock), 3, clock)
    assert arm.actions[3:] == [0.75] and len(bare_arm.actions) == 3
    assert stopping_arm.stops == 1 and len(stopping_arm.actions) == 3 and 0.75 not in stopping_arm.actions


def test_where_it_fails_the_stop_action_is_sent_and_the_first_error_is_the_one_that_is_raised() -> None:
    clock = VirtualClock()
    arm = Stopping(clock, GOOD, fails=True)
    with pytest.raises(OSError, match="brake"):
        drive(arm, stopping_policy(clock), 3, clock)
    assert arm.stops == 1 and arm.actions[3:] == [0.75]
    first = ValueError("the first error")
    with pytest.raises(ValueError, match="the first error") as caught:
        run_loop(arm, stopping_policy(clock), PERIOD, clock, lambda: True, broken_after(1, first))
    assert caught.value is first and "could not be stopped after this: OSError: the brake" in first.__notes__[0]
    assert arm.stops == 2 and arm.actions[-1] == 0.75


def test_where_a_robot_cannot_even_say_how_it_stops_the_stop_action_is_sent() -> None:
    class Odd(Arm):
        @property
        def stop(self) -> Any:
            raise OSError("the driver is gone")

    clock = VirtualClock()
    arm = Odd(clock, GOOD)
    with pytest.raises(OSError, match="driver"):
        drive(arm, stopping_policy(clock), 3, clock)
    assert arm.actions == [0.75]


def test_a_signal_that_the_robots_own_code_swallows_ends_the_loop_as_well() -> None:
    class Deaf(Stopping):
        def observe(self) -> Any:
            with suppress(BaseException):
                signal.raise_signal(signal.SIGTERM)
            return super().observe()

    clock = VirtualClock()
    arm, ticks = Deaf(clock, GOOD), iter(range(5))
    with pytest.raises(Interrupted, match="SIGTERM"):
        run_loop(arm, stopping_policy(clock), PERIOD, clock, lambda: next(ticks, None) is not None, lambda tick: None)
    assert arm.stops == 1 and len(arm.actions) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_the_loop_and_waits_while_the_robot_stops(number: signal.Signals) -> None:
    clock = VirtualClock()
    before = signal.getsignal(number)
    arm = Stopping(clock, GOOD)

    class Impatient(Stopping):
        def stop(self) -> None:
            signal.raise_signal(number)
            super().stop()

    with pytest.raises(Interrupted, match=number.name) as caught:
        run_loop(arm, stopping_policy(clock), PERIOD, clock, lambda: True, lambda tick: signal.raise_signal(number))
    assert caught.value.exit_status == 128 + number and arm.stops == 1
    # One comes while it stops at the end of its time; another one while it stops for the first.
    for twice in (False, True):
        impatient, ticks = Impatient(clock, GOOD), iter(range(2))

        def note(tick: Tick, twice: bool = twice) -> None:
            if twice:
                signal.raise_signal(number)

        def proceed(ticks: Iterator[int] = ticks) -> bool:
            return next(ticks, None) is not None

        with pytest.raises(Interrupted):
            run_loop(impatient, stopping_policy(clock), PERIOD, clock, proceed, note)
        assert impatient.stops == 1
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    clock = VirtualClock()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ticks = iter(range(2))
        run_loop(
            Arm(clock, GOOD), policy_of(clock, [QUICK]), PERIOD, clock, lambda: next(ticks, None) is not None,
            lambda tick: signal.raise_signal(signal.SIGHUP),
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- chunks that are too old ----------------------------------------------------------------------------------------


def test_after_a_stall_the_rest_of_an_old_chunk_is_dropped() -> None:
    clock = VirtualClock()

    class Stalling(Arm):
        def act(self, action: np.ndarray) -> None:
            super().act(action)
            if len(self.actions) == 3:
                clock.sleep(20 * PERIOD)

    arm = Stalling(clock, GOOD)
    ticks, _ = drive(arm, policy_of(clock, [QUICK], fallback=AGED), 8, clock)
    # Ticks 0 and 2 began a chunk of two; the stall in tick 2 costs the rest of its chunk.
    assert [tick.record is not None for tick in ticks] == [True, False, True, True, False, True, False, True]
    # Tick 3 began 20 periods and an inference after tick 2, instead of one.
    assert summary_of(ticks)["lost_periods"] == 19 and summary_of(ticks)["stood_still"] == 19 / 27
    assert summary_of(ticks)["longest_lateness_ms"] == 1e3 * (19 * PERIOD + QUICK)
    unlimited = Stalling(clock, GOOD)
    ticks, _ = drive(unlimited, policy_of(clock, [QUICK]), 8, clock)
    assert [tick.record is not None for tick in ticks] == [True, False] * 4


def test_an_action_that_took_too_long_to_choose_is_not_sent_but_the_next_one_is() -> None:
    clock = VirtualClock()
    arm = Arm(clock, GOOD)
    policy = policy_of(clock, [QUICK, 20 * PERIOD, QUICK], fallback=AGED)
    ticks, began = drive(arm, policy, 6, clock)
    assert [tick.acted for tick in ticks] == [True, True, False, True, True, True]
    assert len(arm.actions) == 5
    # It is chosen anew at once.
    assert began[3] == began[2] + 20 * PERIOD and ticks[3].record is not None
    summary = summary_of(ticks)
    assert summary["too_old"] == 1 and summary["stood_still"] == (1 + summary["lost_periods"]) / (
        6 + summary["lost_periods"]
    )
    # Where every inference takes that long, every second action is sent.
    arm = Arm(clock, GOOD)
    ticks, _ = drive(arm, policy_of(clock, [20 * PERIOD], fallback=AGED), 6, clock)
    assert [tick.acted for tick in ticks] == [False, True] * 3 and len(arm.actions) == 3


def test_a_robot_that_stopped_is_told_to_stand_still() -> None:
    clock = VirtualClock()
    arm, fallback = Arm(clock, GOOD), Fallback("stop", None, STILL)
    policy = policy_of(clock, [QUICK], Always(), verifier=Missing(clock, "deadline"), fallback=fallback)
    ticks, _ = drive(arm, policy, 4, clock)
    assert set(arm.actions) == {0.75}
    # The inference that stopped it is told of once.
    assert [tick.record is not None for tick in ticks] == [True, False, False, False]


def test_a_period_is_positive() -> None:
    clock = VirtualClock()
    for period in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="period"):
            run_loop(Arm(clock), policy_of(clock, [QUICK]), period, clock, lambda: True, lambda tick: None)


def test_the_journal_holds_what_happened() -> None:
    clock = VirtualClock()
    verifier = Missing(clock, "deadline", "disconnected", "deadline", wait=PERIOD)
    policy = policy_of(clock, [QUICK], Always(), verifier=verifier)
    stall = PERIOD + QUICK
    ticks = drive(Arm(clock), policy, 7, clock)[0]
    assert [tick.seam for tick in ticks] == [tick.record is not None for tick in ticks]
    summary = summary_of(ticks)
    assert summary.pop("seams")["largest_step_within"] == pytest.approx(0.1)
    assert summary == {
        "periods": 7,
        # Three ticks began late, by an eighth of a period each: none is lost.
        "lost_periods": 0,
        "stood_still": 0.0,
        "longest_lateness_ms": 1e3 * QUICK,
        "longest_observation_ms": 0.0,
        "longest_stall_ms": 1e3 * stall,
        "unusable": {},
        "too_old": 0,
        "inferences": 4,
        "sent": 1.0,
        "missed": {"deadline": 3, "disconnected": 1},
        "inference_ms": {"p50": 1e3 * stall, "p95": 1e3 * stall, "p99": 1e3 * stall},
    }


def test_the_journal_of_inferences_and_lost_ticks() -> None:
    clock = VirtualClock()
    policy = policy_of(clock, [QUICK])
    policy.act(np.array([1.0]))
    empty = summary_of([])
    assert empty["periods"] == empty["inferences"] == empty["lost_periods"] == 0 and empty["longest_stall_ms"] == 0.0
    assert empty["sent"] is None and empty["inference_ms"] == {"p50": None, "p95": None, "p99": None}
    ticks = [tick for i in range(101) for tick in (Tick(0.0, 0.0, 1e-3 * i, policy.record), Tick(0.0, 0.0, 0.0, None))]
    summary = summary_of([*ticks, *(Tick(late * PERIOD, 0.0, 0.0, None) for late in (0.5, 0.0, 0.75, 2.0))])
    assert summary["inferences"] == 101 and summary["periods"] == 206 and summary["lost_periods"] == 3
    assert summary["inference_ms"] == pytest.approx({"p50": 50.0, "p95": 95.0, "p99": 99.0})
    assert summary["sent"] == 0.0 and summary["missed"] == {}
    assert summary["longest_lateness_ms"] == 2e3 * PERIOD
