"""docs/protocol.md says what the code does: every message, field, code, limit and example, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import json as plain_json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specact.errors import SpecactError
from specact.families.codes.spec import PolicySpec
from specact.remote import transport as channel
from specact.rng import Role, stream
from specact.server import acceptor, http, serve, transport
from specact.server import stream as server_stream
from specact.server.openapi import described
from specact.server.settings import ServerSettings
from specact.types import Window
from specact.wire import checks, json, msgpack
from specact.wire.handshake import Hello, read_hello, shared_spec
from specact.wire.protocol import PROTOCOL, ErrorCode, max_message_bytes
from specact.wire.request import LONGEST_DEADLINE_MS, REPORTED, InferRequest, request_fields

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
MESSAGES = ("hello", "welcome", "infer", "verify", "distribution", "verdict", "error")

Row = list[str]


def section(title: str) -> str:
    """What stands under a heading, up to the next of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^#+ |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert found, f"there is no section {title}"
    return found[2]


def tables(text: str) -> list[list[Row]]:
    """The rows of each table, without its head."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]] for block in blocks
    ]


def names(rows: list[Row]) -> set[str]:
    return {row[0].strip("`") for row in rows}


def example(name: str) -> list[tuple[str, str]]:
    return re.findall(rf"^```(\w+) example={name}\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)


def test_it_is_about_this_version_and_port() -> None:
    assert f"normative for protocol **{PROTOCOL}**" in DOCUMENT
    assert f"The default port is {channel.PORT}." in DOCUMENT
    assert ServerSettings().port == channel.PORT


def test_it_describes_every_field_of_every_message(examples: dict[str, dict[str, Any]]) -> None:
    assert set(re.findall(r"^### `(\w+)`$", DOCUMENT, re.MULTILINE)) == set(MESSAGES) == set(examples)
    for kind in MESSAGES:
        fields = names(tables(section(f"`{kind}`"))[0])
        if kind == "verify":
            fields |= names(tables(section("`infer`"))[0])
        assert fields == set(examples[kind]), kind
        said = dict(row[:2] for row in tables(section(f"`{kind}`"))[0] if row[0] == "`v`" or row[0] == "`type`")
        assert all(word in ("integer", "text") for word in said.values())


def test_it_describes_what_is_inside_spec_report_and_times(
    spec: PolicySpec, examples: dict[str, dict[str, Any]]
) -> None:
    assert names(tables(section("`hello`"))[1]) == set(shared_spec(spec))
    assert names(tables(section("`infer`"))[1]) == set(REPORTED)
    assert names(tables(section("Times"))[0]) == set(examples["verdict"]["times"])


@pytest.mark.parametrize("whole", [True, False])
def test_openapi_agrees_with_it_on_fields_and_on_which_are_optional(
    whole: bool, spec: PolicySpec, plain_spec: PolicySpec
) -> None:
    conditions = () if whole else ("if D > 0", "with a camera", "with a sequential secondary head")
    replies = {"hello": "welcome", "infer": "distribution", "verify": "verdict"}
    for request, reply in replies.items():
        route = described(request, spec if whole else plain_spec)
        bodies = {
            request: route["openapi_extra"]["requestBody"]["content"],
            reply: route["responses"][200]["content"],
            "error": route["responses"][400]["content"],
        }
        for kind, content in bodies.items():
            schema = content["application/json"]["schema"]
            rows = tables(section(f"`{kind}`"))[0]
            if kind == "verify":
                rows = [*tables(section("`infer`"))[0], *rows]
            rows = [row for row in rows if not row[1].endswith(conditions)]
            assert set(schema["properties"]) == names(rows)
            optional = {row[0].strip("`") for row in rows if "optional" in row[1]}
            assert set(schema["required"]) == names(rows) - optional, kind


def test_it_names_every_error_code_with_its_status() -> None:
    rows = tables(section("`error`"))[1]
    assert {row[0].strip("`"): int(row[1]) for row in rows} == {str(code): http.STATUS[code] for code in ErrorCode}


def test_it_names_every_dtype() -> None:
    text = tables(section("msgpack"))[0][0][1]
    said = {int(code): name for code, name in re.findall(r"(\d) (\w+\d|bool)", text)}
    assert said == {code: dtype.name for code, dtype in msgpack._DTYPES.items()}


def test_it_names_every_limit_with_its_value() -> None:
    defaults = ServerSettings()
    known = {
        "longest `deadline_ms`": LONGEST_DEADLINE_MS,
        "largest `id`": checks.LARGEST_ID,
        "dimensions of an array": msgpack._MOST_DIMENSIONS,
        "entries of a msgpack map or list": msgpack._MOST_ENTRIES,
        "nesting of an array field in JSON": json._MOST_DIMENSIONS,
        "characters of `robot`": 64,
        "characters of a token, at least": 16,
        "requests under way per robot; the server then stops reading it; unless set otherwise": defaults.max_under_way,
        "fragments of a WebSocket message": transport._MOST_FRAGMENTS,
        "messages of a connection that wait to be read": transport._MOST_AHEAD,
        "bytes of an HTTP head": transport._LARGEST_HEAD,
        "pipelined HTTP requests": transport._MOST_PIPELINED,
        "pings and pongs per second": transport._MOST_CONTROLS_PER_S,
        "seconds until a TLS handshake is over": acceptor._HANDSHAKE_WITHIN_S,
        "seconds until an HTTP request, or an opening request, is whole": transport._REQUEST_WITHIN_S,
        "seconds until the hello": server_stream._HELLO_WITHIN_S,
        "seconds until an HTTP body is there": http._BODY_WITHIN_S,
        "seconds an idle HTTP connection is kept": serve._KEEP_ALIVE_S,
        "seconds between pings": serve._PING_S,
        "seconds connections may take to close at the end": serve._GOODBYE_S,
        "robots with a stream, unless set otherwise": defaults.max_robots,
        "connections that have not shown a token or said hello, unless set otherwise": defaults.max_pending,
        "connections per address, unless set otherwise": defaults.max_per_address,
        "requests in the queue, unless set otherwise": defaults.max_queue,
        "requests in a batch, unless set otherwise": defaults.max_batch,
        "seconds a shutdown waits for what is under way, unless set otherwise": defaults.drain_s,
    }
    assert {row[0]: int(row[1]) for row in tables(section("Limits"))[0]} == known
    # Those that have no name in the code.
    for length, fits in ((64, True), (65, False)):
        assert _accepts(lambda size=length: read_hello(_hello("x" * size))) is fits
    for length, fits in ((16, True), (15, False)):
        assert _accepts(lambda size=length: ServerSettings(token="x" * size)) is fits


def _hello(robot: str) -> dict[str, Any]:
    return {"v": PROTOCOL, "type": "hello", "robot": robot, "tokenizer": "", "spec": {}}


def _accepts(make: Any) -> bool:
    try:
        make()
    except SpecactError:
        return False
    return True


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("image", [None, (3, 5)])
def test_its_formula_of_the_message_bound_is_the_code_s(
    image: tuple[int, int] | None, sequential: bool, spec: PolicySpec
) -> None:
    spec = dataclasses.replace(spec, image=image, sequential=sequential)
    [(_, formula)] = example("max_message_bytes")
    height, width = spec.image or (0, 0)
    sizes = {
        "T": spec.window, "O": spec.state, "D": spec.goal, "G": spec.codebooks, "K": spec.codes, "n": spec.chunk,
        "A": spec.actions, "H": height, "W": width, "S": int(sequential), "max": max,
    }  # fmt: skip
    assert eval(f"({formula})", {"__builtins__": {}}, sizes) == max_message_bytes(spec)


def test_its_worked_array_is_what_is_sent() -> None:
    """Once with the codec, and once by hand from the table above it."""
    [(_, dump)] = example("array")
    array = np.array([[1.0, -2.5]], np.float32)
    assert bytes.fromhex(dump) == msgpack.encode({"a": array})
    body = bytes([0, 2, *(1).to_bytes(4, "little"), *(2).to_bytes(4, "little")]) + array.astype("<f4").tobytes()
    fixmap, fixstr, ext8 = b"\x81", b"\xa1a", bytes([0xC7, len(body), 1])
    assert bytes.fromhex(dump) == fixmap + fixstr + ext8 + body


def test_its_worked_request_is_what_is_sent() -> None:
    fields = request_fields(InferRequest(7, 100.0, Window(np.array([[0.5, -1.0]], np.float32))))
    dumps = dict(example("infer"))
    assert bytes.fromhex(dumps["hex"]) == msgpack.encode(fields)
    assert dumps["json"].strip().encode() == json.encode(fields)


def philox(key: list[int], counter: list[int]) -> list[int]:
    """Philox 4x64-10 (Salmon et al. 2011), one block."""
    mask = 2**64 - 1
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (second >> 64) ^ c1 ^ k0, second & mask, (first >> 64) ^ c3 ^ k1, first & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def test_its_address_of_the_random_numbers_is_enough_to_make_them() -> None:
    [(_, text)] = example("uniforms")
    seed, robot, episode, step = 7, 1, 2, 3
    words = philox([seed, 2], [1, step, episode, robot])  # 0, incremented before the first block
    assert [word // 2**11 / 2**53 for word in words] == [*itertools.chain(*plain_json.loads(text))]
    generator = stream(seed, Role.VERIFY, robot=robot, episode=episode, step=step)
    assert generator.random((2, 2)).tolist() == plain_json.loads(text)
    # The wrong variant: the counter as it stands.
    assert philox([seed, 2], [0, step, episode, robot]) != words


def test_its_hello_is_one() -> None:
    assert read_hello(_hello("arm")) == Hello("arm", "", {})


def test_its_links_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
               for title in re.findall(r"^#+ (.*)$", DOCUMENT, re.MULTILINE)}  # fmt: skip
    assert set(re.findall(r"\]\(#([\w-]+)\)", DOCUMENT)) <= anchors
