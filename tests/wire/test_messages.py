"""Every message through both codecs: what is written is read again, bit for bit; anything else is a typed refusal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tests.example_count import example_count
from tests.wire.dialects import CHUNKS, CODES, SEEN, of_chunks, of_codes

from specact.errors import WireError
from specact.families.codes.spec import PolicySpec
from specact.observation import Field, ObservationSpec, Window
from specact.rng import StepAddress
from specact.wire import json, msgpack
from specact.wire.checks import ErrorCode
from specact.wire.dialect import ArraySpec, Dialect, Exchange
from specact.wire.handshake import (
    Hello,
    Welcome,
    check_hello,
    hello_fields,
    read_hello,
    read_welcome,
    welcome_fields,
)
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

Frames = Callable[[ModuleType], list[bytes]]

both_codecs = pytest.mark.parametrize("codec", [msgpack, json], ids=["msgpack", "json"])
bounded = example_count(80)

# Positive ones are the smallest subnormal, the smallest normal and the largest.
EXTREMES = np.array([1e-45, 1.1754944e-38, 3.4028235e38, -0.0, -1e-45, -3.4028235e38, 0.1, 1 / 3], np.float32)


NAMES = ("state", "goal", "image.front", "gelenk_\N{LATIN SMALL LETTER O WITH DIAERESIS}", "\U0001d4b3")


@st.composite
def seen(draw: st.DrawFn) -> ObservationSpec:
    small = st.integers(1, 4)
    shapes = st.lists(small, min_size=1, max_size=3).map(tuple)
    vector = st.builds(Field, shapes, st.just("float32"), st.integers(0, 3))
    camera = st.builds(lambda h, w, t: Field((h, w, 3), "uint8", t), small, small, st.integers(0, 3))
    return ObservationSpec(
        draw(st.dictionaries(st.sampled_from(NAMES), vector | camera, min_size=1, max_size=4)), draw(st.booleans())
    )


@st.composite
def dialects(draw: st.DrawFn) -> Dialect:
    """Of either family."""
    small, codebooks, target = st.integers(1, 4), draw(st.integers(1, 3)), draw(seen())
    if draw(st.booleans()):
        return of_chunks(target, draw(small), draw(small))
    spec = PolicySpec(
        draft=target, target=target, codebooks=codebooks, codes=draw(small),
        chunk=draw(small), actions=draw(small), execute=1, overlap="drop",
        temperature=draw(st.floats(1e-3, 1e3)), rate_hz=10.0, sequential=codebooks == 2 and draw(st.booleans()),
    )  # fmt: skip
    return of_codes(spec, draw(st.text()))


def numbers(shape: tuple[int, ...]) -> st.SearchStrategy[NDArray[np.float32]]:
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(EXTREMES.tolist())
    return hnp.arrays(np.float32, shape, elements=finite)


@st.composite
def laws(draw: st.DrawFn, shape: tuple[int, ...]) -> NDArray[np.float64]:
    rows = draw(hnp.arrays(np.float64, shape, elements=st.floats(0.0, 1.0) | st.sampled_from([5e-324, 2.2e-308])))
    # A row too small to be normalised is kept, with what lacks put in front.
    total = rows.sum(-1, keepdims=True)
    rows = np.divide(rows, total, out=rows.copy(), where=total > 1e-3)
    rows[..., 0] = np.maximum(0.0, 1.0 - rows[..., 1:].sum(-1))
    return np.asarray(rows)


def arrays(spec: ArraySpec) -> st.SearchStrategy[NDArray[Any]]:
    """What a spec of the dialect allows."""
    if spec.distribution:
        return laws(spec.shape)
    if spec.dtype is np.float32:
        bounded = hnp.arrays(np.float32, spec.shape, elements=st.floats(spec.low, spec.high, width=32))
        return numbers(spec.shape) if math.isinf(spec.high) else bounded
    if spec.dtype is np.bool_:
        return hnp.arrays(np.bool_, spec.shape)
    elements = st.integers(int(spec.low), int(spec.high)) if spec.dtype is np.int64 else st.floats(spec.low, spec.high)  # type: st.SearchStrategy[Any]
    return hnp.arrays(spec.dtype, spec.shape, elements=elements)


def grouped(specs: Any) -> st.SearchStrategy[dict[str, NDArray[Any]]]:
    return st.fixed_dictionaries({name: arrays(spec) for name, spec in specs.items()})


@st.composite
def requests(draw: st.DrawFn, dialect: Dialect) -> Request:
    wanted = dialect.observation
    window = Window(
        {
            name: draw(hnp.arrays(np.uint8, field.window_shape) if field.is_image else numbers(field.window_shape))
            for name, field in wanted.fields.items()
        },
        draw(st.text(max_size=MAX_INSTRUCTION_CHARS)) if wanted.instruction else None,
    )
    identity, deadline_ms = draw(st.integers(0, 2**63 - 1)), draw(st.floats(0.0, 60_000.0))
    report = draw(st.dictionaries(st.sampled_from(REPORT_COUNTERS), st.integers(0, 2**63 - 1)))
    address = StepAddress(*draw(st.tuples(*[st.integers(0, 2**64 - 1)] * 4)))
    kind = draw(st.sampled_from(sorted(dialect.exchanges)))
    said = draw(grouped(dialect.exchanges[kind].request))
    return Request(kind, identity, deadline_ms, window, address, said, report)


@st.composite
def replies(draw: st.DrawFn, exchange: Exchange) -> Reply | ErrorReply:
    identity = draw(st.integers(0, 2**63 - 1))
    if draw(st.integers(0, 2)) == 0:
        return ErrorReply(draw(st.none() | st.just(identity)), draw(st.sampled_from(ErrorCode)), draw(st.text()))
    milliseconds = st.floats(0.0, 1e9)
    times = ServerTimes(draw(milliseconds), draw(milliseconds), draw(milliseconds), draw(st.integers(1, 2**31 - 1)))
    return Reply(identity, exchange.answer, draw(grouped(exchange.reply)), times)


def bits(value: Any) -> Any:
    """A value down to its bits, so that -0.0 is not 0.0 and a float32 no float64."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {name: bits(entry) for name, entry in value.items()}
    if dataclasses.is_dataclass(value):
        return type(value), [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, float):
        return value.hex()
    return value


@both_codecs
@bounded
@given(data=st.data())
def test_requests_come_back_bit_for_bit(codec: ModuleType, data: st.DataObject) -> None:
    dialect = data.draw(dialects())
    request = data.draw(requests(dialect))
    fields = request_fields(request, dialect.observation)
    assert bits(read_request(codec.decode(codec.encode(fields)), dialect)) == bits(request)


@both_codecs
@bounded
@given(data=st.data())
def test_replies_come_back_bit_for_bit(codec: ModuleType, data: st.DataObject) -> None:
    dialect = data.draw(dialects())
    exchange = dialect.exchanges[data.draw(st.sampled_from(sorted(dialect.exchanges)))]
    reply = data.draw(replies(exchange))
    found = read_reply(codec.decode(codec.encode(reply_fields(reply))), exchange)
    if isinstance(reply, ErrorReply):
        reply = dataclasses.replace(reply, message=reply.message[:500])
    assert bits(found) == bits(reply)


@both_codecs
@bounded
@given(
    dialect=dialects(), name=st.text(st.characters(exclude_categories=["C", "Z"]), max_size=64), fingerprint=st.text()
)
def test_the_handshake_comes_back_and_a_pair_fits_itself(
    codec: ModuleType, dialect: Dialect, name: str, fingerprint: str
) -> None:
    hello = Hello(name, dialect.family, dialect.agreed)
    found = read_hello(codec.decode(codec.encode(hello_fields(hello))))
    assert found == hello
    check_hello(found, dialect)
    welcome = Welcome("ball", fingerprint, "0.1.0", 2**31 - 1, dialect.family, dialect.agreed)
    assert read_welcome(codec.decode(codec.encode(welcome_fields(welcome)))) == welcome


def with_observation(fields: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A request that sees something else."""
    return fields | {"observation": fields["observation"] | changed}


@both_codecs
def test_float32_extremes_survive(codec: ModuleType, examples: dict[str, dict[str, Any]]) -> None:
    for value in EXTREMES:
        state = np.full(SEEN["state"].window_shape, value, np.float32)
        fields = with_observation(examples["infer"], state=state)
        found = read_request(codec.decode(codec.encode(fields)), CODES)
        assert bits(found.window["state"]) == bits(state)
    # Six digits, as many a writer of JSON has it, would not do.
    assert any(np.float32(f"{value:g}") != value for value in EXTREMES)


@both_codecs
def test_arrays_travel_whatever_their_layout(codec: ModuleType, examples: dict[str, dict[str, Any]]) -> None:
    rows, columns = SEEN["state"].window_shape
    state = np.arange(rows * columns, dtype=np.float32).reshape(columns, rows).T
    assert not state.flags.c_contiguous
    fields = with_observation(examples["infer"], state=state)
    found = read_request(codec.decode(codec.encode(fields)), CODES).window["state"]
    assert bits(found) == bits(np.ascontiguousarray(state))
    assert found.flags.c_contiguous and found.flags.aligned and found.flags.writeable


def test_of_a_longer_window_only_what_the_target_sees_is_sent() -> None:
    longer = ObservationSpec(
        {"state": Field((3,), history=4), "goal": SEEN["goal"], "image": SEEN["image"], "touch": Field((2,))}, True
    )
    window = Window({name: np.ones(field.window_shape, field.dtype) for name, field in longer.fields.items()}, "go")
    window.arrays["state"][:2] = 7.0  # what only the draft sees
    fields = request_fields(Request("infer", 1, 1.0, window, StepAddress(0, 0, 0, 0)), SEEN)
    assert {name: value.shape for name, value in fields["observation"].items()} == {
        name: field.window_shape for name, field in SEEN.fields.items()
    }
    assert (fields["observation"]["state"] == 1.0).all() and fields["instruction"] == "go"


@pytest.mark.parametrize("value", [np.zeros(2, ">f4"), np.zeros(2, np.int32), np.array([{}]), np.zeros((1,) * 5), {1}])
def test_what_has_no_place_on_the_wire_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot send"):
        msgpack.encode({"state": value})


def read(codec: ModuleType, payload: bytes) -> str:
    """What a server and a device of either family make of these bytes: the type of what was read, or nothing.

    Anything else that is raised, and with warnings as errors any complaint of NumPy, is the test's failure.
    """
    outcomes = []
    for reader in (
        lambda fields: read_request(fields, CODES),
        lambda fields: read_request(fields, CHUNKS),
        lambda fields: read_reply(fields, CODES.exchanges["infer"]),
        lambda fields: read_reply(fields, CODES.exchanges["verify"]),
        lambda fields: read_reply(fields, CHUNKS.exchanges["infer"]),
        lambda fields: check_hello(read_hello(fields), CODES),
        read_welcome,
    ):
        try:
            found = reader(codec.decode(payload))
            outcomes.append(getattr(found, "kind", type(found).__name__))
        except WireError as error:
            assert error.code in list(ErrorCode)
            # One line, and such that it can be sent.
            assert "\n" not in str(error)
            msgpack.encode({"message": str(error)})
    return " ".join(dict.fromkeys(outcomes))


@st.composite
def mutated(draw: st.DrawFn, frames: list[bytes]) -> bytes:
    """A valid frame with a few bytes changed, cut out, put in, or repeated."""
    frame = bytearray(draw(st.sampled_from(frames)))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from("xxxcpr")):
            case "x":
                frame[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "c":
                del frame[at : at + draw(st.integers(1, 16))]
            case "p":
                frame[at:at] = draw(st.binary(max_size=16))
            case "r":
                frame[at:at] = frame[at : at + draw(st.integers(1, 64))]
    return bytes(frame)


@both_codecs
@example_count(400)
@given(data=st.data())
def test_damaged_messages_are_read_or_refused_and_nothing_else(
    codec: ModuleType, frames: Frames, data: st.DataObject
) -> None:
    read(codec, data.draw(mutated(frames(codec))))


@both_codecs
@example_count(400)
@example(payload=b"")
@example(payload=b"\xc1")
@given(payload=st.binary(max_size=200) | st.text().map(str.encode))
def test_noise_is_refused(codec: ModuleType, payload: bytes) -> None:
    assert read(codec, payload) == ""


# What a stranger could put in place of any value.
ODD: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=4)
        | st.lists(ODD, max_size=3)
        | st.dictionaries(st.text(max_size=3), ODD, max_size=3)
    )
)
ODD_BINARY: st.SearchStrategy[Any] = (
    ODD | st.binary(max_size=4) | hnp.arrays(st.sampled_from(list(map(np.dtype, "fdBl?"))), (3,))
)


@both_codecs
@example_count(400)
@given(data=st.data())
def test_any_value_in_any_place_is_read_or_refused(codec: ModuleType, frames: Frames, data: st.DataObject) -> None:
    fields = codec.decode(data.draw(st.sampled_from(frames(codec))))
    inner, place = fields, data.draw(st.sampled_from(sorted(fields)))
    # Also deep inside: an array of the observation, a field of the spec.
    while isinstance(inner[place], dict) and inner[place] and data.draw(st.booleans()):
        inner, place = inner[place], data.draw(st.sampled_from(sorted(inner[place])))
    inner[place] = data.draw(ODD if codec is json else ODD_BINARY)
    read(codec, codec.encode(fields))


@both_codecs
def test_the_examples_are_read_so_the_tests_above_start_from_valid_messages(codec: ModuleType, frames: Frames) -> None:
    assert [read(codec, frame) for frame in frames(codec)] == [
        "NoneType", "Welcome", "infer", "verify", "inpaint", "distribution", "verdict", "chunk", "ErrorReply",
    ]  # fmt: skip


@both_codecs
def test_a_message_cut_anywhere_or_continued_is_refused(codec: ModuleType, frames: Frames) -> None:
    for frame in frames(codec):
        for end in range(len(frame)):
            assert read(codec, frame[:end]) == ""
        assert read(codec, frame + b"\x00") == ""
        assert read(codec, frame + frame) == ""
