"""The seam to the target: a request that left ahead is taken up by its own step, and what may move a robot."""

from typing import Any, cast

import numpy as np
import pytest

from specact.clock import VirtualClock
from specact.lab.rollout.simulated_target import SimulatedTarget
from specact.observation import Window, vectors
from specact.remote.target import RemoteTarget
from specact.rng import StepAddress
from specact.types import OffloadTimes, Outcome, Proposal
from specact.verification import Answer, LocalTarget, TargetVerifier, is_valid
from specact.wire.dialect import Dialect, Exchange

HERE = StepAddress(1, 2, 3, 4)
OTHERS = [HERE._replace(**{name: 9}) for name in StepAddress._fields]
WINDOW = Window({"state": np.zeros((1, 1), np.float32)})


class Numbering:
    """A line that numbers what it is sent, and answers nothing."""

    jpeg_quality: int | None = None

    def __init__(self) -> None:
        self.dialect = Dialect("none", {}, vectors(1, state=1), {"infer": Exchange({}, "answer", {})})
        self.up = True
        self.sent: list[bool] = []  # the wait_if_busy of each request
        self.waited_for: list[int] = []

    def send(self, kind: str, fields: object, deadline_s: float, wait_if_busy: bool) -> int | None:
        assert kind == "infer"
        self.sent.append(wait_if_busy)
        return len(self.sent) - 1 if self.up else None

    def has_reply(self, identity: int) -> bool:
        return False

    def wait(self, identity: int, timeout: float) -> str:
        self.waited_for.append(identity)
        return "deadline"


@pytest.fixture
def line() -> Numbering:
    return Numbering()


@pytest.fixture
def remote(line: Numbering) -> RemoteTarget[Any]:
    return RemoteTarget(cast(Any, line), cast(Any, None), 20_000.0)


def test_a_step_takes_up_the_request_that_left_for_it_once(line: Numbering, remote: RemoteTarget[Any]) -> None:
    assert remote.prefetch(WINDOW, HERE)
    # The address says which request it is, not the window.
    remote.submit(Window({"state": np.ones((1, 1), np.float32)}), StepAddress(*HERE)).result()
    assert line.sent == [False] and line.waited_for == [0]
    remote.submit(WINDOW, HERE).result()
    assert line.sent == [False, True] and line.waited_for == [0, 1]


@pytest.mark.parametrize("other", OTHERS)
def test_no_step_takes_up_what_left_for_another(line: Numbering, remote: RemoteTarget[Any], other: StepAddress) -> None:
    remote.prefetch(WINDOW, other)
    remote.submit(WINDOW, HERE).result()
    assert line.sent == [False, True] and line.waited_for == [1]
    # Nor does its own any more: nobody keeps it.
    remote.submit(WINDOW, other).result()
    assert line.waited_for == [1, 2]


def test_the_newest_request_ahead_is_the_one_that_counts(line: Numbering, remote: RemoteTarget[Any]) -> None:
    for address in (OTHERS[0], HERE, HERE):
        remote.prefetch(WINDOW, address)
    remote.submit(WINDOW, HERE).result()
    assert line.sent == [False] * 3 and line.waited_for == [2]


def test_what_could_not_leave_ahead_is_asked_for_again(line: Numbering, remote: RemoteTarget[Any]) -> None:
    line.up = False
    assert not remote.prefetch(WINDOW, HERE)
    line.up = True
    remote.submit(WINDOW, HERE).result()
    assert line.sent == [False, True] and line.waited_for == [1]


class Steady:
    """A route of half a second."""

    def round_trip_s(self, at: float) -> float:
        return 0.5


class Says:
    def answer(self, window: Window, address: StepAddress) -> StepAddress:
        return address


@pytest.mark.parametrize("ahead", [HERE, *OTHERS])
def test_a_simulated_target_takes_up_a_request_for_the_same_step_only(ahead: StepAddress) -> None:
    clock = VirtualClock()
    target = SimulatedTarget(Says(), cast(Any, Steady()), clock, 0.25)
    assert target.prefetch(WINDOW, ahead)
    clock.sleep(0.375)
    share = 0.5 if ahead == HERE else 1.0  # half of the time it takes has passed since it left
    pending = target.submit(WINDOW, HERE)
    assert not pending.done()
    assert pending.result() == Answer(HERE, OffloadTimes(network=0.5 * share, target=0.25 * share))
    assert clock.now() == 0.375 + 0.75 * share
    # It was taken up, or dropped: the next one leaves anew.
    target.submit(WINDOW, ahead).result()
    assert clock.now() == 0.375 + 0.75 * share + 0.75


class Echo(TargetVerifier[StepAddress]):
    def judge(self, answer: Answer[StepAddress], proposal: Proposal, address: StepAddress) -> Outcome:
        assert answer.value == address
        return Outcome(proposal.actions, np.zeros(1, np.uint8), 1, 0, answer.times, answer.value)


def test_a_verifier_asks_and_judges_under_the_steps_address() -> None:
    pending = Echo(LocalTarget(Says(), VirtualClock())).submit(Proposal(WINDOW, np.zeros((1, 1), np.float32)), HERE)
    assert pending.done()
    found = pending.result()
    assert isinstance(found, Outcome) and found.evidence == HERE


def test_an_action_is_a_number_that_what_follows_can_compute_with() -> None:
    largest = np.float32(1e15)
    for value in (0.0, largest, -largest):
        assert is_valid(np.array([[0.0], [value]], np.float32))
    for value in (np.nan, np.inf, -np.inf, np.nextafter(largest, np.float32(np.inf))):
        assert not is_valid(np.array([[0.0], [value]], np.float32))
