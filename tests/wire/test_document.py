"""docs/protocol.md says what the code does: every message, field, code, limit and example, and nothing else."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.wire.dialects import CHUNKS, CODES, PLAIN, SPEC, dialect_of, of_chunks, of_codes

import specact.observation as observations
from specact.errors import SpecactError
from specact.families.chunks import wire as chunks
from specact.families.codes.spec import PolicySpec
from specact.families.load import load_pair
from specact.families.staged.stages import SplitSpec
from specact.families.staged.wire import PRECISIONS, split_dialect
from specact.observation import Field, ObservationSpec, Window, read_spec, vectors
from specact.remote import transport as remote_transport
from specact.rng import Role, StepAddress, stream
from specact.server import acceptor, http, serve, transport
from specact.server import stream as server_stream
from specact.server.openapi import route_schema
from specact.server.settings import ServerSettings
from specact.wire import checks, images, msgpack
from specact.wire import json as wire_json
from specact.wire.checks import PROTOCOL, ErrorCode
from specact.wire.dialect import ArraySpec
from specact.wire.handshake import Hello, check_hello, read_hello
from specact.wire.messages import MAX_DEADLINE_MS, MAX_INSTRUCTION_CHARS, REPORT_COUNTERS, Request, request_fields
from specact.wire.sizes import max_message_bytes

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
MESSAGES = ("hello", "welcome", "infer", "error", "verify", "inpaint", "distribution", "verdict", "chunk")
ANSWERS = ("distribution", "verdict", "chunk")
DIALECTS = {"codes": CODES, "chunks": CHUNKS}

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
    assert f"The default port is {remote_transport.PORT}." in DOCUMENT
    assert ServerSettings().port == remote_transport.PORT


def rows_of(kind: str) -> list[Row]:
    """What it says of the fields of a message, those included that several have in common."""
    rows = tables(section(f"`{kind}`"))[0]
    if kind in ANSWERS:
        return [*tables(section("Families"))[0], *rows]
    return [*tables(section("`infer`"))[0], *rows] if kind in ("verify", "inpaint") else rows


@pytest.mark.parametrize(
    ("bundle", "request_title", "reply_title"),
    [
        ("relocate-tokens", "`verify` of tokens", "`decoded` tokens"),
        ("pusht-flow", "`verify` of flows", "`round` of flows"),
    ],
)
def test_it_describes_how_targets_verify_that_decode(bundle: str, request_title: str, reply_title: str) -> None:
    dialect = load_pair(bundle).codec.dialect
    exchange = dialect.exchanges["verify"]
    asked, answered = (tables(section(title))[0] for title in (request_title, reply_title))
    assert names(asked) == {"type", *exchange.request} and names(answered) == set(exchange.reply)
    for rows, specs in ((asked, exchange.request), (answered, exchange.reply)):
        kinds = {row[0].strip("`"): row[1].split()[0] for row in rows}
        assert all(kinds[name] == np.dtype(spec.dtype).name for name, spec in specs.items())
    assert f"`{exchange.answer}`" in reply_title


def test_it_describes_a_target_in_stages() -> None:
    seen = vectors(1, state=3)
    spec = SplitSpec("pair", "0" * 16, seen, ((2, 4), (1, 4)), {"logits": (2, 5)})
    dialect = split_dialect(spec, "1" * 16)
    answered, agreed = tables(section("A target in stages"))
    assert names(agreed) == set(dialect.agreed)
    kinds = {"integer": int, "text": str}
    assert all(type(dialect.agreed[name.strip("`")]) is kinds[kind] for name, kind, _ in agreed)
    assert names(answered) == set(dialect.exchanges["cut-1-uint8"].reply)
    text = section("A target in stages")
    for precision in PRECISIONS:
        exchange = dialect.exchanges[f"cut-2-{precision}"]
        assert f"`{precision}`" in text and exchange.answer == f"activation-2-{precision}"
        assert exchange.reply["activation"] == ArraySpec((4,), np.dtype(precision).type)
    assert dialect.exchanges["infer"].answer == "outputs" and "`outputs`" in text
    assert max_message_bytes(dialect) == max(65536, 8192 + max(30 * 3 + 16 + 12 * 5, 30 * (8 + 2)))


def test_it_describes_every_field_of_every_message(examples: dict[str, dict[str, Any]]) -> None:
    assert set(re.findall(r"^### `(\w+)`$", DOCUMENT, re.MULTILINE)) == set(MESSAGES) == set(examples)
    for kind in MESSAGES:
        assert names(rows_of(kind)) == set(examples[kind]), kind
        said = {row[0]: row[1:] for row in rows_of(kind)}
        assert said["`v`"] == ["integer", str(PROTOCOL)]
        assert said["`type`"] in (["text", f"`{kind}`"], ["text", "as below"])


def test_it_describes_both_families_and_what_is_inside_their_specs() -> None:
    assert set(re.findall(r"^### The family `(\w+)`$", DOCUMENT, re.MULTILINE)) == set(DIALECTS)
    for family, dialect in DIALECTS.items():
        assert dialect.family == family
        text = section(f"The family `{family}`")
        assert names(tables(text)[0]) == set(dialect.agreed)
        for kind, exchange in dialect.exchanges.items():
            assert f"`{kind}`" in text and f"`{exchange.answer}`" in text
    kinds = {"integer": int, "number": float, "boolean": bool, "map": dict, "text": str}
    for family, dialect in DIALECTS.items():
        for name, kind, _ in tables(section(f"The family `{family}`"))[0]:
            assert type(dialect.agreed[name.strip("`")]) is kinds[kind], name


def test_it_describes_what_is_inside_an_observation_s_spec() -> None:
    whole, array = tables(section("Observations"))
    described = SPEC.target.describe()
    assert names(whole) == set(described)
    assert all(names(array) == set(field) for field in described["fields"].values())
    # What it says of names, shapes, dtypes and histories.
    for shape, dtype, history, fits in (
        ([3], "float32", 0, True), ([1, 2, 3], "float32", 2, True), ([2, 4, 3], "uint8", 1, True),
        ([], "float32", 1, False), ([1, 1, 1, 1], "float32", 1, False), ([0], "float32", 1, False),
        ([2, 4, 1], "uint8", 1, False), ([4], "uint8", 1, False), ([3], "float64", 1, False),
        ([3], "float32", -1, False),
    ):  # fmt: skip
        field = {"shape": shape, "dtype": dtype, "history": history}
        assert _accepts(lambda field=field: read_spec({"fields": {"state": field}, "instruction": False})) is fits
    for name, fits in (
        ("state", True), ("image.front", True), ("x" * 64, True), ("x" * 65, False), ("", False), ("a b", False),
        ("a..b", False), ("1", False),
    ):  # fmt: skip
        assert _accepts(lambda name=name: ObservationSpec({name: Field((1,))})) is fits


def test_it_describes_what_is_inside_report_and_times(examples: dict[str, dict[str, Any]]) -> None:
    assert names(tables(section("`infer`"))[1]) == set(REPORT_COUNTERS)
    assert names(tables(section("Times"))[0]) == set(examples["verdict"]["times"])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family", DIALECTS)
def test_openapi_agrees_with_it_on_fields_and_on_which_are_optional(family: str, whole: bool) -> None:
    conditions = () if whole else ("with an instruction", "with a sequential secondary head")
    plain = {"codes": of_codes(PLAIN), "chunks": of_chunks(PLAIN.target, 2, 3)}
    dialect = (DIALECTS if whole else plain)[family]
    replies = {"hello": "welcome"} | {kind: exchange.answer for kind, exchange in dialect.exchanges.items()}
    for request, reply in replies.items():
        route = route_schema(request, dialect)
        bodies = {
            request: route["openapi_extra"]["requestBody"]["content"],
            reply: route["responses"][200]["content"],
            "error": route["responses"][400]["content"],
        }
        for kind, content in bodies.items():
            schema = content["application/json"]["schema"]
            rows = [row for row in rows_of(kind) if not row[1].endswith(conditions)]
            assert set(schema["properties"]) == names(rows)
            optional = {row[0].strip("`") for row in rows if "optional" in row[1]}
            assert set(schema["required"]) == names(rows) - optional, kind
            if "observation" in schema["properties"]:
                seen = schema["properties"]["observation"]
                assert set(seen["properties"]) == set(seen["required"]) == set(dialect.observation.fields)


def test_its_shapes_and_dtypes_of_arrays_are_the_dialects(examples: dict[str, dict[str, Any]]) -> None:
    """Every type column that names a shape, read with the sizes of a spec that uses everything."""
    sizes = {"G": SPEC.codebooks, "K": SPEC.codes, "n": SPEC.chunk, "A": SPEC.actions}
    compared = 0
    for kind in MESSAGES:
        for name, said, _ in rows_of(kind):
            found = re.match(r"(distribution|float32|float64|int64|bool) \[([\w, ]+)\]", said)
            if not found:
                continue
            value = examples[kind][name.strip("`")]
            assert value.shape == tuple(sizes[letter] for letter in found[2].split(", ")), name
            assert value.dtype == np.dtype({"distribution": "float64"}.get(found[1], found[1])), name
            compared += 1
            dialect = dialect_of(kind)
            specs = {n: spec for e in dialect.exchanges.values() for n, spec in [*e.request.items(), *e.reply.items()]}
            if name != "`codes`":
                assert specs[name.strip("`")].distribution is (found[1] == "distribution")
    assert compared == 13


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
        "longest `deadline_ms`": MAX_DEADLINE_MS,
        "largest `id`": checks.MAX_ID,
        "dimensions of an array": checks.MAX_DIMENSIONS,
        "dimensions of an observation, without its history": observations.MAX_DIMENSIONS,
        "arrays of an observation": observations.MAX_FIELDS,
        "characters of an observation's name": 64,
        "characters of `instruction`": MAX_INSTRUCTION_CHARS,
        "nesting of `spec`": 6,
        "entries of a msgpack map or list": msgpack._MAX_ENTRIES,
        "nesting of an array field in JSON": checks.MAX_DIMENSIONS,
        "scans of a JPEG": images.MAX_SCANS,
        "bytes of a JPEG until its first scan has begun": images.MAX_HEADER_BYTES,
        "longest history of a spec that a device takes over": chunks.MAX_HISTORY,
        "bytes of observations and of a chunk of such a spec": chunks.MAX_BYTES,
        "seconds of a control period of such a spec, at most": round(1 / chunks.MIN_RATE_HZ),
        "control rate of such a spec [Hz], at most": chunks.MAX_RATE_HZ,
        "characters of `robot`": 64,
        "characters of a token, at least": 16,
        "requests under way per robot; the server then stops reading it; unless set otherwise": defaults.max_under_way,
        "fragments of a WebSocket message": transport._MAX_FRAGMENTS,
        "messages of a connection that wait to be read": transport._MAX_PENDING,
        "bytes of an HTTP head": transport._MAX_HEADER_BYTES,
        "pipelined HTTP requests": transport._MAX_PIPELINED,
        "pings and pongs per second": transport._MAX_CONTROLS_PER_S,
        "seconds until a TLS handshake is over": acceptor._HANDSHAKE_TIMEOUT_S,
        "seconds until an HTTP request, or an opening request, is whole": transport._REQUEST_TIMEOUT_S,
        "seconds until the hello": server_stream._HELLO_TIMEOUT_S,
        "seconds until an HTTP body is there": http._BODY_TIMEOUT_S,
        "seconds an idle HTTP connection is kept": serve._KEEP_ALIVE_S,
        "seconds between pings": serve._PING_S,
        "seconds connections may take to close at the end": serve._CLOSE_TIMEOUT_S,
        "robots with a stream, unless set otherwise": defaults.max_robots,
        "connections that have not shown a token or said hello, unless set otherwise": defaults.max_pending,
        "connections per address, unless set otherwise": defaults.max_per_address,
        "requests in the queue, unless set otherwise": defaults.max_queue,
        "requests in a batch, unless set otherwise": defaults.max_batch,
        "seconds a shutdown waits for what is under way, unless set otherwise": defaults.drain_s,
    }
    assert {row[0]: int(row[1]) for row in tables(section("Limits"))[0]} == known
    # Those that have no name in the code.
    for depth, fits in ((6, True), (7, False)):
        deep = json.loads("[" * depth + "1" + "]" * depth)
        assert checks.is_plain(deep) is fits
    for length, fits in ((64, True), (65, False)):
        assert _accepts(lambda size=length: read_hello(_hello("x" * size))) is fits
    for length, fits in ((16, True), (15, False)):
        assert _accepts(lambda size=length: ServerSettings(token="x" * size)) is fits


def _hello(robot: str) -> dict[str, Any]:
    return {"v": PROTOCOL, "type": "hello", "robot": robot, "family": None, "spec": {}}


def _accepts(make: Any) -> bool:
    try:
        make()
    except SpecactError:
        return False
    return True


SEEN = [
    vectors(3, goal=2, state=7),
    ObservationSpec({"image.front": Field((3, 5, 3), "uint8", 2), "touch": Field((2, 4), history=0)}, True),
    # Large enough that 65536 bytes are not.
    vectors(40, state=700),
    ObservationSpec({"image": Field((96, 96, 3), "uint8", 0)}),
]


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("codes", [3, 90])
def test_its_formula_of_the_message_bound_is_the_code_s(seen: ObservationSpec, sequential: bool, codes: int) -> None:
    spec = PolicySpec(seen, seen, 2, codes, 4, 3, 1, "drop", 0.5, 10.0, sequential)
    [(_, formula)] = example("max_message_bytes")
    families = {family: (x, y) for family, x, y in tables(section("Limits"))[1]}
    assert {name.strip("`") for name in families} == set(DIALECTS)
    frames = {name: seen[name] for name in seen.images}
    cameras = [(field.history or 1, field.shape[0] * field.shape[1]) for field in frames.values()]
    rest = [field for name, field in seen.fields.items() if name not in frames]
    sizes: dict[str, Any] = {
        "G": spec.codebooks, "K": spec.codes, "n": spec.chunk, "A": spec.actions, "S": int(sequential), "max": max,
        "V": sum(int(np.prod(field.window_shape)) for field in rest), "F": sum(count for count, _ in cameras),
        "P": sum(count * pixels for count, pixels in cameras), "N": sum(16 + 12 * len(name) for name in seen.fields),
        "I": int(seen.instruction),
    }  # fmt: skip
    nothing: dict[str, Any] = {"__builtins__": {}}
    for family, dialect in (("codes", of_codes(spec)), ("chunks", of_chunks(seen, spec.chunk, spec.actions))):
        x, y = (eval(text, nothing, sizes) for text in families[f"`{family}`"])
        assert eval(f"({formula})", nothing, sizes | {"X": x, "Y": y}) == max_message_bytes(dialect)


def test_its_worked_array_is_what_is_sent() -> None:
    """Once with the codec, and once by hand from the table above it."""
    [(_, dump)] = example("array")
    array = np.array([[1.0, -2.5]], np.float32)
    assert bytes.fromhex(dump) == msgpack.encode({"a": array})
    body = bytes([0, 2, *(1).to_bytes(4, "little"), *(2).to_bytes(4, "little")]) + array.astype("<f4").tobytes()
    fixmap, fixstr, ext8 = b"\x81", b"\xa1a", bytes([0xC7, len(body), 1])
    assert bytes.fromhex(dump) == fixmap + fixstr + ext8 + body


def test_its_worked_request_is_what_is_sent() -> None:
    window = Window({"state": np.array([[0.5, -1.0]], np.float32)})
    request = Request("infer", 7, 100.0, window, StepAddress(3, 0, 12, 40))
    fields = request_fields(request, vectors(1, state=2))
    dumps = dict(example("infer"))
    assert bytes.fromhex(dumps["hex"]) == msgpack.encode(fields)
    assert dumps["json"].strip().encode() == wire_json.encode(fields)


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
    assert [word // 2**11 / 2**53 for word in words] == [*itertools.chain(*json.loads(text))]
    generator = stream(seed, Role.VERIFY, robot=robot, episode=episode, step=step)
    assert generator.random((2, 2)).tolist() == json.loads(text)
    # The wrong variant: the counter as it stands.
    assert philox([seed, 2], [0, step, episode, robot]) != words


def test_its_hello_is_one() -> None:
    assert read_hello(_hello("arm")) == Hello("arm", None, {})
    # One that expects nothing is welcome to everything.
    for dialect in DIALECTS.values():
        check_hello(read_hello(_hello("arm")), dialect)


def test_its_links_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
               for title in re.findall(r"^#+ (.*)$", DOCUMENT, re.MULTILINE)}  # fmt: skip
    assert set(re.findall(r"\]\(#([\w-]+)\)", DOCUMENT)) <= anchors
