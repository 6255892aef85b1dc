"""The contract of a pair of policies, of a built-in or a user-defined family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from msgspec import msgpack

from specact.contracts.expectations import Named, call, check_batches, expect, expect_array, random_windows, same
from specact.errors import ContractError, WireError
from specact.files import is_name
from specact.observation import ObservationSpec, Window
from specact.pair import Answer, LocalTarget, Pair, Pending, is_valid
from specact.records import Count, Positive, Record, read_record
from specact.rng import Role, StepAddress, stream
from specact.types import ActionUnits, Chunk, OffloadTimes, Outcome, Proposal
from specact.wire.exchange import Contract, Request
from specact.wire.messages import ask, encode, read_ask, request_of


def check_pair(pair: Pair[Any], *, windows: Sequence[Window] = (), seed: int = 0, within: float = 1e-3) -> None:
    """Checks a pair with its target: proposals, verification, and equivalence of local and remote answers.

    Args:
        pair: the pair.
        windows: test inputs, at least two; random if not given.
        seed: of the windows and the random streams.
        within: relative tolerance between answers from batches of different sizes, of their largest absolute number.

    Raises:
        ContractError: for the first violation of :class:`~specact.pair.Pair`.
    """
    _check_values(pair)
    windows = windows or random_windows(pair.observation, 4, np.random.default_rng(seed))
    addresses = [StepAddress(seed, 0, 0, step) for step in range(len(windows))]
    proposals = [_check_proposal(pair, *step) for step in zip(windows, addresses, strict=True)]
    requests = [_crossed_to_server(pair.exchange.contract, *step) for step in zip(windows, addresses, strict=True)]
    answers = check_batches(
        "an answer", lambda which: _answers(pair, [requests[i] for i in which]), len(windows), within
    )
    for proposal, address, arrays in zip(proposals, addresses, answers, strict=True):
        here = _verify(pair, LocalTarget(pair.target()), proposal, address)
        again = _verify(pair, LocalTarget(pair.target()), proposal, address)
        expect(
            np.array_equal(here.actions, again.actions),
            "the same proposal and address must give the same outcome again: draw from the address's own stream",
        )
        there = _verify(pair, _ReadyTarget(call("the exchange's read", pair.exchange.read, arrays)), proposal, address)
        expect(
            here.accepted == there.accepted and np.allclose(here.actions, there.actions, rtol=0.0, atol=within),
            f"a server's answer must give the outcome that the target in this process gives; {here.accepted} were "
            f"accepted here and {there.accepted} there",
        )


class _Values(Record, frozen=True):
    execute: Count
    rate_hz: Positive
    overlap: Literal["drop", "average"]


def _check_values(pair: Pair[Any]) -> None:
    expect(is_name(pair.name), f"name must be 1 to 64 of the characters A-Z a-z 0-9 . _ + -, got {pair.name!r:.80}")
    for value, kind in ((pair.observation, ObservationSpec), (pair.units, ActionUnits)):
        expect(isinstance(value, kind), f"a pair needs an {kind.__name__}, got {value!r:.60}")
    values = {name: getattr(pair, name) for name in _Values.__struct_fields__}
    read_record(values, _Values, "the pair", ContractError)
    contract = pair.exchange.contract
    expect(isinstance(contract, Contract), f"the exchange's contract must be a Contract, got {contract!r:.60}")
    missing = contract.observation.fields.keys() - pair.observation.fields.keys()
    expect(not missing, f"observation must have all that the target needs; it lacks {', '.join(sorted(missing))}")
    infer = contract.kinds.get("infer")
    expect(infer is not None and not infer.request.nbytes, "the contract must have a kind 'infer' without arrays")
    expect(is_name(pair.exchange.name), f"the exchange's name must be as the pair's, got {pair.exchange.name!r:.80}")
    spec = call("a message with the contract's spec", encode, dict(contract.spec))
    expect(
        msgpack.decode(spec) == dict(contract.spec),
        "the spec of a contract must be plain values: texts, numbers, lists and maps",
    )


def _check_proposal(pair: Pair[Any], window: Window, address: StepAddress) -> Proposal:
    before = {name: value.copy() for name, value in window.arrays.items()}

    def draw() -> Proposal:
        found = call("propose", pair.drafter().propose, window, stream(address.seed, Role.DRAFT, step=address.step))
        expect(isinstance(found, Proposal), f"propose must give a Proposal, got {found!r:.60}")
        _check_chunk(found.actions, pair, "a proposal")
        expect(found.window is window, "a proposal must carry the window that it was made from")
        return cast(Proposal, found)

    first, again = draw(), draw()
    expect(same([before], [dict(window.arrays)]), "propose must not change the window that it is given")
    expect(
        np.array_equal(first.actions, again.actions),
        "the same window and generator must give the same proposal again: draw from the given rng alone",
    )
    return first


def _crossed_to_server(contract: Contract, window: Window, address: StepAddress) -> Request:
    message = ask(Request(window, address), contract, "infer", address.step, 1000.0)
    return request_of(read_ask(encode(message)), contract)


def _answers(pair: Pair[Any], requests: Sequence[Request]) -> list[Named]:
    """The server's answers after a round trip over the wire format."""
    answers = list(call("answer", pair.exchange.answer, "infer", requests))
    expect(len(answers) == len(requests), f"answer must answer all {len(requests)} requests, it gave {len(answers)}")
    layout, crossed = pair.exchange.contract.kinds["infer"].reply, list[Named]()
    for arrays in answers:
        expect(not isinstance(arrays, WireError), f"answer must answer these observations, it gave: {arrays}")
        try:
            crossed.append(layout.unpack(layout.pack(arrays)))
        except (WireError, AttributeError, TypeError, ValueError) as error:
            raise ContractError(f"answer must give the arrays that the contract says: {error}") from error
    return crossed


class _ReadyTarget:
    """A target whose answer is already there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[Any]]:
        return Pending(lambda: Answer(self._value, OffloadTimes()))


def _verify(pair: Pair[Any], target: Any, proposal: Proposal, address: StepAddress) -> Outcome:
    drafted = proposal.actions.copy()
    outcome = call("verification", lambda: pair.verifier(target).submit(proposal, address).result())
    expect(isinstance(outcome, Outcome), f"verification of an answer in time must give an Outcome, got {outcome!r:.80}")
    expect(np.array_equal(drafted, proposal.actions), "verification must not change the proposal")
    _check_chunk(outcome.actions, pair, "an outcome")
    expect_array("the origins of an outcome", outcome.origins, np.uint8, (len(outcome.actions),))
    expect(
        0 <= outcome.accepted <= outcome.verified,
        f"of what is verified a part is accepted; got {outcome.accepted} of {outcome.verified}",
    )
    expect(0.0 <= outcome.kept <= 1.0, f"kept must lie in [0, 1], got {outcome.kept}; audits take its mean")
    return cast(Outcome, outcome)


def _check_chunk(actions: Chunk, pair: Pair[Any], where: str) -> None:
    expect_array(f"the actions of {where}", actions, np.float32, (None, len(pair.units.centre)))
    expect(len(actions) >= pair.execute, f"{where} must have at least {pair.execute} actions, got {len(actions)}")
    expect(is_valid(actions), f"{where} must have normalised actions, got {actions}")
