"""The bound on a message: enough for the largest that is valid, and not much more."""

from __future__ import annotations

import json as plain_json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray
from tests.example_count import example_count
from tests.wire.dialects import SPEC, of_chunks, of_codes

from specact.bundle.manifest import read_manifest
from specact.families.codes.spec import PolicySpec
from specact.observation import Field, ObservationSpec, Window, read_spec, vectors
from specact.rng import StepAddress
from specact.wire import json, msgpack
from specact.wire.checks import ErrorCode
from specact.wire.dialect import ArraySpec, Dialect
from specact.wire.handshake import Hello, Welcome, hello_fields, read_hello, read_welcome, welcome_fields
from specact.wire.messages import (
    MAX_INSTRUCTION_CHARS,
    REPORT_COUNTERS,
    ErrorReply,
    Reply,
    Request,
    ServerTimes,
    read_reply,
    read_request,
    reply_fields,
    request_fields,
)
from specact.wire.sizes import HANDSHAKE_BYTES, exchange_bytes, max_message_bytes

SHELF = Path(__file__).parents[2] / "pretrained"
MANIFESTS = [
    path for path in sorted(SHELF.glob("*/manifest.json")) if read_manifest(path.parent).kind in ("pair", "flow")
]
# The longest that a float32, and a probability, can get as JSON: 23 characters.
LONG = np.float32(-1.1754943508222875e-38)
TINY = 2.2250738585072014e-308
LONG_MS = 0.00012345678901234567
EVERYTHING_ELSE = 8192


def bundle_dialect(manifest: Path) -> Dialect:
    spec = dict(plain_json.loads(manifest.read_text())["spec"])
    if "observation" in spec:
        return of_chunks(read_spec(spec["observation"]), spec["chunk"], spec["actions"])
    draft, target = (read_spec(spec.pop(name)) for name in ("draft", "target"))
    return of_codes(PolicySpec(draft=draft, target=target, **spec))


def longest_array(spec: ArraySpec) -> NDArray[Any]:
    if spec.distribution:
        law = np.full(spec.shape, TINY)
        law[..., -1] = 1.0 - 1e-16
        return law
    if spec.dtype is np.float32:
        return np.full(spec.shape, LONG if spec.low < 0.0 else -LONG)
    if spec.dtype is np.int64:
        return np.full(spec.shape, int(spec.high))
    # false is longer than true.
    return np.zeros(spec.shape, np.bool_) if spec.dtype is np.bool_ else np.full(spec.shape, TINY)


def largest(dialect: Dialect) -> list[dict[str, Any]]:
    """The longest valid message of each type."""
    wanted = dialect.observation
    window = Window(
        {
            name: np.full(field.window_shape, 255, np.uint8) if field.is_image else np.full(field.window_shape, LONG)
            for name, field in wanted.fields.items()
        },
        "\N{ROBOT FACE}" * MAX_INSTRUCTION_CHARS if wanted.instruction else None,
    )
    address, count = StepAddress(*[2**64 - 1] * 4), 2**63 - 1
    times = ServerTimes(LONG_MS, LONG_MS, LONG_MS, 2**31 - 1)
    messages = []
    for kind, exchange in dialect.exchanges.items():
        said, answered = (
            {name: longest_array(spec) for name, spec in specs.items()} for specs in (exchange.request, exchange.reply)
        )
        report = dict.fromkeys(REPORT_COUNTERS, count)
        request = Request(kind, count, 59_999.999999999985, window, address, said, report)
        messages += [
            request_fields(request, wanted),
            reply_fields(Reply(count, exchange.answer, answered, times)),
        ]
        # They are valid.
        read_request(messages[-2], dialect)
        read_reply(messages[-1], exchange)
    hello = hello_fields(Hello("\N{ROBOT FACE}" * 64, dialect.family, dialect.agreed))
    welcome = welcome_fields(Welcome("b" * 200, "f" * 16, "0.1.0", 2**31 - 1, dialect.family, dialect.agreed))
    read_hello(hello)
    read_welcome(welcome)
    error = reply_fields(ErrorReply(count, ErrorCode.UNSUPPORTED_PROTOCOL, "\N{ROBOT FACE}" * 500))
    return [*messages, error, hello, welcome]


def longest(codec: ModuleType, dialect: Dialect) -> int:
    return max(len(codec.encode(fields)) for fields in largest(dialect))


def test_23_characters_are_the_most() -> None:
    assert len(repr(float(LONG))) == len(repr(TINY)) == 23


def is_not_much_more(limit: int, dialect: Dialect) -> bool:
    return limit <= max(HANDSHAKE_BYTES, EVERYTHING_ELSE + 1.35 * longest(json, dialect))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=[path.parent.name for path in MANIFESTS])
def test_the_bound_of_a_bundle_is_enough_and_not_much_more(manifest: Path) -> None:
    dialect = bundle_dialect(manifest)
    limit = max_message_bytes(dialect)
    assert longest(msgpack, dialect) <= longest(json, dialect) <= limit
    assert is_not_much_more(limit, dialect)


@pytest.mark.parametrize(
    "dialect",
    [
        of_codes(structs.replace(SPEC, draft=vectors(1, touch=1), target=ObservationSpec(
            {"image": Field((96, 96, 3), "uint8", 5)}))),
        of_codes(structs.replace(SPEC, codes=64)),
        of_chunks(ObservationSpec({"image": Field((96, 96, 3), "uint8", 0)}, True), 8, 7),
        of_chunks(vectors(5, state=700), 50, 14),
    ],
    ids=["a camera", "a sequential head", "chunks by a single frame", "long chunks"],
)  # fmt: skip
def test_the_bound_of_what_no_bundle_has_is_not_much_more(dialect: Dialect) -> None:
    limit = max_message_bytes(dialect)
    assert longest(json, dialect) <= limit and limit > HANDSHAKE_BYTES
    assert is_not_much_more(limit, dialect)


sizes = st.integers(1, 12)
# Names as long as they may be, of characters that take the most room.
names = st.sampled_from(["state", "goal", "image.front", "x" * 64, "\U0001d4b3" * 64, "\U0001d4b4" * 64])
vector = st.builds(Field, st.lists(sizes, min_size=1, max_size=3).map(tuple), st.just("float32"), st.integers(0, 4))
camera = st.builds(lambda h, w, t: Field((h, w, 3), "uint8", t), sizes, sizes, st.integers(0, 4))
observations = st.builds(
    ObservationSpec, st.dictionaries(names, vector | camera, min_size=1, max_size=4), st.booleans()
)
MANY = ObservationSpec(
    {"\U0001d4b3" * 63 + chr(0x20000 + i): Field((1, 1, 1), history=1) for i in range(64)}, instruction=True
)
FEW = ObservationSpec({"x": Field((1,))})


@example_count(150)
@example(seen=MANY, codebooks=1, codes=1, chunk=1, actions=1, sequential=False)
@example(seen=FEW, codebooks=4000, codes=1, chunk=1, actions=1, sequential=False)
@given(
    seen=observations, codebooks=st.integers(1, 6), codes=st.integers(1, 24), chunk=sizes, actions=sizes,
    sequential=st.booleans(),
)  # fmt: skip
def test_the_bound_is_enough_for_any_spec(
    seen: ObservationSpec, codebooks: int, codes: int, chunk: int, actions: int, sequential: bool
) -> None:
    codebooks = 2 if sequential else codebooks
    spec = PolicySpec(seen, seen, codebooks, codes, chunk, actions, 1, "drop", 1.0, 10.0, sequential)
    for dialect in (of_codes(spec), of_chunks(seen, chunk, actions)):
        for codec in (msgpack, json):
            assert longest(codec, dialect) <= max_message_bytes(dialect)


def test_a_number_and_its_comma_are_not_all_there_is() -> None:
    """The wrong variant: without the brackets of axes of length 1, 25 characters would seem enough."""
    dialect = of_codes(PolicySpec(FEW, FEW, 8000, 2, 1, 1, 1, "drop", 1.0, 10.0))
    numbers = 8000 * 2 + 8000 * 2
    assert max_message_bytes(dialect) == EVERYTHING_ELSE + 30 * numbers
    assert EVERYTHING_ELSE + 25 * numbers < longest(json, dialect) <= max_message_bytes(dialect)


def test_the_bytes_of_an_exchange_are_those_of_its_messages() -> None:
    for dialect in (of_codes(SPEC), of_chunks(SPEC.target, 2, 3)):
        fields = largest(dialect)[:2]
        fields[0] |= {"instruction": "", "id": 2**32}
        del fields[0]["report"]
        fields[1] |= {"id": 2**32}
        sent = sum(len(msgpack.encode(message)) for message in fields)
        # Integers shrink with their value, and there are few: of the address, and the batch.
        assert exchange_bytes(dialect) <= sent <= exchange_bytes(dialect) + 5 * 9
