from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, msgpack
from tests.wire.contracts import CHUNKS, CODES, HERE, PLAIN, SEEN, messages, of_chunks, window_of

from specact.errors import WireError
from specact.observation import Window
from specact.rng import StepAddress
from specact.wire import messages as wire
from specact.wire.exchange import Contract, Request
from specact.wire.messages import PROTOCOL, Ask, ErrorCode, Failure, Hello, Reply, Welcome, ask, encode

MESSAGES = messages()
READERS: dict[str, Callable[[bytes], Any]] = {
    "hello": wire.read_hello,
    "welcome": wire.read_welcome,
    "codes-infer": lambda payload: wire.request_of(wire.read_ask(payload), CODES),
    "codes-verify": lambda payload: wire.request_of(wire.read_ask(payload), CODES),
    "codes-outputs": lambda payload: arrays_of(wire.read_reply(payload)),
    "error": wire.read_reply,
}


def arrays_of(reply: Reply | Failure) -> Any:
    return CODES.kinds["infer"].reply.unpack(reply.arrays) if isinstance(reply, Reply) else reply


@pytest.mark.parametrize("contract", [CODES, CHUNKS, PLAIN], ids=["codes", "chunks", "plain"])
def test_a_request_comes_back_as_it_was(contract: Contract) -> None:
    window = window_of(contract.observation)
    for kind, layouts in contract.kinds.items():
        request = Request(window, HERE, layouts.request.example())
        copy = wire.request_of(wire.read_ask(encode(ask(request, contract, kind, 3, 20.0))), contract)
        assert copy.address == request.address and copy.window.instruction == window.instruction
        for theirs, ours in ((copy.window.arrays, window.arrays), (copy.arrays, request.arrays)):
            assert theirs.keys() == ours.keys()
            assert all(theirs[name].tobytes() == ours[name].tobytes() for name in ours)


def test_of_a_longer_window_only_what_the_target_sees_is_sent() -> None:
    arrays = dict(window_of(SEEN).arrays) | {"unseen": np.zeros(9, np.float32)}
    arrays["state"] = np.repeat(arrays["state"], 2, axis=0)
    copy = wire.request_of(ask(Request(Window(arrays, "go"), HERE), CODES, "infer", 0, 1.0), CODES)
    assert copy.window.arrays.keys() == SEEN.fields.keys()
    np.testing.assert_array_equal(copy.window["state"], arrays["state"][-2:])


# What an element of a message must not be, by its place.
WRONG: dict[str, dict[int, list[Any]]] = {
    "hello": {
        0: ["infer", None], 1: [PROTOCOL - 1, PROTOCOL + 1, "3", True, None],
        2: ["x" * 65, "\x1b[2J", "a\nb", 1, None], 3: [1, b"codes"], 4: [None, [], "codes"],
        5: [0, -1.0, 10_001.0, float("nan"), True, "20"], 6: [0.0, 60_001.0, float("inf"), False, "50"],
    },
    "welcome": {1: ["3", None], 2: [None, 1], 5: [-1, 1.5], 7: [None, []], 8: [None, []]},
    "codes-infer": {
        0: [None, 1, b"infer", "other"],
        1: [-1, 2**63, 1.0, True, None, "7"],
        2: [-1.0, 60_001.0, float("nan"), float("inf"), "1", None],
        3: [[0, 0, 0], [0, 0, 0, -1], [0.0, 0, 0, 0], None, {}],
        4: ["text", b"", b"x", None, [1]],
        5: [b"x", "text", None],
        6: [None, 5, "x" * 1001],
        7: [[], [b""], [b""] * 3, b"", ["x"], 3],
        8: [[-1], [0] * 6, ["x"], None],
    },
    "codes-outputs": {1: [-1, None, "7"], 2: [-1.0, 2e9, None], 4: [float("nan")], 5: [0, 1.5], 6: [b"", None, 1]},
    "error": {1: [-1, "9"], 2: ["other", None], 3: [None, b"text"]},
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), [(name, place) for name, places in WRONG.items() for place in places])
def test_a_wrong_element_is_refused(name: str, place: int) -> None:
    for wrong in WRONG[name][place]:
        elements = msgpack.decode(encode(MESSAGES[name][1]))
        elements[place] = wrong
        with pytest.raises(WireError) as refused:
            READERS[name](msgpack.encode(elements))
        version = place == 1 and name == "hello" and type(wrong) is int
        assert refused.value.code == ("unsupported_protocol" if version else "bad_message"), wrong


def test_later_versions_may_add_elements() -> None:
    for name, read in READERS.items():
        elements = msgpack.decode(encode(MESSAGES[name][1]))
        assert type(read(msgpack.encode([*elements, "new"]))) is type(read(msgpack.encode(elements)))


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_damaged_message_is_read_or_refused_and_nothing_else(name: str, data: st.DataObject) -> None:
    payload = bytearray(encode(MESSAGES[name][1]))
    place, size = data.draw(st.integers(0, len(payload) - 1)), len(payload)
    payload[place : data.draw(st.sampled_from((place, place + 1, size)))] = data.draw(st.binary(max_size=8))
    try:
        READERS[name](bytes(payload))
    except WireError as error:
        assert error.code in list(ErrorCode) and str(error).isprintable()
    else:
        assert len(payload) > place


HUGE = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"", b"\xc1"]
HUGE += [b"\x95\xa5hello" + bytes([PROTOCOL]) + b"\xa1a\xc0\x81\xa1a" + b"\x91" * 50_000]


@pytest.mark.parametrize("payload", HUGE, ids=range(len(HUGE)))
def test_sizes_and_depths_that_nothing_has_are_refused_at_once(payload: bytes) -> None:
    for read in READERS.values():
        with pytest.raises(WireError):
            read(payload)


def test_a_refusal_is_raised_on_the_device_and_its_text_is_printable() -> None:
    with pytest.raises(WireError, match="too \\? late") as refused:
        wire.read_welcome(encode(Failure(None, ErrorCode.MISMATCH, "too \x1b late")))
    assert refused.value.code == "mismatch"
    assert wire.printable("a\x1b[2Jb\n") == "a?[2Jb?" and len(wire.printable("x" * 9999)) == 500


TERMS = dict(CODES.spec)
DIFFERENT: dict[str, tuple[str | None, dict[str, Any]]] = {
    **{name: ("codes", TERMS | {name: value}) for name, value in (
        ("codes", 6), ("temperature", True), ("sequential", 1), ("tokenizer", None), ("chunk", "2"),
        ("observation", {"fields": {}}))},
    r"observation\.instruction .*observation\.new": (
        "codes", TERMS | {"observation": {**SEEN.describe(), "instruction": False, "new": 1}}),
    "family 'chunks', the other codes": ("chunks", TERMS), "family None, the other codes": (None, {}),
    "x1b.*codes": ("\x1b" * 99, TERMS),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_difference_of_the_terms_is_named_with_its_path(name: str) -> None:
    wire.check_terms(CODES, "codes", TERMS | {"temperature": 0.5, "codes": 5.0, "new": 1})
    with pytest.raises(WireError, match=name) as refused:
        wire.check_terms(CODES, *DIFFERENT[name])
    assert refused.value.code == "mismatch" and len(str(refused.value)) < 700


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 10))
def test_the_stages_of_a_request_add_up_whatever_a_server_says(
    queue: float, target: float, total: float, waited: float
) -> None:
    times = wire.device_times(Reply(0, queue, target, total, 1, bytearray()), 0.5, waited, 0.25)
    assert min(times.encode, times.network, times.queue, times.target) >= 0.0
    assert times.total == pytest.approx(0.75 + waited, rel=1e-9)


@pytest.mark.parametrize("contract", [CODES, CHUNKS, of_chunks(SEEN, 500, 9)], ids=["codes", "chunks", "long"])
def test_messages_are_smaller_than_the_bound(contract: Contract) -> None:
    window = Window(window_of(contract.observation).arrays, "ж" * 1000)
    for kind, layouts in contract.kinds.items():
        request = Request(window, StepAddress(*[2**64 - 1] * 4), layouts.request.example())
        message = ask(request, contract, kind, 2**63 - 1, 1.0, {"steps": 2**63 - 1})
        reply = Reply(2**63 - 1, 1e9, 1e9, 1e9, 2**40, layouts.reply.pack(layouts.reply.example()))
        assert max(len(encode(message)), len(encode(reply))) < contract.max_message_bytes
    up, down = (contract.window.nbytes + contract.kinds["infer"].request.nbytes, contract.kinds["infer"].reply.nbytes)
    assert up + down < wire.exchange_bytes(contract) < up + down + 200


# ---- vectors, from which another implementation can be tested --------------------------------------------------------

FOLDER = Path(__file__).parent / "vectors"


def values(contract: Contract, message: Struct) -> dict[str, Any]:
    """What the bytes of a message hold, by array."""
    arrays: dict[str, Any] = {}
    if isinstance(message, Ask):
        request = wire.request_of(message, contract)
        arrays = {**request.window.arrays, **request.arrays}
    elif isinstance(message, Reply):
        kinds = {kind.reply.nbytes: kind.reply for kind in contract.kinds.values()}
        arrays = kinds[len(message.arrays)].unpack(message.arrays)
    return {name: array.tolist() for name, array in arrays.items()}


def vector(contract: Contract, message: Struct) -> str:
    """A message as JSON, bytes in hexadecimal, with its arrays, what the handshake says, and the bytes of its frame."""
    frame = encode(message)
    fields = {"message": msgpack.decode(frame), "arrays": values(contract, message), "spec": dict(contract.spec),
              "kinds": contract.describe(), "frame": frame}  # fmt: skip
    shown = (f" {json.dumps(name)}: {json.dumps(value, default=lambda value: {'hex': value.hex()})}"
             for name, value in fields.items())  # fmt: skip
    return "{\n" + ",\n".join(shown) + "\n}\n"


@pytest.mark.parametrize("name", MESSAGES)
def test_a_vector_is_what_is_sent_and_read(name: str) -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(MESSAGES)
    contract, message = MESSAGES[name]
    stored = (FOLDER / f"{name}.json").read_text()
    assert vector(contract, message) == stored
    readers: dict[type, Callable[[bytes], object]]
    readers = {Hello: wire.read_hello, Welcome: wire.read_welcome, Ask: wire.read_ask,
               Reply: wire.read_reply, Failure: wire.read_reply}  # fmt: skip
    assert readers[type(message)](bytes.fromhex(json.loads(stored)["frame"]["hex"])) == message


if __name__ == "__main__":
    for name, parts in MESSAGES.items():
        (FOLDER / f"{name}.json").write_text(vector(*parts))
