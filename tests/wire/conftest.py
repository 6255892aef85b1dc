"""Specs and fixed examples of every message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution, Verdict
from specact.types import Window
from specact.wire.handshake import Hello, Welcome, hello_fields, shared_spec, welcome_fields
from specact.wire.protocol import ErrorCode
from specact.wire.reply import DistributionReply, ErrorReply, ServerTimes, VerdictReply, reply_fields
from specact.wire.request import REPORTED, InferRequest, VerifyRequest, request_fields

SPEC = PolicySpec(
    window=2, state=3, goal=2, image=(2, 4), codebooks=2, codes=5, chunk=2, actions=3,
    execute=1, overlap="drop", temperature=0.5, rate_hz=10.0, sequential=True,
)  # fmt: skip


@pytest.fixture(scope="session")
def spec() -> PolicySpec:
    """A spec that uses everything there is, no two of its sizes the same where they could be mixed up."""
    return SPEC


@pytest.fixture(scope="session")
def plain_spec() -> PolicySpec:
    """The same without goal, camera and sequential secondary head."""
    return dataclasses.replace(SPEC, goal=0, image=None, sequential=False)


@pytest.fixture
def examples(spec: PolicySpec) -> dict[str, dict[str, Any]]:
    """One message of each type with every field there is; damage them at will."""
    return _examples(spec)


@pytest.fixture(scope="session")
def frames(spec: PolicySpec) -> Callable[[ModuleType], list[bytes]]:
    """The same, encoded by a codec."""
    return lambda codec: [codec.encode(fields) for fields in _examples(spec).values()]


def _examples(spec: PolicySpec) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(1)
    grid = (spec.codebooks, spec.codes)
    window = Window(
        rng.normal(size=(spec.window, spec.state)).astype(np.float32),
        rng.normal(size=spec.goal).astype(np.float32),
        rng.integers(0, 256, (spec.window, 2, 4, 3)).astype(np.uint8),
    )
    report = dict.fromkeys(REPORTED, 3)
    laws = rng.dirichlet(np.ones(spec.codes), spec.codebooks)
    conditional = rng.dirichlet(np.ones(spec.codes), spec.codes)
    offsets = rng.normal(size=(*grid, spec.chunk, spec.actions)).astype(np.float32)
    times = ServerTimes(0.25, 1.5, 2.0, 3)
    verdict = Verdict(np.array([4, 0]), np.array([True, False]), np.array([0.0, 0.5]))
    infer = InferRequest(7, 100.0, window, report)
    verify = VerifyRequest(8, 100.0, window, laws, conditional, np.array([1, 2]), (1, 2, 3, 2**64 - 1), report)
    return {
        "hello": hello_fields(Hello("arm 1", "0123456789abcdef", shared_spec(spec))),
        "welcome": welcome_fields(Welcome("ball", "fedcba9876543210", "0.1.0", 10_000)),
        "infer": request_fields(infer),
        "verify": request_fields(verify),
        "distribution": reply_fields(DistributionReply(7, CodeDistribution(laws, offsets, conditional), times)),
        "verdict": reply_fields(VerdictReply(8, verdict, offsets[0, 0], times)),
        "error": reply_fields(ErrorReply(9, ErrorCode.EXPIRED, "too late")),
    }
