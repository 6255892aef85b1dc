"""Rollouts of token policies in lock step: which steps are verified together, and what time each of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.lab.train.test_drafters import write_target

from specact.families.tokens.pair import TokenParts
from specact.families.tokens.policy import TokenNetworks
from specact.families.tokens.speculative import Array
from specact.gates.gate import Always
from specact.gates.settings import GateSettings
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.rollout import Shard, run_shard
from specact.lab.rollout.steps import Table
from specact.lab.rollout.timed import BatchVerifier, SharedClock, TokenBatch
from specact.load import load_pair
from specact.observation import Window
from specact.pair import Pair
from specact.policy import SpeculativePolicy

EPISODES = (3, 4, 5, 6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair[Any]:
    bundle = load_pair(write_target(tmp_path_factory.mktemp("batch") / "small").path)
    assert isinstance(bundle.parts, TokenParts)
    return bundle


def rolled(pair: Pair[Any], method: str, gate: GateSettings, episodes: Sequence[int] = EPISODES) -> Table:
    return run_shard(Shard.of(pair, "ball", load_method(method), gate, episodes, 2))[1]


@pytest.mark.parametrize("method", ["ar", "strict_last"])
def test_one_batch_answers_what_the_gates_want_verified_at_a_control_step(
    pair: Pair[Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(self: TokenBatch) -> None:
        sizes.append(len(self.pending))
        answer(self)

    answer = TokenBatch.answer
    monkeypatch.setattr(TokenBatch, "answer", counted)
    table = rolled(pair, method, GateSettings("random", 0.5))
    verified = np.bincount(table["step"], table["transmitted"]).astype(int)
    assert sizes == verified[verified > 0].tolist() and 1 < max(sizes) <= len(EPISODES)
    assert 0 < table["transmitted"].mean() < 1
    assert (table["passes"] > 0).tolist() == table["transmitted"].tolist()


def test_the_time_of_a_batch_is_divided_by_its_windows(pair: Pair[Any]) -> None:
    table = rolled(pair, "ar", GateSettings("always"))
    for step in np.unique(table["step"]):
        shares = table["target_s"][table["step"] == step]
        assert (shares > 0.0).all() and (shares == shares[0]).all()
    assert (table["finish_s"] >= 0.0).all()


def test_a_robot_asks_before_it_acts(pair: Pair[Any]) -> None:
    """Two robots of one batch act as one robot of its own."""
    windows = [pair.observation.zeros() for _ in range(2)]
    batch, clocks = TokenBatch(pair.parts), [SharedClock() for _ in windows]
    policies = [
        SpeculativePolicy(pair, Always(), verifier=BatchVerifier(batch, clock), clock=clock) for clock in clocks
    ]
    for policy, window in zip(policies, windows, strict=True):
        policy.ask(window)
    actions = [policy.finish() for policy in policies]
    alone = SpeculativePolicy(pair, Always()).act_on(windows[0])
    np.testing.assert_array_equal(actions, [alone, alone])
    assert all(policy.record is not None and policy.record.times.finish >= 0.0 for policy in policies)


def test_what_is_not_finite_misses_alone(pair: Pair[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def first_is_nan(self: TokenNetworks, windows: Sequence[Window]) -> Array:
        features = tokens(self, windows)
        features[0] = np.nan
        return features

    tokens = TokenNetworks.tokens
    monkeypatch.setattr(TokenNetworks, "tokens", first_is_nan)
    batch = TokenBatch(pair.parts)
    policies = [SpeculativePolicy(pair, Always(), verifier=BatchVerifier(batch, SharedClock())) for _ in range(3)]
    for policy in policies:
        policy.ask(pair.observation.zeros())
    for policy in policies:
        policy.finish()
    misses: list[Any] = [policy.record and policy.record.miss for policy in policies]
    assert misses == ["invalid", None, None]
