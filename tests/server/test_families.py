"""A server of somebody's own chunk policy, with a camera and instructions, and an old device at its door."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgpack as plain_msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.example_count import example_count

from specact.families.chunks.wire import ChunkCodec, spec_of
from specact.observation import Window
from specact.rng import Role, StepAddress, stream
from specact.wire import json as wire_json
from specact.wire import msgpack
from specact.wire.handshake import Hello, hello_fields, read_welcome
from specact.wire.images import to_jpeg
from specact.wire.messages import Reply, Request, read_reply, request_fields
from specact.wire.sizes import max_message_bytes

if TYPE_CHECKING:
    from tests.server.conftest import Fields, Server

Image = pytest.importorskip("PIL.Image")

# What it says of a window: the mean of each array, the length of the instruction, and a number that it draws.
SEER = """
import numpy as np
from specact.families.chunks.adapters import chunk_policy
from specact.observation import Field

@chunk_policy(
    observation={"state": Field((3,), history=2), "image.front": Field((4, 6, 3), "uint8", 2),
                 "image.wrist": Field((2, 2, 3), "uint8", 0)},
    chunk=3, actions=2, rate_hz=10.0, instruction=True, seeded=True,
)
def seer(seen, instruction, rngs):
    if (seen["state"] == 7.0).any():
        raise RuntimeError("secret inside")
    rows = []
    for row, (text, rng) in enumerate(zip(instruction, rngs)):
        mean = [np.mean(seen[name][row]) for name in ("image.front", "image.wrist")]
        rows.append([[seen["state"][row].sum(), len(text)], mean, [rng.random(), seen["state"][row, 0, 0]]])
    return np.array(rows)
"""


@pytest.fixture(scope="module")
def seer(command: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.server.conftest import Server

    folder = tmp_path_factory.mktemp("seer")
    (folder / "seeing.py").write_text(SEER)
    path = f"{folder}:{environment.get('PYTHONPATH', '')}"
    server = Server(command, {**environment, "PYTHONPATH": path}, folder / "log", ("--policy", "seeing:seer"))
    yield server
    server.end()
    # The one that a test provokes, with its cause, and no other.
    assert server.log.count("Traceback") == server.log.count("RuntimeError: secret inside") <= 2


def window(number: int = 0) -> Window:
    rng = np.random.default_rng(number)
    return Window(
        {
            "state": rng.normal(size=(2, 3)).astype(np.float32),
            "image.front": rng.integers(0, 256, (2, 4, 6, 3)).astype(np.uint8),
            "image.wrist": rng.integers(0, 256, (2, 2, 3)).astype(np.uint8),
        },
        "x" * number,
    )


@pytest.fixture(scope="module")
def codec(seer: Server) -> ChunkCodec:
    """Made of what the server says to a device that expects nothing."""
    with seer.connect() as robot:
        welcome = read_welcome(robot.ask(hello_fields(Hello("curious", None, {}))))
    assert welcome.family == "chunks" and welcome.bundle == "seer"
    made = ChunkCodec(spec_of(welcome.spec))
    assert welcome.max_message_bytes == max_message_bytes(made.dialect)
    return made


@pytest.fixture
def hello(codec: ChunkCodec) -> Fields:
    return hello_fields(Hello("tester", "chunks", codec.dialect.agreed))


def asked(codec: ChunkCodec, number: int, **options: Any) -> Fields:
    request = Request("infer", number, 30_000.0, window(number), StepAddress(1, 2, 3, number))
    return request_fields(request, codec.dialect.observation, **options)


def expected(number: int, seen: Window) -> np.ndarray:
    drawn = stream(1, Role.VERIFY, robot=2, episode=3, step=number).random()
    front, wrist = (np.mean(seen[name]) for name in ("image.front", "image.wrist"))
    state = seen["state"]
    return np.array([[state.sum(), len(seen.instruction or "")], [front, wrist], [drawn, state[0, 0]]], np.float32)


def test_it_sees_what_the_device_sees_over_both_transports(seer: Server, codec: ChunkCodec, hello: Fields) -> None:
    exchange = codec.dialect.exchanges["infer"]
    with seer.stream(hello) as robot:
        for number in (0, 1, 5):
            fields = asked(codec, number)
            posted = seer.http("POST", "/v1/infer", wire_json.encode(fields), **{"Content-Type": "application/json"})
            for answer in (robot.ask(fields), wire_json.decode(posted.body)):
                reply = read_reply(answer, exchange)
                assert isinstance(reply, Reply) and reply.id == number
                np.testing.assert_array_equal(codec.read(reply.arrays), expected(number, window(number)))
        # As JPEG it sees other pixels, and everything else as it is.
        reply = read_reply(robot.ask(asked(codec, 5, jpeg_quality=90)), exchange)
        assert isinstance(reply, Reply)
        chunk, local = codec.read(reply.arrays), expected(5, window(5))
        np.testing.assert_array_equal(chunk[[0, 2]], local[[0, 2]])
        assert 0.0 < np.abs(chunk[1] - local[1]).max() < 30.0


def test_there_is_nothing_to_verify(seer: Server, codec: ChunkCodec, hello: Fields) -> None:
    assert "/v1/verify" not in seer.http("GET", "/openapi.json").fields["paths"]
    missing = seer.http("POST", "/v1/verify", {"v": 2, "type": "verify"})
    assert (missing.status, missing.fields["code"]) == (404, "bad_message")
    with seer.stream(hello) as robot:
        reply = robot.ask(asked(codec, 1) | {"type": "verify"})
    expected = "expected a message of type infer or inpaint, got 'verify'"
    assert (reply["code"], reply["message"]) == ("bad_message", expected)


def test_a_policy_that_fails_says_nothing_of_its_inside_and_goes_on(
    seer: Server, codec: ChunkCodec, hello: Fields
) -> None:
    good = asked(codec, 2)
    seven = good["observation"] | {"state": np.full((2, 3), 7.0, np.float32)}
    with seer.stream(hello) as robot:
        failed = robot.ask(good | {"observation": seven})
        assert (failed["code"], "secret" in failed["message"]) == ("internal", False)
        assert robot.ask(good)["type"] == "chunk"


def jpeg(size: tuple[int, int], kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


FRONT, WRIST = "image.front", "image.wrist"
# Name, what stands there, a word of the refusal; None leaves it out.
SEEN: dict[str, tuple[str, Any, str]] = {
    "no frames": (FRONT, None, "image.front must be an array of uint8 (2, 4, 6, 3) or a list of 2 JPEG files"),
    "frames in float": (FRONT, np.zeros((2, 4, 6, 3), np.float32), "image.front must be an array of uint8"),
    "one frame of two": (FRONT, np.zeros((1, 4, 6, 3), np.uint8), "image.front must be an array of uint8"),
    "a frame without its history": (FRONT, np.zeros((4, 6, 3), np.uint8), "image.front must be an array of uint8"),
    "a single frame with a history": (WRIST, np.zeros((1, 2, 2, 3), np.uint8), "image.wrist must be an array"),
    "no JPEG": (FRONT, [], "a list of 2 JPEG files"),
    "one JPEG for two": (FRONT, [jpeg((6, 4))], "a list of 2 JPEG files"),
    "three JPEGs for two": (FRONT, [jpeg((6, 4))] * 3, "a list of 2 JPEG files"),
    "two JPEGs for one": (WRIST, [jpeg((2, 2))] * 2, "image.wrist must be an array of uint8 (2, 2, 3) or a list of 1"),
    "a JPEG outside of a list": (WRIST, jpeg((2, 2)), "a list of 1 JPEG files"),
    "an array among JPEGs": (FRONT, [jpeg((6, 4)), np.zeros((4, 6, 3), np.uint8)], "a list of 2 JPEG files"),
    "JPEGs in a map": (FRONT, {"0": jpeg((6, 4)), "1": jpeg((6, 4))}, "a list of 2 JPEG files"),
    "a JPEG of another size": (FRONT, [jpeg((6, 4)), jpeg((4, 6))], "must be a JPEG of (6, 4) pixels, got (4, 6)"),
    "a PNG": (FRONT, [jpeg((6, 4), "PNG")] * 2, "image.front is not a readable JPEG"),
    "half a JPEG": (WRIST, [jpeg((2, 2))[:200]], "image.wrist is not a readable JPEG"),
    "a JPEG of 65 scans": (FRONT, [jpeg((6, 4)) + b"\xff\xda" * 64] * 2, "must be a JPEG of at most 64 scans, got 65"),
    "no instruction": ("instruction", None, "instruction must be text of at most 1000 characters"),
    "a long instruction": ("instruction", "x" * 1001, "instruction must be text of at most 1000 characters"),
    "an instruction of bytes": ("instruction", b"go", "instruction must be text of at most 1000 characters"),
}


@pytest.mark.parametrize(("name", "value", "word"), SEEN.values(), ids=SEEN.keys())
def test_frames_and_instructions_that_are_none_are_refused_by_name(
    name: str, value: Any, word: str, seer: Server, codec: ChunkCodec, hello: Fields
) -> None:
    fields = asked(codec, 3)
    place = fields if name == "instruction" else fields["observation"]
    place[name] = value
    if value is None:
        del place[name]
    with seer.stream(hello) as robot:
        reply = robot.ask(fields)
        assert (reply["type"], reply.get("code"), reply["id"]) == ("error", "bad_message", 3)
        assert word in reply["message"]
        assert robot.ask(asked(codec, 3))["type"] == "chunk"


WHOLE = to_jpeg(window()["image.front"], 90)
FILES = st.lists(
    st.sampled_from([*WHOLE, jpeg((2, 2)), b""])
    | st.binary(max_size=30)
    | st.tuples(st.sampled_from(WHOLE), st.integers(0, 400), st.binary(max_size=8)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + len(parts[2]) :]
    ),
    max_size=3,
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, max_side=6)
PIXELS: st.SearchStrategy[Any] = st.one_of([hnp.arrays(np.dtype(kind), SHAPES) for kind in ("u1", "f4", "i8")])


@pytest.mark.hypothesis
def test_whatever_frames_come_there_is_one_answer_and_it_is_typed(
    seer: Server, codec: ChunkCodec, hello: Fields
) -> None:
    kinds: Counter[str] = Counter()
    good = asked(codec, 4)
    with seer.stream(hello) as robot:

        @settings(example_count(200), phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
        @given(name=st.sampled_from([FRONT, WRIST]), frames=FILES | PIXELS)
        def check(name: str, frames: Any) -> None:
            reply = robot.ask(good | {"observation": good["observation"] | {name: frames}})
            kinds[reply["type"]] += 1
            assert reply["type"] == "chunk" or reply["code"] == "bad_message"

        check()
    assert kinds["error"] > 50
    assert seer.process.poll() is None


# A device of protocol 1, byte for byte as it spoke: its own encoding, and arrays beside everything else.


def old(fields: Fields) -> bytes:
    return bytes(plain_msgpack.packb(fields))


OLD_SPEC = {"window": 1, "state": 8, "goal": 2, "image": None, "codebooks": 2, "codes": 16, "chunk": 5, "actions": 2,
            "temperature": 1.0, "sequential": False}  # fmt: skip
OLD_HELLO = {"v": 1, "type": "hello", "robot": "old arm", "tokenizer": "164f97c407035f60", "spec": OLD_SPEC}
OLD_INFER = {"v": 1, "type": "infer", "id": 4, "deadline_ms": 100.0, "state": [[0.0] * 8], "goal": [0.0, 0.0]}
ADVICE = "this side uses protocol 2, but the message says 1; install the same version of specact on both"


def test_a_device_of_protocol_1_is_told_in_a_sentence_it_can_read_and_does_not_hang(server: Server) -> None:
    with server.connect() as robot:
        robot.send(old(OLD_HELLO))
        # What it looked at in an error: type, code and message, whatever the version.
        refusal = plain_msgpack.unpackb(robot.connection.recv(timeout=30.0))
        assert (refusal["type"], refusal["code"], refusal["message"]) == ("error", "unsupported_protocol", ADVICE)
        assert robot.closed() == 1008


@pytest.mark.parametrize("kind", ["hello", "infer", "verify"])
def test_over_http_a_device_of_protocol_1_is_told_the_same(kind: str, server: Server) -> None:
    fields = OLD_HELLO if kind == "hello" else OLD_INFER | {"type": kind}
    answer = server.http("POST", f"/v1/{kind}", json.dumps(fields).encode(), **{"Content-Type": "application/json"})
    assert (answer.status, answer.fields["code"]) == (400, "unsupported_protocol")
    assert answer.fields["message"] == ADVICE
    assert answer.fields["id"] == fields.get("id")


def test_a_request_of_protocol_1_after_a_hello_of_ours_is_told_the_same(seer: Server, hello: Fields) -> None:
    with seer.stream(hello) as robot:
        reply = msgpack.decode(_sent(robot, old(OLD_INFER)))
        assert (reply["id"], reply["code"], reply["message"]) == (4, "unsupported_protocol", ADVICE)


def _sent(robot: Any, payload: bytes) -> bytes:
    robot.send(payload)
    return bytes(robot.connection.recv(timeout=30.0))
