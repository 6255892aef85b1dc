"""Chance with privileges: the free probability that gives it a wanted rate, against the gate itself and by hand."""

import numpy as np
import pytest

from specact.families.codes.sampling import CodeDistribution, Drafted
from specact.gates import Random
from specact.lab.evaluation.chance import expected_rate, free_probability
from specact.observation import Window
from specact.types import Proposal

STEP = Proposal(
    Window({"state": np.zeros((1, 1), np.float32)}),
    np.zeros((1, 1), np.float32),
    Drafted(CodeDistribution(np.ones((1, 1)), np.zeros((1, 1, 1, 1), np.float32)), np.zeros(1, np.int64)),
)


def test_without_privileges_the_free_probability_is_the_rate() -> None:
    assert free_probability(0.37, None, force_first=False, lengths=(5, 9)) == pytest.approx(0.37, abs=1e-5)


def test_the_first_step_counts_as_transmitted() -> None:
    """Episodes of 10 inferences: 1 + 9 f = 10 * 0.4."""
    assert free_probability(0.4, None, lengths=(10, 10)) == pytest.approx(3 / 9, abs=1e-5)


@pytest.mark.parametrize("max_skips", [1, 2, 4])
@pytest.mark.parametrize("free", [0.1, 0.5])
def test_in_the_long_run_a_transmission_comes_once_in_a_truncated_geometric_time(max_skips: int, free: float) -> None:
    """The mean gap between transmissions is sum_{s=0}^{m} (1 - f)^s."""
    gap = sum((1.0 - free) ** skips for skips in range(max_skips + 1))
    assert expected_rate(free, max_skips, force_first=True, lengths=(20_000,)) == pytest.approx(1 / gap, abs=1e-3)


@pytest.mark.parametrize(("max_skips", "rate"), [(None, 0.3), (2, 0.4), (2, 0.6), (4, 0.25)])
def test_the_gate_achieves_the_rate_it_was_solved_for(max_skips: int | None, rate: float) -> None:
    """8,000 inferences in short episodes; .03 is more than five standard errors."""
    lengths, rng, sent = (12, 20, 8) * 200, np.random.default_rng(0), []
    gate = Random(free_probability(rate, max_skips, lengths=lengths), max_skips=max_skips, force_first=True)
    for length in lengths:
        gate.reset()
        sent += [gate.decide(STEP, rng).transmit for _ in range(length)]
    assert np.mean(sent) == pytest.approx(rate, abs=0.03)
    assert gate.rate < rate


def test_where_force_makes_more_than_the_rate_nothing_is_left_to_chance() -> None:
    assert free_probability(0.1, 2) == 0.0
    assert free_probability(1.0, None) == 1.0
