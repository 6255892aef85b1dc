"""The seam to the target: requests, and what may move a robot."""

from typing import Any, cast

import numpy as np
import pytest

from specact.lab.rollout.timed import SimulatedTarget
from specact.observation import Window
from specact.pair import Answer, LocalTarget, Pending, TargetVerifier, is_valid
from specact.rng import StepAddress
from specact.types import Miss, OffloadTimes, Outcome, Proposal, VirtualClock

HERE = StepAddress(1, 2, 3, 4)
WINDOW = Window({"state": np.zeros((1, 1), np.float32)})


class Steady:
    """A route of half a second."""

    def round_trip_s(self, at: float) -> float:
        return 0.5


class Says:
    def answer(self, window: Window, address: StepAddress) -> StepAddress:
        return address


@pytest.mark.parametrize("slept", [0.0, 0.375, 1.0])
def test_a_simulated_target_counts_the_time_that_was_waited_for(slept: float) -> None:
    clock = VirtualClock()
    request = SimulatedTarget(Says(), cast(Any, Steady()), clock, 0.25).submit(WINDOW, HERE)
    clock.sleep(slept)
    left = max(0.0, 0.75 - slept)
    assert request.done() == (left == 0.0)
    assert request.result() == Answer(HERE, OffloadTimes(network=left / 0.75 * 0.5, target=left / 0.75 * 0.25))
    assert clock.now() == slept + left


@pytest.mark.parametrize("first", [Miss("deadline", OffloadTimes()), 3])
def test_a_request_reads_its_result_further_unless_it_missed(first: Any) -> None:
    request = Pending[int](lambda: first, lambda: False, sent=False).then(lambda number: number + 1)
    assert not request.done() and not request.sent
    assert request.result() == (4 if first == 3 else first)


class Echo(TargetVerifier[StepAddress]):
    def judge(self, answer: Answer[StepAddress], proposal: Proposal, address: StepAddress) -> Outcome:
        assert answer.value == address
        return Outcome(proposal.actions, np.zeros(1, np.uint8), 1, 0, answer.times, answer.value)


def test_a_verifier_asks_and_judges_under_the_steps_address() -> None:
    pending = Echo(LocalTarget(Says(), VirtualClock())).submit(Proposal(WINDOW, np.zeros((1, 1), np.float32)), HERE)
    assert pending.done()
    outcome = pending.result()
    assert isinstance(outcome, Outcome) and outcome.evidence == HERE


def test_an_action_is_a_number_that_what_follows_can_compute_with() -> None:
    largest = np.float32(1e15)
    for value in (0.0, largest, -largest):
        assert is_valid(np.array([[0.0], [value]], np.float32))
    for value in (np.nan, np.inf, -np.inf, np.nextafter(largest, np.float32(np.inf))):
        assert not is_valid(np.array([[0.0], [value]], np.float32))
