"""Forecasts of a gate's next decision."""

from __future__ import annotations

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.gates import Always, Never, Random
from specact.gates.prefetch import PrefetchPredictor
from specact.types import Decision


def test_certain_gates_are_forecast_without_error() -> None:
    for gate, expected in ((Always(), True), (Never(), False)):
        prefetch = PrefetchPredictor(gate)
        for step in range(5):
            # Nothing is known of the very first step.
            assert step == 0 or prefetch.expects_transmission() == expected
            prefetch.learn(Decision(expected, 0.0, gate.threshold, "score"))


def test_a_step_that_must_be_transmitted_is_known_beforehand() -> None:
    gate = Random(0.0, max_skips=2)
    prefetch = PrefetchPredictor(gate)
    for step in range(30):
        expected = prefetch.expects_transmission()
        decision = gate.decide(None, np.random.default_rng(0))  # type: ignore[arg-type]
        assert step == 0 or expected == decision.transmit
        prefetch.learn(decision)


def test_it_learns_which_scores_come_before_a_transmission() -> None:
    # A gate that alternates: a low score is always followed by a high one. The starting guess is wrong.
    prefetch = PrefetchPredictor(Random(0.5))
    hits = []
    for step in range(200):
        expected = prefetch.expects_transmission()
        high = step % 2 == 1
        hits.append(expected == high)
        prefetch.learn(Decision(high, 2.0 if high else 0.1, 1.0, "score"))
    assert not any(hits[2:6])
    assert all(hits[60:])


def test_a_limit_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[0, 1\)"):
        PrefetchPredictor(Always(), limit=1.0)
