"""Every message through both codecs: what is written is read again, bit for bit; anything else is a typed refusal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tests.example_count import example_count

from specact.errors import WireError
from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution, Verdict
from specact.types import Window
from specact.wire import json, msgpack
from specact.wire.handshake import (
    Hello,
    Welcome,
    check_hello,
    hello_fields,
    read_hello,
    read_welcome,
    shared_spec,
    welcome_fields,
)
from specact.wire.protocol import ErrorCode
from specact.wire.reply import DistributionReply, ErrorReply, Reply, ServerTimes, VerdictReply, read_reply, reply_fields
from specact.wire.request import REPORTED, InferRequest, Request, VerifyRequest, read_request, request_fields

Frames = Callable[[ModuleType], list[bytes]]

both_codecs = pytest.mark.parametrize("codec", [msgpack, json], ids=["msgpack", "json"])
bounded = example_count(80)

# Positive ones are the smallest subnormal, the smallest normal and the largest.
EXTREMES = np.array([1e-45, 1.1754944e-38, 3.4028235e38, -0.0, -1e-45, -3.4028235e38, 0.1, 1 / 3], np.float32)


@st.composite
def specs(draw: st.DrawFn) -> PolicySpec:
    small, codebooks = st.integers(1, 4), draw(st.integers(1, 3))
    return PolicySpec(
        window=draw(small), state=draw(small), goal=draw(st.integers(0, 3)),
        image=draw(st.none() | st.tuples(small, small)), codebooks=codebooks, codes=draw(small),
        chunk=draw(small), actions=draw(small), execute=1, overlap="drop",
        temperature=draw(st.floats(1e-3, 1e3)), rate_hz=10.0, sequential=codebooks == 2 and draw(st.booleans()),
    )  # fmt: skip


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


@st.composite
def requests(draw: st.DrawFn, spec: PolicySpec) -> Request:
    image = (spec.window, *spec.image, 3) if spec.image else None
    window = Window(
        draw(numbers((spec.window, spec.state))),
        draw(numbers((spec.goal,))) if spec.goal else None,
        draw(hnp.arrays(np.uint8, image)) if image else None,
    )
    identity, deadline_ms = draw(st.integers(0, 2**63 - 1)), draw(st.floats(0.0, 60_000.0))
    report = draw(st.dictionaries(st.sampled_from(REPORTED), st.integers(0, 2**63 - 1)))
    if draw(st.booleans()):
        return InferRequest(identity, deadline_ms, window, report)
    address = draw(st.tuples(*[st.integers(0, 2**64 - 1)] * 4))
    codes = draw(hnp.arrays(np.int64, (spec.codebooks,), elements=st.integers(0, spec.codes - 1)))
    conditional = draw(laws((spec.codes, spec.codes))) if spec.sequential else None
    probs = draw(laws((spec.codebooks, spec.codes)))
    return VerifyRequest(identity, deadline_ms, window, probs, conditional, codes, address, report)


@st.composite
def replies(draw: st.DrawFn, spec: PolicySpec) -> Reply:
    identity, grid, chunk = draw(st.integers(0, 2**63 - 1)), (spec.codebooks, spec.codes), (spec.chunk, spec.actions)
    kind = draw(st.sampled_from(["distribution", "verdict", "error"]))
    if kind == "error":
        return ErrorReply(draw(st.none() | st.just(identity)), draw(st.sampled_from(ErrorCode)), draw(st.text()))
    milliseconds = st.floats(0.0, 1e9)
    times = ServerTimes(draw(milliseconds), draw(milliseconds), draw(milliseconds), draw(st.integers(1, 2**31 - 1)))
    if kind == "distribution":
        conditional = draw(laws((spec.codes, spec.codes))) if spec.sequential else None
        target = CodeDistribution(draw(laws(grid)), draw(numbers((*grid, *chunk))), conditional)
        return DistributionReply(identity, target, times)
    verdict = Verdict(
        draw(hnp.arrays(np.int64, (spec.codebooks,), elements=st.integers(0, spec.codes - 1))),
        draw(hnp.arrays(np.bool_, (spec.codebooks,))),
        draw(hnp.arrays(np.float64, (spec.codebooks,), elements=st.floats(0.0, 1.0))),
    )
    return VerdictReply(identity, verdict, draw(numbers(chunk)), times)


def bits(value: Any) -> Any:
    """A value down to its bits, so that -0.0 is not 0.0 and a float32 no float64."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return type(value), [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, float):
        return value.hex()
    return value


@both_codecs
@bounded
@given(data=st.data())
def test_requests_come_back_bit_for_bit(codec: ModuleType, data: st.DataObject) -> None:
    spec = data.draw(specs())
    request = data.draw(requests(spec))
    assert bits(read_request(codec.decode(codec.encode(request_fields(request))), spec)) == bits(request)


@both_codecs
@bounded
@given(data=st.data())
def test_replies_come_back_bit_for_bit(codec: ModuleType, data: st.DataObject) -> None:
    spec = data.draw(specs())
    reply = data.draw(replies(spec))
    found = read_reply(codec.decode(codec.encode(reply_fields(reply))), spec)
    if isinstance(reply, ErrorReply):
        reply = dataclasses.replace(reply, message=reply.message[:500])
    assert bits(found) == bits(reply)


@both_codecs
@bounded
@given(spec=specs(), name=st.text(st.characters(exclude_categories=["C", "Z"]), max_size=64), fingerprint=st.text())
def test_the_handshake_comes_back_and_a_pair_fits_itself(
    codec: ModuleType, spec: PolicySpec, name: str, fingerprint: str
) -> None:
    hello = Hello(name, fingerprint, shared_spec(spec))
    found = read_hello(codec.decode(codec.encode(hello_fields(hello))))
    assert found == hello
    check_hello(found, shared_spec(spec), fingerprint)
    welcome = Welcome("ball", fingerprint, "0.1.0", 2**31 - 1)
    assert read_welcome(codec.decode(codec.encode(welcome_fields(welcome)))) == welcome


@both_codecs
def test_float32_extremes_survive(codec: ModuleType, spec: PolicySpec, examples: dict[str, dict[str, Any]]) -> None:
    for value in EXTREMES:
        state = np.full((spec.window, spec.state), value, np.float32)
        found = read_request(codec.decode(codec.encode(examples["infer"] | {"state": state})), spec)
        assert bits(found.window.state) == bits(state)
    # Six digits, as many a writer of JSON has it, would not do.
    assert any(np.float32(f"{value:g}") != value for value in EXTREMES)


@both_codecs
def test_arrays_travel_whatever_their_layout(
    codec: ModuleType, spec: PolicySpec, examples: dict[str, dict[str, Any]]
) -> None:
    state = np.arange(spec.window * spec.state, dtype=np.float32).reshape(spec.state, spec.window).T
    assert not state.flags.c_contiguous
    found = read_request(codec.decode(codec.encode(examples["infer"] | {"state": state})), spec).window.state
    assert bits(found) == bits(np.ascontiguousarray(state))
    assert found.flags.c_contiguous and found.flags.aligned and found.flags.writeable


@pytest.mark.parametrize("value", [np.zeros(2, ">f4"), np.zeros(2, np.int32), np.array([{}]), np.zeros((1,) * 5), {1}])
def test_what_has_no_place_on_the_wire_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot send"):
        msgpack.encode({"state": value})


def read(codec: ModuleType, payload: bytes, spec: PolicySpec) -> str:
    """What a server and a device make of these bytes: the type of what was read, or the refusal's code.

    Anything else that is raised, and with warnings as errors any complaint of NumPy, is the test's failure.
    """
    outcomes = []
    for reader in (
        lambda fields: read_request(fields, spec),
        lambda fields: read_reply(fields, spec),
        lambda fields: check_hello(read_hello(fields), shared_spec(spec), "0123456789abcdef"),
        read_welcome,
    ):
        try:
            outcomes.append(type(reader(codec.decode(payload))).__name__)
        except WireError as error:
            assert error.code in list(ErrorCode)
            # One line, and such that it can be sent.
            assert "\n" not in str(error)
            msgpack.encode({"message": str(error)})
    return " ".join(outcomes)


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
    codec: ModuleType, spec: PolicySpec, frames: Frames, data: st.DataObject
) -> None:
    read(codec, data.draw(mutated(frames(codec))), spec)


@both_codecs
@example_count(400)
@example(payload=b"")
@example(payload=b"\xc1")
@given(payload=st.binary(max_size=200) | st.text().map(str.encode))
def test_noise_is_refused(codec: ModuleType, spec: PolicySpec, payload: bytes) -> None:
    assert read(codec, payload, spec) == ""


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
def test_any_value_in_any_place_is_read_or_refused(
    codec: ModuleType, spec: PolicySpec, frames: Frames, data: st.DataObject
) -> None:
    fields = codec.decode(data.draw(st.sampled_from(frames(codec))))
    place = data.draw(st.sampled_from(sorted(fields)))
    if isinstance(fields[place], dict) and data.draw(st.booleans()):
        fields, place = fields[place], data.draw(st.sampled_from(sorted(fields[place])))
    fields[place] = data.draw(ODD if codec is json else ODD_BINARY)
    read(codec, codec.encode(fields), spec)


@both_codecs
def test_the_examples_are_read_so_the_tests_above_start_from_valid_messages(
    codec: ModuleType, spec: PolicySpec, frames: Frames
) -> None:
    assert [read(codec, frame, spec) for frame in frames(codec)] == [
        "NoneType", "Welcome", "InferRequest", "VerifyRequest", "DistributionReply", "VerdictReply", "ErrorReply",
    ]  # fmt: skip


@both_codecs
def test_a_message_cut_anywhere_or_continued_is_refused(codec: ModuleType, spec: PolicySpec, frames: Frames) -> None:
    for frame in frames(codec):
        for end in range(len(frame)):
            assert read(codec, frame[:end], spec) == ""
        assert read(codec, frame + b"\x00", spec) == ""
        assert read(codec, frame + frame, spec) == ""
