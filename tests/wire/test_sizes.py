"""The bound on a message: enough for the largest that is valid, and not much more."""

from __future__ import annotations

import dataclasses
import json as plain_json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.example_count import example_count

from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution, Verdict
from specact.runtime.manifest import kind_of
from specact.types import Window
from specact.wire import json, msgpack
from specact.wire.handshake import Hello, hello_fields, read_hello, shared_spec
from specact.wire.protocol import ErrorCode, max_message_bytes
from specact.wire.reply import DistributionReply, ErrorReply, Reply, ServerTimes, VerdictReply, read_reply, reply_fields
from specact.wire.request import REPORTED, VerifyRequest, read_request, request_fields

SHELF = Path(__file__).parents[2] / "pretrained"
PRETRAINED = [path for path in sorted(SHELF.glob("*/manifest.json")) if kind_of(path.parent) == "pair"]
# The longest that a float32, and a probability, can get as JSON: 23 characters.
LONG = np.float32(-1.1754943508222875e-38)
TINY = 2.2250738585072014e-308
LONG_MS = 0.00012345678901234567
EVERYTHING_ELSE = 8192


def bundle_spec(manifest: Path) -> PolicySpec:
    fields = plain_json.loads(manifest.read_text())["spec"]
    return PolicySpec(**fields | {"image": tuple(fields["image"]) if fields["image"] else None})


def long_law(rows: int, codes: int) -> NDArray[np.float64]:
    law = np.full((rows, codes), TINY)
    law[:, -1] = 1.0 - 1e-16
    return law


def largest(spec: PolicySpec) -> list[dict[str, Any]]:
    """The longest valid message of each type."""
    grid, chunk = (spec.codebooks, spec.codes), (spec.chunk, spec.actions)
    window = Window(
        np.full((spec.window, spec.state), LONG),
        np.full(spec.goal, LONG) if spec.goal else None,
        np.full((spec.window, *spec.image, 3), 255, np.uint8) if spec.image else None,
    )
    law = long_law(*grid)
    conditional = long_law(spec.codes, spec.codes) if spec.sequential else None
    codes = np.full(spec.codebooks, spec.codes - 1)
    word, count = 2**64 - 1, 2**63 - 1
    request = VerifyRequest(
        count, 59_999.999999999985, window, law, conditional, codes, (word,) * 4, dict.fromkeys(REPORTED, count)
    )
    times = ServerTimes(LONG_MS, LONG_MS, LONG_MS, 2**31 - 1)
    target = CodeDistribution(law, np.full((*grid, *chunk), LONG), conditional)
    verdict = Verdict(codes, np.zeros(spec.codebooks, np.bool_), np.full(spec.codebooks, TINY))
    replies: list[Reply] = [
        DistributionReply(count, target, times),
        VerdictReply(count, verdict, np.full(chunk, LONG), times),
        ErrorReply(count, ErrorCode.UNSUPPORTED_PROTOCOL, "\N{ROBOT FACE}" * 500),
    ]
    hello = Hello("\N{ROBOT FACE}" * 64, "f" * 16, shared_spec(spec))
    fields = [request_fields(request), *map(reply_fields, replies), hello_fields(hello)]
    # They are valid.
    read_request(fields[0], spec)
    for reply in fields[1:4]:
        read_reply(reply, spec)
    read_hello(fields[4])
    return fields


def longest(codec: ModuleType, spec: PolicySpec) -> int:
    return max(len(codec.encode(fields)) for fields in largest(spec))


def test_23_characters_are_the_most() -> None:
    assert len(repr(float(LONG))) == len(repr(TINY)) == 23


@pytest.mark.parametrize("manifest", PRETRAINED, ids=[path.parent.name for path in PRETRAINED])
def test_the_bound_of_a_bundle_is_enough_and_not_much_more(manifest: Path) -> None:
    spec = bundle_spec(manifest)
    limit = max_message_bytes(spec)
    assert longest(msgpack, spec) <= longest(json, spec) <= limit
    assert limit <= EVERYTHING_ELSE + 1.35 * longest(json, spec)


@pytest.mark.parametrize("change", [{"image": (96, 96), "window": 5}, {"sequential": True, "codes": 64}])
def test_the_bound_with_a_camera_or_a_sequential_head_is_not_much_more(change: dict[str, Any]) -> None:
    spec = dataclasses.replace(bundle_spec(PRETRAINED[0]), **change)
    assert longest(json, spec) <= max_message_bytes(spec) <= EVERYTHING_ELSE + 1.35 * longest(json, spec)


sizes = st.integers(1, 12)


@example_count(150)
@given(
    window=sizes, state=st.integers(1, 60), goal=st.integers(0, 60), image=st.none() | st.tuples(sizes, sizes),
    codebooks=st.integers(1, 6), codes=st.integers(1, 24), chunk=sizes, actions=sizes, sequential=st.booleans(),
)  # fmt: skip
def test_the_bound_is_enough_for_any_spec(
    window: int, state: int, goal: int, image: tuple[int, int] | None, codebooks: int, codes: int, chunk: int,
    actions: int, sequential: bool,
) -> None:  # fmt: skip
    codebooks = 2 if sequential else codebooks
    spec = PolicySpec(window, state, goal, image, codebooks, codes, chunk, actions, 1, "drop", 1.0, 10.0, sequential)
    for codec in (msgpack, json):
        assert longest(codec, spec) <= max_message_bytes(spec)


def test_a_number_and_its_comma_are_not_all_there_is() -> None:
    """The wrong variant: without the brackets of axes of length 1, 25 characters would seem enough."""
    spec = PolicySpec(1, 1, 0, None, 8000, 2, 1, 1, 1, "drop", 1.0, 10.0)
    numbers = 8000 * 2 + 8000 * 2
    assert max_message_bytes(spec) == EVERYTHING_ELSE + 30 * numbers
    assert EVERYTHING_ELSE + 25 * numbers < longest(json, spec) <= max_message_bytes(spec)
