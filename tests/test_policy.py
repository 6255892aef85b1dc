"""The algorithm, with tiny policies whose every number is known."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from tests.gates.steps import scripted

from specact.bundle.manifest import Manifest
from specact.errors import ConfigError, ObservationError
from specact.execution.player import WAIT, LateVerdicts
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import (
    ActionTokenizer,
    CodeVerifier,
    PolicySpec,
    executed_codes,
    take_target,
)
from specact.families.codes.sampling import CodeDistribution, rejection_probability, sample_codes
from specact.gates import ActionDeviation, Always, Gate, Never, Random
from specact.gates.controller import LinkBudget
from specact.observation import Window, vectors
from specact.pair import Answer, LocalTarget, Pair, Pending, checked
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, StepStreams, stream
from specact.robot.loop import Tick, run_loop
from specact.safety import Fallback
from specact.types import Clock, Miss, OffloadTimes, Origin, Outcome, Proposal, StepRecord, VirtualClock, all_from

SEEN = vectors(2, state=1)
SPEC = PolicySpec(
    SEEN, SEEN, codebooks=2, codes=3, chunk=3, actions=2, execute=1, overlap="drop", temperature=1.0, rate_hz=10.0
)  # fmt: skip
UNWRITTEN = Manifest(format=2, name="test", env="", spec={}, fingerprints={"target": ""})
ERROR_RATE = 1e-6
LARGEST = 1.0 - 2.0**-53


@dataclass(frozen=True)
class Keyed:
    """A policy whose answer is drawn anew for every value of the newest observation."""

    seed: int
    spec: PolicySpec = SPEC
    clock: Clock | None = None
    delay: float = 0.0

    def infer(self, window: Window) -> CodeDistribution:
        if self.clock is not None:
            self.clock.sleep(self.delay)
        s = self.spec
        rng = np.random.default_rng([self.seed, int(window["state"][-1, 0])])
        probs = rng.dirichlet(np.ones(s.codes), size=s.codebooks)
        offsets = rng.normal(size=(s.codebooks, s.codes, s.chunk, s.actions)).astype(np.float32) / np.float32(10)
        if not s.sequential:
            return CodeDistribution(probs, offsets)
        conditional = rng.dirichlet(np.ones(s.codes), size=s.codes)
        probs[1] = probs[0] @ conditional
        return CodeDistribution(probs, offsets, conditional)

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.infer(window) for window in windows]

    def answer(self, window: Window, address: StepAddress) -> CodeDistribution:
        return self.infer(window)


def pair(spec: PolicySpec = SPEC, *, clock: Clock | None = None) -> Pair[Any]:
    table = np.random.default_rng(9).uniform(-0.6, 0.6, size=(spec.codes**spec.codebooks, spec.chunk, spec.actions))
    scale = np.linspace(2.0, 3.0, spec.actions).astype(np.float32)
    tokenizer = ActionTokenizer(scale - 1.0, scale, table.astype(np.float32), "none", spec.codes)
    draft, target = cast(Any, Keyed(1, spec, clock, 0.002)), cast(Any, Keyed(2, spec, clock, 0.010))
    return CodeParts(Path(), UNWRITTEN, spec, {}, tokenizer, draft, target).pair()


def at(i: int) -> np.ndarray:
    return np.array([float(i)])


def play(policy: SpeculativePolicy, episode: int, steps: int = 12) -> tuple[np.ndarray, list[StepRecord]]:
    """Actions and records of one episode over the observations 0, 1, 2, ..."""
    policy.reset(episode)
    actions, records = [], []
    for i in range(steps):
        actions.append(policy.act(at(i)))
        assert policy.record is not None
        records.append(policy.record)
    return np.stack(actions), records


def window(i: int) -> Window:
    return Window({"state": np.array([[max(i - 1, 0)], [i]], np.float32)})


# ---- which codes are executed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequential", [False, True])
def test_draft_only_executes_what_the_draft_draws(sequential: bool) -> None:
    bundle = pair(structs.replace(SPEC, sequential=sequential))
    actions, records = play(SpeculativePolicy(bundle, Never(), seed=4, robot=2), episode=6)
    for i, (action, record) in enumerate(zip(actions, records, strict=True)):
        draft = bundle.parts.draft.infer(window(i))
        codes = sample_codes(draft, stream(4, Role.DRAFT, robot=2, episode=6, step=i))
        assert executed_codes(record).tolist() == codes.tolist()
        chunk = bundle.parts.tokenizer.decode(codes, draft.offsets)
        np.testing.assert_array_equal(action, bundle.parts.tokenizer.to_environment(chunk[0]))


def test_remote_target_executes_what_the_target_draws() -> None:
    bundle = pair()
    verifier = CodeVerifier(LocalTarget(bundle.target(), VirtualClock()), bundle.parts.tokenizer, take_target)
    _, records = play(SpeculativePolicy(bundle, Always(), verifier=verifier, seed=4, robot=2), episode=6)
    for i, record in enumerate(records):
        codes = sample_codes(bundle.parts.target.infer(window(i)), stream(4, Role.VERIFY, robot=2, episode=6, step=i))
        assert executed_codes(record).tolist() == codes.tolist() and record.outcome is not None
        kept = codes == record.proposal.evidence.codes
        assert record.outcome.evidence.accepted.tolist() == kept.tolist()
        assert record.outcome.evidence.rejection.tolist() == (1.0 - kept).tolist()


def test_the_draft_draws_the_same_whatever_the_gate_does() -> None:
    # The streams of different methods stay aligned: a comparison pairs step with step.
    remote = CodeVerifier(LocalTarget(pair().target()), pair().parts.tokenizer, take_target)
    methods = [
        *(SpeculativePolicy(pair(), gate, seed=1) for gate in (Never(), Always(), Random(0.5))),
        SpeculativePolicy(pair(), Always(), seed=1, verifier=remote),
    ]
    drafted = [[record.proposal.evidence.codes.tolist() for record in play(method, 0)[1]] for method in methods]
    assert all(codes == drafted[0] for codes in drafted)


@pytest.mark.parametrize("i", [0, 3])
@pytest.mark.parametrize("gate", [Always(), Never()])
def test_hybrid_has_exactly_the_targets_law_and_draft_only_the_drafts(
    gate: Gate, i: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over every cell of the uniforms that a step draws, by its volume."""
    bundle, law = pair(structs.replace(SPEC, codebooks=1, chunk=1)), np.zeros(SPEC.codes)
    policy = SpeculativePolicy(bundle, gate, clock=VirtualClock())
    q, p = (network.infer(window(i)).probs[0] for network in (bundle.parts.draft, bundle.parts.target))
    excess = np.clip(p - q, 0.0, None)
    steps = (np.cumsum(q), 1.0 - np.minimum(1.0, p / q), np.cumsum(excess) / excess.sum())
    ends = (np.unique([0.0, *np.clip(points, 0.0, 1.0), 1.0]) for points in steps)
    for cell in itertools.product(*map(itertools.pairwise, ends)):
        drafted, *verified = (float(low + high) / 2 for low, high in cell)
        numbers = {Role.DRAFT: [drafted], Role.GATE: [0.5] * 4, Role.VERIFY: verified}
        monkeypatch.setattr(StepStreams, "__call__", lambda self, role, address, given=numbers: scripted(given[role]))
        policy.reset(0)
        policy.act(at(i))
        assert policy.record is not None
        law[executed_codes(policy.record)[0]] += math.prod(high - low for low, high in cell)
    wanted, alternative = (p, q) if isinstance(gate, Always) else (q, p)
    assert 0.5 * np.abs(law - wanted).sum() <= 1e-12
    assert 0.5 * np.abs(law - alternative).sum() > 0.05


# ---- addresses, interleaving, episodes ------------------------------------------------------------------------------


def gates() -> list[Gate]:
    return [Random(0.5), ActionDeviation(0.8, max_skips=3)]


@pytest.mark.parametrize("kind", [0, 1])
def test_robots_do_not_disturb_each_other(kind: int) -> None:
    bundle = pair()
    alone = [play(SpeculativePolicy(bundle, gates()[kind], robot=robot), 2)[0] for robot in range(3)]
    team = [SpeculativePolicy(bundle, gates()[kind], robot=robot) for robot in range(3)]
    for policy in team:
        policy.reset(2)
    together = np.zeros((3, 12, SPEC.actions), np.float32)
    clock = [0, 0, 0]
    for robot in np.random.default_rng(0).permutation(np.repeat(np.arange(3), 12)):
        together[robot, clock[robot]] = team[robot].act(at(clock[robot]))
        clock[robot] += 1
    np.testing.assert_array_equal(together, np.stack(alone))
    assert not np.array_equal(alone[0], alone[1])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("execute", [1, 2])
def test_an_episode_is_reproduced_by_its_number(kind: int, execute: int) -> None:
    bundle = pair(structs.replace(SPEC, execute=execute, overlap="average"))
    policy = SpeculativePolicy(bundle, gates()[kind], seed=3)
    first, second, repeat = (play(policy, episode, steps=9)[0] for episode in (5, 6, 5))
    np.testing.assert_array_equal(first, repeat)
    assert not np.array_equal(first, second)
    fresh = SpeculativePolicy(bundle, gates()[kind], seed=3)
    np.testing.assert_array_equal(first, play(fresh, 5, steps=9)[0])
    assert not np.array_equal(first, play(SpeculativePolicy(bundle, gates()[kind], seed=4), 5, steps=9)[0])


@pytest.mark.parametrize("bad", [np.array([np.nan]), np.zeros(2), {"goal": np.zeros(1)}, np.array([np.inf])])
@pytest.mark.parametrize("kind", [0, 1])
def test_a_refused_observation_leaves_the_policy_where_it_was(bad: Any, kind: int) -> None:
    bundle = pair(structs.replace(SPEC, execute=2))
    wanted = play(SpeculativePolicy(bundle, gates()[kind]), 1, steps=8)[0]
    policy = SpeculativePolicy(bundle, gates()[kind])
    play(policy, 0, steps=3)
    policy.reset(1)
    actions: list[np.ndarray] = []
    assert policy.record is None and policy.wants_inference
    for i in range(8):
        before = policy.record
        with pytest.raises(ObservationError):
            policy.act(bad)
        assert policy.record is before
        actions.append(policy.act(at(i)))
    np.testing.assert_array_equal(np.stack(actions), wanted)


# ---- chunks and what the gate is told -------------------------------------------------------------------------------


class Listening(Random):
    """A gate that keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.told: list[tuple[np.ndarray, np.ndarray]] = []

    def on_action(self, drafted: np.ndarray, executed: np.ndarray) -> None:
        self.told.append((drafted.copy(), executed.copy()))


@pytest.mark.parametrize("execute", [1, 2, 3])
def test_the_gate_hears_of_every_action_drafted_and_executed(execute: int) -> None:
    gate, bundle = Listening(), pair(structs.replace(SPEC, execute=execute))
    actions, records = play(SpeculativePolicy(bundle, gate), 0, steps=12)
    assert [record.address.step for record in records] == [i // execute for i in range(12)]  # one inference per chunk
    assert {record.decision.transmit for record in records} == {True, False}
    assert len(gate.told) == 12
    for i, (drafted, executed) in enumerate(gate.told):
        np.testing.assert_array_equal(drafted, records[i].proposal.actions[i % execute])
        np.testing.assert_array_equal(executed, records[i].actions[i % execute])
        np.testing.assert_array_equal(actions[i], bundle.parts.tokenizer.to_environment(executed))


def test_inference_is_wanted_once_per_chunk_and_sees_every_observation() -> None:
    policy = SpeculativePolicy(pair(structs.replace(SPEC, execute=3)), Never())
    wanted = []
    for i in range(7):
        wanted.append(policy.wants_inference)
        policy.act_on(policy.observe(at(i)))
    assert wanted == [True, False, False, True, False, False, True]
    assert policy.record is not None
    assert policy.record.proposal.window["state"][:, 0].tolist() == [5.0, 6.0]  # also those between inferences


# ---- the record -----------------------------------------------------------------------------------------------------


def test_records_are_consistent() -> None:
    bundle = pair()
    _, records = play(SpeculativePolicy(bundle, Random(0.5), seed=1), episode=4, steps=60)
    for i, record in enumerate(records):
        assert record.address == StepAddress(1, 0, 4, i)
        draft = bundle.parts.draft.infer(window(i))
        np.testing.assert_array_equal(record.proposal.window["state"], window(i)["state"])
        np.testing.assert_array_equal(record.proposal.evidence.draft.probs, draft.probs)
        np.testing.assert_array_equal(
            record.proposal.actions, bundle.parts.tokenizer.decode(record.proposal.evidence.codes, draft.offsets)
        )
        assert record.decision.threshold == 0.5
        if not record.decision.transmit:
            assert record.outcome is None
            np.testing.assert_array_equal(record.actions, record.proposal.actions)
            continue
        assert record.outcome is not None
        target, verified, codes = bundle.parts.target.infer(window(i)), record.outcome.evidence, executed_codes(record)
        np.testing.assert_array_equal(record.actions, bundle.parts.tokenizer.decode(codes, target.offsets))
        np.testing.assert_array_equal(verified.target.probs, target.probs)
        np.testing.assert_array_equal(
            verified.rejection, rejection_probability(target.probs, draft.probs, record.proposal.evidence.codes)
        )
        kept = codes == record.proposal.evidence.codes  # a residual never gives the rejected code back
        assert verified.accepted.tolist() == kept.tolist()


class Slow(Gate):
    """Transmits every other step after thinking about it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(0.5, force_first=False)
        self._clock, self._turn = clock, False

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        self._clock.sleep(0.0005)
        self._turn = not self._turn
        return float(self._turn)


class Far:
    """A target behind a link of 12 ms whose own time is 10 ms; it answers, or misses, as it is told."""

    def __init__(
        self, bundle: Pair[Any], clock: Clock, misses: Sequence[str | None] = (), *, connected: bool = True
    ) -> None:
        self._policy, self._clock, self._misses, self._connected = bundle.parts.target, clock, list(misses), connected

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[CodeDistribution]]:
        cause = self._misses.pop(0) if self._misses else None
        arrival_s = self._clock.now() + 0.012

        def result() -> Answer[CodeDistribution] | Miss:
            if not self._connected:
                return Miss("disconnected", OffloadTimes(), sent=False)
            waited = max(0.0, arrival_s - self._clock.now())
            self._clock.sleep(waited)
            if cause is not None:
                return Miss(cast(Any, cause), OffloadTimes(network=waited))
            before = self._clock.now()
            distribution = self._policy.infer(window)
            return Answer(distribution, OffloadTimes(network=waited, target=self._clock.now() - before))

        return Pending(result, lambda: self._clock.now() >= arrival_s, self._connected)


def test_times_add_up() -> None:
    clock = VirtualClock(100.0)
    bundle = pair(clock=clock)
    verifier = CodeVerifier(Far(bundle, clock), bundle.parts.tokenizer)
    policy = SpeculativePolicy(bundle, Slow(clock), verifier=verifier, clock=clock)
    for i in range(6):
        before = clock.now()
        policy.act(at(i))
        assert policy.record is not None
        times = policy.record.times
        assert policy.record.decision.transmit == (i % 2 == 0)
        transmitted = 1.0 if policy.record.decision.transmit else 0.0
        assert times.draft == pytest.approx(0.002)
        assert times.gate == pytest.approx(0.0005)
        assert times.offload.network == pytest.approx(0.012 * transmitted)
        assert times.offload.target == pytest.approx(0.010 * transmitted)
        assert times.finish == pytest.approx(0.0, abs=1e-9)
        assert times.total == pytest.approx(clock.now() - before)


# ---- misses ---------------------------------------------------------------------------------------------------------


STILL = np.array([0.5, 0.25], np.float32)


def missing(misses: Sequence[str | None], fallback: Fallback) -> tuple[SpeculativePolicy, Pair[Any]]:
    clock = VirtualClock()
    bundle = pair(clock=clock)
    verifier = CodeVerifier(Far(bundle, clock, misses), bundle.parts.tokenizer)
    return SpeculativePolicy(bundle, Always(), verifier=verifier, fallback=fallback, clock=clock), bundle


def test_a_miss_executes_the_draft_and_says_why() -> None:
    # An answer ends a run of misses: three in all are no three in a row.
    told = [None, "deadline", "overloaded", None, "expired"]
    policy, bundle = missing(told, Fallback(max_consecutive_misses=2, stop_action=tuple(STILL)))
    actions, records = play(policy, 0, steps=5)
    drafted, _ = play(SpeculativePolicy(bundle, Never(), clock=VirtualClock()), 0, steps=5)
    assert [record.miss for record in records] == told and not policy.safety.stopped
    assert [record.outcome is None for record in records] == [False, True, True, False, True]
    np.testing.assert_array_equal(actions[1:3], drafted[1:3])
    assert executed_codes(records[1]).tolist() == records[1].proposal.evidence.codes.tolist()


def test_a_stopped_robot_stays_stopped_until_the_next_episode() -> None:
    policy, _ = missing([None, "disconnected"], Fallback("stop", stop_action=tuple(STILL)))
    actions, _ = play(policy, 0, steps=5)
    assert policy.safety.stopped
    np.testing.assert_array_equal(actions[1:], np.tile(STILL, (4, 1)))
    actions, records = play(policy, 1, steps=3)
    assert not policy.safety.stopped and all(record.miss is None for record in records)


def test_an_action_expires_two_seconds_after_its_chunk_should_have_ended() -> None:
    bundle, clock = pair(), VirtualClock()
    policy = SpeculativePolicy(bundle, Never(), fallback=Fallback(stop_action=tuple(STILL)), clock=clock)
    policy.act(at(0))
    for seconds, expired in ((bundle.execute / bundle.rate_hz, False), (1.9, False), (0.2, True)):
        clock.sleep(seconds)
        assert policy.safety.expired == expired


def test_a_rule_that_can_stop_needs_to_know_how() -> None:
    for options in ({"on_miss": "hold_last"}, {"on_miss": "stop"}, {"max_consecutive_misses": 3}):
        with pytest.raises(ConfigError, match="stop_action"):
            Fallback(**cast(Any, options))
    with pytest.raises(ConfigError, match=r"\[2\]"):
        SpeculativePolicy(pair(), Always(), fallback=Fallback("stop", stop_action=(0.0,) * 3))
    with pytest.raises(ConfigError, match="did you mean 'stop'"):
        Fallback(cast(Any, "stopp"))


class Unsure(Keyed):
    """Its probabilities are not numbers, its offsets are."""

    def infer(self, window: Window) -> CodeDistribution:
        answer = super().infer(window)
        return replace(answer, probs=answer.probs * np.nan)


def test_probabilities_that_are_not_finite_are_no_acceptance_and_no_draft() -> None:
    policy = SpeculativePolicy(pair().composed(local_target=cast(Any, Unsure(2))), Always())
    policy.act(at(0))
    assert policy.record is not None and policy.record.miss == "invalid"
    unsure = SpeculativePolicy(pair().composed(draft=cast(Any, Unsure(1))), Never())
    with pytest.raises(ObservationError, match="not finite"):
        unsure.act(at(0))


@pytest.mark.parametrize(("apart", "kept"), [(0.0, 1.0), (1e-7, 1.0), (7.8e-3, 0.0)])
def test_a_draft_is_kept_though_its_actions_went_through_other_units(apart: float, kept: float) -> None:
    """A token's bin is 7.8e-3 wide; the way to the environment's units and back costs the last bits."""
    actions = np.full((3, 2), 0.3, np.float32)
    outcome = Outcome(actions + np.float32(apart), all_from(Origin.ACCEPTED, 3), 6, 6, OffloadTimes())
    result = checked(outcome, Proposal(SEEN.zeros(), actions))
    assert isinstance(result, Outcome) and result.kept == kept


def test_a_loop_that_holds_after_misses_stands_still_in_the_end() -> None:
    class Arm:
        def __init__(self) -> None:
            self.sent = list[list[float]]()

        def observe(self) -> NDArray[np.float32]:
            return at(0)

        def act(self, action: NDArray[np.float32]) -> None:
            self.sent.append(action.tolist())

    clock, arm, bundle = VirtualClock(), Arm(), pair()
    verifier = CodeVerifier(Far(bundle, clock, [None, *["deadline"] * 400]), bundle.parts.tokenizer)
    rule = Fallback("hold_last", stop_action=tuple(STILL), max_chunk_age_ms=500.0)
    policy = SpeculativePolicy(bundle, Always(), verifier=verifier, fallback=rule, clock=clock)
    ticks = list[Tick]()
    run_loop(arm, policy, 0.05, clock, lambda: clock.now() < 5.0, ticks.append)
    assert arm.sent[-50:] == 50 * [list(STILL)] and policy.safety.outages == 1
    assert all(tick.action is not None for tick in ticks), "no period without an action"


@pytest.mark.parametrize("gate", [Never(), Always()])
def test_an_action_that_is_not_finite_is_never_returned(gate: Gate) -> None:
    class Broken(Keyed):
        def infer(self, window: Window) -> CodeDistribution:
            answer = super().infer(window)
            return replace(answer, offsets=answer.offsets * (np.nan if window["state"][-1, 0] == 2.0 else 1.0))

    broken = pair().composed(draft=cast(Any, Broken(1)), local_target=cast(Any, Broken(2)))
    policy = SpeculativePolicy(broken, gate)
    for i in (0, 1, 2, 3):
        if i == 2:
            record = policy.record
            with pytest.raises(ObservationError, match="not finite"):
                policy.act(at(i))
            assert policy.record is record
        else:
            assert np.isfinite(policy.act(at(i))).all()


# Both are valid on the wire; in float32 their sum, or that of two of them, is not finite or as good as that.
@pytest.mark.parametrize("value", [3.3e38, -3.3e38, 1e30])
@pytest.mark.parametrize("overlap", ["drop", "average"])
def test_an_answer_that_decodes_to_no_finite_action_is_a_miss(value: float, overlap: Any) -> None:
    class Overflowing(Keyed):
        def infer(self, window: Window) -> CodeDistribution:
            answer = super().infer(window)
            return replace(
                answer, offsets=np.full_like(answer.offsets, value if 2 <= window["state"][-1, 0] < 5 else 0.1)
            )

    bundle = pair(structs.replace(SPEC, overlap=overlap)).composed(local_target=cast(Any, Overflowing(2)))
    rule = Fallback(max_consecutive_misses=2, stop_action=tuple(STILL))
    policy = SpeculativePolicy(bundle, Always(), fallback=rule)
    actions, records = play(policy, 0, steps=8)
    assert [record.miss for record in records[:5]] == [None, None, "invalid", "invalid", "invalid"]
    assert np.isfinite(actions).all() and policy.safety.stopped
    np.testing.assert_array_equal(actions[4:], np.tile(STILL, (4, 1)))
    assert policy.counts["missed"] == 3
    np.testing.assert_array_equal(records[3].actions, records[3].proposal.actions)
    stops = SpeculativePolicy(bundle, Always(), fallback=Fallback("stop", stop_action=tuple(STILL)))
    play(stops, 0, steps=3)
    assert stops.safety.stopped


# ---- where every action comes from ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["execute_draft", "hold_last"])
def test_the_record_says_where_every_action_comes_from(rule: Any) -> None:
    clock = VirtualClock()
    bundle = pair(clock=clock)
    verifier = CodeVerifier(Far(bundle, clock, [None, None, "deadline"] * 20), bundle.parts.tokenizer)
    fallback = Fallback(rule, stop_action=tuple(STILL))
    policy = SpeculativePolicy(bundle, Random(0.5), verifier=verifier, fallback=fallback, clock=clock)
    _, records = play(policy, 0, steps=60)
    seen = set()
    for record in records:
        kept = executed_codes(record) == record.proposal.evidence.codes
        if not record.decision.transmit:
            origin, actions = Origin.DRAFTED, record.proposal.actions
        elif record.miss is not None:
            # What is held is one action, again and again.
            held = np.broadcast_to(record.actions[0], record.actions.shape)
            origin, actions = Origin.FALLBACK, record.proposal.actions if rule == "execute_draft" else held
        else:
            assert record.outcome is not None
            origin, actions = Origin.ACCEPTED if kept.all() else Origin.REPLACED, record.outcome.actions
            np.testing.assert_array_equal(record.outcome.origins, record.origins)
        assert record.origins.dtype == np.uint8 and record.origins.tolist() == [origin] * SPEC.chunk
        np.testing.assert_array_equal(record.actions, actions)
        seen.add(origin)
    assert seen == {Origin.DRAFTED, Origin.ACCEPTED, Origin.REPLACED, Origin.FALLBACK}


def late(
    misses: Sequence[str | None], tick: float, steps: int = 12, gate: Gate | None = None, **options: Any
) -> tuple[SpeculativePolicy, list[np.ndarray]]:
    """What control steps, ``tick`` [s] apart, do in chunks of 3; a verdict takes 12 ms, a draft 2 ms."""
    clock = VirtualClock()
    bundle = pair(structs.replace(SPEC, execute=3), clock=clock)
    verifier = CodeVerifier(Far(bundle, clock, misses), bundle.parts.tokenizer)
    options = {"verdicts": LateVerdicts(math.inf)} | options
    policy = SpeculativePolicy(bundle, gate or Always(), verifier=verifier, clock=clock, **options)
    actions = []
    for i in range(steps):
        actions.append(policy.act(at(i)))
        clock.sleep(tick)
    return policy, actions


def drafted_actions() -> list[np.ndarray]:
    policy = SpeculativePolicy(pair(structs.replace(SPEC, execute=3)), Never())
    return [policy.act(at(i)) for i in range(12)]


@pytest.mark.parametrize(
    ("for_s", "tick", "sent", "missed"),
    [
        (0.014, 0.015, 4, 4),  # older than that when it is looked at
        (math.inf, 0.005, 4, 3),  # its chunk is over, the next one not drafted; the last one is still under way
        (math.inf, 0.003, 2, 2),  # the next chunk is running, whose step could not be sent meanwhile
    ],
)
def test_an_answer_too_late_is_missed_and_never_executed(for_s: float, tick: float, sent: int, missed: int) -> None:
    policy, actions = late([], tick, verdicts=LateVerdicts(for_s))
    np.testing.assert_array_equal(actions, drafted_actions())
    counts = policy.counts
    assert (counts["wanted"], counts["transmitted"], counts["missed"]) == (4, sent, missed)
    assert counts["in_time"] == counts["replaced"] == counts["verified"] == counts["accepted"] == 0
    assert policy.record is not None and policy.record.outcome is None and policy.record.miss is None
    assert policy.record.origins.tolist() == [Origin.DRAFTED] * 3


@pytest.mark.parametrize(
    ("misses", "tick"),
    [
        (["deadline"] * 9, 0.003),  # misses of chunks that are over
        (["deadline"] * 9, 0.015),  # misses of the chunk that is executed
        ([], 0.003),  # answers after their chunk
    ],
)
@pytest.mark.parametrize(("rule", "most"), [("execute_draft", 1), ("stop", None)])
def test_late_verdicts_that_never_serve_stop_the_robot(
    misses: list[str], tick: float, rule: Any, most: int | None
) -> None:
    policy, actions = late(misses, tick, 24, fallback=Fallback(rule, most, tuple(STILL)))
    missed = 1 if most is None else most + 1
    assert policy.safety.stopped and policy.counts["missed"] == missed
    first = next(i for i, action in enumerate(actions) if np.array_equal(action, STILL))
    np.testing.assert_array_equal(actions[first:], np.broadcast_to(STILL, (24 - first, len(STILL))))
    assert policy.origin is Origin.FALLBACK


@pytest.mark.parametrize("tick", [0.015, 0.003])
def test_a_gate_learns_of_every_verdict_that_is_used_once_at_once_or_late(tick: float) -> None:
    class Told(Always):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[Proposal] = []

        def on_verified(self, record: StepRecord) -> None:
            self.told.append(record.proposal)

    for verdicts in (LateVerdicts(math.inf), WAIT):
        gate = Told()
        policy, _ = late([None, "overloaded"], tick, gate=gate, verdicts=verdicts)
        used = policy.counts["in_time"] if verdicts.late else policy.counts["transmitted"] - policy.counts["missed"]
        assert len(gate.told) == used and (used > 0) == (tick > 0.01 or not verdicts.late)


@pytest.mark.parametrize("cause", [None, "overloaded"])
def test_what_was_played_before_a_late_verdict_is_the_drafts_in_the_record_too(cause: str | None) -> None:
    policy, actions = late([cause] * 4, 0.015)
    record, units = policy.record, pair().parts.tokenizer
    assert record is not None and record.miss == cause
    np.testing.assert_array_equal(actions[9:], [units.to_environment(action) for action in record.actions])
    np.testing.assert_array_equal(record.actions[:1], record.proposal.actions[:1])
    if cause is not None:
        assert record.origins.tolist() == [Origin.DRAFTED, Origin.FALLBACK, Origin.FALLBACK]
        np.testing.assert_array_equal(record.actions, record.proposal.actions)
        return
    assert record.outcome is not None
    assert record.origins.tolist() == [Origin.DRAFTED, *record.outcome.origins[1:]]
    np.testing.assert_array_equal(record.actions[1:], record.outcome.actions[1:])
    assert not np.array_equal(record.actions[:1], record.outcome.actions[:1])


# ---- requests that cannot leave -------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_for_s", [None, math.inf])
def test_a_request_that_could_not_leave_is_not_charged(late_for_s: float | None) -> None:
    clock = VirtualClock()
    bundle = pair(clock=clock)
    policy = SpeculativePolicy(
        bundle, Always(), clock=clock,
        verifier=CodeVerifier(Far(bundle, clock, connected=False), bundle.parts.tokenizer),
        verdicts=LateVerdicts(late_for_s) if late_for_s else WAIT,
    )  # fmt: skip
    _, records = play(policy, 0, steps=3)
    budget = LinkBudget(4000.0, 1000, 8.0)
    for record in records:
        assert record.decision.transmit and record.miss == "disconnected" and record.unsent
        assert budget.overspent(record) == -budget.rate


# ---- other parts, and errors ----------------------------------------------------------------------------------------


def test_what_is_no_pair_gate_or_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="'ball'"):
        SpeculativePolicy(cast(Any, "ball"), Never())
    with pytest.raises(ConfigError, match="'adahi'"):
        SpeculativePolicy(pair(), cast(Any, "adahi"))
    for wrong in ({"seed": -1}, {"robot": -1}):
        with pytest.raises(ConfigError, match="-1"):
            SpeculativePolicy(pair(), Never(), **cast(Any, wrong))


def test_the_gates_stream_is_the_steps_own() -> None:
    draws: list[float] = []

    class Drawing(Never):
        def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
            draws.append(float(rng.random()))
            return 0.0

    play(SpeculativePolicy(pair(), Drawing(), seed=3, robot=1), 2, steps=4)
    wanted: Callable[[int], float] = lambda i: stream(3, Role.GATE, robot=1, episode=2, step=i).random(2)[1]  # noqa: E731
    assert draws == [wanted(i) for i in range(4)]  # after the one that breaks ties
