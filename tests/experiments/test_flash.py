"""FLASH's study: what its rounds cost, and a policy in closed loop at two episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from experiments.flash import METHODS, ShuffledVerifier, StaleVerifier, controlled, cost_of

from specact.load import load_pair
from specact.observation import Window
from specact.pair import LocalTarget
from specact.rng import StepAddress
from specact.systems.flash import Check, FlashVerifier, RoundRequest, Rounds
from specact.types import Outcome, Proposal

COSTS = {
    name: {"ms": ms}
    for name, ms in {
        "full_10": 10.0, "check": 2.0, "failed": 11.0, "given": 1.5, "given_failed": 10.5, "stale": 1.0,
        "block": 0.25,
    }.items()
}  # fmt: skip


def metrics(full: float, failed: float, sent: float = 1.0, actions: float = 4.0) -> dict[str, float]:
    return {"full": full, "failed": failed, "sent": sent, "actions_per_round": actions}


@pytest.mark.parametrize(
    ("name", "shares", "wanted"),
    [
        ("full", metrics(1.0, 0.0), 10.0 / 4),
        # A fifth of the rounds full at once, a tenth failed, the rest accepted.
        ("flash", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 11.0 + 0.7 * 2.0) / 4),
        ("flash_stale", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 11.0 + 0.7 * 1.0) / 4),
        ("flash_last", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 10.5 + 0.7 * 1.5) / 4),
        # The block runs on the device every time, and the target checks what it is given.
        ("flash_device", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 10.5 + 0.7 * 1.5 + 0.25) / 4),
        ("block", metrics(0.0, 0.0, 0.0), 0.25 / 4),
        ("unchecked", metrics(0.3, 0.0, 0.3), (0.25 + 0.3 * 10.0) / 4),
    ],
)
def test_every_round_is_charged_and_failed_ones_in_full(name: str, shares: dict[str, float], wanted: float) -> None:
    rounds = METHODS[name].composition
    assert isinstance(rounds, Rounds)
    assert cost_of(rounds, shares, COSTS) == pytest.approx(wanted)


def verdicts(kind: type[FlashVerifier], requests: list[RoundRequest]) -> tuple[list[Any], list[Any]]:
    """The rounds of one robot of PushT's flow: its own, and those that a control executes."""
    pair = load_pair("pusht-flow")
    control = pair.composed(rounds=controlled(kind, METHODS["flash"].composition, ""))  # type: ignore[arg-type]
    verifier, rng, answers, used = control.verifier(LocalTarget(pair.target())), np.random.default_rng(0), [], []
    for step, request in enumerate(requests):
        window = Window({"state": rng.uniform(-1, 1, (2, 26)).astype(np.float32)})
        address = StepAddress(1, 0, 0, step)
        answers.append([pair.target().answer(window, address).round(variant) for variant in (
            request, replace(request, check=Check(within=1e9, guarded=False)), replace(request, full=True)
        )])  # fmt: skip
        outcome = verifier.submit(Proposal(window, np.zeros((1, 2), np.float32), request), address).result()
        assert isinstance(outcome, Outcome)
        used.append(outcome.evidence)
    return answers, used


def test_shuffled_verdicts_are_those_of_other_rounds_of_the_same_robot() -> None:
    answers, used = verdicts(ShuffledVerifier, 30 * [RoundRequest(False, check=Check((0.8, 0.4), 1.0))])
    lengths = [real.accepted for real, _, _ in answers]
    for number, (evidence, (real, whole, full)) in enumerate(zip(used, answers, strict=True)):
        # What is executed is drafted or the target's own, as the drawn verdict says, whatever this round's own was.
        assert evidence.checked and evidence.accepted in lengths[: number + 1]
        np.testing.assert_array_equal(evidence.deviation, real.deviation)
        np.testing.assert_array_equal(evidence.chunk, whole.chunk if evidence.accepted else full.chunk)
    assert len(set(lengths)) > 1 and [evidence.accepted for evidence in used] != lengths


def test_a_stale_check_reads_the_cache_of_the_last_full_round() -> None:
    accepting, failing = (RoundRequest(False, check=Check((1.0,), within)) for within in (100.0, 0.0))
    answers, used = verdicts(StaleVerifier, [RoundRequest(True), accepting, failing, accepting])
    assert [evidence.full for evidence in used] == [True, False, True, False]
    for number in (0, 2):
        np.testing.assert_array_equal(used[number].chunk, answers[number][2].chunk)
    for number in (1, 2, 3):
        assert np.abs(used[number].deviation - answers[number][0].deviation).max() > 1e-3
