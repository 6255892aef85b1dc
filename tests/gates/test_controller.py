"""A controller holds its budget whatever the scores do, with the bound that it promises."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.families.codes.sampling import CodeDistribution, Drafted
from specact.gates import ActionDeviation, Gate, Never, Random
from specact.gates import controller as controller_module
from specact.gates.controller import Budget, Controller, LatencyBudget, LinkBudget, RateBudget
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import OffloadTimes, Proposal, StageTimes, StepRecord

T = 3000
STEP = Proposal(
    Window({"state": np.zeros((1, 1), np.float32)}),
    np.zeros((1, 1), np.float32),
    Drafted(CodeDistribution(np.ones((1, 1)), np.zeros((1, 1, 1, 1), np.float32)), np.zeros(1, np.int64)),
)
BLANK = StepRecord(
    StepAddress(0, 0, 0, 0), STEP, cast(Any, None), None, STEP.actions, np.zeros(1, np.uint8),
    StageTimes(0, 0, OffloadTimes(), 0),
)  # fmt: skip


class Given(Gate):
    """A gate whose scores are given."""

    def __init__(self, scores: Iterable[float], **limits: Any) -> None:
        super().__init__(math.inf, **({"force_first": False} | limits))
        self._scores = iter(scores)
        self.resets = 0

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return float(next(self._scores))

    def reset(self) -> None:
        super().reset()
        self.resets += 1


def drive(
    gate: Gate,
    steps: int = T,
    *,
    skip_s: Callable[[int], float] = lambda t: 0.0,
    send_s: Callable[[int], float] = lambda t: 0.0,
    episode: int | None = None,
) -> Iterator[StepRecord]:
    """One inference after the other, with what each took; a new episode every so many."""
    rng = np.random.default_rng(7)
    for t in range(steps):
        if episode is not None and t % episode == 0:
            gate.reset()
        decision = gate.decide(STEP, rng)
        took = send_s(t) if decision.transmit else skip_s(t)
        record = replace(BLANK, decision=decision, times=StageTimes(took, 0.0, OffloadTimes(), 0.0))
        gate.on_inference(record)
        yield record


def sent(records: Iterable[StepRecord]) -> np.ndarray:
    return np.array([record.decision.transmit for record in records])


# ---- the rate -------------------------------------------------------------------------------------------------------

SCORES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.normal(size=T),
    "ever larger": lambda rng: np.arange(T, dtype=float),
    "ever smaller": lambda rng: 1.0 / np.arange(1, T + 1),
    "heavy tails, growing a thousandfold": lambda rng: rng.pareto(0.5, T) * np.geomspace(1.0, 1e3, T),
    "mostly exactly 0": lambda rng: np.where(rng.random(T) < 0.7, 0.0, rng.exponential(size=T)),
    "all the same": lambda rng: np.full(T, 0.25),
    "long waves": lambda rng: np.sin(np.arange(T) / 300.0) + 0.1 * rng.normal(size=T),
    "sudden": lambda rng: np.where(np.arange(T) // 700 % 2, 50.0, 0.02) * rng.random(T),
    "without bounds": lambda rng: np.where(rng.random(T) < 0.5, np.inf, -np.inf),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.6, 1.0])
@pytest.mark.parametrize(("window", "horizon"), [(200, 100.0), (1, 1.0)])
def test_the_rate_is_within_its_bound_after_every_inference(
    name: str, rate: float, window: int, horizon: float
) -> None:
    gate = Given(SCORES[name](np.random.default_rng(1)))
    transmitted = sent(drive(Controller(gate, RateBudget(rate), window=window, horizon=horizon)))
    off = np.abs(np.cumsum(transmitted) / np.arange(1, T + 1) - rate)
    assert (off <= (horizon + 1.0) / np.arange(1, T + 1) + 1e-12).all()


def test_a_fixed_threshold_and_a_finite_one_at_the_ends_both_fail_where_scores_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = np.arange(T, dtype=float)
    fixed = Given(scores)
    fixed.threshold = 100.0
    assert sent(drive(fixed)).mean() > 0.95
    right = controller_module._threshold
    monkeypatch.setattr(
        controller_module, "_threshold", lambda ordered, share: right(ordered, min(0.999, max(0.001, share)))
    )
    assert abs(sent(drive(Controller(Given(scores), RateBudget(0.6)))).mean() - 0.6) > 0.3


def test_forced_transmissions_and_audits_count() -> None:
    scores = np.random.default_rng(2).normal(size=T)
    gate = Controller(Given(scores, force_first=True, max_skips=5, audit_rate=0.05), RateBudget(0.4))
    records = list(drive(gate, episode=10))
    reasons = {record.decision.reason for record in records}
    assert {"first", "max_skips", "audit", "score"} <= reasons
    assert abs(sent(records).mean() - 0.4) <= 101.0 / T


def test_a_budget_that_cannot_be_held_leaves_no_endless_debt() -> None:
    budget = RateBudget(0.1)
    records = drive(Controller(Given(np.random.default_rng(3).normal(size=T), max_skips=1), budget))
    first = [next(records) for _ in range(T // 2)]
    assert sent(first).mean() == pytest.approx(0.5, abs=0.01)  # all that max_skips allows
    budget.rate = 0.7
    later = sent(records)
    # The debt kept is at most horizon + 1 transmissions, whatever the 600 too many were.
    assert abs(later.sum() - 0.7 * len(later)) <= 2 * 101.0
    assert later[-500:].mean() == pytest.approx(0.7, abs=0.05)


def test_a_new_set_point_is_reached_at_once() -> None:
    budget = RateBudget(0.7)
    records = drive(Controller(Given(np.random.default_rng(4).exponential(size=T)), budget))
    assert sent([next(records) for _ in range(T // 2)])[-500:].mean() == pytest.approx(0.7, abs=0.07)
    budget.rate = 0.3
    # Binomial, n = 200: 0.16 is five standard deviations.
    assert sent([next(records) for _ in range(200)]).mean() == pytest.approx(0.3, abs=0.16)


def test_it_transmits_the_highest_scores() -> None:
    scores = np.random.default_rng(5).exponential(size=T)
    transmitted = sent(drive(Controller(Given(scores), RateBudget(0.4))))
    best = np.sort(scores)[-int(transmitted.sum()) :].sum()
    chance = scores.mean() * transmitted.sum()
    # The share of what a perfect threshold gains over chance.
    assert (scores[transmitted].sum() - chance) / (best - chance) > 0.95


def test_an_episode_is_forgotten_and_a_life_is_not() -> None:
    inner = Given(np.random.default_rng(6).normal(size=T), force_first=True, max_skips=4)
    gate = Controller(inner, RateBudget(0.3))
    list(drive(gate, 500))
    threshold, resets = gate.threshold, inner.resets
    gate.reset()
    assert inner.resets == resets + 1
    assert gate.threshold == threshold and gate.forced == "first"


def test_scores_that_are_not_numbers_ask_the_target_and_are_not_remembered() -> None:
    scores = np.where(np.arange(T) % 10 == 0, math.nan, np.random.default_rng(8).normal(size=T))
    records = list(drive(Controller(Given(scores), RateBudget(0.5))))
    assert sent(records)[::10].all()
    assert abs(sent(records).mean() - 0.5) <= 101.0 / T


def test_it_draws_from_the_stream_what_its_gate_draws() -> None:
    one, other = np.random.default_rng(9), np.random.default_rng(9)
    Random(0.5).decide(STEP, one)
    Controller(Random(0.5), RateBudget(0.2)).decide(STEP, other)
    assert one.bit_generator.state == other.bit_generator.state


# ---- latency and link -----------------------------------------------------------------------------------------------


def test_a_mean_latency_is_held_when_the_link_gets_slower() -> None:
    rng = np.random.default_rng(10)
    jitter = rng.exponential(0.002, T)
    records = list(
        drive(
            Controller(Given(rng.normal(size=T)), LatencyBudget(0.008)),
            skip_s=lambda t: 0.002,
            send_s=lambda t: (0.010 if t < T // 2 else 0.025) + float(jitter[t]),
        )
    )
    took = np.array([record.times.total for record in records])
    rates = sent(records)
    for half, price in ((slice(0, T // 2), 0.010), (slice(T // 2, T), 0.025)):
        # The bound of the rate in seconds, twice: the debt of the first half is paid in the second.
        assert abs(took[half].mean() - 0.008) <= 2 * 101.0 * price / (T // 2)
    assert took[500 : T // 2].mean() == pytest.approx(0.008, abs=0.0005)
    assert took[T // 2 + 500 :].mean() == pytest.approx(0.008, abs=0.0005)
    assert rates[500 : T // 2].mean() == pytest.approx(0.6, abs=0.05)
    assert rates[T // 2 + 500 :].mean() == pytest.approx(0.24, abs=0.05)


@pytest.mark.parametrize(("budget_s", "rate"), [(0.001, 0.0), (1.0, 1.0)])
def test_a_latency_that_cannot_be_had_skips_all_and_one_that_cannot_be_spent_sends_all(
    budget_s: float, rate: float
) -> None:
    gate = Controller(Given(np.random.default_rng(11).normal(size=T)), LatencyBudget(budget_s))
    rates = sent(drive(gate, skip_s=lambda t: 0.002, send_s=lambda t: 0.010))
    assert rates[300:].mean() == rate == gate.rate


def test_a_link_as_fast_as_the_draft_does_not_divide_by_nothing() -> None:
    gate = Controller(Given(np.random.default_rng(12).normal(size=T)), LatencyBudget(0.003))
    assert sent(drive(gate, skip_s=lambda t: 0.002, send_s=lambda t: 0.002))[300:].all()


def test_a_share_of_a_link_is_a_rate_of_requests() -> None:
    budget = LinkBudget(4000.0, 1000, 8.0)
    assert budget.rate == 0.5
    gate = Controller(Given(np.random.default_rng(13).normal(size=T)), budget)
    assert abs(sent(drive(gate)).mean() - 0.5) <= 101.0 / T
    assert LinkBudget(1e9, 1000, 8.0).rate == 1.0


# ---- settings and errors --------------------------------------------------------------------------------------------


def test_settings_say_what_is_held_around_what() -> None:
    gate = Controller(ActionDeviation(0.3, reading="jump", max_skips=4), RateBudget(0.5))
    gate.audit_rate = 0.1
    written = json.loads(json.dumps(gate.settings()))
    assert written["audit_rate"] == 0.1
    assert written["gate"] == "ActionDeviation" and written["reading"] == "jump" and written["max_skips"] == 4
    assert written["held"] == {"type": "RateBudget", "rate": 0.5, "window": 200, "horizon": 100.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RateBudget(1.1), r"rate must lie in \[0, 1\], got 1.1"),
        (lambda: RateBudget(math.nan), r"rate must lie in \[0, 1\], got nan"),
        (lambda: LatencyBudget(0.0), "must be positive, got 0.0 s"),
        (lambda: LatencyBudget(0.1, memory=0), "must be positive, got 0.1 s and 0"),
        (lambda: LinkBudget(0.0, 100, 5.0), "must be positive, got 0.0 B/s"),
        (lambda: Controller(Never(), RateBudget(0.5), window=0), "at least 1, got 0"),
        (lambda: Controller(Never(), RateBudget(0.5), horizon=math.nan), "at least 1, got 200 and nan"),
    ],
)
def test_bad_settings_are_refused_with_what_is_allowed(make: Callable[[], Budget | Gate], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
