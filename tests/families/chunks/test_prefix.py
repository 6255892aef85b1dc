"""How many drafted actions are kept, and what becomes of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tests.served import served

from specact.families.chunks.pair import ChunkAnswers, ChunkVerifier, accepted_prefix, replaced_after_prefix
from specact.families.chunks.policy import Chunk, ChunkSpec
from specact.families.chunks.sources import FunctionPolicy
from specact.families.chunks.wire import ChunkExchange
from specact.observation import Window, vectors
from specact.rng import Role, StepAddress, stream
from specact.types import OffloadTimes, Origin, Proposal
from specact.units import ActionUnits
from specact.verification import Answer, LocalTarget
from specact.wire.exchange import Request

HERE = StepAddress(0, 0, 0, 0)


def rows(*numbers: Sequence[float] | float) -> Chunk:
    return np.array([np.atleast_1d(row) for row in numbers], np.float32)


# Powers of two, so that every distance is exact.
@pytest.mark.parametrize(
    ("drafted", "wanted", "within", "accepted"),
    [
        (rows(0, 0, 0), rows(0, 0, 0), 0.0, 0),  # 0 takes the target's chunk whole
        (rows(0, 0, 0), rows(0, 0, 0), 1e-9, 3),
        (rows(0, 0, 0), rows(0.5, 0.5, 0.5), 0.5, 3),  # the threshold itself is within
        (rows(0, 0, 0), rows(0.5, 0.5, 0.5), 0.499, 0),
        (rows(0, 0, 0), rows(0.25, 0.5, 0.25), 0.25, 1),  # what comes after the first is not looked at
        (rows(0, 0, 0), rows(0.25, 0.25, 0.5), 0.25, 2),
        (rows(0, 0, 0), rows(0.5, 0, 0), 0.25, 0),
        # The root of the mean over dimensions: (1, 1) is 1 away from (0, 0), and (1, 0) the root of a half.
        (rows((0, 0), (0, 0)), rows((1, 1), (0, 0)), 1.0, 2),
        (rows((0, 0), (0, 0)), rows((1, 1), (0, 0)), 0.99, 0),
        (rows((0, 0), (0, 0)), rows((1, 0), (1, 1)), 0.71, 1),
        (rows((0, 0), (0, 0)), rows((1, 0), (1, 1)), 0.70, 0),
        # What is no number is not within anything.
        (rows(0, 0), rows(0, math.nan), 1.0, 1),
        (rows(0, math.inf), rows(0, math.inf), 1e9, 1),
        (rows(0, 0), rows(0, 0), math.inf, 2),
    ],
)
def test_the_prefix_ends_before_the_first_action_that_is_too_far(
    drafted: Chunk, wanted: Chunk, within: float, accepted: int
) -> None:
    with np.errstate(invalid="ignore"):
        assert accepted_prefix(drafted, wanted, within) == accepted


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


@given(pair=chunks(), thresholds=st.tuples(st.floats(0, 4), st.floats(0, 4)))
def test_a_wider_threshold_never_accepts_fewer(pair: tuple[Chunk, Chunk], thresholds: tuple[float, float]) -> None:
    drafted, wanted = pair
    count = min(map(len, pair))
    narrow, wide = (accepted_prefix(drafted[:count], wanted[:count], within) for within in sorted(thresholds))
    assert narrow <= wide
    assert accepted_prefix(drafted[:count], drafted[:count], max(thresholds) + 1e-3) == count


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
