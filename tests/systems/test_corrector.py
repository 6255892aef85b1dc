"""A corrector: aligned where it corrects nothing, never further from the chunk than its bound, and its gate."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.lab.rollout.conftest import Instant
from tests.lab.rollout.tape import CHUNK, PERIOD_S, TAPE, Prophet, Tape

from specact.errors import ConfigError, ObservationError
from specact.execution.player import LateVerdicts
from specact.execution.schedule import Execution
from specact.gates import Controller, Gate, Never
from specact.gates.controller import RateBudget
from specact.gates.gate import Periodic
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.episode import Pairing, run_episode, run_pair
from specact.lab.rollout.methods import load_method
from specact.observation import Field, Window
from specact.pair import Answer, Pair, Pending
from specact.policy import SpeculativePolicy
from specact.rng import StepAddress
from specact.systems.corrector import (
    Correction,
    CorrectorParts,
    CorrectorSpec,
    Staleness,
    age_features,
    corrected,
    doubled,
    joined,
)
from specact.types import Chunk, Miss, OffloadTimes, Origin, Proposal

RANGE = 1024.0  # a power of two: normalising is exact
DRAFTED = -7.0 / RANGE
STEPS = 40


class Stub:
    """A network whose correction and draft are what one likes; it keeps what it was shown."""

    def __init__(self, correction: float = 0.0) -> None:
        self.correction = correction
        self.shown: list[tuple[list[float], Chunk, Chunk]] = []

    def run(self, seen: Window, based: Chunk, index: Chunk) -> tuple[Chunk, Chunk]:
        self.shown.append((seen["state"][:, 0].tolist(), based, index))
        return np.array([self.correction], np.float32), np.array([DRAFTED], np.float32)


def pair_of(network: Any, bound: float = 0.25 / RANGE, policy: Prophet | None = None, **changes: Any) -> Pair[Chunk]:
    policy = policy or Prophet()
    bounds = ((bound,),) * CHUNK
    spec = CorrectorSpec("", policy.spec, policy.spec.observation, (-RANGE,), (RANGE,), bounds, **changes)
    return CorrectorParts("tape", network, spec, lambda: policy).pair()


def commands(network: Any, delay: int, every: int, **changes: Any) -> list[tuple[float, float]]:
    """When the robot was told what, from the arrival of the first chunk on."""
    world = MovingWorld(replace(TAPE, max_steps=STEPS))
    pairing = Pairing(
        GateSettings("periodic", options=(("period", every),)), Instant(), 0.0, delay * PERIOD_S, math.inf
    )
    run_pair(world, pair_of(network, **changes), pairing, start=0, seed=0, episode=0)
    return told(world, delay)


def told(world: MovingWorld, delay: int) -> list[tuple[float, float]]:
    assert isinstance(world.env, Tape)
    return [command for command in world.env.commands[1:] if command[0] >= delay * PERIOD_S - 1e-9]


def executed(kind: Any, delay: int, every: int) -> list[tuple[float, float]]:
    world = MovingWorld(replace(TAPE, max_steps=STEPS))
    how = Execution(kind, CHUNK, CHUNK - every)
    run_episode(world, Prophet(), how, delay * PERIOD_S, start=0, seed=0, episode=0)
    return told(world, delay)


# --- exactness ---


@pytest.mark.parametrize(("delay", "every"), [(0, 1), (0, 3), (1, 1), (1, 4), (2, 3), (4, 4)])
def test_without_a_correction_it_is_aligned_execution_bit_for_bit(delay: int, every: int) -> None:
    wanted = executed("aligned", delay, every)
    assert len(wanted) == STEPS - delay
    assert commands(Stub(), delay, every) == wanted
    # A correction shows where the base is a chunk's and not the answer of now, and by no more than the bound.
    ours, bound = commands(Stub(9.0), delay, every), 0.25
    moved = [round(action - base, 5) for (_, action), (_, base) in zip(ours, wanted, strict=True)]
    assert set(moved) <= {0.0, bound} and (bound in moved or (delay, every) == (0, 1))


def test_a_chunk_that_is_played_from_its_beginning_is_something_else() -> None:
    assert executed("append", 2, 3) != commands(Stub(), 2, 3)


def test_the_network_sees_the_chunk_its_age_and_what_was_seen_when_it_was_asked_for() -> None:
    network = Stub()
    commands(network, 2, 3)
    nothing, (seen, based, index) = network.shown[0], network.shown[3]
    assert not nothing[1].any() and not nothing[2].any()
    # The observation of step 0 was answered at step 2.
    np.testing.assert_allclose(seen, [0.0, 3 * PERIOD_S], atol=1e-6)
    np.testing.assert_allclose(based[:, 0], np.array([3, *range(CHUNK)]) * PERIOD_S / RANGE, rtol=1e-6)
    np.testing.assert_array_equal(index, age_features(3, CHUNK))
    np.testing.assert_allclose(age_features(2, CHUNK), [1.0, 1.0, 0.0], atol=1e-6)


def test_a_window_of_then_and_one_of_now_become_one_with_and_without_a_history() -> None:
    fields = {"state": Field((2,), history=2), "goal": Field((3,), history=0)}
    then = {"state": np.zeros((5, 2, 2)), "goal": np.zeros((5, 3))}
    now = {name: values + 1.0 for name, values in then.items()}
    seen = joined(then, now, fields)
    assert {name: values.shape[1:] for name, values in seen.items()} == {
        name: field.window_shape for name, field in doubled(fields).items()
    }
    assert seen["state"][0, :, 0].tolist() == [0.0, 0.0, 1.0, 1.0] and seen["goal"][0, :, 0].tolist() == [0.0, 1.0]


def test_a_correction_may_be_larger_the_older_the_chunk_is() -> None:
    policy, ages = Prophet(), np.arange(CHUNK)
    bounds = tuple((float(age),) for age in ages + 1)
    spec = CorrectorSpec("", policy.spec, policy.spec.observation, (-1.0,), (1.0,), bounds)
    seen, chunk = {"state": np.zeros((1, 1), np.float32)}, np.zeros((CHUNK, 1), np.float32)
    actions = [corrected(Stub(9.0).run, spec, chunk, age, seen, seen)[0][0] for age in ages.tolist()]
    assert actions == (ages + 1).tolist()


# --- start, outage, and what cannot be executed ---


class Far:
    """A target whose every answer takes so many steps, but for the requests that miss."""

    def __init__(self, policy: Prophet, delay: int, misses: range = range(0)) -> None:
        self.policy, self.delay, self.misses, self.step = policy, delay, misses, 0

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[Chunk]]:
        due = self.step + self.delay

        def result() -> Answer[Chunk] | Miss:
            if address.step in self.misses:
                return Miss("deadline", OffloadTimes())
            return Answer(self.policy.infer(window, np.random.default_rng(0)), OffloadTimes())

        return Pending(result, lambda: self.step >= due)


def driven(pair: Pair[Chunk], target: Far, gate: Gate, steps: int = STEPS) -> tuple[SpeculativePolicy, list[float]]:
    verdicts = LateVerdicts(math.inf)
    policy = SpeculativePolicy(pair, gate, verifier=pair.verifier(target), verdicts=verdicts)
    actions = []
    for target.step in range(steps):
        actions.append(float(policy.act(np.array([target.step * PERIOD_S], np.float32))[0]))
    return policy, actions


def test_it_drafts_until_the_first_chunk_and_in_an_outage_longer_than_one_and_resumes_from_a_fresh_one() -> None:
    policy, actions = driven(pair_of(Stub()), Far(Prophet(), 1, range(8, 28)), Periodic(4))
    drafting = [step for step, action in enumerate(actions) if action == DRAFTED * RANGE]
    # Asked at 4, and no longer answered: that chunk ends at step 12. Asked again at 28, answered at 29.
    assert drafting == [0, *range(12, 29)]
    played = [(step, action) for step, action in enumerate(actions) if step not in drafting]
    np.testing.assert_allclose([action for _, action in played], [step * PERIOD_S for step, _ in played], rtol=1e-5)
    assert policy.counts["missed"] == 5 and policy.counts["in_time"] == policy.counts["transmitted"] - 5


def test_one_that_does_not_draft_holds_its_last_action() -> None:
    _, actions = driven(pair_of(Stub(), drafts=False), Far(Prophet(), 1, range(8, 28)), Periodic(4))
    assert actions[0] == 0.0 and set(actions[12:29]) == {actions[11]} and actions[29] != actions[28]


def test_the_draft_alone_never_plays_a_chunk() -> None:
    _, actions = driven(pair_of(Stub(), corrects=False), Far(Prophet(), 1), Never())
    assert set(actions) == {DRAFTED * RANGE}
    assert pair_of(Stub(), corrects=False).corrects == 0 and pair_of(Stub()).corrects == CHUNK


def test_verdicts_that_are_waited_for_are_executed_themselves() -> None:
    network = Stub(1.0)
    policy = SpeculativePolicy(pair_of(network), Periodic(2))
    actions, origins = [], []
    for step in range(6):
        actions.append(float(policy.act(np.array([step * PERIOD_S], np.float32))[0]))
        origins.append(policy.origin)
    np.testing.assert_allclose(actions, [0.0, 0.1 + 0.25, 0.2, 0.3 + 0.25, 0.4, 0.5 + 0.25], rtol=1e-5)
    assert origins == [Origin.REPLACED, Origin.DRAFTED] * 3


def test_a_correction_that_is_no_number_is_never_executed() -> None:
    policy, target = SpeculativePolicy(pair_of(Stub(math.nan)), Periodic(4)), np.zeros(1, np.float32)
    policy.act(target)
    with pytest.raises(ObservationError):
        policy.act(target)


def test_an_episode_does_not_begin_with_the_chunk_of_the_one_before() -> None:
    policy, _ = driven(pair_of(Stub()), Far(Prophet(), 1), Periodic(4), 10)
    policy.reset(1)
    assert policy.act(np.zeros(1, np.float32))[0] == DRAFTED * RANGE


def test_an_audit_tells_whether_the_target_is_within_the_bound() -> None:
    for correction, within in ((0.0, 1.0), (1.0, 1.0), (4.0, 0.0)):
        pair = pair_of(Stub(), bound=0.25 / RANGE)
        chunk = np.full((CHUNK, 1), 0.25 * correction, np.float32)
        proposal = Proposal(Window({}), np.zeros((1, 1), np.float32))
        fixed: Any = SimpleNamespace(
            submit=lambda window, address, chunk=chunk: Pending(lambda: Answer(chunk, OffloadTimes()))
        )
        outcome = pair.verifier(fixed).submit(proposal, StepAddress(0, 0, 0, 0)).result()
        assert not isinstance(outcome, Miss) and (outcome.kept, outcome.verified) == (within, 1)


# --- the gate ---


def score(size: float, age: float, **settings: Any) -> float:
    proposal = Proposal(Window({}), np.zeros((1, 1), np.float32), Correction(size, age))
    return Staleness(0.0, **settings).score(proposal, np.random.default_rng(0))


def test_it_asks_where_the_correction_has_grown_or_the_chunk_is_old_or_missing() -> None:
    assert score(0.5, 0.5) > score(0.25, 0.5) > score(0.25, 0.25) > score(0.0, 0.0) == 0.0
    assert score(0.25, 0.9, age_weight=0.0) == 0.25
    for settings in ({}, {"age_weight": 0.0}):  # without a chunk it is as large as it can be, and finite
        assert score(math.inf, math.inf, **settings) == score(1.0, 1.0, **settings) < math.inf


class Growing(Stub):
    """Corrects more and more in the second half of the run, as if the world began to move."""

    def run(self, seen: Window, based: Chunk, index: Chunk) -> tuple[Chunk, Chunk]:
        self.correction = float(seen["state"][-1, 0] > STEPS * PERIOD_S / 2)
        return super().run(seen, based, index)


def request_steps(gate: Gate) -> list[int]:
    target = Far(Prophet(), 1)
    seen: list[int] = []
    submit = target.submit

    def noting(window: Window, address: StepAddress) -> Pending[Answer[Chunk]]:
        seen.append(address.step)
        return submit(window, address)

    target.submit = noting  # type: ignore[method-assign]
    driven(pair_of(Growing()), target, gate)
    return seen


def test_it_asks_more_often_where_the_world_moves_and_a_cadence_does_not() -> None:
    half = STEPS // 2
    ours, fixed = request_steps(Staleness(0.6)), request_steps(Periodic(5))
    assert [step < half for step in ours].count(True) < [step > half for step in ours].count(True)
    assert [step < half for step in fixed].count(True) == [step >= half for step in fixed].count(True)


def test_the_controller_holds_its_rate_and_the_random_control_has_its_forced_steps() -> None:
    steps = request_steps(Controller(Staleness(0.0), RateBudget(0.25), horizon=1.0))
    assert abs(len(steps) / STEPS - 0.25) <= 2.0 / STEPS  # the theorem's (horizon + 1) / T
    control = load_method("random_staleness")
    assert (control.gate, control.rate_of, control.limits_of) == ("random", "staleness", "staleness")


def test_other_pairs_have_no_staleness() -> None:
    settings = gate_settings("staleness", pair_of(Stub()), ("age_weight=0.5",))
    assert settings.build(pair_of(Stub())).age_weight == 0.5  # type: ignore[attr-defined]
    stranger: Any = replace(pair_of(Stub()), parts=None)
    with pytest.raises(ConfigError, match="staleness"):
        settings.build(stranger)


# --- the spec ---


@pytest.mark.parametrize(
    "changes",
    [{"bound": ((0.1, 0.2),) * CHUNK}, {"bound": ((0.0,),) * CHUNK}, {"bound": ((0.1,),)}, {"low": ()},
     {"corrects": False, "drafts": False}],
)  # fmt: skip
def test_what_does_not_fit_an_action_is_refused(changes: dict[str, Any]) -> None:
    spec = Prophet().spec
    given = {"low": (-1.0,), "high": (1.0,), "bound": ((0.1,),) * CHUNK} | changes
    with pytest.raises(ConfigError):
        CorrectorSpec("", spec, spec.observation, **given)
