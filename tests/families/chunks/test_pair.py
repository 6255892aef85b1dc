"""A pair of chunk policies: which actions are executed, where they come from, and what draft and target get to see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import structs
from numpy.typing import NDArray
from tests.served import served

from specact.errors import BundleError, ConfigError, ObservationError
from specact.families.chunks.pair import ChunkAnswers, ChunkParts, ChunkVerifier, replaced_after_prefix
from specact.families.chunks.policy import Chunk, ChunkSpec, Inpainting
from specact.families.chunks.sources import FunctionPolicy, Inputs, chunk_policy
from specact.families.chunks.wire import ChunkExchange
from specact.gates import Always, Gate, Never
from specact.observation import Field, ObservationSpec, Window, vectors
from specact.pair import Answer, LocalTarget, Pair
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, stream
from specact.types import ActionUnits, OffloadTimes, Origin, Proposal, StepRecord
from specact.wire.exchange import Request

HERE = StepAddress(0, 0, 0, 0)


def rows(*numbers: Sequence[float] | float) -> Chunk:
    return np.array([np.atleast_1d(row) for row in numbers], np.float32)


# Powers of two, so that every distance is exact.
@pytest.mark.parametrize(
    ("drafted", "wanted", "within", "accepted"),
    [
        (rows(0, 0, 0), rows(0, 0, 0), 0.0, 0),  # 0 takes the target's chunk whole
        (rows(0, 0, 0), rows(0.5, 0.5, 0.5), 0.5, 3),  # the threshold itself is within
        (rows(0, 0, 0), rows(0.5, 0.5, 0.5), 0.499, 0),
        (rows(0, 0, 0), rows(0.25, 0.5, 0.25), 0.25, 1),  # what comes after the first is not looked at
        # The root of the mean over dimensions: (1, 1) is 1 away from (0, 0), and (1, 0) the root of a half.
        (rows((0, 0), (0, 0)), rows((1, 1), (0, 0)), 0.99, 0),
        (rows((0, 0), (0, 0)), rows((1, 0), (1, 1)), 0.71, 1),
        # What is no number is not within anything.
        (rows(0, 0), rows(0, math.nan), 1.0, 1),
        (rows(0, math.inf), rows(0, math.inf), 1e9, 1),
    ],
)
def test_the_prefix_ends_before_the_first_action_that_is_too_far(
    drafted: Chunk, wanted: Chunk, within: float, accepted: int
) -> None:
    with np.errstate(invalid="ignore"):
        assert replaced_after_prefix(drafted, wanted, within)[1] == accepted


def chunks(most: int = 6) -> st.SearchStrategy[tuple[Chunk, Chunk]]:
    """Two chunks of one action space; some of their actions are the same."""
    numbers = st.sampled_from([0.0, 0.125, -0.25, 0.5, 1.0]) | st.floats(-4, 4, width=32)

    def both(width: int) -> st.SearchStrategy[tuple[Chunk, Chunk]]:
        lengths = st.integers(1, most)
        one = lengths.flatmap(lambda n: hnp.arrays(np.float32, (n, width), elements=numbers))
        return st.tuples(one, one)

    return st.integers(1, 3).flatmap(both)


def by_hand(drafted: Chunk, wanted: Chunk, within: float) -> int:
    """One action after the other, in Python's numbers."""
    count = 0
    for one, other in zip(drafted.tolist(), wanted.tolist(), strict=False):
        apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one))
        # Not decided where float32 may round either way.
        if math.isclose(apart, within, rel_tol=1e-5):
            return -1
        if within <= 0.0 or apart > within:
            break
        count += 1
    return count


@given(pair=chunks(), within=st.floats(0, 4))
@example(pair=(rows(1), rows(1)), within=0.0)
def test_what_is_executed_is_a_prefix_of_the_draft_and_then_the_target(
    pair: tuple[Chunk, Chunk], within: float
) -> None:
    drafted, wanted = pair
    actions, accepted = replaced_after_prefix(drafted, wanted, within)
    count = min(len(drafted), len(wanted))
    assert len(actions) == count and 0 <= accepted <= count
    np.testing.assert_array_equal(actions[:accepted], drafted[:accepted])
    np.testing.assert_array_equal(actions[accepted:], wanted[accepted:count])
    expected = by_hand(drafted, wanted, within)
    assert expected in (-1, accepted)
    # No executed action is further from the target's than the threshold, as the module says.
    apart = np.sqrt(np.square(actions - wanted[:count]).mean(-1))
    assert (apart <= within).all() or (within <= 0.0 and not apart.any())


@given(pair=chunks(), within=st.floats(0, 4), execute=st.integers(1, 9))
def test_the_verdict_says_of_every_action_where_it_comes_from(
    pair: tuple[Chunk, Chunk], within: float, execute: int
) -> None:
    drafted, wanted = pair
    width = drafted.shape[1]
    # Scales of powers of two, and so the same numbers after there and back.
    units = ActionUnits(np.zeros(width, np.float32), np.full(width, 2.0, np.float32))
    unasked = LocalTarget(ChunkAnswers(FunctionPolicy(SPEC, drawn, seeded=True)))
    verifier = ChunkVerifier(unasked, units, execute, within)
    window = Window({"state": np.zeros((1, 1), np.float32)})
    times = OffloadTimes(target=0.5)
    outcome = verifier.judge(Answer(wanted * np.float32(2.0), times), Proposal(window, drafted), HERE)
    actions, accepted = replaced_after_prefix(drafted, wanted, within)
    np.testing.assert_array_equal(outcome.actions, actions)
    assert outcome.origins.tolist() == [Origin.ACCEPTED] * accepted + [Origin.REPLACED] * (len(actions) - accepted)
    assert (outcome.verified, outcome.accepted, outcome.times) == (len(actions), accepted, times)
    # For audits a proposal is kept if all that is executed of it is.
    assert outcome.kept == float(
        set(outcome.origins[:execute].tolist()) == {Origin.ACCEPTED} and len(actions) >= execute
    )


# ---- the server's side ----------------------------------------------------------------------------------------------

SPEC = ChunkSpec(vectors(1, state=1), chunk=2, actions=1, rate_hz=10.0)


def drawn(seen: dict[str, NDArray[np.float32]], rngs: Sequence[np.random.Generator]) -> NDArray[np.float64]:
    """The state, and what is drawn for it; nothing finite where the state is 9."""
    found = np.array([[[state[0, 0]], [rng.random()]] for state, rng in zip(seen["state"], rngs, strict=True)])
    found[seen["state"][:, 0, 0] == 9.0] = np.nan
    return found


def request(state: float, address: StepAddress) -> Request:
    return Request(Window({"state": np.full((1, 1), state, np.float32)}), address)


@given(
    batch=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 9.0]), st.builds(StepAddress, *[st.integers(0, 2**64 - 1)] * 4)),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_a_batch_draws_for_each_request_from_its_own_address(batch: list[tuple[float, StepAddress]]) -> None:
    """In any order and company the same; one request without a finite answer is no other's fault."""
    policy = FunctionPolicy(SPEC, drawn, seeded=True)
    exchange = ChunkExchange(policy.spec, "drawn", "", lambda: policy)
    together = served(exchange, "infer", [request(state, address) for state, address in batch])
    backwards = served(exchange, "infer", [request(state, address) for state, address in reversed(batch)])
    for (state, address), found, again in zip(batch, together, reversed(backwards), strict=True):
        if state == 9.0:
            assert getattr(found, "code", None) == getattr(again, "code", None) == "bad_message"
            continue
        seed, robot, episode, step = address
        own = stream(seed, Role.VERIFY, robot=robot, episode=episode, step=step).random()
        assert isinstance(found, dict) and isinstance(again, dict)
        assert found["chunk"].tolist() == again["chunk"].tolist() == [[state], [float(np.float32(own))]]


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


def at(i: int) -> dict[str, Any]:
    return {
        "state": np.array([0.1 * i, -0.2 * i]),
        "goal": np.array([float(i)]),
        "image.front": np.full((2, 2, 3), i, np.uint8),
    }


def play(policy: SpeculativePolicy, steps: int = 30) -> tuple[np.ndarray, list[StepRecord]]:
    """Actions, and the record behind each of them as it was right after it."""
    actions, records = [], []
    for i in range(steps):
        actions.append(policy.act(at(i)))
        assert policy.record is not None
        records.append(policy.record)
    return np.stack(actions), records


def targeted_at(i: int, seed: int = 0) -> np.ndarray:
    step = stream(seed, Role.VERIFY, step=i // EXECUTE)
    return target.infer(windows(i + 1)[i], step)


def windows(count: int) -> list[Window]:
    from specact.observation import ObservationHistory

    history = ObservationHistory(made().observation)
    return [history.push(at(i)) for i in range(count)]


# ---- which actions are executed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("within", [0.0, 0.03, 0.12, 0.17, 10.0])
def test_drafted_actions_are_executed_up_to_the_first_one_too_far_from_the_targets(within: float) -> None:
    policy = SpeculativePolicy(made(accept_within=within), Always(), seed=7)
    _, records = play(policy)
    accepted = 0
    for step, record in enumerate(records[::EXECUTE]):
        wanted = UNITS.from_environment(targeted_at(step * EXECUTE, seed=7))
        distance = np.sqrt(np.square(record.proposal.actions[:SHORT] - wanted).mean(axis=-1))
        kept = int(np.argmax(distance > within)) if (distance > within).any() else SHORT
        kept = 0 if within == 0.0 else kept
        assert record.outcome is not None
        assert (record.outcome.verified, record.outcome.accepted) == (SHORT, kept)
        np.testing.assert_array_equal(record.actions[:kept], record.proposal.actions[:kept])
        np.testing.assert_allclose(record.actions[kept:], wanted[kept:], atol=1e-6)
        assert record.origins.tolist() == [Origin.ACCEPTED] * kept + [Origin.REPLACED] * (SHORT - kept)
        accepted += kept
    assert policy.counts["accepted"] == accepted
    # Actions i = 0, 1, 2, ... are 0.04 i to 0.06 i apart.
    assert accepted / len(records[::EXECUTE]) == {0.0: 0, 0.03: 1, 0.12: 3, 10.0: SHORT}.get(
        within, pytest.approx(3.5, abs=0.5)
    )


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


@pytest.mark.parametrize("value", [math.nan, 3.3e38])
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


@pytest.mark.parametrize("value", [math.nan, -math.inf, 3.3e38])
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


def test_the_target_is_loaded_once_when_it_is_first_asked_for_and_refused_where_it_is_only_on_a_server() -> None:
    loads: list[int] = []

    def load() -> FunctionPolicy:
        loads.append(1)
        return target

    here, device = made(load_target=load), made(load_target=None)
    assert here.observation.images and here.exchange.contract.family == "chunks" and not loads
    with pytest.raises(BundleError, match="the target of test is only on its server; connect to it"):
        SpeculativePolicy(device, Always())
    verifier = device.verifier(LocalTarget(made().target()))
    actions, _ = play(SpeculativePolicy(device, Always(), verifier=verifier), 6)
    for _ in range(2):
        np.testing.assert_array_equal(actions, play(SpeculativePolicy(here, Always()), 6)[0])
    assert len(loads) == 1


def test_a_function_that_writes_into_its_inputs_changes_no_observation() -> None:
    def spoils(inputs: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        inputs["state"] *= 0.0
        return np.zeros((len(inputs["state"]), LONG, ACTIONS), np.float32)

    policy = chunk_policy(observation={"state": (2,)}, chunk=LONG, actions=ACTIONS, rate_hz=RATE_HZ)(spoils)
    for count in (1, 2):
        windows = [Window({"state": np.ones((1, 2), np.float32)}) for _ in range(count)]
        policy.infer_batch(windows, [stream(0, Role.DRAFT)] * count)
        assert all((window["state"] == 1.0).all() for window in windows)
