from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace
from tests.wire.contracts import CHUNKS, CODES, PLAIN, SEEN, messages, of_chunks, of_codes, window_of

from specact.errors import WireError
from specact.observation import Window
from specact.rng import StepAddress
from specact.wire.exchange import Contract, Request
from specact.wire.messages import (
    PROTOCOL,
    Ask,
    ErrorCode,
    Failure,
    Hello,
    Reply,
    Welcome,
    ask,
    check_terms,
    device_times,
    encode,
    exchange_bytes,
    printable,
    read_ask,
    read_hello,
    read_reply,
    read_welcome,
    request_of,
)

READERS: dict[str, Callable[[bytes], Any]] = {
    "hello": read_hello,
    "welcome": read_welcome,
    "codes-verify": lambda payload: request_of(read_ask(payload), CODES),
    "codes-distribution": lambda payload: _arrays_of(read_reply(payload)),
    "error": read_reply,
}


def _arrays_of(reply: Reply | Failure) -> Any:
    return CODES.kinds["infer"].reply.unpack(reply.arrays) if isinstance(reply, Reply) else reply


def ask_of(**changes: Any) -> Ask:
    message = messages()["codes-infer"][1]
    assert isinstance(message, Ask)
    return replace(message, **changes)


@pytest.mark.parametrize("contract", [CODES, CHUNKS, of_codes(PLAIN)], ids=["codes", "chunks", "plain"])
def test_a_request_comes_back_as_it_was(contract: Contract) -> None:
    window = window_of(contract.observation)
    for kind, layouts in contract.kinds.items():
        request = Request(window, StepAddress(0, 1, 2, 2**64 - 1), layouts.request.example())
        again = request_of(read_ask(encode(ask(request, contract, kind, 3, 20.0))), contract)
        assert again.address == request.address and again.window.instruction == window.instruction
        for theirs, ours in ((again.window.arrays, window.arrays), (again.arrays, request.arrays)):
            assert theirs.keys() == ours.keys()
            assert all(theirs[name].tobytes() == ours[name].tobytes() for name in ours)


def test_of_a_longer_window_only_what_the_target_sees_is_sent() -> None:
    longer = {name: np.repeat(array, 2, axis=0) if name == "state" else array for name, array in
              window_of(SEEN).arrays.items()}  # fmt: skip
    window = Window(longer | {"unseen": np.zeros(9, np.float32)}, "go")
    again = request_of(ask(Request(window, StepAddress(0, 0, 0, 0)), CODES, "infer", 0, 1.0), CODES)
    assert again.window.arrays.keys() == SEEN.fields.keys()
    np.testing.assert_array_equal(again.window["state"], longer["state"][-2:])


# What a field of a request must not be, by its place in the message.
WRONG_FIELDS: dict[int, list[Any]] = {
    0: [None, 1, b"infer", "other"],
    1: [-1, 2**63, 1.0, True, None, "7"],
    2: [-1.0, 60_001.0, float("nan"), float("inf"), "1", None],
    3: [[0, 0, 0], [0, 0, 0, -1], [0, 0, 0, 2**64], [0.0, 0, 0, 0], None, {}],
    4: ["text", b"", b"x", None, [1]],
    5: [b"x", "text", None],
    6: [None, 5, "x" * 1001],
    7: [[b""], b"", ["x"], 3],
    8: [[-1], [0] * 6, ["x"], None],
}


@pytest.mark.parametrize(
    ("place", "wrong"), [(place, wrong) for place, cases in WRONG_FIELDS.items() for wrong in cases]
)
def test_a_wrong_field_is_refused(place: int, wrong: Any) -> None:
    fields = msgpack.decode(encode(ask_of()))
    fields[place] = wrong
    try:
        payload = msgpack.encode(fields)
    except OverflowError:  # not even msgpack holds it
        return
    with pytest.raises(WireError) as refused:
        request_of(read_ask(payload), CODES)
    assert refused.value.code == "bad_message"


def test_later_versions_may_add_fields() -> None:
    for name, read in READERS.items():
        fields = msgpack.decode(encode(messages()[name][1]))
        assert type(read(msgpack.encode([*fields, "new"]))) is type(read(msgpack.encode(fields)))


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_damaged_message_is_read_or_refused_and_nothing_else(name: str, data: st.DataObject) -> None:
    payload = bytearray(encode(messages()[name][1]))
    place, damage = data.draw(st.integers(0, len(payload) - 1)), data.draw(st.sampled_from(["byte", "cut", "value"]))
    if damage == "byte":
        payload[place] = data.draw(st.integers(0, 255))
    elif damage == "cut":
        del payload[place:]
    else:
        fields = msgpack.decode(payload)
        fields[place % len(fields)] = data.draw(plain_values)
        payload = bytearray(msgpack.encode(fields))
    try:
        READERS[name](bytes(payload))
    except WireError as error:
        assert error.code in list(ErrorCode) and str(error).isprintable()
    else:
        assert damage != "cut"


HUGE = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"", b"\xc1"]
HUGE += [b"\x95\xa5hello\x03\xa1a\xc0\x81\xa1a" + b"\x91" * 50_000]


@pytest.mark.parametrize("payload", HUGE, ids=range(len(HUGE)))
def test_sizes_and_depths_that_nothing_has_are_refused_at_once(payload: bytes) -> None:
    for read in READERS.values():
        with pytest.raises(WireError):
            read(payload)


def test_another_version_or_name_is_refused_and_a_refusal_is_raised_on_the_device() -> None:
    for protocol in (2, 4):
        with pytest.raises(WireError) as refused:
            read_hello(encode(Hello(protocol, "arm")))
        assert refused.value.code == "unsupported_protocol"
    for name in ("x" * 65, "\x1b[2J", "a\nb"):
        with pytest.raises(WireError):
            read_hello(encode(Hello(PROTOCOL, name)))
    with pytest.raises(WireError, match="too \\? late") as refused:
        read_welcome(encode(Failure(None, ErrorCode.MISMATCH, "too \x1b late")))
    assert refused.value.code == "mismatch"
    assert printable("a\x1b[2Jb\n") == "a?[2Jb?" and len(printable("x" * 9999)) == 500


def test_a_welcome_says_the_arrays_of_each_kind() -> None:
    welcome = read_welcome(encode(messages()["welcome"][1]))
    assert welcome.kinds == CODES.describe()
    assert welcome.kinds["verify"][0] == [
        ["draft_probs", "float64", [2, 5]], ["codes", "int64", [2]], ["draft_conditional", "float64", [5, 5]],
    ]  # fmt: skip


SPEC_OF_CODES = dict(CODES.spec)
DIFFERENT: dict[str, tuple[str | None, dict[str, Any]]] = {
    **{name: ("codes", SPEC_OF_CODES | {name: value}) for name, value in (
        ("codes", 6), ("temperature", True), ("sequential", 1), ("tokenizer", None), ("chunk", "2"),
        ("observation", {"fields": {}}))},
    r"observation\.instruction .*observation\.new": (
        "codes", SPEC_OF_CODES | {"observation": {**SEEN.describe(), "instruction": False, "new": 1}}),
    "family 'chunks', the other codes": ("chunks", SPEC_OF_CODES), "family None, the other codes": (None, {}),
    "x1b.*codes": ("\x1b" * 99, SPEC_OF_CODES),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_difference_of_the_terms_is_named_with_its_path(name: str) -> None:
    check_terms(CODES, "codes", SPEC_OF_CODES | {"temperature": 0.5, "codes": 5.0, "new": 1})
    with pytest.raises(WireError, match=name) as refused:
        check_terms(CODES, *DIFFERENT[name])
    assert refused.value.code == "mismatch" and len(str(refused.value)) < 700


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 10))
def test_the_stages_of_a_request_add_up_whatever_a_server_says(
    queue: float, target: float, total: float, waited: float
) -> None:
    times = device_times(Reply(0, queue, target, total, 1, bytearray()), 0.5, waited, 0.25)
    assert min(times.encode, times.network, times.queue, times.target) >= 0.0
    assert times.total == pytest.approx(0.75 + waited, rel=1e-9)


@pytest.mark.parametrize("contract", [CODES, CHUNKS, of_chunks(SEEN, 500, 9)], ids=["codes", "chunks", "long"])
def test_messages_are_smaller_than_the_bound(contract: Contract) -> None:
    window = Window(window_of(contract.observation).arrays, "ж" * 1000)
    for kind, layouts in contract.kinds.items():
        request = Request(window, StepAddress(*[2**64 - 1] * 4), layouts.request.example())
        assert (
            len(encode(ask(request, contract, kind, 2**63 - 1, 1.0, {"steps": 2**63 - 1}))) < contract.max_message_bytes
        )
        reply = Reply(2**63 - 1, 1e9, 1e9, 1e9, 2**40, layouts.reply.pack(layouts.reply.example()))
        assert len(encode(reply)) < contract.max_message_bytes
    up, down = (contract.window.nbytes + contract.kinds["infer"].request.nbytes, contract.kinds["infer"].reply.nbytes)
    assert up + down < exchange_bytes(contract) < up + down + 200


# ---- vectors, from which another implementation can be tested --------------------------------------------------------

FOLDER = Path(__file__).parent / "vectors"


def readable(value: Any) -> Any:
    """A decoded message as JSON: bytes in hexadecimal."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, list):
        return [readable(entry) for entry in value]
    return {key: readable(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def arrays(contract: Contract, message: Any) -> dict[str, Any]:
    """What the bytes of a message hold, by array."""
    if isinstance(message, Ask):
        request = request_of(message, contract)
        return {name: array.tolist() for name, array in {**request.window.arrays, **request.arrays}.items()}
    if isinstance(message, Reply):
        kinds = {kind.reply.nbytes: kind.reply for kind in contract.kinds.values()}
        return {name: array.tolist() for name, array in kinds[len(message.arrays)].unpack(message.arrays).items()}
    return {}


def vector(contract: Contract, message: Any) -> str:
    frame = encode(message)
    fields = {
        "message": readable(msgpack.decode(frame)), "arrays": arrays(contract, message),
        "spec": dict(contract.spec), "kinds": contract.describe(), "frame": frame.hex(),
    }  # fmt: skip
    return json.dumps(fields, indent=1) + "\n"


@pytest.mark.parametrize("name", messages())
def test_a_vector_is_what_is_sent_and_read(name: str) -> None:
    contract, message = messages()[name]
    stored = (FOLDER / f"{name}.json").read_text()
    assert vector(contract, message) == stored
    frame = bytes.fromhex(json.loads(stored)["frame"])
    readers: dict[type, Callable[[bytes], object]]
    readers = {Hello: read_hello, Welcome: read_welcome, Ask: read_ask, Reply: read_reply, Failure: read_reply}
    assert readers[type(message)](frame) == message


def test_there_is_no_other_vector() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(messages())


if __name__ == "__main__":
    for name, found in messages().items():
        (FOLDER / f"{name}.json").write_text(vector(*found))
