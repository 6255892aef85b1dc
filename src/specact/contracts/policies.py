"""The contracts of a chunk policy, of a pair of policies, and of a gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
from msgspec import msgpack
from numpy.typing import DTypeLike, NDArray

from specact.errors import ContractError, WireError
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec
from specact.files import is_name
from specact.gates.gate import Gate
from specact.observation import Field, ObservationSpec, Window
from specact.pair import Answer, LocalTarget, Pair, Pending, is_valid
from specact.records import Count, Positive, Record, read_record
from specact.rng import Role, StepAddress, stream
from specact.types import ActionUnits, Chunk, Decision, OffloadTimes, Outcome, Proposal
from specact.wire.exchange import Contract, Request
from specact.wire.messages import ask, encode, read_ask, request_of

Named = Mapping[str, NDArray[Any]]


def expect(true: bool, sentence: str) -> None:
    """Raises a :class:`~specact.errors.ContractError` with this sentence unless ``true``."""
    if not true:
        raise ContractError(sentence)


def expect_array(what: str, value: Any, dtype: DTypeLike, shape: Sequence[int | None]) -> None:
    """Expects a finite array; a length of None may be any."""
    sizes = [size if wanted is None else wanted for size, wanted in zip(np.shape(value), shape, strict=False)]
    fits = isinstance(value, np.ndarray) and value.dtype == dtype and list(value.shape) == sizes
    text = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"{value!r:.60}"
    wanted = f"{np.dtype(dtype)} {['any' if n is None else n for n in shape]}"
    expect(fits and len(sizes) == len(shape), f"{what} must be {wanted}, got {text}")
    expect(bool(np.isfinite(value).all()), f"{what} must be finite, got {value}")


def same(first: Sequence[Named], second: Sequence[Named], within: float = 0.0) -> bool:
    """Whether two sequences of named arrays agree, within a share of the largest number of each array."""

    def near(a: NDArray[Any], b: NDArray[Any]) -> bool:
        if not within or a.shape != b.shape:
            return np.array_equal(a, b)
        return np.allclose(a, b, rtol=0.0, atol=within * max(1e-6, float(np.abs(b).max(initial=0.0))))

    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(near(a[name], b[name]) for name in a) for a, b in zip(first, second, strict=True)
    )


def _copies(window: Window) -> Named:
    return {name: value.copy() for name, value in window.arrays.items()}


def _random_windows(spec: ObservationSpec, count: int) -> list[Window]:
    rng = np.random.default_rng(0)

    def array(field: Field) -> NDArray[Any]:
        if field.is_image:
            return rng.integers(0, 256, field.window_shape, np.uint8)
        return rng.normal(size=field.window_shape).astype(np.float32)

    instruction = "pick up the block" if spec.instruction else None
    return [Window({name: array(field) for name, field in spec.fields.items()}, instruction) for _ in range(count)]


def _check_batches(what: str, answer: Callable[[Sequence[int]], list[Named]], count: int, within: float) -> list[Named]:
    """Checks that the answer to an input, by its number, depends on that input alone; returns each input's."""
    everything = list(range(count))
    together = answer(everything)
    rule = "the same inputs and generators must give it again: draw from the given stream alone, and keep nothing"
    expect(same(answer(everything), together, within), f"{what} must not depend on earlier calls; {rule}")
    alone = [answer([index])[0] for index in everything]
    expect(same(alone, together, within), f"{what} must not depend on the rest of its batch")
    expect(same(answer(everything[::-1])[::-1], together, within), f"{what} must not depend on its place in the batch")
    return alone


# ---- a chunk policy --------------------------------------------------------------------------------------------------


def check_policy(policy: ChunkPolicy, *, within: float = 1e-3) -> None:
    """Checks a chunk policy: shapes, and that a chunk depends on its window and generator alone.

    A policy with an internal queue of actions or history fails, because a server serves many robots in turn. Chunks
    from batches of different sizes may differ by ``within``, as a share of their largest absolute action.
    """
    spec = policy.spec
    expect(isinstance(spec, ChunkSpec), f"spec must be a ChunkSpec, got {spec!r:.60}")
    windows = _random_windows(spec.observation, 4)

    def infer(which: Sequence[int]) -> list[Named]:
        batch = [windows[i] for i in which]
        before, rngs = list(map(_copies, batch)), [np.random.default_rng([0, i]) for i in which]
        chunks = list(policy.infer_batch(batch, rngs))
        wanted = f"infer_batch must give {len(which)} chunks, one per window"
        expect(len(chunks) == len(which), f"{wanted}; got {len(chunks)}")
        for chunk in chunks:
            expect_array("a chunk of infer_batch", chunk, np.float32, (spec.chunk, spec.actions))
        expect(same(before, [window.arrays for window in batch]), "infer_batch must not change the given windows")
        return [{"chunk": chunk} for chunk in chunks]

    chunks = _check_batches("a chunk", infer, len(windows), within)
    for i, (window, chunk) in enumerate(zip(windows, chunks, strict=True)):
        single = policy.infer(window, np.random.default_rng([0, i]))
        expect_array("a chunk of infer", single, np.float32, (spec.chunk, spec.actions))
        expect(same([{"chunk": single}], [chunk], within), "infer must give what infer_batch gives")


# ---- a pair ----------------------------------------------------------------------------------------------------------


def check_pair(pair: Pair[Any], *, within: float = 1e-3) -> None:
    """Checks a pair with its target: proposals, verification, and equivalence of local and remote answers.

    Answers from batches of different sizes may differ by ``within``, as a share of their largest absolute number.
    """
    _check_values(pair)
    contract, exchange = pair.exchange.contract, pair.exchange
    windows = _random_windows(pair.observation, 4)
    addresses = [StepAddress(0, 0, 0, step) for step in range(len(windows))]
    proposals = [_check_proposal(pair, *step) for step in zip(windows, addresses, strict=True)]
    messages = [ask(Request(*step), contract, "infer", 1, 1e3) for step in zip(windows, addresses, strict=True)]
    requests = [request_of(read_ask(encode(message)), contract) for message in messages]
    answers = _check_batches(
        "an answer", lambda which: _answers(pair, [requests[i] for i in which]), len(windows), within
    )
    for proposal, address, arrays in zip(proposals, addresses, answers, strict=True):
        local, repeated = (_verify(pair, LocalTarget(pair.target()), proposal, address) for _ in range(2))
        expect(
            np.array_equal(local.actions, repeated.actions),
            "the same proposal and address must give the same outcome again: draw from the address's own stream",
        )
        ready = Pending(partial(Answer, exchange.read(arrays), OffloadTimes()))
        remote = _verify(pair, SimpleNamespace(submit=lambda *_, ready=ready: ready), proposal, address)
        expect(
            local.accepted == remote.accepted and np.allclose(local.actions, remote.actions, rtol=0.0, atol=within),
            f"a server's answer must give the outcome that the target in this process gives; {local.accepted} were "
            f"accepted here and {remote.accepted} there",
        )


class _Values(Record, frozen=True):
    execute: Count
    rate_hz: Positive
    overlap: Literal["drop", "average"]


def _check_values(pair: Pair[Any]) -> None:
    for what, name in (("name", pair.name), ("the exchange's name", pair.exchange.name)):
        expect(is_name(name), f"{what} must be 1 to 64 of the characters A-Z a-z 0-9 . _ + -, got {name!r:.80}")
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
    expect(
        msgpack.decode(encode(dict(contract.spec))) == dict(contract.spec),
        "the spec of a contract must be plain values: texts, numbers, lists and maps",
    )


def _check_proposal(pair: Pair[Any], window: Window, address: StepAddress) -> Proposal:
    before = _copies(window)

    def draw() -> Proposal:
        proposal = pair.drafter().propose(window, stream(address.seed, Role.DRAFT, step=address.step))
        expect(isinstance(proposal, Proposal), f"propose must give a Proposal, got {proposal!r:.60}")
        _check_chunk(proposal.actions, pair, "a proposal")
        expect(proposal.window is window, "a proposal must carry the window that it was made from")
        return proposal

    first, second = draw(), draw()
    expect(same([before], [window.arrays]), "propose must not change the window that it is given")
    expect(
        np.array_equal(first.actions, second.actions),
        "the same window and generator must give the same proposal again: draw from the given rng alone",
    )
    return first


def _answers(pair: Pair[Any], requests: Sequence[Request]) -> list[Named]:
    """The server's answers after a round trip over the wire format."""
    answers = list(pair.exchange.answer("infer", requests))
    expect(len(answers) == len(requests), f"answer must answer all {len(requests)} requests, it gave {len(answers)}")
    layout, crossed = pair.exchange.contract.kinds["infer"].reply, list[Named]()
    for arrays in answers:
        expect(not isinstance(arrays, WireError), f"answer must answer these observations, it gave: {arrays}")
        try:
            crossed.append(layout.unpack(layout.pack(cast(Named, arrays))))
        except (WireError, AttributeError, TypeError, ValueError) as error:
            raise ContractError(f"answer must give the arrays that the contract says: {error}") from error
    return crossed


def _verify(pair: Pair[Any], target: Any, proposal: Proposal, address: StepAddress) -> Outcome:
    drafted = proposal.actions.copy()
    outcome = pair.verifier(target).submit(proposal, address).result()
    expect(isinstance(outcome, Outcome), f"verification of an answer in time must give an Outcome, got {outcome!r:.80}")
    outcome = cast(Outcome, outcome)
    expect(np.array_equal(drafted, proposal.actions), "verification must not change the proposal")
    _check_chunk(outcome.actions, pair, "an outcome")
    expect_array("the origins of an outcome", outcome.origins, np.uint8, (len(outcome.actions),))
    accepted, verified = outcome.accepted, outcome.verified
    expect(0 <= accepted <= verified, f"of what is verified a part is accepted; got {accepted} of {verified}")
    expect(0.0 <= outcome.kept <= 1.0, f"kept must lie in [0, 1], got {outcome.kept}; audits take its mean")
    return outcome


def _check_chunk(actions: Chunk, pair: Pair[Any], where: str) -> None:
    expect_array(f"the actions of {where}", actions, np.float32, (None, len(pair.units.centre)))
    expect(len(actions) >= pair.execute, f"{where} must have at least {pair.execute} actions, got {len(actions)}")
    expect(is_valid(actions), f"{where} must have normalised actions, got {actions}")


# ---- a gate ----------------------------------------------------------------------------------------------------------


def check_gate(gate: type[Gate], pair: Pair[Any], *, steps: int = 50, **options: Any) -> None:
    """Checks a gate: that it can be made from stored settings, and that its scores and decisions can be calibrated.

    It is given the proposals of a pair, in episodes of so many inferences. The options are parameters of its
    constructor without a default.
    """
    kind: Any = gate
    expect(isinstance(kind, type) and issubclass(kind, Gate), f"a gate must be a subclass of Gate, got {gate!r:.60}")
    rng = np.random.default_rng(1)
    proposals = [pair.drafter().propose(window, rng) for window in _random_windows(pair.observation, steps)]

    def make_gate(threshold: float, **limits: Any) -> Gate:
        settings: dict[str, Any] = {"tie_probability": 0.0, "max_skips": None} | options | limits
        return gate.for_pair(pair, threshold, **settings)

    def decide(instance: Gate, count: int = steps, salt: int = 0) -> list[Decision]:
        """The decisions of an episode that executes the drafted actions."""
        instance.reset()
        decisions = []
        for step, proposal in enumerate(proposals[:count]):
            before = proposal.actions.copy()
            decisions.append(instance.decide(proposal, np.random.default_rng([salt, step])))
            expect(np.array_equal(before, proposal.actions), "score must not change the proposal")
            instance.on_action(proposal.actions[0], proposal.actions[0])
        return decisions

    checked = make_gate(0.0)
    first = decide(checked)
    for score in (decision.score for decision in first):
        expect(math.isfinite(score), f"score must be finite, got {score}; where there is nothing to go by, 0.0")
    expect(
        decide(make_gate(0.0)) == first,
        "two gates that see the same proposals must decide the same; what is random in score must come from its rng",
    )
    decide(checked, steps // 2, 1)
    expect(decide(checked) == first, "reset must forget the episode; call super().reset() in it")
    if not gate.calibrated:
        return
    for threshold, sent in ((math.inf, False), (-math.inf, True)):
        verdicts = [decision.transmit for decision in decide(make_gate(threshold)) if decision.reason == "score"]
        expect(
            all(transmit == sent for transmit in verdicts),
            f"with a threshold of {threshold} every step that nothing forces must be {'sent' if sent else 'skipped'}; "
            "pass threshold on to Gate's constructor",
        )
    limited = [decision.transmit for decision in decide(make_gate(math.inf, max_skips=1))]
    expect(
        all(a or b for a, b in pairwise(limited)),
        "with max_skips=1 no two steps in a row may be skipped; pass **limits on to Gate's constructor",
    )
