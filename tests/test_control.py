"""The control loop in virtual time, where every tick is exact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from specact.agent import SpeculativePolicy
from specact.clock import VirtualClock
from specact.control import Journal, Tick, run_loop
from specact.errors import ConfigError
from specact.fallback import Fallback
from specact.gates import Always, Gate, Never
from specact.gates.forecast import Forecast
from specact.policies.bundle import Bundle
from specact.policies.policy import PolicySpec
from specact.policies.tokenizer import ActionTokenizer
from specact.types import CodeDistribution, OffloadTimes, Proposal, StepRecord, Window
from specact.verifiers import Miss, Verification

# Powers of two: sums of them are exact, and so is every assertion.
PERIOD = 0.0625
QUICK = PERIOD / 8
SPEC = PolicySpec(
    window=1, state=1, goal=0, image=None, codebooks=1, codes=2, chunk=2, actions=1, execute=2, overlap="drop",
    temperature=1.0, rate_hz=16.0,
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
        offsets = np.full((1, 2, 2, 1), 0.001 * window.state[-1, 0], np.float32)
        return CodeDistribution(np.array([[0.5, 0.5]]), offsets)


@dataclass
class Arm:
    """A robot that remembers when it was moved; its sensor fails where ``broken`` says so."""

    clock: VirtualClock
    broken: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.observed = 0
        self.moved: list[float] = []

    def observe(self) -> np.ndarray:
        self.observed += 1
        return np.array([np.nan if self.observed - 1 in self.broken else float(self.observed)])

    def act(self, action: np.ndarray) -> None:
        assert action.shape == (1,)
        self.moved.append(self.clock.now())


class Missing:
    """A verifier that always misses, for these causes in turn, after as long."""

    def __init__(self, clock: VirtualClock, *causes: str, wait: float = 0.0) -> None:
        self._clock, self._causes, self._wait = clock, itertools.cycle(causes), wait

    def prefetch(self, window: Window) -> bool:
        """Nothing leaves."""
        return False

    def pending(self, window: Window) -> bool:
        return False

    def verify(self, proposal: Proposal, rng: np.random.Generator) -> Verification | Miss:
        self._clock.sleep(self._wait)
        return Miss(cast(Any, next(self._causes)), OffloadTimes(network=self._wait))


def policy_of(clock: VirtualClock, delays: Sequence[float], gate: Gate | None = None, **options: Any) -> Any:
    table = np.array([[[0.1], [0.2]], [[-0.1], [-0.2]]], np.float32)
    tokenizer = ActionTokenizer(table, np.zeros(1, np.float32), np.ones(1, np.float32), "none", 2)
    draft, target = cast(Any, Slow(clock, delays)), cast(Any, Slow(clock, [0.0]))
    pair = Bundle(Path(), {}, SPEC, tokenizer, draft, target)
    return SpeculativePolicy(pair, gate or Never(), clock=clock, **options)


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


def test_a_bad_observation_leaves_the_robot_alone_for_that_tick() -> None:
    clock = VirtualClock()
    arm, journal = Arm(clock, frozenset({0, 3})), Journal(PERIOD)
    ticks, began = drive(arm, policy_of(clock, [QUICK]), 6, clock)
    for tick in ticks:
        journal.note(tick)
    assert [tick.acted for tick in ticks] == [False, True, True, False, True, True]
    # The chunk goes on where it was, and the inference waits for the next good observation.
    assert [tick.record is not None for tick in ticks] == [False, True, False, False, True, False]
    assert arm.moved == [began[1] + QUICK, began[2], began[4] + QUICK, began[5]]
    assert began == [i * PERIOD for i in range(6)]
    summary = journal.summary()
    assert summary["unusable"] == 2 and summary["inferences"] == 2 and summary["ticks"] == 6


def test_other_errors_of_a_robot_are_not_hidden() -> None:
    clock = VirtualClock()

    class Broken(Arm):
        def observe(self) -> np.ndarray:
            raise OSError("the cable is out")

    with pytest.raises(OSError, match="cable"):
        drive(Broken(clock), policy_of(clock, [QUICK]), 1, clock)


def test_a_robot_that_stopped_is_told_to_stand_still() -> None:
    clock = VirtualClock()
    still = np.array([0.7], np.float32)
    told: list[float] = []

    class Told(Arm):
        def act(self, action: np.ndarray) -> None:
            told.append(float(action[0]))

    policy = policy_of(
        clock, [QUICK], Always(), verifier=Missing(clock, "deadline"), fallback=Fallback("stop", stop_action=still)
    )
    ticks, _ = drive(Told(clock), policy, 4, clock)
    np.testing.assert_allclose(told, 0.7, rtol=1e-6)
    # The inference that stopped it is told of once.
    assert [tick.record is not None for tick in ticks] == [True, False, False, False]


@pytest.mark.parametrize("period", [0.0, -1.0, float("nan")])
def test_a_period_is_positive(period: float) -> None:
    clock = VirtualClock()
    with pytest.raises(ConfigError, match="must be positive, got"):
        run_loop(Arm(clock), policy_of(clock, [QUICK]), period, clock, lambda: True, lambda tick: None)


def test_the_journal_holds_what_happened() -> None:
    clock = VirtualClock()
    gate = Always()
    policy = policy_of(
        clock, [QUICK], gate,
        verifier=Missing(clock, "deadline", "disconnected", "deadline", wait=PERIOD), forecast=Forecast(gate),
    )  # fmt: skip
    journal = Journal(PERIOD)
    for tick in drive(Arm(clock), policy, 7, clock)[0]:
        journal.note(tick)
    stall = PERIOD + QUICK
    assert journal.summary() == {
        "ticks": 7,
        "overruns": 4,
        "unusable": 0,
        "longest_stall_ms": 1e3 * stall,
        "inferences": 4,
        "transmission_rate": 1.0,
        "sent_ahead": 1.0,
        "misses": {"deadline": 3, "disconnected": 1},
        "inference_ms": {"p50": 1e3 * stall, "p95": 1e3 * stall, "p99": 1e3 * stall},
    }


def test_quantiles_and_rates_are_those_of_the_inferences_alone() -> None:
    clock = VirtualClock()
    policy = policy_of(clock, [QUICK])
    policy.act(np.array([1.0]))
    record = policy.record
    assert isinstance(record, StepRecord)
    journal = Journal(PERIOD)
    for i in range(101):
        journal.note(Tick(0.0, 1e-3 * i, record, True))
        journal.note(Tick(0.0, 0.0, None, True))
    summary = journal.summary()
    assert summary["inferences"] == 101 and summary["ticks"] == 202
    assert summary["inference_ms"] == pytest.approx({"p50": 50.0, "p95": 95.0, "p99": 99.0})
    assert summary["overruns"] == sum(1e-3 * i > PERIOD for i in range(101))
    assert summary["transmission_rate"] == 0.0 and summary["sent_ahead"] == 0.0 and summary["misses"] == {}


def test_an_empty_journal_has_no_numbers_to_invent() -> None:
    summary = Journal(PERIOD).summary()
    assert summary["ticks"] == summary["inferences"] == 0 and summary["longest_stall_ms"] == 0.0
    assert summary["transmission_rate"] is None and summary["sent_ahead"] is None
    assert summary["inference_ms"] == {"p50": None, "p95": None, "p99": None}
