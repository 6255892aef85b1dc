"""A controller holds its budget whatever the scores do, with the bound that it promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.gates.steps import STEP, Told, record

from specact.gates import Gate, Random
from specact.gates.controller import Controller, LatencyBudget, LinkBudget, RateBudget
from specact.types import StepRecord

T = 3000


def given(scores: np.ndarray, **limits: Any) -> Told:
    """A gate whose scores are given, and whose threshold a controller replaces."""
    return Told(scores, math.inf, **({"force_first": False} | limits))


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
        inference = record(decision, took_s=took)
        gate.on_inference(inference)
        yield inference


def sent(records: Iterable[StepRecord]) -> np.ndarray:
    return np.array([record.decision.transmit for record in records])


SCORES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.normal(size=T),
    "ever larger": lambda rng: np.arange(T, dtype=float),
    "heavy tails, growing a thousandfold": lambda rng: rng.pareto(0.5, T) * np.geomspace(1.0, 1e3, T),
    "mostly exactly 0": lambda rng: np.where(rng.random(T) < 0.7, 0.0, rng.exponential(size=T)),
    "sudden": lambda rng: np.where(np.arange(T) // 700 % 2, 50.0, 0.02) * rng.random(T),
    "without bounds": lambda rng: np.where(rng.random(T) < 0.5, np.inf, -np.inf),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.6, 1.0])
@pytest.mark.parametrize(("window", "horizon"), [(200, 100.0), (1, 1.0)])
def test_the_rate_is_within_its_bound_after_every_inference(
    name: str, rate: float, window: int, horizon: float
) -> None:
    gate = given(SCORES[name](np.random.default_rng(1)))
    transmitted = sent(drive(Controller(gate, RateBudget(rate), window=window, horizon=horizon)))
    off = np.abs(np.cumsum(transmitted) / np.arange(1, T + 1) - rate)
    assert (off <= (horizon + 1.0) / np.arange(1, T + 1) + 1e-12).all()


def test_forced_transmissions_and_audits_count() -> None:
    scores = np.random.default_rng(2).normal(size=T)
    gate = Controller(given(scores, force_first=True, max_skips=5, audit_rate=0.05), RateBudget(0.4))
    records = list(drive(gate, episode=10))
    reasons = {record.decision.reason for record in records}
    assert {"first", "max_skips", "audit", "score"} <= reasons
    assert abs(sent(records).mean() - 0.4) <= 101.0 / T


def test_a_budget_that_cannot_be_held_leaves_no_endless_debt() -> None:
    budget = RateBudget(0.1)
    records = drive(Controller(given(np.random.default_rng(3).normal(size=T), max_skips=1), budget))
    first = [next(records) for _ in range(T // 2)]
    assert sent(first).mean() == pytest.approx(0.5, abs=0.01)  # all that max_skips allows
    budget.rate = 0.7
    later = sent(records)
    # The debt kept is at most horizon + 1 transmissions, whatever the 600 too many were.
    assert abs(later.sum() - 0.7 * len(later)) <= 2 * 101.0
    assert later[-500:].mean() == pytest.approx(0.7, abs=0.05)


def test_it_transmits_the_highest_scores() -> None:
    scores = np.random.default_rng(5).exponential(size=T)
    transmitted = sent(drive(Controller(given(scores), RateBudget(0.4))))
    best = np.sort(scores)[-int(transmitted.sum()) :].sum()
    chance = scores.mean() * transmitted.sum()
    # The share of what a perfect threshold gains over chance.
    assert (scores[transmitted].sum() - chance) / (best - chance) > 0.95


def test_an_episode_is_forgotten_and_a_life_is_not() -> None:
    inner = given(np.random.default_rng(6).normal(size=T), force_first=True, max_skips=4)
    gate = Controller(inner, RateBudget(0.3))
    list(drive(gate, 500))
    threshold, resets = gate.threshold, inner.resets
    gate.reset()
    assert inner.resets == resets + 1
    assert gate.threshold == threshold and gate.forced == "first"


def test_scores_that_are_not_numbers_ask_the_target_and_are_not_remembered() -> None:
    scores = np.where(np.arange(T) % 10 == 0, math.nan, np.random.default_rng(8).normal(size=T))
    records = list(drive(Controller(given(scores), RateBudget(0.5))))
    assert sent(records)[::10].all()
    assert abs(sent(records).mean() - 0.5) <= 101.0 / T


def test_it_draws_from_the_stream_what_its_gate_draws() -> None:
    gate_rng, rng = np.random.default_rng(9), np.random.default_rng(9)
    Random(0.5).decide(STEP, gate_rng)
    Controller(Random(0.5), RateBudget(0.2)).decide(STEP, rng)
    assert gate_rng.bit_generator.state == rng.bit_generator.state


def test_a_mean_latency_is_held_when_the_link_gets_slower() -> None:
    rng = np.random.default_rng(10)
    jitter = rng.exponential(0.002, T)
    records = list(
        drive(
            Controller(given(rng.normal(size=T)), LatencyBudget(0.008)),
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


@pytest.mark.parametrize(("budget_s", "send_s", "rate"), [(0.001, 0.01, 0.0), (1.0, 0.01, 1.0), (0.003, 0.002, 1.0)])
def test_a_latency_that_cannot_be_had_skips_all_and_one_that_cannot_be_spent_sends_all(
    budget_s: float, send_s: float, rate: float
) -> None:
    """Also where the link is as fast as the draft."""
    budget = LatencyBudget(budget_s)
    gate = Controller(given(np.random.default_rng(11).normal(size=T)), budget)
    rates = sent(drive(gate, skip_s=lambda t: 0.002, send_s=lambda t: send_s))
    assert rates[300:].mean() == rate == budget.rate


def test_a_share_of_a_link_is_a_rate_of_requests() -> None:
    budget = LinkBudget(4000.0, 1000, 8.0)
    assert budget.rate == 0.5
    gate = Controller(given(np.random.default_rng(13).normal(size=T)), budget)
    assert abs(sent(drive(gate)).mean() - 0.5) <= 101.0 / T
    assert LinkBudget(1e9, 1000, 8.0).rate == 1.0
