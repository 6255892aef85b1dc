"""When a verdict is executed: what is waited for, what may come late, and what comes too late."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.execution.player import SKIPPED, WAIT, LateVerdict, LateVerdicts
from specact.families.codes.pair import CodeVerifier
from specact.families.codes.policy import ActionTokenizer
from specact.families.codes.sampling import CodeDistribution, Drafted
from specact.observation import Window
from specact.pair import LocalTarget, Pending
from specact.rng import StepAddress
from specact.types import Miss, OffloadTimes, Origin, Outcome, Proposal, VirtualClock

HERE = StepAddress(1, 2, 3, 4)
ACTIONS = np.zeros((2, 1), np.float32)
PROPOSAL = Proposal(Window({"state": np.zeros((1, 1), np.float32)}), ACTIONS)
OUTCOME = Outcome(ACTIONS, np.full(2, Origin.ACCEPTED, np.uint8), 1, 1, OffloadTimes())


@dataclass
class Scripted:
    """A verifier whose answer is there once the test says so; it knows what it was asked, and whether it was read."""

    leaves: bool = True
    there: bool = False
    calls: list[StepAddress] = field(default_factory=list)
    read: int = 0

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        self.calls.append(address)
        return Pending(self._result, lambda: self.there, self.leaves)

    def _result(self) -> Outcome:
        self.read += 1
        return OUTCOME


def asked(for_s: float = math.inf, seen_s: float = 1.0) -> tuple[LateVerdicts, Scripted]:
    """Late verdicts with one under way."""
    verdicts, verifier = LateVerdicts(for_s), Scripted()
    assert verdicts.free
    assert verdicts.ask(verifier, PROPOSAL, HERE, seen_s) is SKIPPED
    assert not verdicts.free
    return verdicts, verifier


def test_waiting_asks_and_has_the_answer() -> None:
    verifier = Scripted()
    assert WAIT.ask(verifier, PROPOSAL, HERE, 0.0).result() is OUTCOME
    assert verifier.calls == [HERE] and verifier.read == 1
    assert WAIT.free and not WAIT.late


@pytest.mark.parametrize("for_s", [0.0, -0.0, -1.0, -math.inf, math.nan])
def test_verdicts_that_could_never_be_used_are_refused(for_s: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0 s, got"):
        LateVerdicts(for_s)


def test_a_late_verdict_arrives_once_when_it_is_there() -> None:
    verdicts, verifier = asked()
    assert verifier.calls == [HERE]
    assert verdicts.arrived(9.0, HERE) is None and not verdicts.free and verifier.read == 0
    verifier.there = True
    assert verdicts.arrived(9.0, HERE) == LateVerdict(OUTCOME, in_time=True)
    assert verdicts.free and verdicts.arrived(9.0, HERE) is None and verifier.read == 1


@pytest.mark.parametrize(("now", "used"), [(1.0, True), (1.5, True), (math.nextafter(1.5, 2.0), False), (9.0, False)])
def test_it_is_of_use_until_its_observation_is_older_than_that(now: float, used: bool) -> None:
    verdicts, verifier = asked(for_s=0.5, seen_s=1.0)
    verifier.there = True
    assert verdicts.arrived(now, HERE) == LateVerdict(OUTCOME, in_time=used)
    assert verifier.read == 1 and verdicts.free


@pytest.mark.parametrize("wanted", [None, *(HERE._replace(**{name: 9}) for name in StepAddress._fields)])
def test_it_is_of_use_for_its_own_step_alone(wanted: StepAddress | None) -> None:
    verdicts, verifier = asked()
    verifier.there = True
    assert verdicts.arrived(1.0, wanted) == LateVerdict(OUTCOME, in_time=False)
    assert verifier.read == 1 and verdicts.free


def test_an_episode_does_not_hear_of_the_one_before() -> None:
    verdicts, verifier = asked()
    verdicts.reset()
    verifier.there = True
    assert verdicts.free and verdicts.arrived(1.0, HERE) is None and verifier.read == 0


def test_a_request_that_cannot_leave_is_a_miss_at_once() -> None:
    verdicts, verifier = LateVerdicts(1.0), Scripted(leaves=False, there=True)
    assert verdicts.ask(verifier, PROPOSAL, HERE, 0.0).result() == Miss("disconnected", OffloadTimes(), sent=False)
    assert verifier.calls == [HERE] and verdicts.free and verdicts.arrived(0.0, HERE) is None


@dataclass
class Same:
    """A target that gives every code the same offset, and takes a quarter of a second."""

    clock: VirtualClock
    offset: float

    def answer(self, window: Window, address: StepAddress) -> CodeDistribution:
        self.clock.sleep(0.25)
        return answer(self.offset)


def answer(offset: float) -> CodeDistribution:
    return CodeDistribution(np.full((2, 2), 0.5), np.full((2, 2, 2, 1), offset, np.float32))


# The sum over two codebooks is infinite in float32, or finite and too large for what follows.
@pytest.mark.parametrize("offset", [3.3e38, -3.3e38, 1e30])
@pytest.mark.parametrize("verdicts", [WAIT, LateVerdicts(math.inf)])
def test_a_finite_answer_that_overflows_in_decoding_is_an_invalid_miss(verdicts: Any, offset: float) -> None:
    clock, one = VirtualClock(), np.ones(1, np.float32)
    tokenizer = ActionTokenizer(one, one, np.zeros((4, 2, 1), np.float32), "none", 2)
    verifier = CodeVerifier(LocalTarget(Same(clock, offset), clock), tokenizer)
    proposal = Proposal(PROPOSAL.window, ACTIONS, Drafted(answer(0.0), np.zeros(2, np.int64)))
    found = verdicts.ask(verifier, proposal, HERE, 0.0).result()
    if verdicts.late:
        assert found is None
        found = verdicts.arrived(0.0, HERE).result
    assert np.isfinite(answer(offset).offsets).all()
    assert found == Miss("invalid", OffloadTimes(target=0.25), sent=True)
