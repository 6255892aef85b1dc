"""Token policies as pairs: what a step remembers, asks and executes; here, and over a real server."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.decodings import DECODINGS
from tests.families.tokens.dots import SEEN, connected, decoded, nonsense, played, rngs
from tests.served import served, verifying

from specact.errors import BundleError, ConfigError, WireError
from specact.execution.player import LateVerdicts
from specact.families.tokens.pair import TokenParts
from specact.families.tokens.policy import DecodingRequest, TokenBundle, load_tokens, to_actions, to_tokens
from specact.families.tokens.speculative import DRAFT, DROPPED, TAIL, TARGET, Bigram, Decoded, relaxed
from specact.families.tokens.verify import token_outcome
from specact.gates.gate import Never, Random
from specact.load import load_pair
from specact.observation import Window
from specact.pair import Pair
from specact.rng import StepAddress
from specact.systems.kerv import Kerv
from specact.systems.tokens import load_token_pair
from specact.types import NO_OFFLOAD, Origin, Outcome, Proposal
from specact.wire.exchange import Request

FEW = SEEN[:40]
# What the last action drafts is never right: the first inference after a plain one is always compensated.
COMPENSATING = Kerv("for a test", "last", then="none", bins=0, adapts=None, tail="last", plain_steps=2)


@pytest.fixture(scope="module")
def pair(wild: TokenBundle) -> Pair[Any]:
    return load_token_pair(wild)


def test_a_tail_is_the_last_action_and_never_soon_again(pair: Pair[Any], greedy: np.ndarray) -> None:
    actions, records = played(pair.composed(decoding=COMPENSATING), FEW)
    compensated = [(decoded(record).sources == TAIL).any() for record in records]
    # Nothing can be extrapolated at first; then after every two plain inferences, as soon as something is refused.
    wait = 1
    for record, tail in zip(records, compensated, strict=True):
        assert tail == (wait <= 0 and decoded(record).rejected < decoded(record).tokens.size)
        wait = 2 if tail else wait - 1
    assert sum(compensated) > 8
    starts = np.cumsum([0, *(len(record.actions) for record in records)])
    for number in np.flatnonzero(compensated):
        chunk, end = decoded(records[number]), 2 * len(records[number].actions)
        before, at = pair.units.from_environment(actions[starts[number] - 1]), np.arange(chunk.rejected, end)
        np.testing.assert_array_equal(np.flatnonzero(chunk.sources == TAIL), at)
        np.testing.assert_allclose(to_actions(chunk.tokens)[at], np.resize(before, 6)[at], atol=1.01 / 255)
        np.testing.assert_array_equal(chunk.tokens[: chunk.rejected], greedy[number][: chunk.rejected])
        assert len(chunk.accepted) == 1, "one pass after that over the prefix"
    # The next inference is the target's again: nothing of the compensation stays.
    np.testing.assert_array_equal(decoded(records[2]).tokens, greedy[2])
    # So are late verdicts that are there at once: what a compensation teaches the drafter comes with them.
    late, _ = played(pair.composed(decoding=COMPENSATING), FEW, verdicts=LateVerdicts(10.0))
    np.testing.assert_array_equal(late, actions)


@pytest.mark.parametrize("first", range(1, 6))
def test_a_tail_fills_the_rejected_action_alone_and_the_chunk_ends_with_it(pair: Pair[Any], first: int) -> None:
    """Of three actions of two tokens; the tokens before the rejected one stay as they are."""
    tokens, sources = np.arange(6) * 40, np.array([TARGET, *[DRAFT] * (first - 1), *[TAIL] * (6 - first)], np.uint8)
    chunk = Decoded(tokens, sources, np.zeros(6, np.int64), [first - 1], [6], first, np.zeros((6, 1), np.float32), True)

    def outcome(decoding: Kerv) -> Outcome:
        return token_outcome(chunk, pair.composed(decoding=decoding).parts, NO_OFFLOAD)

    verdict, whole = outcome(COMPENSATING), outcome(replace(COMPENSATING, tail_actions=3))
    end = first // 2 + 1
    np.testing.assert_allclose(verdict.actions, to_actions(tokens).reshape(3, 2)[:end], atol=1e-5)
    assert verdict.origins.tolist() == [*[Origin.ACCEPTED] * (end - 1), Origin.COMPENSATED]
    np.testing.assert_array_equal(verdict.evidence.tokens[:first], tokens[:first])
    np.testing.assert_array_equal(verdict.evidence.sources, np.where(np.arange(6) < 2 * end, sources, DROPPED))
    # A wrong variant, whose tail fills the rest of the chunk.
    assert whole.origins.tolist().count(Origin.COMPENSATED) == 4 - end
    # With one action of a chunk executed, a tail in a later one is none: the next rejection may be compensated.
    single = replace(COMPENSATING, execute=1)
    drafter: Any = pair.composed(decoding=single).drafter()
    drafter.on_action(np.zeros(2, np.float32), np.zeros(2, np.float32))
    drafter.verified(outcome(single).evidence)
    assert (drafter.tail() is None) == (first < 2)


def test_a_draft_may_have_shorter_or_longer_chunks(pair: Pair[Any]) -> None:
    """A short one's last action is repeated, proposed as it is and as candidate tokens."""
    for steps in (1, 2, 3, 5):
        drafted = np.linspace(-0.5, 0.5, 2 * steps, dtype=np.float32).reshape(steps, 2)
        chunk, spec = pair.units.to_environment(drafted), structs.replace(pair.parts.policy.spec, chunk=steps)
        draft = SimpleNamespace(spec=spec, infer=lambda *_, chunk=chunk: chunk)
        for name in ("ar", "strict_draft"):
            composed = pair.composed(decoding=DECODINGS[name], draft=draft)
            actions = composed.drafter().propose(SEEN[0], rngs(1)[0]).actions
            np.testing.assert_allclose(actions, drafted[np.minimum(np.arange(3), steps - 1)], atol=1.01 / 255.0)


def test_an_episode_begins_without_memory(pair: Pair[Any]) -> None:
    drafter: Any = pair.composed(decoding=COMPENSATING).drafter()
    drafter.on_action(np.zeros(2, np.float32), np.array([0.5, -0.5], np.float32))
    proposal = drafter.propose(SEEN[0], rngs(1)[0])
    assert proposal.evidence.tail is not None and len(proposal.evidence.candidates) == 1
    np.testing.assert_allclose(proposal.actions, np.tile([0.5, -0.5], (3, 1)), atol=1.01 / 255.0)
    drafter.reset()
    proposal = drafter.propose(SEEN[0], rngs(1)[0])
    assert proposal.evidence.tail is None and not len(proposal.evidence.candidates)
    np.testing.assert_array_equal(proposal.actions, np.zeros((3, 2)))


def test_skipped_steps_repeat_the_last_action(pair: Pair[Any]) -> None:
    actions, records = played(pair.composed(decoding=DECODINGS["strict_last"]), FEW, Random(0.5), seed=3)
    skipped = [number for number, record in enumerate(records) if record.outcome is None]
    assert 8 <= len(skipped) <= 32
    for number in skipped:
        assert (records[number].origins == Origin.DRAFTED).all()
        first = number * pair.execute
        near = np.abs(actions[first : first + pair.execute] - actions[first - 1]) / pair.units.scale
        assert number == 0 or near.max() <= 1.01 / 255.0
    # Where nothing is verified the middle of the range is repeated.
    still, _ = played(pair, FEW, Never())
    np.testing.assert_array_equal(still, np.broadcast_to(pair.units.centre, still.shape))


def test_a_device_without_the_decoder_acts_with_a_server_as_a_complete_one_alone(
    wild: TokenBundle, pair: Pair[Any], tmp_path: Path
) -> None:
    """Bit for bit: the question holds all that the server needs. Alone it says what it cannot do."""
    shutil.copytree(wild.path, tmp_path / "device", ignore=shutil.ignore_patterns("decoder.onnx"))
    manifest = tmp_path / "device" / "manifest.json"
    with pytest.raises(BundleError, match=r"decoder\.onnx"):
        load_tokens(tmp_path / "device")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"left_out": ["decoder"]}))
    device = load_token_pair(load_tokens(tmp_path / "device"))
    assert device.fingerprint == pair.fingerprint
    with connected(device, wild.path) as asking:
        for decoding in (DECODINGS["ar"], DECODINGS["strict_last"], COMPENSATING, DECODINGS["random_tokens"]):
            strict = replace(decoding, bins=0)
            here, known = played(pair.composed(decoding=strict), FEW, seed=5)
            composed = device.composed(decoding=strict)
            remote, records = played(composed, FEW, seed=5, verifier=asking(composed))
            np.testing.assert_array_equal(remote, here)
            for record, reference in zip(records, known, strict=True):
                assert record.miss is None and record.outcome is not None
                told, same = decoded(record), decoded(reference)
                assert (told.accepted, told.read, told.rejected) == (same.accepted, same.read, same.rejected)
                np.testing.assert_allclose(told.features[0], same.features[0], atol=1e-2)
                # Audits take its mean: whether the tokens that would have been executed are those that were proposed.
                proposed = to_tokens(record.proposal.actions).ravel()
                assert record.outcome.kept == float((proposed == told.tokens).all())
    for alone in (device.target, lambda: device.parts.policy.infer(SEEN[0], rngs(1)[0])):
        with pytest.raises(BundleError, match="exported without its decoder, which runs on the server"):
            alone()
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"left_out": ["encoder"]}))
    with pytest.raises(BundleError, match=r"left_out.*encoder"):
        load_tokens(tmp_path / "device")


# ---- the wire --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exchange(wild: TokenBundle, pair: Pair[Any]) -> Any:
    """Of a target with one drafter of its own."""
    drafters = {"bigram": Bigram(np.random.default_rng(0).integers(0, 256, (5, 256)))}
    return pair.composed(policy=wild.policy(drafters)).exchange


def query(pair: Pair[Any], window: Window = SEEN[0], step: int = 0, **changes: Any) -> Request:
    """A request for greedy decoding with some changes."""
    question = DecodingRequest(np.zeros((0, 6), np.int64), "none", relaxed(0, 6, 2))
    proposal = Proposal(window, np.zeros((3, 2), np.float32), replace(question, **changes))
    return Request(window, StepAddress(0, 0, 0, step), verifying(pair).request(proposal))


def answer_to(exchange: Any, request: Request) -> dict[str, np.ndarray]:
    (answer,) = served(exchange, "verify", [request])
    assert not isinstance(answer, WireError)
    return dict(answer)


def test_requests_of_a_batch_are_answered_as_alone(pair: Pair[Any], exchange: Any, greedy: np.ndarray) -> None:
    """Requests to verify, refused ones and one without a finite answer, side by side."""
    requests = []
    for row, window in enumerate(SEEN[:24]):
        changes: dict[str, Any] = {"candidates": greedy[row : row + row % 3]}
        changes |= {"then": ("none", "bigram", "head")[row % 5 % 3], "combined": row % 4 == 1}
        changes |= {"tail": np.full(6, 7)} if row % 6 == 2 else {}
        requests.append(query(pair, window, row, **changes))
    answers = served(exchange, "verify", requests)
    refused = 0
    for answer, request in zip(answers, requests, strict=True):
        (alone,) = served(exchange, "verify", [request])
        if isinstance(alone, WireError) or isinstance(answer, WireError):
            assert str(answer) == str(alone)
            refused += 1
            continue
        for name, values in alone.items():
            np.testing.assert_allclose(answer[name] + 0.0, values + 0.0, atol=1e-2 * (name == "feature"))
    assert "'head'" in str(answers[2]) and 1 < refused < 12
    bad = Window({**SEEN[6].arrays, "state": np.full((1, 2), np.nan, np.float32)}, SEEN[6].instruction)
    replies = exchange.answer("verify", [replace(requests[6], window=bad), requests[0]])
    assert isinstance(replies[0], WireError) and not isinstance(replies[1], WireError)


def test_the_server_reads_candidates_up_to_their_end(pair: Pair[Any], exchange: Any, greedy: np.ndarray) -> None:
    """The beginning of the target's own chunk is accepted whole, whatever a peer puts behind its end."""
    for count in range(2, 6):
        begun = np.where(np.arange(6) < count, greedy[0], -1)
        request = query(pair, candidates=np.stack([begun, begun]))
        answer = answer_to(exchange, request)
        assert answer["accepted"].tolist() == [count - 1, *[0] * (5 - count), *[-1] * count]
        assert answer["read"][0] == count
        request.arrays["candidates"][:2, count + 1 :] = 99
        repeat = answer_to(exchange, request)
        for name, values in answer.items():
            np.testing.assert_array_equal(repeat[name], values)
    # Rows that propose nothing leave the first pass to the server's own drafter.
    rows = np.full((2, 6), -1)
    rows[0, 0], rows[1, 1:] = 3, 4
    first, second = (answer_to(exchange, query(pair, then="bigram", candidates=given)) for given in (rows, rows[:0]))
    for name, values in first.items():
        np.testing.assert_array_equal(second[name], values)
    assert first["read"][0] > 1


def test_no_question_within_the_dialect_hurts_the_server(pair: Pair[Any]) -> None:
    """300 questions of numbers that are allowed and make no sense; each is answered, or refused with a sentence."""
    rng, answered = np.random.default_rng(0), 0
    for _ in range(300):
        arrays = nonsense(pair.exchange.contract.kinds["verify"].request, rng)
        arrays["candidates"][rng.random(arrays["candidates"].shape) < 0.2] = -1
        (answer,) = served(pair.exchange, "verify", [Request(SEEN[0], StepAddress(0, 0, 0, 0), arrays)])
        answered += not isinstance(answer, WireError)
    assert answered > 50


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_a_token_policy_is_loaded_as_a_pair(wild: TokenBundle, greedy: np.ndarray) -> None:
    pair = load_pair(wild.path)
    assert load_pair(wild.path, decoding="strict").parts.decoding == DECODINGS["strict"]
    assert isinstance(pair.parts, TokenParts) and pair.parts.draft is None and pair.parts.drafters is None
    for name in ("specvla", "kerv", "heisd"):
        with pytest.raises(ConfigError, match="drafters"):
            pair.composed(decoding=DECODINGS[name]).drafter()
    with pytest.raises(ConfigError, match="--draft"):
        pair.composed(decoding=DECODINGS["strict_draft"]).drafter()
    with_itself = load_pair(wild.path, draft=str(wild.path))
    assert with_itself.fingerprint != pair.fingerprint
    _, records = played(with_itself.composed(decoding=DECODINGS["strict_draft"]), SEEN[:10])
    assert all(decoded(record).accepted == [4] for record in records), "the target drafts for itself"
    np.testing.assert_array_equal([decoded(record).tokens for record in records], greedy[:10])
