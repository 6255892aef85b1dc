"""What a reader refuses, one reason at a time: the type of the error and a word that says why."""

from __future__ import annotations

import copy
import dataclasses
import math
import struct
import tracemalloc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgpack as plain_msgpack
import numpy as np
import pytest
from tests.wire.dialects import CHUNKS, CODES, PLAIN, dialect_of, of_codes

from specact.errors import WireError
from specact.wire import json, msgpack
from specact.wire.handshake import Hello, check_hello, read_hello, read_welcome
from specact.wire.messages import MAX_INSTRUCTION_CHARS, read_reply, read_request
from specact.wire.sizes import max_message_bytes

Fields = dict[str, Any]
Examples = dict[str, Fields]

MISSING = object()
ROW = np.full(5, 0.2)


def law(*changed: tuple[int, float]) -> np.ndarray:
    rows = np.tile(ROW, (2, 1))
    for place, value in changed:
        rows[0, place] = value
    return rows


def read(kind: str, fields: Fields) -> object:
    if kind == "hello":
        return read_hello(fields)
    if kind == "welcome":
        return read_welcome(fields)
    dialect = dialect_of(kind)
    if kind in dialect.exchanges:
        return read_request(fields, dialect)
    answers = {exchange.answer: exchange for exchange in dialect.exchanges.values()}
    return read_reply(fields, answers.get(kind, dialect.exchanges["infer"]))


def seen(fields: Fields, **changed: Any) -> Fields:
    """A request that sees something else."""
    return fields | {"observation": fields["observation"] | changed}


REPORTS: list[Any] = [
    *({"steps": count} for count in (-1, 1.0, True, 2**63, None, "1", np.zeros(3))), {"other": 1}, {b"steps": 1},
    [], None, 1, "steps",
]  # fmt: skip

# message, field, value in its place, a word of the refusal.
REFUSALS: list[tuple[str, str, Any, str]] = [
    *[(kind, "v", value, "protocol 2")
      for kind in ("hello", "welcome", "infer", "verify", "inpaint", "distribution", "verdict", "chunk")
      for value in (0, 1, 3, 2.0, True, "1", None, MISSING, -1, 2**64 - 1, [1], np.ones(3, np.int64))],
    *[(kind, "type", value, "expected a message")
      for kind in ("hello", "infer", "distribution", "chunk")
      for value in ("other", "welcome!", None, MISSING, 1, ["infer"], np.zeros(3), {"infer": 1}, "\n\u202e")],
    *[(kind, "id", value, "id")
      for kind in ("infer", "verify", "inpaint", "distribution", "verdict", "chunk")
      for value in (-1, 2**63, 1.0, True, "1", None, MISSING, [1], np.zeros((), np.int64))],
    *[("infer", "deadline_ms", value, "deadline_ms must be a number from 0 to 60000")
      for value in (-1e-9, 60_000.1, math.inf, math.nan, True, "100", None, MISSING, [1.0], np.zeros(()), 2**63)],
    *[("infer", "observation", value, "observation must be a map with state, goal, image")
      for value in (None, MISSING, [], 1, "state", b"", np.zeros((2, 3), np.float32), [np.zeros((2, 3), np.float32)])],
    ("infer", "observation", {}, "state"),
    *[("infer", "observation.state", value, "state")
      for value in (np.zeros((2, 3)), np.zeros((2, 3), np.int64), np.zeros((3, 2), np.float32), 0.0, None, MISSING,
                    np.zeros((2, 4), np.float32), np.zeros(6, np.float32), np.zeros((1, 2, 3), np.float32),
                    np.zeros((), np.float32), [[0.0] * 3] * 2, b"\0" * 24, "zeros", {"state": 1}, {})],
    *[("infer", "observation.state", np.full((2, 3), odd, np.float32), "state holds NaN or infinite")
      for odd in (np.nan, np.inf, -np.inf)],
    *[("infer", "observation.goal", value, "goal")
      for value in (np.zeros(3, np.float32), np.zeros(2), np.zeros((2, 2), np.float32), MISSING, None)],
    *[("infer", "observation.image", value, "image")
      for value in (np.zeros((2, 2, 4, 3), np.float32), np.zeros((2, 4, 2, 3), np.uint8), MISSING, None, b"\xff\xd8",
                    np.zeros((1, 2, 4, 3), np.uint8), np.zeros((2, 4, 3), np.uint8), [b"\xff\xd8"],
                    [b"\xff\xd8"] * 3, [b"", b""], ["a", "b"], [], [b"\xff\xd8", None])],
    *[("infer", "instruction", value, "instruction must be text of at most 1000 characters")
      for value in (None, MISSING, 1, b"go", ["go"], "x" * 1001)],
    *[("infer", "report", value, "report") for value in REPORTS],
    *[("verify", "draft_probs", value, "draft_probs")
      for value in (law((0, -1e-300)), law((0, 0.2 + 2e-6)), law((0, 0.2 - 2e-6)), law((0, 1e308), (1, 1e308)),
                    np.zeros((2, 5)), law((0, np.nan)), law((0, np.inf)), law((0, -0.2), (1, 0.6)),
                    law().astype(np.float32), law()[:1], law().T, ROW, MISSING, None)],
    *[("verify", "draft_conditional", value, "draft_conditional")
      for value in (law(), np.zeros((5, 5)), np.eye(4), np.eye(5, dtype=np.float32), None, -np.eye(5), MISSING)],
    *[("verify", "codes", np.array(value), "codes must lie in [0, 4]") for value in ([0, 5], [-1, 0], [2**62, 0])],
    *[("verify", "codes", value, "codes")
      for value in (np.zeros(3, np.int64), np.zeros(2), np.zeros(2, np.bool_), np.zeros((2, 1), np.int64), 1, MISSING)],
    *[(kind, "address", value, "address")
      for kind in ("infer", "verify", "inpaint")
      for value in ([0, 0, 0], [0] * 5, [0, 0, 0, -1], [0, 0, 0, 0.0], [0, 0, 0, True], None, MISSING, {},
                    [0, 0, 0, None], np.zeros(4, np.int64), "0000", [np.zeros(3)] * 4)],
    *[("inpaint", "actions", value, "actions")
      for value in (np.zeros((3, 3), np.float32), np.full((2, 3), np.inf, np.float32), np.zeros((2, 3)), MISSING)],
    *[("inpaint", "weights", np.array(value, np.float32), "weights must lie in")
      for value in ([0.0, 1.5], [-0.5, 1.0])],
    *[("distribution", name, value, name)
      for name, value in (("probs", law((0, -0.1), (1, 0.5))), ("probs", MISSING), ("conditional", np.ones((5, 5))),
                          ("conditional", MISSING), ("offsets", np.full((2, 5, 2, 3), np.nan, np.float32)),
                          ("offsets", MISSING), ("offsets", np.zeros((2, 5, 3, 2), np.float32)))],
    *[("distribution", "times", value, word)
      for value, word in ((MISSING, "times"), ([], "times"), ({}, "queue_ms"),
                          ({"queue_ms": -1.0, "target_ms": 0.0, "total_ms": 0.0, "batch": 1}, "queue_ms"),
                          ({"queue_ms": 0.0, "target_ms": math.nan, "total_ms": 0.0, "batch": 1}, "target_ms"),
                          ({"queue_ms": 0.0, "target_ms": 0.0, "total_ms": math.inf, "batch": 1}, "total_ms"),
                          *[({"queue_ms": 0.0, "target_ms": 0.0, "total_ms": 0.0, "batch": batch}, "batch")
                            for batch in (0, 1.0, True, None)])],
    *[("verdict", name, value, word)
      for name, value, word in (("codes", np.array([0, 5]), "codes"), ("rejection", np.array([0.0, 1.1]), "rejection"),
                                ("rejection", np.array([-0.1, 0.0]), "rejection"),
                                ("accepted", np.zeros(2, np.int64), "accepted"),
                                ("chunk", np.full((2, 3), np.inf, np.float32), "chunk"),
                                ("chunk", np.zeros((3, 2), np.float32), "chunk"), ("chunk", MISSING, "chunk"))],
    *[("chunk", "chunk", value, "chunk")
      for value in (np.full((2, 3), np.nan, np.float32), np.zeros((3, 2), np.float32), np.zeros((2, 3)), MISSING,
                    None)],
    ("chunk", "times", MISSING, "times"),
    *[("error", name, value, "error")
      for name, value in (("code", "unheard_of"), ("code", MISSING), ("code", ["expired"]), ("message", 1))],
    *[("hello", name, value, "hello")
      for name, value in (("robot", "x" * 65), ("robot", "a\nb"), ("robot", "\u202e"), ("robot", 1), ("robot", MISSING),
                          ("family", 1), ("family", ["codes"]), ("family", MISSING),
                          ("spec", []), ("spec", None), ("spec", MISSING),
                          ("spec", {"window": np.zeros(1)}), ("spec", {"window": b"1"}), ("spec", {"a": {b"b": 1}}),
                          ("spec", {"image": [[[[[[[1]]]]]]]}),
                          ("spec", {"a": {"a": {"a": {"a": {"a": {"a": {}}}}}}}))],
    *[("welcome", name, value, "welcome")
      for name, value in (("bundle", 1), ("target", MISSING), ("version", None), ("max_message_bytes", 1.0),
                          ("max_message_bytes", 2**31), ("max_message_bytes", True), ("family", None),
                          ("family", MISSING), ("spec", None), ("spec", MISSING), ("spec", []))],
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value", "word"), REFUSALS)
def test_a_field_that_is_wrong_is_refused_and_named(
    kind: str, name: str, value: Any, word: str, examples: Examples
) -> None:
    fields = examples[kind]
    read(kind, fields)  # the rest of it is right
    *path, last = name.split(".")
    inner = fields
    for part in path:
        inner = inner[part]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(WireError) as refused:
        read(kind, fields)
    assert refused.value.code == ("unsupported_protocol" if name == "v" else "bad_message")
    assert word in str(refused.value)
    assert str(refused.value).isprintable()


def test_what_is_not_known_is_ignored(examples: Examples) -> None:
    for kind, fields in examples.items():
        assert type(read(kind, fields | {"later": np.zeros(3)})) is type(read(kind, fields))
    # Also in an observation, where a server may need less than the device sends; whatever it is.
    for more in (np.full(3, np.nan), None, {"deep": [1]}, "text", [b"\xff"]):
        found = read_request(seen(examples["infer"], later=more), CODES)
        assert set(found.window.arrays) == {"state", "goal", "image"}
    window = read_request(examples["infer"], of_codes(PLAIN)).window
    assert set(window.arrays) == {"state"} and window.instruction is None


def test_the_longest_instruction_and_none_at_all_are_read(examples: Examples) -> None:
    for text in ("", "x" * MAX_INSTRUCTION_CHARS, "\N{ROBOT FACE}" * MAX_INSTRUCTION_CHARS, "two\nlines"):
        assert read_request(examples["infer"] | {"instruction": text}, CODES).window.instruction == text


def test_a_family_knows_its_own_messages_only(examples: Examples) -> None:
    with pytest.raises(WireError, match="expected a message of type infer or inpaint, got 'verify'"):
        read_request(examples["verify"], CHUNKS)
    for kind, exchange in (("chunk", CODES.exchanges["infer"]), ("distribution", CHUNKS.exchanges["infer"])):
        with pytest.raises(WireError, match=f"expected a message of type {exchange.answer} or error, got '{kind}'"):
            read_reply(examples[kind], exchange)


@pytest.mark.parametrize(("kind", "name"), [("verify", "draft_conditional"), ("distribution", "conditional")])
def test_a_conditional_belongs_to_a_sequential_secondary_head(kind: str, name: str, examples: Examples) -> None:
    """Where both sides have none it is a field like any that is not known: nothing of it is read."""
    other = of_codes(PLAIN)
    fields = examples[kind]
    for value in (fields[name], None, MISSING):
        given = {key: entry for key, entry in fields.items() if key != name or value is not MISSING}
        if value is not MISSING:
            given[name] = value
        found = read_request(given, other) if kind == "verify" else read_reply(given, other.exchanges["infer"])
        assert name not in getattr(found, "arrays", {name})


def test_an_error_can_be_read_whatever_version_it_is_of(examples: Examples) -> None:
    for version in (1, 3, None, "2"):
        with pytest.raises(WireError, match="too late") as refused:
            read_welcome(examples["error"] | {"v": version})
        assert refused.value.code == "expired"


def test_the_handshake_names_everything_that_differs(examples: Examples) -> None:
    ours = CODES.agreed
    for name in ours:
        for value in (77, MISSING):
            theirs = {key: entry for key, entry in ours.items() if key != name or value is not MISSING}
            if value is not MISSING:
                theirs[name] = value
            with pytest.raises(WireError, match=f"differ in {name}") as refused:
                check_hello(read_hello(examples["hello"] | {"spec": theirs}), CODES)
            assert refused.value.code == "mismatch"
    with pytest.raises(WireError, match="tokenizer 'another' / '0123456789abcdef'") as refused:
        check_hello(read_hello(examples["hello"] | {"spec": {**ours, "tokenizer": "another"}}), CODES)
    assert refused.value.code == "mismatch"
    # Python's True is 1, and its False 0; on the wire they are not.
    for said, served, word in ((1, True, "1 / True"), (False, 0, "False / 0"), (True, False, "True / False")):
        misfit = read_hello(examples["hello"] | {"spec": {**ours, "sequential": said}})
        dialect = dataclasses.replace(CODES, agreed={**ours, "sequential": served})
        with pytest.raises(WireError, match=f"differ in sequential {word}; deploy the same bundle on both") as refused:
            check_hello(misfit, dialect)
        assert refused.value.code == "mismatch"
    # A family alone says nothing of the rest.
    nothing = read_hello(examples["hello"] | {"spec": {}})
    first = ", ".join(f"{name} None / .*" for name in list(ours)[:4])
    with pytest.raises(WireError, match=f"differ in {first} and {len(ours) - 4} more; deploy the same bundle on both"):
        check_hello(nothing, CODES)
    # Numbers are compared as numbers, and names that only the device knows do not matter.
    same = {**ours, "temperature": 0.5, "codes": 5.0, "later": [1, 2]}
    check_hello(read_hello(examples["hello"] | {"spec": same}), CODES)


OBSERVED: list[tuple[str, Any]] = [
    ("shape", [4]), ("shape", {"3": 1}), ("shape", 3), ("shape", [True, 1]), ("dtype", "uint8"), ("dtype", None),
    ("history", 3), ("history", True), ("history", MISSING), ("later", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OBSERVED)
def test_the_handshake_compares_an_observation_down_to_its_last_number(
    name: str, value: Any, examples: Examples
) -> None:
    for dialect in (CODES, CHUNKS):
        theirs = copy.deepcopy(dict(dialect.agreed))
        check_hello(Hello("arm", dialect.family, theirs), dialect)
        theirs["observation"]["fields"]["state"].pop(name, None)
        if value is not MISSING:
            theirs["observation"]["fields"]["state"][name] = value
        hello = examples["hello"] | {"family": dialect.family, "spec": theirs}
        # It says where, and no more than that.
        with pytest.raises(WireError, match=rf"differ in observation\.fields\.state\.'?{name}'? [^.]*;") as refused:
            check_hello(read_hello(hello), dialect)
        assert refused.value.code == "mismatch"


def test_the_handshake_compares_the_names_of_an_observation_and_whether_there_is_an_instruction() -> None:
    changes: list[tuple[Callable[[Any], Any], str]] = [
        (lambda seen: seen["fields"].pop("goal"), "observation.fields.goal None / {'shape': [2]"),
        (lambda seen: seen["fields"].update({"touch": seen["fields"]["goal"]}), "observation.fields.'touch' / None;"),
        (lambda seen: seen["fields"].update({"\n": 1}), r"observation.fields.'\n' / None;"),
        (lambda seen: seen["fields"].update({"x" * 10**4: 1}), "xxx / None;"),
        (
            lambda seen: seen["fields"].update({"Goal": seen["fields"].pop("goal")}),
            ".fields.'Goal' / None;",
        ),
        (lambda seen: seen.update(instruction=False), "observation.instruction False / True;"),
        (lambda seen: seen.update(instruction=1), "observation.instruction 1 / True;"),
        (lambda seen: seen.pop("instruction"), "observation.instruction None / True;"),
        (lambda seen: seen.update(fields=[]), "observation.fields [] / {"),
    ]
    for change, word in changes:
        theirs = copy.deepcopy(dict(CODES.agreed))
        change(theirs["observation"])
        with pytest.raises(WireError, match="differ in observation") as refused:
            check_hello(Hello("arm", "codes", theirs), CODES)
        assert word in str(refused.value) and str(refused.value).isprintable() and len(str(refused.value)) < 400


def test_another_family_is_refused_by_name_and_none_is_told(examples: Examples) -> None:
    for family in ("chunks", "\n\u202e", "x" * 300):
        with pytest.raises(WireError, match=r"of the family .*, the server codes; deploy the same bundle") as refused:
            check_hello(read_hello(examples["hello"] | {"family": family}), CODES)
        assert refused.value.code == "mismatch" and str(refused.value).isprintable() and len(str(refused.value)) < 200
    check_hello(read_hello(examples["hello"] | {"family": None, "spec": {}}), CODES)
    # With a spec it means something, and that is no family of ours.
    with pytest.raises(WireError, match="of the family None"):
        check_hello(read_hello(examples["hello"] | {"family": None}), CODES)


def test_what_differs_is_quoted_in_one_short_line(examples: Examples) -> None:
    for value in ("a\nb", "\u202e" * 1000, ["\x1b[31m"] * 60, {"\n": {"\n": "\n"}}, 10**4000):
        with pytest.raises(WireError, match="differ in tokenizer") as refused:
            check_hello(read_hello(examples["hello"] | {"spec": {**CODES.agreed, "tokenizer": value}}), CODES)
        assert str(refused.value).isprintable() and str(refused.value).isascii() and len(str(refused.value)) < 400


# Frames that no encoder of ours writes.


def ext(body: bytes, kind: int = 1) -> bytes:
    return bytes(plain_msgpack.packb({"state": plain_msgpack.ExtType(kind, body)}))


HEAD = b"\x81\xa5state"
SHAPES = {
    "unknown extension type": ext(b"\0\0\0\0\0\0", 2),
    "object dtype": ext(b"\x05\0"),
    "last dtype": ext(b"\xff\0"),
    "no header": ext(b""),
    "half a header": ext(b"\0"),
    "five dimensions": ext(b"\0\x05" + struct.pack("<5I", 1, 1, 1, 1, 1) + bytes(4)),
    "half a shape": ext(b"\0\x01\x01\0"),
    "too few bytes": ext(b"\0\x01" + struct.pack("<I", 2) + bytes(7)),
    "too many bytes": ext(b"\0\x01" + struct.pack("<I", 2) + bytes(9)),
    "bytes of a scalar": ext(b"\0\0" + bytes(5)),
    "2^64 elements": ext(b"\x02\x04" + struct.pack("<4I", *[65536] * 4)),
    "2^62 float32": ext(b"\0\x02" + struct.pack("<2I", 2**31, 2**31)),
    "2^32 - 1 rows": ext(b"\x02\x01" + struct.pack("<I", 2**32 - 1) + b"x"),
    "none of a great many": ext(b"\0\x04" + struct.pack("<4I", 0, 2**32 - 1, 2**32 - 1, 2**32 - 1)),
    "a bool that is 2": ext(b"\x04\x01" + struct.pack("<I", 2) + b"\x01\x02"),
    "a key of bytes": b"\x81\xc4\x01a\x01",
    "a key that is an integer": b"\x81\x01\x01",
    "a key that is a list": b"\x81\x91\x01\x01",
    "a list": b"\x91\x01",
    "a number": b"\x01",
    "a bare array": ext(b"\0\0" + bytes(4))[len(HEAD) :],
    "text that is no UTF-8": b"\x81\xa1a\xa1\xff",
    "the reserved byte": b"\xc1",
    "nothing": b"",
    "65 entries": b"\xde\x00\x41" + b"".join(b"\xa2%02d\x01" % i for i in range(65)),
    "a list of 65": b"\x81\xa1a\xdc\x00\x41" + b"\x01" * 65,
    "a list of 2^32 - 1": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a map of 2^32 - 1": b"\xdf\xff\xff\xff\xff",
    "a text of 2^32 - 1": HEAD + b"\xdb\xff\xff\xff\xff",
    "a binary of 2^32 - 1": HEAD + b"\xc6\xff\xff\xff\xff",
    "an extension of 2^32 - 1": HEAD + b"\xc9\xff\xff\xff\xff\x01",
    "lists in lists": b"\x81\xa1a" + b"\x91" * 20_000,
    "lists of 64 in lists": b"\x81\xa1a" + b"\xdc\x00\x40" * 8_000,
    "maps in maps": b"\x81\xa1a" * 7_000,
    "a broken timestamp": b"\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12,
}
BODIES = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"1",
    "two objects": b"{}{}",
    "NaN": b'{"state":[[NaN]]}',
    "infinity": b'{"deadline_ms":Infinity}',
    "UTF-16": '{"v":1}'.encode("utf-16"),
    "UTF-32": '{"v":1}'.encode("utf-32"),
    "a byte order mark": b'\xef\xbb\xbf{"v":1}',
    "no UTF-8": b'{"v":"\xff"}',
    "half a surrogate pair": b'{"v":"\xed\xa0\x80"}',
    "lists in lists": b'{"a":' + b"[" * 13_000,
    "closed lists in lists": b'{"a":' + b"[" * 13_000 + b"]" * 13_000 + b"}",
    "objects in objects": b'{"a":' * 5_000,
    "an integer of 5000 digits": b'{"id":' + b"1" * 5_000 + b"}",
}
# Lists that stand for no array; what they stand for is known where the field is read.
LISTS: dict[str, tuple[str, str, str]] = {
    "a float32 that is ragged": ("infer", "observation.state", "[[1,2],[3]]"),
    "numbers beside lists": ("infer", "observation.state", "[1,[2]]"),
    "text in an array": ("infer", "observation.state", '[["1"]]'),
    "bool in an array": ("infer", "observation.state", "[[true]]"),
    "null in an array": ("infer", "observation.state", "[[null]]"),
    "1e400 in an array": ("infer", "observation.state", "[[1e400]]"),
    "five dimensions": ("infer", "observation.state", "[[[[[1]]]]]"),
    "a map in an array": ("infer", "observation.state", '[{"a":1}]'),
    "empty lists": ("infer", "observation.state", "[[],[]]"),
    "900 lists in lists": ("infer", "observation.state", "[" * 900 + "]" * 900),
    "a float32 of 400 digits": ("infer", "observation.state", "[" + "9" * 400 + "]"),
    "a pixel of 256": ("infer", "observation.image", "[256]"),
    "a pixel of -1": ("infer", "observation.image", "[-1]"),
    "a pixel of 1.0": ("infer", "observation.image", "[1.0]"),
    "a JPEG as text": ("infer", "observation.image", '["/9j/", "/9j/"]'),
    "a float among codes": ("verify", "codes", "[1.0,1]"),
    "a bool among codes": ("verify", "codes", "[true,1]"),
    "a code of 2^63": ("verify", "codes", "[9223372036854775808,1]"),
    "a number where bool belongs": ("verdict", "accepted", "[1,0]"),
    "a float where an address belongs": ("infer", "address", "[0,0,0,0.0]"),
    "a chunk that is ragged": ("chunk", "chunk", "[[1,2,3],[1,2]]"),
}


@pytest.mark.parametrize(
    ("codec", "payload"),
    [*((msgpack, payload) for payload in SHAPES.values()), *((json, payload) for payload in BODIES.values())],
    ids=[*(f"msgpack {name}" for name in SHAPES), *(f"json {name}" for name in BODIES)],
)
def test_a_payload_that_is_no_message_is_refused_without_memory(codec: ModuleType, payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as refused:
            codec.decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.code == "bad_message"
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400
    # The deepest that msgpack goes, 1024 lists of 64 places, are the most that any of these makes.
    assert peak < 1_200_000


@pytest.mark.parametrize(("kind", "name", "text"), LISTS.values(), ids=LISTS.keys())
def test_a_list_that_is_no_array_is_refused_where_it_is_read(
    kind: str, name: str, text: str, examples: Examples
) -> None:
    fields = examples[kind]
    read(kind, json.decode(json.encode(fields)))
    *path, last = name.split(".")
    inner = fields
    for part in path:
        inner = inner[part]
    inner[last] = "HERE"
    payload = json.encode(fields).replace(b'"HERE"', text.encode())
    with pytest.raises(WireError, match=last) as refused:
        read(kind, json.decode(payload))
    assert refused.value.code == "bad_message"
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400


def test_a_shape_that_would_wrap_around_is_not_fooled_by_its_product() -> None:
    """The wrong variant: in 64 bits the product of this shape is 0, and so is the number of bytes."""
    shape = np.array([65536] * 4)
    assert int(np.prod(shape)) == 0
    with pytest.raises(WireError, match="does not have 0 bytes"):
        msgpack.decode(SHAPES["2^64 elements"])


def test_values_of_the_allowed_size_cannot_be_made_into_much_memory() -> None:
    """The most memory for a byte of message: empty lists and maps, as many as a message may hold."""
    size = max_message_bytes(CODES)
    # A list of 64 lists of 64 lists ..., three bytes each and one per empty map inside.
    tight = b"\x81\xa1a" + b"\xdc\x00\x40" + (b"\xdc\x00\x40" + b"\x80" * 64) * 64
    lists = b'{"a":[' + b"[]," * (size // 3 - 4) + b"[]]}"
    for codec, payload in ((msgpack, tight), (json, lists)):
        tracemalloc.start()
        try:
            codec.decode(payload)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 80 * len(payload) + 100_000


@pytest.mark.parametrize("digits", [b"1e39", b"-3.5e38", b"1" + b"0" * 39, b"1" + b"0" * 300, b"1e308"])
def test_a_number_too_large_for_float32_is_refused(digits: bytes) -> None:
    rows = b",".join([b"[%s,0,0]" % digits] * 2)
    payload = b'{"v":2,"type":"infer","id":0,"deadline_ms":1,"observation":{"state":[%s]},"address":[0,0,0,0]}' % rows
    with pytest.raises(WireError, match="state holds NaN or infinite numbers"):
        read_request(json.decode(payload), of_codes(PLAIN))
    read_request(json.decode(payload.replace(digits, b"1")), of_codes(PLAIN))


@pytest.mark.parametrize("depth", [5, 100, 500, 900, 960, 990, 1_000, 5_000])
def test_deep_values_in_fields_that_are_named_in_the_refusal(depth: int) -> None:
    """What can just be parsed must not overflow the stack where it is quoted."""
    lists, maps = b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth
    for name in (b"v", b"type", b"family", b"spec", b"robot", b"id", b"times", b"observation", b"address"):
        for nested in (lists, maps, b'{"state":' + lists + b"}", b'{"observation":' + maps + b"}"):
            payload = b'{"v":2,"type":"hello","%s":%s}' % (name, nested)
            request = payload.replace(b"hello", b"infer")
            for reader in (read_hello, read_welcome, lambda fields: read_request(fields, CODES)):
                for sent in (payload, request):
                    with pytest.raises(WireError):
                        reader(json.decode(sent))
