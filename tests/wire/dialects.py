"""Dialects of both families for specs that no bundle has, and a message of every type."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.wire import ChunkCodec
from specact.families.codes.spec import PolicySpec
from specact.families.codes.tokenizer import ActionTokenizer
from specact.families.codes.wire import CodeCodec
from specact.observation import Field, ObservationSpec, Window, vectors
from specact.rng import StepAddress
from specact.wire.checks import ErrorCode
from specact.wire.dialect import Dialect
from specact.wire.handshake import Hello, Welcome, hello_fields, welcome_fields
from specact.wire.messages import REPORT_COUNTERS, ErrorReply, Reply, Request, ServerTimes, reply_fields, request_fields

FINGERPRINT = "0123456789abcdef"
# Everything there is, no two of its sizes the same where they could be mixed up.
SEEN = ObservationSpec(
    {"state": Field((3,), history=2), "goal": Field((2,), history=0), "image": Field((2, 4, 3), "uint8", 2)},
    instruction=True,
)
SPEC = PolicySpec(
    draft=vectors(1, state=3), target=SEEN, codebooks=2, codes=5, chunk=2, actions=3,
    execute=1, overlap="drop", temperature=0.5, rate_hz=10.0, sequential=True,
)  # fmt: skip
PLAIN = structs.replace(SPEC, target=vectors(2, state=3), sequential=False)


def of_codes(spec: PolicySpec, fingerprint: str = FINGERPRINT) -> Dialect:
    """What is said about a pair over action codes; of its tokenizer only the fingerprint is."""
    table = np.zeros((0, spec.chunk, spec.actions), np.float32)
    scale = np.ones(spec.actions, np.float32)
    return CodeCodec(spec, ActionTokenizer(0 * scale, scale, table, fingerprint, spec.codes)).dialect


def of_chunks(seen: ObservationSpec, chunk: int, actions: int) -> Dialect:
    """What is said about a chunk policy."""
    return ChunkCodec(ChunkSpec(seen, chunk, actions, 10.0)).dialect


CODES, CHUNKS = of_codes(SPEC), of_chunks(SEEN, 2, 3)


def window_of(seen: ObservationSpec, rng: np.random.Generator) -> Window:
    """A window drawn at random."""
    arrays: dict[str, NDArray[Any]] = {
        name: rng.integers(0, 256, field.window_shape).astype(np.uint8)
        if field.is_image
        else rng.normal(size=field.window_shape).astype(np.float32)
        for name, field in seen.fields.items()
    }
    return Window(arrays, "put it there" if seen.instruction else None)


def messages() -> dict[str, dict[str, Any]]:
    """One message of each type with every field there is."""
    rng = np.random.default_rng(1)
    grid = (SPEC.codebooks, SPEC.codes)
    window = window_of(SEEN, rng)
    report, address = dict.fromkeys(REPORT_COUNTERS, 3), StepAddress(1, 2, 3, 2**64 - 1)
    laws = rng.dirichlet(np.ones(SPEC.codes), SPEC.codebooks)
    conditional = rng.dirichlet(np.ones(SPEC.codes), SPEC.codes)
    offsets = rng.normal(size=(*grid, SPEC.chunk, SPEC.actions)).astype(np.float32)
    times = ServerTimes(0.25, 1.5, 2.0, 3)
    drafted = {"draft_probs": laws, "draft_conditional": conditional, "codes": np.array([1, 2])}
    old = {"actions": offsets[0, 0], "weights": np.array([1.0, 0.5], np.float32)}
    distribution: dict[str, NDArray[Any]] = {"probs": laws, "offsets": offsets, "conditional": conditional}
    verdict: dict[str, NDArray[Any]] = {
        "codes": np.array([4, 0]),
        "accepted": np.array([True, False]),
        "rejection": np.array([0.0, 0.5]),
        "chunk": offsets[0, 0],
    }
    welcome = Welcome("ball", "fedcba9876543210", "0.1.0", 10_000, CODES.family, CODES.agreed)
    return {
        "hello": hello_fields(Hello("arm 1", CODES.family, CODES.agreed)),
        "welcome": welcome_fields(welcome),
        "infer": request_fields(Request("infer", 7, 100.0, window, address, report=report), SEEN),
        "verify": request_fields(Request("verify", 8, 100.0, window, address, drafted, report), SEEN),
        "inpaint": request_fields(Request("inpaint", 7, 100.0, window, address, old, report), SEEN),
        "distribution": reply_fields(Reply(7, "distribution", distribution, times)),
        "verdict": reply_fields(Reply(8, "verdict", verdict, times)),
        "chunk": reply_fields(Reply(7, "chunk", {"chunk": offsets[0, 0]}, times)),
        "error": reply_fields(ErrorReply(9, ErrorCode.EXPIRED, "too late")),
    }


def dialect_of(kind: str) -> Dialect:
    """The one in which a message of this type is valid."""
    return CHUNKS if kind in ("inpaint", "chunk") else CODES
