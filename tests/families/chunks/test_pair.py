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
from specact.families.chunks.pair import ChunkAnswers, ChunkParts, ChunkVerifier, PairSpec, replaced_after_prefix
from specact.families.chunks.policy import Chunk, ChunkExchange, ChunkSpec
from specact.families.chunks.sources import FunctionPolicy, Inputs, chunk_policy
from specact.gates import Always
from specact.observation import Field, ObservationSpec, Window, vectors
from specact.pair import Answer, LocalTarget, Pair
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, stream
from specact.types import ActionUnits, OffloadTimes, Origin, Proposal
from specact.wire.exchange import Request

HERE = StepAddress(0, 0, 0, 0)


def rows(*numbers: Sequence[float] | float) -> Chunk:
    return np.array([np.atleast_1d(row) for row in numbers], np.float32)


# Powers of two, so that every distance is exact.
@pytest.mark.parametrize(
    ("drafted", "wanted", "within", "accepted"),
    [
        (rows(0, 0, 0), rows(0.5, 0.5, 0.5), 0.5, 3),  # the threshold itself is within
        (rows(0, 0, 0), rows(0.5, 0.5, 0.5), 0.499, 0),
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
        chunk = lengths.flatmap(lambda n: hnp.arrays(np.float32, (n, width), elements=numbers))
        return st.tuples(chunk, chunk)

    return st.integers(1, 3).flatmap(both)


def by_hand(drafted: Chunk, wanted: Chunk, within: float) -> int:
    """One action after the other, in Python's numbers."""
    count = 0
    for draft, target in zip(drafted.tolist(), wanted.tolist(), strict=False):
        apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(draft, target, strict=True)) / len(draft))
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


SPEC = ChunkSpec(vectors(1, state=1), chunk=2, actions=1, rate_hz=10.0)


def drawn(seen: dict[str, NDArray[np.float32]], rngs: Sequence[np.random.Generator]) -> NDArray[np.float64]:
    """The state, and what is drawn for it; nothing finite where the state is 9."""
    draws = np.array([[[state[0, 0]], [rng.random()]] for state, rng in zip(seen["state"], rngs, strict=True)])
    draws[seen["state"][:, 0, 0] == 9.0] = np.nan
    return draws


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
    for (state, address), answer, repeat in zip(batch, together, reversed(backwards), strict=True):
        if state == 9.0:
            assert getattr(answer, "code", None) == getattr(repeat, "code", None) == "bad_message"
            continue
        seed, robot, episode, step = address
        draw = stream(seed, Role.VERIFY, robot=robot, episode=episode, step=step).random()
        assert isinstance(answer, dict) and isinstance(repeat, dict)
        assert answer["chunk"].tolist() == repeat["chunk"].tolist() == [[state], [float(np.float32(draw))]]


LONG, SHORT, EXECUTE = 8, 5, 3
UNITS = ActionUnits.of_range(np.array([-4.0, -40.0], np.float32), np.array([4.0, 60.0], np.float32))
SEES = {"state": Field((2,), history=3), "goal": Field((1,), history=0), "image.front": Field((2, 2, 3), "uint8", 2)}


@chunk_policy(observation={"state": (2,)}, chunk=LONG, actions=2, rate_hz=10.0)
def draft(inputs: Inputs) -> Chunk:
    """Stays where the newest state is."""
    return np.repeat(np.asarray(inputs["state"]), LONG, axis=1)


@chunk_policy(observation=SEES, chunk=SHORT, actions=2, rate_hz=10.0, seeded=True)
def target(inputs: Inputs, rngs: Sequence[np.random.Generator]) -> Chunk:
    """As the draft, give or take what is drawn."""
    return np.asarray(inputs["state"][:, -1:] + np.stack([rng.random((SHORT, 2), np.float32) for rng in rngs]))


def made(**changes: Any) -> Pair[Any]:
    parts: dict[str, Any] = {"name": "test", "draft": draft, "units": UNITS, "load_target": lambda: target}
    spec: dict[str, Any] = {"target": target.spec, "execute": EXECUTE, "accept_within": 0.12}
    spec |= {name: changes.pop(name) for name in spec.keys() & changes.keys()}
    return ChunkParts(**parts | changes, spec=PairSpec(**spec)).pair()


def at(i: int) -> dict[str, Any]:
    image = np.full((2, 2, 3), i, np.uint8)
    return {"state": np.array([0.1 * i, -0.2 * i]), "goal": np.array([float(i)]), "image.front": image}


def play(policy: SpeculativePolicy, steps: int) -> list[list[float]]:
    return [policy.act(at(i)).tolist() for i in range(steps)]


def watched(policy: FunctionPolicy, seen: list[Inputs]) -> FunctionPolicy:
    """A policy of the same spec that keeps what it was shown."""

    def function(inputs: Inputs) -> Chunk:
        seen.append(inputs)
        return np.zeros((len(inputs["state"]), policy.spec.chunk, 2), np.float32)

    return FunctionPolicy(policy.spec, function)


def test_the_device_keeps_the_union_and_each_policy_sees_its_own() -> None:
    small, large = list[Inputs](), list[Inputs]()
    pair = made(draft=watched(draft, small), load_target=lambda: watched(target, large))
    assert pair.observation == ObservationSpec(SEES)
    play(SpeculativePolicy(pair, Always()), 9)
    assert len(small) == len(large) == 3
    for i, little, much in zip((0, 3, 6), small, large, strict=True):
        assert {name: array.shape for name, array in little.items()} == {"state": (1, 1, 2)}
        np.testing.assert_allclose(little["state"][0, :, 0], [0.1 * i], rtol=1e-6)
        np.testing.assert_allclose(much["state"][0, :, 0], [0.1 * max(0, i - k) for k in (2, 1, 0)], rtol=1e-6)
        assert much["goal"].tolist() == [[i]]
        assert much["image.front"][0, :, 0, 0, 0].tolist() == [max(0, i - 1), i]


def test_an_instruction_reaches_the_policy_that_asks_for_it() -> None:
    told: list[list[str]] = []

    @chunk_policy(observation={"state": (2,)}, chunk=3, actions=2, rate_hz=10.0, instruction=True)
    def listens(inputs: Inputs, instruction: list[str]) -> Chunk:
        told.append(instruction)
        return np.zeros((len(inputs["state"]), 3, 2), np.float32)

    policy = SpeculativePolicy(made(target=listens.spec, load_target=lambda: listens), Always())
    with pytest.raises(ObservationError, match="no 'instruction'"):
        policy.act(at(0))
    for i in range(2 * EXECUTE):
        policy.act(at(i) | {"instruction": f"pick {i}"})
    assert told == [["pick 0"], ["pick 3"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"execute": 6}, "execute must lie between 1 and 5, the shorter of both chunks; got 6"),
        ({"target": structs.replace(target.spec, actions=3)}, "2 actions at 10 Hz and the target 3 at 10 Hz"),
        ({"target": structs.replace(target.spec, rate_hz=20.0)}, "2 actions at 10 Hz and the target 2 at 20 Hz"),
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
    actions = play(SpeculativePolicy(device, Always(), verifier=verifier), 6)
    assert actions == play(SpeculativePolicy(here, Always()), 6) == play(SpeculativePolicy(here, Always()), 6)
    assert len(loads) == 1


def test_a_function_that_writes_into_its_inputs_changes_no_observation() -> None:
    def spoils(inputs: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        inputs["state"] *= 0.0
        return np.zeros((len(inputs["state"]), LONG, 2), np.float32)

    for count in (1, 2):
        windows = [Window({"state": np.ones((1, 2), np.float32)}) for _ in range(count)]
        FunctionPolicy(draft.spec, spoils).infer_batch(windows, [stream(0, Role.DRAFT)] * count)
        assert all((window["state"] == 1.0).all() for window in windows)
