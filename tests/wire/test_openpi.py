"""openpi's messages byte by byte, the three forms of an array, and everything that is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import msgpack

from specact.errors import WireError
from specact.wire import openpi

PAIR = np.array([1.0, -2.5], np.float32)
# Recorded from openpi-client 0.1.2.
ARRAY = bytes.fromhex(
    "84 c40b 5f5f6e6461727261795f5f c3 c404 64617461 c408 0000803f 000020c0 c405 6474797065 a3 3c6634"
    "c405 7368617065 91 02"
)
SCALAR = bytes.fromhex(
    "83 c40d 5f5f6e7067656e657269635f5f c3 c404 64617461 cb 3fe0000000000000 c405 6474797065 a3 3c6634"
)


def test_openpis_bytes_are_written_and_read() -> None:
    assert openpi.encode({"a": PAIR}) == b"\x81\xa1a" + ARRAY
    assert openpi.encode({"a": np.float32(0.5)}) == b"\x81\xa1a" + SCALAR
    assert openpi.encode({"bundle": "ball", "rate": 2, "on": True}) == b"\x83\xa6bundle\xa4ball\xa4rate\x02\xa2on\xc3"
    fields = openpi.decode(b"\x82\xa1a" + ARRAY + b"\xa1b" + SCALAR)
    np.testing.assert_array_equal(fields["a"], PAIR)
    assert fields["a"].dtype == np.float32 and fields["a"].flags.writeable
    assert fields["b"] == np.float32(0.5) and isinstance(fields["b"], np.float32)


DATA = PAIR.tobytes()
FORMS: dict[str, dict[str, Any]] = {
    "openpi": {"__ndarray__": True, "data": DATA, "dtype": "<f4", "shape": [2]},
    "vllm": {"nd": True, "type": "<f4", "kind": "", "shape": [2], "data": DATA},
    "msgpack-numpy": {"nd": True, "type": "<f4", "kind": b"", "shape": [2], "data": DATA},
    "names": {"__ndarray__": True, "data": DATA, "dtype": "float32", "shape": [2]},
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_an_array(form: str) -> None:
    for array in (FORMS[form], {name.encode(): value for name, value in FORMS[form].items()}):
        for message in ({"a": array}, {b"a": array}):
            np.testing.assert_array_equal(openpi.decode(msgpack.encode(message))["a"], PAIR)


@pytest.mark.parametrize("dtype", ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"])
def test_numbers_of_every_kind(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    scalar = {"nd": False, "type": array.dtype.str, "data": array[0, 1].tobytes()}
    fields = openpi.decode(openpi.encode({"a": array, "b": array[0, 1], "c": scalar}))
    np.testing.assert_array_equal(fields["a"], array)
    assert fields["a"].dtype == array.dtype and fields["b"] == fields["c"] == array[0, 1]


def array_of(**changed: Any) -> dict[str, Any]:
    return {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2], **changed}


WRONG: list[Any] = [
    array_of(dtype="|O"), array_of(dtype=">f4"), array_of(dtype=[["x", "<f4"]]), array_of(shape=[3]),
    array_of(shape=[-2]), array_of(shape=[True, 2]), array_of(shape=[1, 1, 1, 1, 2]), array_of(shape=[2**62, 2**62]),
    array_of(shape=[0, 2**63], data=b""), array_of(data="text"), array_of(dtype="|b1", shape=[1], data=b"\x02"),
    {"nd": True, "type": "|O", "kind": b"O", "shape": [1], "data": b"cos\nsystem\n(S'true'\ntR."},
    {"nd": False, "type": "<f4", "data": b"12345"}, {"__npgeneric__": True, "data": "1", "dtype": "<f4"},
    {"__npgeneric__": True, "data": 2**40, "dtype": "|i1"},
    {"__npgeneric__": True, "data": float("nan"), "dtype": "<i8"}, {1: 2}, {"\u00e9".encode(): 2},
    {str(number): number for number in range(4096)}, [{}] * 4096, msgpack.Ext(1, b"\x00\x01\x02\x00\x00\x00"),
]  # fmt: skip


@pytest.mark.parametrize("message", WRONG, ids=range(len(WRONG)))
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(WireError) as refused:
        openpi.decode(msgpack.encode({"a": message}))
    assert refused.value.code == "bad_message"
    assert len(str(refused.value)) <= 300


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81", b"\x90", b"\xa1a", b"\x80\x80", b"\x91" * 2000, ARRAY])
def test_what_is_no_map_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="message"):
        openpi.decode(payload)


def test_objects_are_not_sent() -> None:
    for value in (np.array([None]), np.array(["x"]), np.array([1j]), object(), np.array([1.0], ">f4")):
        with pytest.raises(TypeError, match="cannot send"):
            openpi.encode({"a": value})
