"""Token policies as pairs: what a step remembers, asks and executes; here, and over a real server."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.numpy import load_file
from tests.children import wait_for
from tests.decodings import DECODINGS
from tests.families.tokens.dots import rngs, windows
from tests.served import served, verifying

from specact.errors import BundleError, ConfigError, MissingExtraError, WireError
from specact.execution.player import LateVerdicts
from specact.families.tokens.drafters import Bigram
from specact.families.tokens.pair import Decoding, TokenParts
from specact.families.tokens.policy import TokenBundle, load_tokens, to_actions, to_tokens
from specact.families.tokens.speculative import DRAFT, EMPTY, TAIL, Decided, Decoded, Tree, relaxed
from specact.families.tokens.verify import DecodingRequest, TokenTarget
from specact.families.tokens.wire import TokenExchange
from specact.gates.gate import Always, Never, Random
from specact.lab.rollout.processes import serving
from specact.lab.rollout.token_rollouts import TokenRollouts
from specact.lab.train.drafter_settings import fit_settings
from specact.lab.train.drafters import DrafterHead, output_layer, write_drafters
from specact.load import load_pair
from specact.observation import Window
from specact.pair import Pair, is_valid
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import RemoteTarget, remote_verifier
from specact.rng import StepAddress
from specact.systems.kerv import Kerv
from specact.systems.specvla import HeadDrafter
from specact.systems.tokens import load_token_pair
from specact.types import OffloadTimes, Origin, Proposal, StepRecord
from specact.wire.exchange import Request

PATIENT_MS = 30_000.0
SEEN = windows(40, seed=4)
# What the last action drafts is never right: the first inference after a plain one is always compensated.
COMPENSATING = Kerv("for a test", "last", then="none", bins=0, adapts=None, tail="last", plain_steps=2)


@pytest.fixture(scope="module")
def pair(wild: TokenBundle) -> Pair[Any]:
    return load_token_pair(wild)


def played(pair: Pair[Any], inferences: int = len(SEEN), **parts: Any) -> tuple[np.ndarray, list[StepRecord]]:
    policy = SpeculativePolicy(pair, parts.pop("gate", Always()), **parts)
    actions, records = [], []
    for window in SEEN[:inferences]:
        actions += [policy.act_on(window) for _ in range(pair.execute)]
        assert policy.record is not None
        records.append(policy.record)
    return np.stack(actions), records


def greedy(pair: Pair[Any]) -> np.ndarray:
    return np.concatenate([pair.parts.policy.infer(window, rngs(1)[0]) for window in SEEN])


@pytest.mark.parametrize("decoding", ["ar", "strict_last"])
def test_what_is_strict_acts_as_the_target_does(pair: Pair[Any], decoding: str) -> None:
    actions, records = played(pair.composed(decoding=DECODINGS[decoding]))
    # A near tie between two tokens may fall otherwise where it is read in another company.
    same = (actions == greedy(pair)).all(axis=1)
    assert same.mean() > 0.95
    assert {int(origin) for record in records for origin in record.origins} <= {Origin.REPLACED, Origin.ACCEPTED}


def test_a_tail_is_the_last_action_and_never_soon_again(pair: Pair[Any]) -> None:
    actions, records = played(pair.composed(decoding=COMPENSATING))
    compensated = [_decoded(record).sources.max() == TAIL for record in records]
    # Nothing can be extrapolated at first; then after every two plain inferences, as soon as something is refused.
    wait = 1
    for record, tail in zip(records, compensated, strict=True):
        assert tail == (wait <= 0 and _decoded(record).rejected < _decoded(record).tokens.size)
        wait = 2 if tail else wait - 1
    assert sum(compensated) > 8
    wanted = greedy(pair)
    for number in np.flatnonzero(compensated):
        found, first = _decoded(records[number]), number * pair.execute
        before = pair.units.from_environment(actions[first - 1])
        tail = found.sources == TAIL
        repeated = np.resize(before, tail.size)[tail]
        np.testing.assert_allclose(to_actions(found.tokens)[tail], repeated, atol=1.01 / 255.0)
        assert not tail[: found.rejected].any() and tail[found.rejected :].all()
        origins = records[number].origins
        assert (origins == Origin.COMPENSATED).tolist() == tail.reshape(-1, 2).any(axis=1).tolist()
        plain = pair.units.from_environment(wanted[first : first + pair.execute]).ravel()
        np.testing.assert_allclose(to_actions(found.tokens)[~tail], plain[~tail], atol=1e-5)
    # The next inference is the target's again: nothing of the compensation stays.
    np.testing.assert_array_equal(actions[2 * pair.execute], wanted[2 * pair.execute])


def test_late_verdicts_replace_the_rest_of_a_chunk(pair: Pair[Any]) -> None:
    """Here they are there at once, and what a compensation teaches the drafter comes with them."""
    composed = pair.composed(decoding=COMPENSATING)
    late, records = played(composed, verdicts=LateVerdicts(10.0))
    np.testing.assert_array_equal(late, played(composed)[0])
    assert any(_decoded(record).sources.max() == TAIL for record in records)


def _decoded(record: StepRecord) -> Decoded:
    assert record.outcome is not None
    found: Decoded = record.outcome.evidence
    return found


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("decoding", ["ar", "strict_draft"])
def test_a_draft_may_have_shorter_or_longer_chunks(pair: Pair[Any], steps: int, decoding: str) -> None:
    """A short one's last action is repeated, proposed as it is and as candidate tokens."""
    drafted = np.linspace(-0.5, 0.5, 2 * steps, dtype=np.float32).reshape(steps, 2)

    class Draft:
        spec = structs.replace(pair.parts.policy.spec, chunk=steps)

        def infer(self, window: Window, rng: Any, inpainting: Any = None) -> np.ndarray:
            return pair.units.to_environment(drafted)

    composed = pair.composed(decoding=DECODINGS[decoding], draft=Draft())
    found = composed.drafter().propose(SEEN[0], rngs(1)[0]).actions
    np.testing.assert_allclose(found, drafted[np.minimum(np.arange(3), steps - 1)], atol=1.01 / 255.0)


def test_an_episode_begins_without_memory(pair: Pair[Any]) -> None:
    drafter: Any = pair.composed(decoding=COMPENSATING).drafter()
    drafter.on_action(np.zeros(2, np.float32), np.array([0.5, -0.5], np.float32))
    asked = drafter.propose(SEEN[0], rngs(1)[0])
    assert asked.evidence.request.tail is not None and len(asked.evidence.request.candidates) == 1
    np.testing.assert_allclose(asked.actions, np.tile([0.5, -0.5], (3, 1)), atol=1.01 / 255.0)
    drafter.reset()
    asked = drafter.propose(SEEN[0], rngs(1)[0])
    assert asked.evidence.request.tail is None and not len(asked.evidence.request.candidates)
    np.testing.assert_array_equal(asked.actions, np.zeros((3, 2)))


def test_skipped_steps_repeat_the_last_action(pair: Pair[Any]) -> None:
    actions, records = played(pair.composed(decoding=DECODINGS["strict_last"]), gate=Random(0.5), seed=3)
    skipped = [number for number, record in enumerate(records) if record.outcome is None]
    assert 8 <= len(skipped) <= 32
    for number in skipped:
        assert (records[number].origins == Origin.DRAFTED).all()
        first = number * pair.execute
        near = np.abs(actions[first : first + pair.execute] - actions[first - 1]) / pair.units.scale
        assert number == 0 or near.max() <= 1.01 / 255.0


@pytest.mark.parametrize(
    "decoding", [DECODINGS["ar"], DECODINGS["strict_last"], COMPENSATING, Decoding("for a test", "random")]
)
def test_over_a_server_it_is_the_same(pair: Pair[Any], server: tuple[Endpoint, Client], decoding: Decoding) -> None:
    """Bit for bit: the question holds all that the server needs."""
    composed = pair.composed(decoding=decoding)
    here, _ = played(composed, seed=5)
    there, records = played(composed, seed=5, verifier=remote_verifier(server[1], composed, PATIENT_MS))
    assert all(record.miss is None for record in records)
    np.testing.assert_array_equal(there, here)
    told, known = _decoded(records[3]), _decoded(played(composed, 4, seed=5)[1][3])
    assert (told.accepted, told.read, told.rejected) == (known.accepted, known.read, known.rejected)
    np.testing.assert_allclose(told.feature, known.feature, atol=1e-2)
    # Audits take its mean: whether the tokens that would have been executed are those that were proposed.
    for record in records:
        assert record.outcome is not None
        proposed = to_tokens(record.proposal.actions).ravel()
        assert record.outcome.kept == float((proposed == _decoded(record).tokens).all())


def test_a_late_verdict_of_a_server_replaces_the_rest_of_a_chunk(
    pair: Pair[Any], server: tuple[Endpoint, Client]
) -> None:
    """The request holds what was drafted, and leaves at once all the same."""
    composed, verdicts = pair.composed(decoding=DECODINGS["strict_last"]), LateVerdicts(math.inf)
    policy = SpeculativePolicy(
        composed, Always(), verifier=remote_verifier(server[1], composed, PATIENT_MS), verdicts=verdicts
    )
    waited = SpeculativePolicy(composed, Always())
    for number, window in enumerate(SEEN[:12], 1):
        executed = [policy.act_on(window)]
        wait_for(lambda: verdicts.free or verdicts._in_flight[0].done(), "the server answers")  # type: ignore[index]
        executed += [policy.act_on(None) for _ in range(pair.execute - 1)]
        np.testing.assert_array_equal(executed[1:], [waited.act_on(window) for _ in range(pair.execute)][1:])
        assert policy.counts["in_time"] == number and policy.counts["missed"] == 0
    assert policy.record is not None and policy.record.outcome is not None and policy.record.outcome.kept in (0.0, 1.0)


@pytest.mark.parametrize("decoding", [DECODINGS["strict_last"], COMPENSATING])
def test_a_device_needs_no_decoder(
    wild: TokenBundle, pair: Pair[Any], server: tuple[Endpoint, Client], decoding: Decoding, tmp_path: Path
) -> None:
    """A copy without it acts with the server as the complete one does, and says what it cannot do alone."""
    shutil.copytree(wild.path, tmp_path / "device", ignore=shutil.ignore_patterns("decoder.onnx"))
    manifest = tmp_path / "device" / "manifest.json"
    with pytest.raises(BundleError, match=r"decoder\.onnx"):
        load_tokens(tmp_path / "device")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"left_out": ["decoder"]}))
    device = load_token_pair(load_tokens(tmp_path / "device")).composed(decoding=decoding)
    assert device.fingerprint == pair.fingerprint
    there, records = played(device, seed=5, verifier=remote_verifier(server[1], device, PATIENT_MS))
    assert all(record.miss is None for record in records)
    np.testing.assert_array_equal(there, played(pair.composed(decoding=decoding), seed=5)[0])
    np.testing.assert_array_equal(
        device.parts.policy.networks.tokens(SEEN[:2]), pair.parts.policy.networks.tokens(SEEN[:2])
    )
    for alone in (device.target, lambda: device.parts.policy.infer(SEEN[0], rngs(1)[0])):
        with pytest.raises(BundleError, match="exported without its decoder, which runs on the server"):
            alone()
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"left_out": ["encoder"]}))
    with pytest.raises(BundleError, match=r"left_out.*encoder"):
        load_tokens(tmp_path / "device")


@pytest.fixture(scope="module")
def server(wild: TokenBundle) -> Any:
    with serving(wild.path) as process:
        endpoint = Endpoint("ws", "127.0.0.1", process.port)
        with Client(endpoint, load_token_pair(wild).exchange.contract, "test") as client:
            client.connect(30.0)
            yield endpoint, client


def test_a_robot_that_only_wants_chunks_is_served_by_the_same(
    wild: TokenBundle, pair: Pair[Any], server: tuple[Endpoint, Client]
) -> None:
    found = RemoteTarget(server[1], pair.exchange, PATIENT_MS).submit(SEEN[0], StepAddress(0, 0, 0, 0)).result()
    np.testing.assert_array_equal(found.value, pair.parts.policy.infer(SEEN[0], rngs(1)[0]))  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def drafted(wild: TokenBundle, tmp_path_factory: pytest.TempPathFactory) -> Pair[Any]:
    """The pair with drafters beside it that learned nothing; only the head is used."""
    folder = tmp_path_factory.mktemp("drafted") / "dots"
    shutil.copytree(wild.path, folder)
    rng, count, length, width = np.random.default_rng(0), 40, wild.networks.length, wild.networks.width
    rollouts = TokenRollouts(
        np.repeat([0, 1], count // 2), np.tile(np.arange(count // 2), 2),
        rng.integers(0, 256, (count, length), dtype=np.uint8),
        rng.normal(size=(count, length, width)).astype(np.float16), rng.normal(size=(count, width)).astype(np.float16),
        rng.normal(size=(count, 2)).astype(np.float32), np.ones(count, np.bool_),
    )  # fmt: skip
    settings = fit_settings(rollouts, rollouts, 2, strict=(), groups=(0, 0), path=(0, 1), window=4)
    torch.manual_seed(0)
    embedding = torch.from_numpy(load_file(folder / "embedding.safetensors")["embedding"])
    head = DrafterHead(embedding, output_layer(folder / "decoder.onnx"), length, 2, 0.0)
    write_drafters(
        folder / "drafters", {"name": "drafted", "env": ""}, replace(settings, top=3, nodes=20), wild, head,
        rollouts, rollouts, half=True,
    )  # fmt: skip
    found = load_pair(folder, decoding="specvla_device")
    assert isinstance(found.parts, TokenParts)
    return found


def test_a_memory_is_searched_in_a_graph_where_its_recipe_says_so(
    drafted: Pair[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(drafted.path or "", tmp_path / "dots")
    manifest = tmp_path / "dots" / "drafters" / "manifest.json"
    told = json.loads(manifest.read_text())
    assert told["spec"]["settings"]["graph"] is False
    told["spec"]["settings"]["graph"] = True
    manifest.write_text(json.dumps(told))
    graph = load_pair(tmp_path / "dots")
    assert (
        isinstance(graph.parts, TokenParts) and graph.parts.drafters is not None and drafted.parts.drafters is not None
    )
    feature = drafted.parts.drafters.memory.entries.features[7]
    assert graph.parts.drafters.memory.nearest(feature).steps == drafted.parts.drafters.memory.nearest(feature).steps
    monkeypatch.setitem(sys.modules, "voyager", None)
    load_pair(drafted.path or "")
    with pytest.raises(MissingExtraError, match=r"specact\[retrieval\]"):
        load_pair(tmp_path / "dots")


def tree_after(pair: Pair[Any], decoded: Decoded) -> set[tuple[int, ...]]:
    """The paths that the head drafts after a chunk's first token; the wire rounds the feature."""
    assert pair.parts.drafters is not None
    feature = decoded.feature.astype(np.float16).astype(np.float32)
    settings = pair.parts.drafters.settings
    drafter = HeadDrafter(pair.parts.drafters.head, settings.top, settings.depth, 8)
    (tree,) = drafter.grow([Decided(decoded.tokens[:1], feature[None], len(decoded.tokens))])
    assert len(tree) == 8
    return {(int(decoded.tokens[0]), *tree.tokens[path].tolist()) for path in tree.paths}


def drafted_paths(record: StepRecord) -> set[tuple[int, ...]]:
    rows = record.proposal.evidence.request.candidates
    return {tuple(row[row >= 0].tolist()) for row in rows}


def test_a_head_on_the_device_is_served_bit_for_bit(drafted: Pair[Any]) -> None:
    # The head learned nothing: a wide tolerance accepts some of its tokens.
    wide = drafted.composed(decoding=replace(drafted.parts.decoding, bins=60))
    here, known = played(wide)
    assert wide.path is not None
    with (
        serving(wide.path) as process,
        Client(Endpoint("ws", "127.0.0.1", process.port), wide.exchange.contract, "test") as client,
    ):
        client.connect(30.0)
        there, told = played(wide, verifier=remote_verifier(client, wide, PATIENT_MS))
    np.testing.assert_array_equal(there, here)
    for number, (one, other) in enumerate(zip(told, known, strict=True)):
        assert one.miss is None and drafted_paths(one) == drafted_paths(other)
        for name in ("tokens", "sources", "bias", "accepted", "read", "rejected"):
            np.testing.assert_array_equal(getattr(_decoded(one), name), getattr(_decoded(other), name))
        np.testing.assert_array_equal(one.origins, other.origins)
        # A tree of eight nodes, all of which the target reads in one pass.
        assert _decoded(one).read[0] == 9 or number == 0
    assert sum(_decoded(record).accepted[0] for record in told[1:]) > 0


def test_a_head_on_the_device_reads_the_last_verified_chunk(drafted: Pair[Any]) -> None:
    """Neither a newer one that was not verified, nor an older one."""
    _, records = played(drafted, gate=Random(0.5), seed=3)
    verified: Decoded | None = None
    sent = [record.decision.transmit for record in records]
    assert 8 <= sum(sent) <= 32
    for record in records:
        assert drafted_paths(record) == (set() if verified is None else tree_after(drafted, verified))
        verified = verified if record.outcome is None else _decoded(record)


def test_a_head_on_the_device_drafts_nothing_without_the_target(drafted: Pair[Any]) -> None:
    (_, (record, *_)), drafter, rng = played(drafted, 1), cast(Any, drafted.drafter()), rngs(1)[0]
    decoded = _decoded(record)

    def rows() -> np.ndarray:
        found: np.ndarray = drafter.propose(SEEN[0], rng).evidence.request.candidates
        return found

    assert not len(rows())
    drafter.on_inference(record)
    assert not len(rows()), "it was not verified"
    drafter.on_verified(record)
    first = rows()
    assert len(first) and (first[:, 0] == decoded.tokens[0]).all()
    drafter.verified(replace(decoded, feature=-decoded.feature))
    assert rows().tolist() != first.tolist(), "the feature counts"
    drafter.verified(replace(decoded, tokens=(decoded.tokens + 100) % 256))
    assert rows()[:, 1:].tolist() != first[:, 1:].tolist(), "so does the first token"
    drafter.verified(decoded)
    np.testing.assert_array_equal(rows(), first)
    drafter.reset()
    assert not len(rows()), "an episode begins without memory"


def test_a_head_on_the_device_reads_the_feature_as_the_wire_rounds_it(
    drafted: Pair[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a tree would depend, rarely, on where the target runs."""
    (_, (record, *_)), drafter = played(drafted, 1), cast(Any, drafted.drafter())
    given: list[Decided] = []

    def grow(drafter: HeadDrafter, decided: Sequence[Decided]) -> list[Tree]:
        given.extend(decided)
        return [EMPTY]

    monkeypatch.setattr(HeadDrafter, "grow", grow)
    decoded = _decoded(record)
    rounded = decoded.feature.astype(np.float16).astype(np.float32)
    assert (rounded != decoded.feature).any()
    drafter.verified(decoded)
    drafter.propose(SEEN[0], rngs(1)[0])
    np.testing.assert_array_equal(given[0].features, rounded[None])


def test_what_a_head_on_the_device_leaves_open_is_the_last_action(drafted: Pair[Any]) -> None:
    (_, (record, *_)), drafter = played(drafted, 1), cast(Any, drafted.drafter())
    drafter.verified(_decoded(record))
    drafter.on_action(np.zeros(2, np.float32), np.array([0.5, -0.5], np.float32))
    proposal = drafter.propose(SEEN[0], rngs(1)[0])
    best = proposal.evidence.request.candidates[0]
    found, known = proposal.actions.ravel(), best >= 0
    assert 1 < known.sum() < 6
    np.testing.assert_array_equal(found[known], to_actions(best[known]))
    np.testing.assert_allclose(found[~known], np.tile([0.5, -0.5], 3)[~known], atol=1.01 / 255.0)


def asked(pair: Pair[Any], **changes: Any) -> dict[str, np.ndarray]:
    length = pair.parts.policy.networks.length
    question = DecodingRequest(np.zeros((0, length), np.int64), "none", False, relaxed(0, length, 2, ()))
    evidence = replace_question(question, **changes)
    return dict(verifying(pair).request(Proposal(SEEN[0], np.zeros((3, 2), np.float32), evidence)))


class _Evidence:
    def __init__(self, question: DecodingRequest) -> None:
        self.request = question


def replace_question(question: DecodingRequest, **changes: Any) -> _Evidence:
    return _Evidence(replace(question, **changes))


def test_a_question_for_a_drafter_that_is_not_there_is_refused(pair: Pair[Any]) -> None:
    (found,) = served(pair.exchange, "verify", [_request(pair, asked(pair, then="head"))])
    assert isinstance(found, WireError) and "head" in str(found)
    arrays = asked(pair)
    arrays["how"][1] = 3
    (found,) = served(pair.exchange, "verify", [_request(pair, arrays)])
    assert isinstance(found, WireError) and "0 to 2" in str(found)


def test_requests_of_a_batch_are_answered_as_alone(pair: Pair[Any]) -> None:
    """Requests to verify, refused ones and one without a finite answer, side by side."""
    own = {"bigram": Bigram(np.random.default_rng(0).integers(0, 256, (5, 256, 2)), (2, 1))}
    exchange = TokenExchange(pair.parts.policy, pair.units, "", "", lambda: TokenTarget(pair.parts.policy, own))
    drafts, requests = greedy_tokens(pair), []
    for row, window in enumerate(SEEN[:24]):
        changes: dict[str, Any] = {"candidates": drafts[row : row + row % 3]}
        changes |= {"then": ("none", "bigram", "head")[row % 5 % 3], "combined": row % 4 == 1}
        changes |= {"tail": np.full(6, 7)} if row % 6 == 2 else {}
        arrays = asked(pair, **changes)
        if row == 8:
            arrays["how"][1] = 3
        requests.append(Request(window, StepAddress(0, 0, 0, row), arrays))
    answers = served(exchange, "verify", requests)
    refused = 0
    for answer, request in zip(answers, requests, strict=True):
        (alone,) = served(exchange, "verify", [request])
        if isinstance(alone, WireError) or isinstance(answer, WireError):
            assert str(answer) == str(alone)
            refused += 1
            continue
        for name, values in alone.items():
            if name == "feature":
                np.testing.assert_allclose(answer[name].astype(float), values.astype(float), atol=1e-2)
            else:
                np.testing.assert_array_equal(answer[name], values)
    assert "0 to 2" in str(answers[8]) and 1 < refused < 12
    bad = Window({**SEEN[6].arrays, "state": np.full((1, 2), np.nan, np.float32)}, SEEN[6].instruction)
    found = exchange.answer("verify", [replace(requests[6], window=bad), requests[0]])
    assert isinstance(found[0], WireError) and not isinstance(found[1], WireError)


def greedy_tokens(pair: Pair[Any]) -> np.ndarray:
    return np.concatenate([pair.parts.policy.decode([window], rngs(1))[0] for window in SEEN])


def _request(pair: Pair[Any], arrays: dict[str, np.ndarray]) -> Request:
    return Request(SEEN[0], StepAddress(0, 0, 0, 0), arrays)


@pytest.mark.parametrize("count", range(2, 6))
def test_the_server_reads_candidates_up_to_their_end(pair: Pair[Any], count: int) -> None:
    """The beginning of the target's own chunk is accepted whole, whatever a peer puts behind its end."""
    begun = np.where(np.arange(6) < count, greedy_tokens(pair)[0], -1)
    arrays = asked(pair, candidates=np.stack([begun, begun]))
    (found,) = served(pair.exchange, "verify", [_request(pair, arrays)])
    assert not isinstance(found, WireError)
    assert found["accepted"].tolist() == [count - 1, *[0] * (5 - count), *[-1] * count]
    assert found["read"][0] == count
    for row in arrays["candidates"][:2]:
        row[count + 1 :] = 99
    (again,) = served(pair.exchange, "verify", [_request(pair, arrays)])
    assert not isinstance(again, WireError)
    for name, values in found.items():
        np.testing.assert_array_equal(again[name], values)


def test_rows_that_propose_nothing_leave_the_first_pass_to_the_server(pair: Pair[Any]) -> None:
    own = {"bigram": Bigram(np.random.default_rng(0).integers(0, 256, (5, 256, 2)), (2, 1))}
    exchange = TokenExchange(pair.parts.policy, pair.units, "", "", lambda: TokenTarget(pair.parts.policy, own))
    rows = np.full((2, 6), -1)
    rows[0, 0], rows[1, 1:] = 3, 4
    first, second = served(
        exchange,
        "verify",
        [_request(pair, asked(pair, then="bigram", candidates=given)) for given in (rows, rows[:0])],
    )
    assert not isinstance(first, WireError) and not isinstance(second, WireError)
    for name, values in first.items():
        np.testing.assert_array_equal(second[name], values)
    assert first["read"][0] > 1


def test_no_question_within_the_dialect_hurts_the_server(pair: Pair[Any]) -> None:
    """300 questions of numbers that are allowed and make no sense; each is answered, or refused with a sentence."""
    rng, specs = np.random.default_rng(0), pair.exchange.contract.kinds["verify"].request.specs
    answered = 0
    for _ in range(300):
        arrays = {
            name: rng.integers(int(spec.low), int(spec.high) + 1, spec.shape).astype(spec.dtype)
            for name, spec in specs.items()
        }
        arrays["how"][1:] = rng.integers(0, 4, 2)
        arrays["candidates"][rng.random(arrays["candidates"].shape) < 0.2] = -1
        (found,) = served(pair.exchange, "verify", [_request(pair, arrays)])
        if not isinstance(found, WireError):
            answered += 1
    assert answered > 50


@pytest.mark.parametrize("decoding", ["kerv", "specvla_device"])
def test_no_answer_within_the_dialect_hurts_the_robot(drafted: Pair[Any], decoding: str) -> None:
    """300 replies of numbers that are allowed and make no sense; each is a miss, or the drafter lives with it."""
    pair = drafted.composed(decoding=DECODINGS[decoding])
    rng, specs = np.random.default_rng(0), pair.exchange.contract.kinds["verify"].reply.specs
    drafter, invalid = cast(Any, pair.drafter()), 0
    for _ in range(300):
        arrays = {
            name: rng.integers(
                int(max(spec.low, 0 if spec.dtype is np.uint8 else -255)), 1 + int(min(spec.high, 255)), spec.shape
            ).astype(spec.dtype)
            for name, spec in specs.items()
        }
        arrays["feature"] = rng.choice(np.array([0.0, 1.0, 6e4, -6e4], np.float16), specs["feature"].shape)
        arrays["bias"] //= rng.choice([1, 50, 510])
        outcome = verifying(pair).outcome(arrays, OffloadTimes())
        if not is_valid(outcome.actions):
            invalid += 1
            continue
        drafter.verified(outcome.evidence)
        drafter.propose(SEEN[0], rng)
    assert 20 < invalid < 280
    # A token of 255 that the target would have wanted to be 510.
    arrays["tokens"][:], arrays["bias"][:], arrays["sources"][:] = 255, -255, DRAFT
    assert not is_valid(verifying(pair).outcome(arrays, OffloadTimes()).actions)


def test_the_draft_alone_needs_no_target(pair: Pair[Any]) -> None:
    actions, _ = played(pair, gate=Never())
    np.testing.assert_array_equal(actions, np.broadcast_to(pair.units.centre, actions.shape))


@pytest.mark.parametrize("name", ["specvla", "specvla_device", "kerv", "heisd", "filter", "last"])
def test_what_needs_drafters_says_so(pair: Pair[Any], name: str) -> None:
    with pytest.raises(ConfigError, match="drafters"):
        pair.composed(decoding=DECODINGS[name]).drafter()


def test_a_token_policy_is_loaded_as_a_pair(wild: TokenBundle) -> None:
    found = load_pair(wild.path)
    assert load_pair(wild.path, decoding="strict").parts.decoding == DECODINGS["strict"]
    with pytest.raises(ConfigError, match="no token policy"):
        load_pair("ball", decoding="strict")
    assert isinstance(found.parts, TokenParts) and found.parts.draft is None and found.parts.drafters is None
    with pytest.raises(ConfigError, match="--draft"):
        found.composed(decoding=DECODINGS["strict_draft"]).drafter()
    with_itself = load_pair(wild.path, draft=str(wild.path))
    assert isinstance(with_itself.parts, TokenParts) and with_itself.fingerprint != found.fingerprint
    actions, records = played(with_itself.composed(decoding=DECODINGS["strict_draft"]), 10)
    assert all(_decoded(record).accepted == (4,) for record in records), "the target drafts for itself"
    np.testing.assert_array_equal(actions, greedy(found)[: len(actions)])
