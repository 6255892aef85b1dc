"""A pair of chunk policies as a robot runs it: which actions are executed, and what draft and target get to see."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from tests.served import served

from specact.clock import Clock, VirtualClock
from specact.errors import BundleError, ConfigError, ObservationError
from specact.execution.verdicts import LateVerdicts
from specact.fallback import Fallback
from specact.families.chunks.flow import FlowNetworks, FlowPolicy, load_flow
from specact.families.chunks.pair import ChunkParts
from specact.families.chunks.policy import Chunk, Inpainting
from specact.families.chunks.sources import FunctionPolicy, Inputs, chunk_policy
from specact.families.chunks.wire import ChunkExchange
from specact.gates import ActionDeviation, Always, Gate, Never, Random
from specact.gates.controller import Controller, RateBudget
from specact.observation import Field, Observation, ObservationSpec, Window
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, stream
from specact.types import Cause, Miss, OffloadTimes, Origin, StepRecord
from specact.units import ActionUnits
from specact.verification import Answer, Pending, TargetPolicy
from specact.wire.exchange import Request

ACTIONS, LONG, SHORT, EXECUTE, RATE_HZ = 2, 8, 5, 3, 10.0
UNITS = ActionUnits.of_range(np.array([-4.0, -40.0], np.float32), np.array([4.0, 60.0], np.float32))
ADDRESS = StepAddress(3, 1, 4, 1)


@chunk_policy(observation={"state": (2,)}, chunk=LONG, actions=ACTIONS, rate_hz=RATE_HZ)
def draft(inputs: Inputs) -> Chunk:
    """Goes on from the newest state; in normalised units a step is 1/40 of what ``state`` says."""
    return in_units(inputs["state"][:, -1, None] * 0.1 + 0.025 * np.arange(LONG)[:, None])


@chunk_policy(
    observation={
        "state": Field((2,), history=3),
        "goal": Field((1,), history=0),
        "image.front": Field((2, 2, 3), "uint8", 2),
    },
    chunk=SHORT,
    actions=ACTIONS,
    rate_hz=RATE_HZ,
    seeded=True,
)
def target(inputs: Inputs, rngs: Sequence[np.random.Generator]) -> Chunk:
    """As the draft at first, then away from it: by 0.05, give or take 0.01, for every action."""
    away = np.stack([rng.uniform(0.04, 0.06, ACTIONS) for rng in rngs])[:, None] * np.arange(SHORT)[:, None]
    return in_units(inputs["state"][:, -1, None] * 0.1 + 0.025 * np.arange(SHORT)[:, None] + away)


def in_units(normalised: np.ndarray) -> Chunk:
    return np.asarray(UNITS.centre + UNITS.scale * normalised, np.float32)


def made(**changes: Any) -> Pair[Any]:
    parts: dict[str, Any] = {
        "name": "test",
        "draft": draft,
        "units": UNITS,
        "target_spec": target.spec,
        "load_target": lambda: target,
        "execute": EXECUTE,
        "accept_within": 0.12,
    }
    return ChunkParts(**parts | changes).pair()


def swapped(**changes: Any) -> Pair[Any]:
    """The policy with the longer chunks as the target."""
    return made(draft=target, target_spec=draft.spec, load_target=lambda: draft, **changes)


def at(i: int) -> dict[str, Any]:
    return {
        "state": np.array([0.1 * i, -0.2 * i]),
        "goal": np.array([float(i)]),
        "image.front": np.full((2, 2, 3), i, np.uint8),
    }


def play(
    policy: SpeculativePolicy, steps: int = 30, see: Callable[[int], dict[str, Any]] = at
) -> tuple[np.ndarray, list[StepRecord]]:
    """Actions, and the record behind each of them as it was right after it."""
    actions, records = [], []
    for i in range(steps):
        actions.append(policy.act(see(i)))
        assert policy.record is not None
        records.append(policy.record)
    return np.stack(actions), records


def restless(i: int) -> dict[str, Any]:
    return at(17 * i % 11)


def drafted_at(i: int) -> np.ndarray:
    return draft.infer(draft.spec.observation.select(windows(i + 1)[i]), np.random.default_rng(0))


def targeted_at(i: int, seed: int = 0) -> np.ndarray:
    step = stream(seed, Role.VERIFY, step=i // EXECUTE)
    return target.infer(windows(i + 1)[i], step)


def windows(count: int) -> list[Window]:
    from specact.observation import ObservationHistory

    history = ObservationHistory(made().observation)
    return [history.push(at(i)) for i in range(count)]


# ---- which actions are executed -------------------------------------------------------------------------------------


def test_without_a_gates_transmission_it_executes_the_draft() -> None:
    actions, records = play(SpeculativePolicy(made(load_target=lambda: target), Never()))
    for i, (action, record) in enumerate(zip(actions, records, strict=True)):
        asked = i - i % EXECUTE
        np.testing.assert_allclose(action, drafted_at(asked)[i % EXECUTE], rtol=1e-5)
        assert record.outcome is None and record.miss is None and len(record.actions) == LONG
        assert record.origins.tolist() == [Origin.DRAFTED] * LONG


def test_with_a_distance_of_0_every_verified_chunk_is_the_targets() -> None:
    policy = SpeculativePolicy(made(accept_within=0.0), Always(), seed=7)
    actions, records = play(policy)
    for i, (action, record) in enumerate(zip(actions, records, strict=True)):
        asked = i - i % EXECUTE
        np.testing.assert_allclose(action, targeted_at(asked, seed=7)[i % EXECUTE], rtol=1e-5)
        assert record.outcome is not None and record.origins.tolist() == [Origin.REPLACED] * SHORT
    assert policy.counts["accepted"] == 0 < policy.counts["verified"] == 10 * SHORT


@pytest.mark.parametrize("within", [0.03, 0.12, 0.17, 10.0])
def test_drafted_actions_are_executed_up_to_the_first_one_too_far_from_the_targets(within: float) -> None:
    policy = SpeculativePolicy(made(accept_within=within), Always(), seed=7)
    _, records = play(policy)
    accepted = 0
    for step, record in enumerate(records[::EXECUTE]):
        wanted = UNITS.from_environment(targeted_at(step * EXECUTE, seed=7))
        distance = np.sqrt(np.square(record.proposal.actions[:SHORT] - wanted).mean(axis=-1))
        kept = int(np.argmax(distance > within)) if (distance > within).any() else SHORT
        assert record.outcome is not None
        assert (record.outcome.verified, record.outcome.accepted) == (SHORT, kept)
        np.testing.assert_array_equal(record.actions[:kept], record.proposal.actions[:kept])
        np.testing.assert_allclose(record.actions[kept:], wanted[kept:], atol=1e-6)
        assert record.origins.tolist() == [Origin.ACCEPTED] * kept + [Origin.REPLACED] * (SHORT - kept)
        accepted += kept
    assert policy.counts["accepted"] == accepted
    # Actions i = 0, 1, 2, ... are 0.04 i to 0.06 i apart.
    assert accepted / len(records[::EXECUTE]) == {0.03: 1, 0.12: 3, 10.0: SHORT}.get(
        within, pytest.approx(3.5, abs=0.5)
    )


def test_a_longer_chunk_of_the_target_is_used_as_far_as_the_draft_reaches() -> None:
    policy = SpeculativePolicy(swapped(accept_within=0.0), Always())
    _, records = play(policy, 6)
    assert {len(record.actions) for record in records} == {SHORT}
    np.testing.assert_allclose(UNITS.to_environment(records[0].actions), drafted_at(0)[:SHORT], rtol=1e-5)
    _, records = play(SpeculativePolicy(swapped(), Never()), 6)
    assert {len(record.actions) for record in records} == {SHORT}


def gates() -> dict[str, Gate]:
    return {
        "never": Never(),
        "always": Always(),
        "random": Random(0.5),
        "deviation": ActionDeviation(0.16, max_skips=4),
        "controller": Controller(ActionDeviation(math.inf), RateBudget(0.4)),
        "audited": audited(ActionDeviation(math.inf)),
    }


def audited(gate: Gate) -> Gate:
    gate.audit_rate = 0.4
    return gate


@pytest.mark.parametrize("overlap", ["drop", "average"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", gates())
def test_every_gate_that_looks_at_actions_alone_serves_a_pair_of_chunk_policies(
    name: str, turned: bool, overlap: Literal["drop", "average"]
) -> None:
    pair = (swapped if turned else made)(overlap=overlap)
    gate = gates()[name]
    if name == "deviation" and turned:
        gate.threshold = 0.22  # scores of other policies
    policy = SpeculativePolicy(pair, gate, seed=5)
    actions, records = play(policy, 90, restless)
    steps = records[::EXECUTE]
    assert np.isfinite(actions).all() and (np.abs(actions - UNITS.centre) <= UNITS.scale * 1.00001).all()
    for record in steps:
        assert (record.outcome is not None) == record.decision.transmit and record.miss is None
        expected = {Origin.ACCEPTED, Origin.REPLACED} if record.decision.transmit else {Origin.DRAFTED}
        assert set(record.origins.tolist()) <= expected
        assert len(record.origins) == len(record.actions)
    sent = sum(record.decision.transmit for record in steps)
    counts = policy.counts
    assert (counts["steps"], counts["transmitted"], counts["missed"]) == (30, sent, 0)
    assert counts["verified"] == SHORT * sent
    assert counts["accepted"] == sum(record.outcome.accepted for record in steps if record.outcome)
    wanted = {"never": (0, 0), "always": (30, 30)}
    low, high = wanted.get(name, (4, 26))
    assert low <= sent <= high
    if name == "audited":
        assert {record.decision.reason for record in steps if record.decision.transmit} == {"first", "audit"}
    # An episode is reproduced by its number, whatever was drawn in between.
    policy.reset(0)
    if name != "controller":  # it learns for life
        np.testing.assert_array_equal(play(policy, 90, restless)[0], actions)


def test_the_target_draws_from_the_steps_own_stream_whoever_else_was_asked() -> None:
    _, always = play(SpeculativePolicy(made(accept_within=0.0), Always(), seed=2))
    _, some = play(SpeculativePolicy(made(accept_within=0.0), Random(0.5), seed=2))
    both = [(one, two) for one, two in zip(always, some, strict=True) if two.outcome is not None]
    assert 0 < len(both) < len(always)
    for one, two in both:
        np.testing.assert_array_equal(one.actions, two.actions)


# ---- draft and target see different things --------------------------------------------------------------------------


class Watching:
    """A chunk policy that keeps the windows it was shown."""

    inpaints = False

    def __init__(self, policy: FunctionPolicy) -> None:
        self._policy, self.spec = policy, policy.spec
        self.seen: list[Window] = []

    def infer(self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None) -> Chunk:
        return self.infer_batch([window], [rng])[0]

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> Sequence[Chunk]:
        self.seen += windows
        return self._policy.infer_batch(windows, rngs)


def test_the_device_keeps_the_union_and_each_policy_sees_its_own() -> None:
    small, large = Watching(draft), Watching(target)
    pair = made(draft=small, load_target=lambda: large)
    assert pair.observation == ObservationSpec(
        {
            "state": Field((2,), history=3),
            "goal": Field((1,), history=0),
            "image.front": Field((2, 2, 3), "uint8", 2),
        }
    )
    policy = SpeculativePolicy(pair, Always())
    _, records = play(policy, 9)
    assert len(small.seen) == len(large.seen) == 3
    for inference, (little, much) in enumerate(zip(small.seen, large.seen, strict=True)):
        i = inference * EXECUTE
        assert {name: array.shape for name, array in little.arrays.items()} == {"state": (1, 2)}
        np.testing.assert_allclose(little["state"][:, 0], [0.1 * i], rtol=1e-6)
        assert set(much.arrays) == {"state", "goal", "image.front"}
        np.testing.assert_allclose(much["state"][:, 0], [0.1 * max(0, i - k) for k in (2, 1, 0)], rtol=1e-6)
        assert much["goal"].tolist() == [i]
        assert much["image.front"][:, 0, 0, 0].tolist() == [max(0, i - 1), i]
        kept = records[i].proposal.window  # what late requests are made of
        assert {name: list(array.shape) for name, array in kept.arrays.items()} == pair.observation.shapes


def test_what_only_the_target_needs_is_missed_by_its_name() -> None:
    policy = SpeculativePolicy(made(), Never())
    with pytest.raises(ObservationError, match=r"no 'image\.front'; this policy needs image\.front \[2, 2, 3\], uint8"):
        policy.act({name: value for name, value in at(0).items() if name != "image.front"})
    assert np.isfinite(policy.act(at(0))).all()


def test_an_instruction_reaches_the_policy_that_asks_for_it() -> None:
    told: list[list[str]] = []

    @chunk_policy(observation={"state": (2,)}, chunk=3, actions=ACTIONS, rate_hz=RATE_HZ, instruction=True)
    def listens(inputs: Inputs, instruction: list[str]) -> Chunk:
        told.append(instruction)
        return np.zeros((len(inputs["state"]), 3, ACTIONS), np.float32)

    pair = made(target_spec=listens.spec, load_target=lambda: listens)
    assert pair.observation.instruction and not draft.spec.observation.instruction
    policy = SpeculativePolicy(pair, Always())
    with pytest.raises(ObservationError, match="no 'instruction'"):
        policy.act(at(0))
    for i in range(2 * EXECUTE):
        policy.act(at(i) | {"instruction": f"pick {i}"})
    assert told == [["pick 0"], ["pick 3"]]


def test_a_batch_at_the_server_answers_each_request_as_if_it_had_come_alone() -> None:
    pair, seen = made(), windows(4)
    addresses = [ADDRESS, ADDRESS._replace(step=2), ADDRESS._replace(robot=2), ADDRESS._replace(seed=9)]
    requests = [Request(window, address) for k, (window, address) in enumerate(zip(seen, addresses, strict=True))]
    exchange = ChunkExchange(target.spec, "test", "none", lambda: target)
    together = served(exchange, "infer", requests)
    for window, address, answer in zip(seen, addresses, together, strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_array_equal(answer["chunk"], pair.target().answer(window, address))
    alone = [served(exchange, "infer", [request])[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, dict) and isinstance(other, dict)
        np.testing.assert_array_equal(one["chunk"], other["chunk"])
    assert len({answer["chunk"].tobytes() for answer in together if isinstance(answer, dict)}) == 4


@pytest.mark.parametrize("shapes", [[(SHORT, ACTIONS)], [(SHORT, ACTIONS), (SHORT, 1)], [(SHORT, ACTIONS)] * 3])
def test_a_server_does_not_answer_with_chunks_of_other_shapes_or_to_others(shapes: list[tuple[int, int]]) -> None:
    class Careless:
        spec, inpaints = target.spec, False

        def infer(self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None) -> Chunk:
            raise NotImplementedError

        def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> list[Chunk]:
            return [np.zeros(shape, np.float32) for shape in shapes]

    requests = [Request(window, ADDRESS) for k, window in enumerate(windows(2))]
    with pytest.raises(BundleError, match=r"must answer 2 windows with 2 chunks of shape \(5, 2\)"):
        ChunkExchange(target.spec, "careless", "none", Careless).answer("infer", requests)


# ---- misses, fallbacks and late verdicts ----------------------------------------------------------------------------


class Far:
    """A target that answers 12 ms after it was asked, or misses, as it is told."""

    def __init__(self, policy: TargetPolicy[Chunk], clock: Clock, misses: Sequence[Cause | None] = ()) -> None:
        self._policy, self._clock, self._misses = policy, clock, list(misses)

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[Chunk]]:
        there, cause = self._clock.now() + 0.012, self._misses.pop(0) if self._misses else None

        def result() -> Answer[Chunk] | Miss:
            waited = max(0.0, there - self._clock.now())
            self._clock.sleep(waited)
            times = OffloadTimes(network=waited)
            return Miss(cause, times) if cause else Answer(self._policy.answer(window, address), times)

        return Pending(result, lambda: self._clock.now() >= there)


STILL = np.array([1.0, 20.0], np.float32)


def missing(misses: Sequence[Cause | None], fallback: Fallback, pair: Pair[Any]) -> SpeculativePolicy:
    clock = VirtualClock()
    verifier = pair.verifier(Far(pair.target(), clock, misses))
    return SpeculativePolicy(pair, Always(), verifier=verifier, fallback=fallback, clock=clock)


@pytest.mark.parametrize("turned", [False, True])
def test_a_miss_executes_the_drafts_chunk_and_says_why(turned: bool) -> None:
    pair = swapped() if turned else made()
    policy = missing([None, "deadline", "overloaded"], Fallback(), pair)
    _, records = play(policy, 12)
    steps = records[::EXECUTE]
    assert [record.miss for record in steps] == [None, "deadline", "overloaded", None]
    for record in steps[1:3]:
        np.testing.assert_array_equal(record.actions, record.proposal.actions)
        assert record.origins.tolist() == [Origin.FALLBACK] * (SHORT if turned else LONG)
    assert policy.counts["missed"] == 2


def test_a_miss_holds_the_last_action_for_a_whole_chunk() -> None:
    policy = missing(["deadline", None, "deadline"], Fallback("hold_last", stop_action=tuple(STILL)), made())
    actions, _ = play(policy, 9)
    np.testing.assert_allclose(actions[:3], np.tile(STILL, (3, 1)), atol=1e-5)
    np.testing.assert_array_equal(actions[6:], np.tile(actions[5], (3, 1)))
    assert not np.allclose(actions[5], STILL, atol=1e-2)


def test_misses_in_a_row_stop_the_robot() -> None:
    rule = Fallback(max_consecutive_misses=1, stop_action=tuple(STILL))
    policy = missing(["deadline", None, "deadline", "expired"], rule, made())
    actions, _ = play(policy, 15)
    assert [i for i, action in enumerate(actions) if np.array_equal(action, STILL)] == list(range(9, 15))
    assert policy.safety.stopped


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("tick", [0.005, 0.007, 0.015, 0.1])
def test_a_late_verdict_corrects_what_is_left_of_its_chunk(turned: bool, tick: float) -> None:
    pair, clock = (swapped if turned else made)(accept_within=0.0), VirtualClock()
    verifier = pair.verifier(Far(pair.target(), clock))
    policy = SpeculativePolicy(pair, Always(), verifier=verifier, verdicts=LateVerdicts(math.inf), clock=clock)
    played_before = min(EXECUTE, math.ceil(round(0.012 / tick, 6)))
    for i in range(12):
        action = policy.act(at(i))
        record, place = policy.record, i % EXECUTE
        assert record is not None
        if place < played_before:
            assert record.outcome is None
            np.testing.assert_array_equal(action, UNITS.to_environment(record.proposal.actions[place]))
        else:
            assert record.outcome is not None
            np.testing.assert_array_equal(action, UNITS.to_environment(record.outcome.actions[place]))
            np.testing.assert_array_equal(record.actions[:played_before], record.proposal.actions[:played_before])
            np.testing.assert_array_equal(record.actions[played_before:], record.outcome.actions[played_before:])
            assert record.origins.tolist() == [Origin.DRAFTED] * played_before + [Origin.REPLACED] * (
                SHORT - played_before
            )
        clock.sleep(tick)
    in_time = 4 if played_before < EXECUTE else 0
    assert policy.counts["in_time"] == in_time
    assert policy.counts["replaced"] == in_time * (EXECUTE - played_before)


def test_a_late_miss_leaves_the_drafts_chunk() -> None:
    pair, clock = made(accept_within=0.0), VirtualClock()
    verifier = pair.verifier(Far(pair.target(), clock, ["overloaded"] * 9))
    policy = SpeculativePolicy(pair, Always(), verifier=verifier, verdicts=LateVerdicts(math.inf), clock=clock)
    for i in range(3):
        policy.act(at(i))
        clock.sleep(0.015)
    assert policy.record is not None and policy.record.miss == "overloaded"
    assert policy.record.origins.tolist() == [Origin.DRAFTED] + [Origin.FALLBACK] * (LONG - 1)
    np.testing.assert_array_equal(policy.record.actions, policy.record.proposal.actions)


# ---- what is not finite ---------------------------------------------------------------------------------------------


def broken(policy: FunctionPolicy, value: float, action: int) -> FunctionPolicy:
    """The policy, one of whose actions is something else where ``state`` is that of the observation 3, 4 or 5."""

    def function(inputs: Inputs, **more: Any) -> Chunk:
        chunks = np.stack(policy.infer_batch(unstacked(inputs), more.get("rngs", [np.random.default_rng(0)] * 9)))
        chunks[np.abs(inputs["state"][:, -1, 0] - 0.4) < 0.15, action, 1] = value
        return chunks

    def unstacked(inputs: Inputs) -> list[Window]:
        return [Window({name: array[b] for name, array in inputs.items()}) for b in range(len(inputs["state"]))]

    return FunctionPolicy(policy.spec, function, seeded=policy is target)


NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", [*NOT_FINITE, 3.3e38])
@pytest.mark.parametrize("gate", [Never(), Always()])
@pytest.mark.parametrize("action", [0, LONG - 1])
def test_a_draft_that_is_not_finite_gives_no_action_and_changes_nothing(gate: Gate, value: float, action: int) -> None:
    policy = SpeculativePolicy(made(draft=broken(draft, value, action), execute=1), gate, seed=1)
    for i in range(8):
        record = policy.record
        if i in (3, 4, 5):
            with pytest.raises(ObservationError, match="the policy's action is not finite for this observation"):
                policy.act(at(i))
            assert policy.record is record
        else:
            assert np.isfinite(policy.act(at(i))).all()
    assert policy.counts["steps"] == 5


@pytest.mark.parametrize("value", [*NOT_FINITE, 3.3e38])
@pytest.mark.parametrize("within", [0.0, 10.0])
def test_a_target_that_is_not_finite_is_a_miss(value: float, within: float) -> None:
    bad = broken(target, value, 2)
    policy = SpeculativePolicy(made(load_target=lambda: bad, accept_within=within, execute=1), Always())
    actions, records = play(policy, 8)
    assert np.isfinite(actions).all()
    assert [record.miss for record in records] == [None] * 3 + ["invalid"] * 3 + [None] * 2
    for record in records[3:6]:
        np.testing.assert_array_equal(record.actions, record.proposal.actions)
        assert set(record.origins.tolist()) == {Origin.FALLBACK}


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_late_target_that_is_not_finite_is_a_miss(value: float) -> None:
    bad = broken(target, value, 0)
    policy = SpeculativePolicy(made(load_target=lambda: bad, execute=1), Always(), verdicts=LateVerdicts(math.inf))
    actions, records = play(policy, 8)
    assert np.isfinite(actions).all()
    assert [record.miss for record in records] == [None] * 3 + ["invalid"] * 3 + [None] * 2


class Overflowing:
    """A flow's networks; where the first number of the state is above 1, velocities overflow."""

    def __init__(self, networks: FlowNetworks) -> None:
        self._networks, self._far = networks, False

    def cache(self, windows: Sequence[Window]) -> Chunk:
        self._far = bool(windows[0]["state"][-1, 0] > 1.0)
        return self._networks.cache(windows)

    def velocity(self, chunks: Chunk, times: Chunk, cache: Chunk) -> Chunk:
        found = self._networks.velocity(chunks, times, cache)
        return np.full_like(found, np.inf) if self._far else found


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_flow_that_overflows_is_refused_as_a_draft_and_missed_as_a_target(tiny_flow: Path, role: str) -> None:
    bundle = load_flow(tiny_flow)
    flow = FlowPolicy(cast(Any, Overflowing(bundle.networks)), bundle.units, bundle.spec, steps=2)
    units = ActionUnits.of_range(bundle.units.low, bundle.units.high)

    @chunk_policy(observation={"state": (8,)}, chunk=6, actions=2, rate_hz=bundle.spec.rate_hz)
    def still(inputs: Inputs) -> Chunk:
        return np.tile(units.centre, (len(inputs["state"]), 6, 1))

    small, large = (flow, still) if role == "draft" else (still, flow)
    pair = ChunkParts("flow", small, units, large.spec, lambda: large, execute=2).pair()
    policy = SpeculativePolicy(pair, Always())
    near: Observation = {"state": np.zeros(8), "goal": np.zeros(2)}
    far: Observation = {"state": np.full(8, 2.0), "goal": np.zeros(2)}
    assert np.isfinite(policy.act(near)).all() and np.isfinite(policy.act(near)).all()
    if role == "draft":
        with pytest.raises(ObservationError, match="not finite"):
            policy.act(far)
        return
    np.testing.assert_allclose(policy.act(far), units.centre, atol=1e-6)
    assert policy.record is not None and policy.record.miss == "invalid"


# ---- pairs that do not fit together ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"execute": 0}, "execute must lie between 1 and 5, the shorter of both chunks; got 0"),
        ({"execute": 6}, "execute must lie between 1 and 5, the shorter of both chunks; got 6"),
        ({"accept_within": -0.1}, r"accept_within must be at least 0, got -0\.1"),
        ({"accept_within": math.nan}, "accept_within must be at least 0, got nan"),
        ({"target_spec": structs.replace(target.spec, actions=3)}, "2 actions at 10 Hz and the target 3 at 10 Hz"),
        ({"target_spec": structs.replace(target.spec, rate_hz=20.0)}, "2 actions at 10 Hz and the target 2 at 20 Hz"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**changes)


def test_a_target_that_is_only_on_a_server_is_not_asked_for_here() -> None:
    device = made(load_target=None)
    with pytest.raises(BundleError, match="the target of test is only on its server; connect to it"):
        SpeculativePolicy(device, Always())
    clock = VirtualClock()
    verifier = device.verifier(Far(made().target(), clock))
    actions, _ = play(SpeculativePolicy(device, Always(), verifier=verifier, clock=clock), 6)
    np.testing.assert_array_equal(actions, play(SpeculativePolicy(made(), Always()), 6)[0])


def test_the_target_is_loaded_when_it_is_first_asked_for_and_once() -> None:
    loads: list[int] = []

    def load() -> FunctionPolicy:
        loads.append(1)
        return target

    pair = made(load_target=load)
    assert pair.observation.images and pair.exchange.contract.family == "chunks" and not loads
    for _ in range(2):
        play(SpeculativePolicy(pair, Always()), 3)
    assert len(loads) == 1


def test_a_stop_action_is_one_of_the_pairs_units() -> None:
    with pytest.raises(ConfigError, match=r"must have shape \[2\] and lie between"):
        SpeculativePolicy(made(), Always(), fallback=Fallback("stop", stop_action=(9.0, 0.0)))


def test_a_function_that_writes_into_its_inputs_changes_no_observation() -> None:
    def spoils(inputs: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        inputs["state"] *= 0.0
        return np.zeros((len(inputs["state"]), LONG, ACTIONS), np.float32)

    policy = chunk_policy(observation={"state": (2,)}, chunk=LONG, actions=ACTIONS, rate_hz=RATE_HZ)(spoils)
    for count in (1, 2):
        windows = [Window({"state": np.ones((1, 2), np.float32)}) for _ in range(count)]
        policy.infer_batch(windows, [stream(0, Role.DRAFT)] * count)
        assert all((window["state"] == 1.0).all() for window in windows)
