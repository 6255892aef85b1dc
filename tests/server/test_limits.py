"""What one peer can make a server do is bounded: frames, messages, connections, memory, and what others notice."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.children import wait_for
from tests.server.conftest import HERE, Doubling, Here, Process, Robot, state
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame

from specact import Pair
from specact.errors import WireError
from specact.load import load_exchange
from specact.server import Limits
from specact.wire import openpi
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Kind, Request
from specact.wire.messages import PATH, PROTOCOL, Hello, Reply, ask, encode, read_reply


class AnyFrame(Frame):
    """A frame that may break the rules."""

    def check(self) -> None:
        pass


def frame(opcode: int, payload: bytes = b"", fin: bool = True, mask: bool = True) -> bytes:
    """A frame as a client sends it, or one that none may send."""
    return AnyFrame(opcode, payload, fin).serialize(mask=mask)  # type: ignore[arg-type]


def question(server: Here, number: int = 1) -> bytes:
    return encode(ask(Request(state(1.0), HERE), server.contract, "infer", number, 60_000.0))


def end_of(robot: Robot) -> int | None:
    """The code of the close frame that the server sends, after any messages; None if there is none."""
    try:
        while True:
            robot.connection.recv(timeout=60)
    except ConnectionClosed as closing:
        return None if closing.rcvd is None else int(closing.rcvd.code)


BROKEN = {
    "a fragment of nothing": frame(0x0, b"x"),
    "a message in a message": frame(0x2, b"x", fin=False) + frame(0x2, b"y"),
    "a ping in fragments": frame(0x9, b"x", fin=False),
    "a long ping": frame(0x9, bytes(126)),
    "an opcode of no meaning": frame(0x3, b"x"),
    "no mask": frame(0x2, b"xx", mask=False),
    "a close frame of one byte": frame(0x8, b"x"),
    "a close code that is none": frame(0x8, struct.pack(">H", 1005)),
    "text": frame(0x1, b"\xff"),
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
def test_broken_frames_end_the_connection_and_no_other(sent: bytes, doubling: Here) -> None:
    with doubling.robot() as witness, doubling.robot() as robot:
        robot.connection.socket.sendall(sent)
        assert end_of(robot) in (1002, 1007, 1008)
        assert witness.ask(1, state(1.0))["x"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("pieces", [2, 7])
def test_a_message_may_come_in_fragments_with_pings_between(pieces: int, doubling: Here) -> None:
    payload = question(doubling)
    size = -(-len(payload) // pieces)
    parts = [payload[start : start + size] for start in range(0, len(payload), size)]
    with doubling.robot() as robot:
        for number, part in enumerate(parts):
            robot.connection.socket.sendall(
                frame(0x0 if number else 0x2, part, number == len(parts) - 1) + frame(0x9, b"?")
            )
        assert robot.receive().id == 1


FLOODS = {
    "pings": frame(0x9, b"x") * 1000, "pongs": frame(0xA) * 1000,
    "fragments": frame(0x2, b"x", fin=False) + frame(0x0, b"x", fin=False) * 1000,
    "empty fragments": frame(0x2, b"", fin=False) + frame(0x0, b"", fin=False) * 5000,
    "a long message": frame(0x2, bytes(60_000), fin=False) + frame(0x0, bytes(60_000), fin=False) * 3,
    "messages that are none": frame(0x2, b"\xc1") * 1000, "requests without waiting": b"",
}  # fmt: skip


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_ends_its_connection_and_others_are_answered(kind: str, doubling: Here) -> None:
    chunk, ended = FLOODS[kind] or frame(0x2, question(doubling)) * 200, False
    with doubling.robot() as witness, doubling.robot() as robot:
        robot.connection.socket.settimeout(60)
        try:
            for _ in range(2000):
                robot.connection.socket.sendall(chunk)
                witness.ask(1, state(1.0))
        except OSError:
            ended = True
        assert ended or end_of(robot) is not None
    wait_for(lambda: not doubling.status()["robots"], "both are gone")


def test_an_announced_size_is_refused_before_it_is_there(doubling: Here) -> None:
    with doubling.robot() as robot:
        robot.connection.socket.sendall(struct.pack(">BBQ4x", 0x82, 0x80 | 127, 1 << 40))
        assert end_of(robot) == 1009


def test_a_message_of_the_largest_size_is_read_and_one_byte_more_is_not(doubling: Here) -> None:
    with doubling.connect() as robot:
        limit = robot.hello().max_message_bytes
        robot.connection.send(bytes(limit))
        assert robot.failure().code == "bad_message"
    with doubling.robot() as robot:
        robot.connection.send(bytes(limit + 1))
        assert end_of(robot) == 1009


def test_many_messages_in_one_read_are_handled_in_turns_and_in_order() -> None:
    with Here(Doubling(), Limits(max_under_way=64)) as server, server.robot() as robot:
        robot.connection.socket.sendall(b"".join(frame(0x2, question(server, number)) for number in range(50)))
        assert [robot.receive().id for _ in range(50)] == list(range(50))


class Talkative(Doubling):
    """Its replies have a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        reply = Layout({"x": ArraySpec((250_000,), np.float32)})
        self.contract = dataclasses.replace(self.contract, kinds={"infer": Kind(Layout({}), reply)})

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        return [{"x": np.zeros(250_000, np.float32)} for _ in requests]


def test_who_does_not_read_is_not_answered_without_end() -> None:
    head = f"GET {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with Here(Talkative()) as server, server.robot() as witness, server.raw() as side:
        side.sendall(head.encode() + frame(0x2, encode(Hello(PROTOCOL, "silent"))))
        side.sendall(b"".join(frame(0x2, question(server, number)) for number in range(60)))
        for number in range(100):
            witness.ask(number, state(1.0))
        # What the system's buffers hold, and a few more; the rest of its requests wait.
        assert len(server.exchange.batches) - 100 < 50


def test_half_open_handshakes_and_slow_heads_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specact.server.serve.HELLO_TIMEOUT_S", 0.1)
    with Here(Doubling()) as server:
        sides = [server.raw() for _ in range(20)]
        for side in sides[10:]:
            side.sendall(f"GET {PATH} HTTP/1.1\r\nHost: x\r\n".encode())
        for side in sides:
            side.settimeout(60)
            assert side.recv(1) == b""
            side.close()
        with server.robot() as robot:
            robot.ask(1, state(1.0))


MALFORMED = [
    b"\x16\x03\x01\x02\x00" + bytes(300), b"GET / HTTP/1.0\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n", b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    f"GET {PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n".encode(),
]  # fmt: skip


@pytest.mark.parametrize("sent", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_requests_are_refused_and_closed(sent: bytes, doubling: Here) -> None:
    with doubling.raw() as side:
        side.settimeout(60)
        answer = b""
        try:
            side.sendall(sent)
            while data := side.recv(65536):
                answer += data
        except ConnectionError:
            pass
        assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))
    assert doubling.http("/healthz")[0] == 200


def test_who_proves_nothing_makes_room_for_others() -> None:
    with Here(Doubling(), Limits(max_robots=5)) as server, server.robot() as robot, ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(12)]
        with server.robot() as other:
            other.ask(1, state(1.0))
        robot.ask(1, state(1.0))
        assert idle[0].failure().code == "overloaded"


def senseless(rng: random.Random, valid: bytes) -> bytes | str:
    """A message that is hardly ever valid."""
    place, changed = rng.randrange(len(valid)), bytearray(valid)
    for _ in range(rng.randrange(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    nested: Any = rng.choice([None, -1, 1e300, "x", [], {}])
    for _ in range(rng.randrange(6)):
        nested = {rng.choice(["state", "observation", "prompt", "endpoint", "__ndarray__", "nd", 3]): nested}
    kinds: list[bytes | str] = [
        rng.randbytes(rng.randrange(200)), valid[:place], bytes(changed), msgspec.msgpack.encode(nested),
        valid[:place] + rng.randbytes(rng.randrange(1, 20)) + valid[place:], "text \u0416",
        bytes([rng.choice((0x81, 0x91, 0xDE, 0xDF, 0xDC, 0xC7, 0xD4))]) * rng.randrange(1, 3000),
    ]  # fmt: skip
    return rng.choice(kinds)


@pytest.mark.parametrize("path", [PATH, "/"])
def test_whatever_is_sent_has_a_typed_answer_or_ends_its_connection(path: str) -> None:
    rng = random.Random(0)
    with Here(load_exchange("ball-chase-flow")) as server, server.robot() as witness:
        window = server.contract.observation.zeros()
        request = encode(ask(Request(window, HERE), server.contract, "infer", 1, 60_000.0))
        valid = request if path == PATH else openpi.encode({"observation/state": window["state"][0]})
        for number in range(300):
            with server.connect(path) as robot:
                if path == PATH:
                    robot.hello()
                else:
                    robot.connection.recv(timeout=60)
                robot.connection.send(senseless(rng, valid))
                try:
                    answer = robot.connection.recv(timeout=60)
                    assert b"Traceback" not in (answer.encode() if isinstance(answer, str) else answer)
                    if path == PATH:
                        reply = read_reply(answer)
                        assert isinstance(reply, Reply) or reply.code != "internal"
                except ConnectionClosed as closing:
                    assert closing.rcvd is not None and closing.rcvd.code in (1002, 1007, 1008, 1009)
            if number % 50 == 0:
                assert witness.ask(number, window)["chunk"].shape == (16, 2)


def memory_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def test_connections_and_bad_messages_that_come_and_go_cost_no_memory(ball: Pair[Any]) -> None:
    with Process(ball.exchange.contract, "ball") as server:

        def visit(count: int) -> None:
            for number in range(count):
                with server.robot() as robot:
                    robot.connection.send(b"\xc1" * (number % 1000 + 1))
                    robot.failure()

        visit(50)
        before = memory_kb(server.pid)
        visit(200)
        assert memory_kb(server.pid) - before < 4_000
        assert "Traceback" not in server.output
