"""Contracts for specs that no bundle has, and a message of every kind in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import Struct, structs

from specact.families.chunks.flow import FlowPolicy, FlowUnits
from specact.families.chunks.policy import ChunkSpec, chunk_contract, filled
from specact.families.codes.pair import CodeExchange
from specact.families.codes.policy import ActionTokenizer, PolicySpec
from specact.families.tokens.pair import TokenParts
from specact.families.tokens.policy import TokenPolicy
from specact.families.tokens.verify import TokenExchange
from specact.observation import Field, ObservationSpec, Window, vectors
from specact.rng import StepAddress
from specact.systems.flash import FlashExchange, FlashSettings
from specact.systems.flow import FlowParts
from specact.wire.exchange import Contract, Request
from specact.wire.messages import PROTOCOL, REPORT_COUNTERS, ErrorCode, Failure, Hello, Reply, Welcome, ask

# Everything there is, no two of its sizes the same where they could be mixed up.
SEEN = ObservationSpec(
    {"image": Field((2, 4, 3), "uint8", 2), "state": Field((3,), history=2), "goal": Field((2,), history=0)},
    instruction=True,
)
SPEC = PolicySpec(
    draft=vectors(1, state=3), target=SEEN, codebooks=2, codes=5, chunk=2, actions=3,
    execute=1, overlap="drop", temperature=0.5, rate_hz=10.0, sequential=True,
)  # fmt: skip
HERE = StepAddress(1, 2, 3, 2**64 - 1)


def of_codes(spec: PolicySpec) -> Contract:
    """The contract of a pair of action codes; of its tokenizer only the fingerprint is part of it."""
    table, scale = np.zeros((0, spec.chunk, spec.actions), np.float32), np.ones(spec.actions, np.float32)
    tokenizer = ActionTokenizer(0 * scale, scale, table, "0123456789abcdef", spec.codes)
    return CodeExchange(spec, tokenizer, "pair", "fedcba9876543210", lambda: pytest.fail("a target was made")).contract


def of_chunks(seen: ObservationSpec, chunk: int, actions: int) -> Contract:
    """The contract of a chunk policy."""
    return chunk_contract(ChunkSpec(seen, chunk, actions, 10.0))


def verifying() -> tuple[Contract, Contract]:
    """The contracts of a flow policy of 5 steps, whose last dimension is a gripper, and of a token policy."""
    spec, ends = ChunkSpec(SEEN, 2, 3, 10.0), np.ones(3, np.float32)
    networks: Any = SimpleNamespace(length=6, width=4)
    units = FlowUnits(0 * ends, ends, -ends, ends)
    flow = FlowParts("flow", FlowPolicy(networks, units, spec, steps=5), FlashSettings(2, (2,)))
    tokens = TokenParts("tokens", TokenPolicy(networks, units, spec, {}))
    return FlashExchange(flow).contract, TokenExchange(tokens).contract


CODES, CHUNKS = of_codes(SPEC), of_chunks(SEEN, 2, 3)
FLOWS, TOKENS = verifying()
PLAIN = of_codes(structs.replace(SPEC, target=vectors(2, state=3), sequential=False))


def window_of(seen: ObservationSpec) -> Window:
    """A window with other numbers in every place."""
    arrays: dict[str, Any] = {}
    for name, field in seen.fields.items():
        numbers = np.arange(np.prod(field.window_shape)).reshape(field.window_shape)
        arrays[name] = numbers.astype(np.uint8) if field.is_image else numbers.astype(np.float32) / 4 - 1
    return Window(arrays, "put it there" if seen.instruction else None)


def messages() -> dict[str, tuple[Contract, Struct]]:
    """One message of each kind, with its contract; every number is a sum of few powers of two."""
    report = dict(zip(REPORT_COUNTERS, range(5, 0, -1), strict=True))
    probs = np.array([[0.5, 0.25, 0.125, 0.125, 0.0], [0.0, 0.0, 0.75, 0.0, 0.25]])
    conditional = np.eye(5)[[1, 2, 3, 4, 0]]
    offsets = (np.arange(60, dtype=np.float32) / 8 - 3).reshape(2, 5, 2, 3)
    logits, rows, chunk = offsets[:1, :, 0, 0], conditional.astype(np.float32), offsets[0, 0]
    drafted = {"draft_probs": probs, "draft_conditional": conditional, "codes": np.array([1, 2])}
    accepted, rejection = np.array([True, False]), np.array([0.0, 0.5])
    verdict = {"codes": np.array([4, 0]), "accepted": accepted, "rejection": rejection, "chunk": chunk}
    old = {"actions": chunk, "weights": np.array([1.0, 0.5], np.float32)}
    plain = Request(window_of(PLAIN.observation), StepAddress(3, 0, 12, 40))
    spec, arrays = dict(CODES.spec), CODES.describe()

    def request(contract: Contract, kind: str, arrays: dict[str, Any]) -> tuple[Contract, Struct]:
        return contract, ask(Request(window_of(SEEN), HERE, arrays), contract, kind, 7, 100.0, report)

    def reply(contract: Contract, kind: str, arrays: dict[str, Any]) -> tuple[Contract, Struct]:
        return contract, Reply(7, 0.25, 1.5, 2.0, 3, contract.kinds[kind].reply.pack(arrays))

    return {
        "hello": (CODES, Hello(PROTOCOL, "arm 1", CODES.family, spec, 20.0, 50.0)),
        "hello-question": (CODES, Hello(PROTOCOL, "arm 1")),
        "welcome": (CODES, Welcome(PROTOCOL, "ball", "fedcba9876543210", "0.1.0", CODES.max_message_bytes, CODES.family,
                                   spec, arrays)),
        "codes-infer": request(CODES, "infer", {}),
        "codes-infer-plain": (PLAIN, ask(plain, PLAIN, "infer", 8, 50.0)),
        "codes-verify": request(CODES, "verify", drafted),
        "codes-outputs": reply(CODES, "infer", {"logits": logits, "offsets": offsets, "conditional": rows}),
        "codes-verdict": reply(CODES, "verify", verdict),
        "chunks-inpaint": request(CHUNKS, "inpaint", old),
        "chunks-chunk": reply(CHUNKS, "infer", {"chunk": chunk}),
        "flows-verify": request(FLOWS, "verify", filled(
            FLOWS.kinds["verify"].request, drafted=chunk, levels=[0.5, 0.25], within=0.125, steps=5, checks=2,
            held=[True], known=True, guarded=True)),
        "flows-round": reply(FLOWS, "verify", filled(
            FLOWS.kinds["verify"].reply, chunk=chunk, accepted=1, checked=True, switches=False)),
        "tokens-verify": request(TOKENS, "verify", filled(
            TOKENS.kinds["verify"].request, candidates=[[0, 1, 2, 3, 4, 255], [0, 9, 8, -1, -1, -1]],
            each=[9, 9, 0, 9, 9, 0], groups=[0, 0, 1, 2, 2, 3], total=12, then=1, combined=True)),
        "tokens-chunk": reply(TOKENS, "verify", filled(
            TOKENS.kinds["verify"].reply, tokens=[0, 1, 2, 7, 4, 5], sources=[0, 1, 1, 0, 1, 0],
            bias=[0, 1, -1, 0, 2, 0], accepted=[2, 1], read=[6, 3], rejected=3, feature=[0.5, -0.25, 2.0, 0.0])),
        "error": (CODES, Failure(9, ErrorCode.EXPIRED, "the deadline passed in the queue")),
        "error-without-id": (CODES, Failure(None, ErrorCode.MISMATCH, "deploy the same bundle on both")),
    }  # fmt: skip
