"""What one peer can make a server do is bounded: frames, messages, connections, memory, and what others notice."""

from __future__ import annotations

import dataclasses
import random
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.children import wait_for
from tests.serving import (
    HELLO,
    HERE,
    Doubling,
    Here,
    Listening,
    Process,
    frame,
    opening,
    requests,
    state,
)  # fmt: skip

from specact.errors import WireError
from specact.load import load_exchange
from specact.wire import openpi
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Kind, Request
from specact.wire.messages import PATH, ask, encode

BROKEN = {
    "a fragment of nothing": frame(0x0, b"x"),
    "a message in a message": frame(0x2, b"x", fin=False) + frame(0x2, b"y"),
    "a ping in fragments": frame(0x9, b"x", fin=False),
    "a long ping": frame(0x9, bytes(126)),
    "an opcode of no meaning": frame(0x3, b"x"),
    "no mask": b"\x82\x02xx",
    "a close frame of one byte": frame(0x8, b"x"),
    "a close code that is none": frame(0x8, struct.pack(">H", 1005)),
    "text": frame(0x1, b"\xff"),
    "a message that is none": frame(0x2, b"\xc1"),
    "a size that is announced": struct.pack(">BBQ4x", 0x82, 0x80 | 127, 1 << 40),
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
def test_broken_frames_end_the_connection_and_no_other(sent: bytes, doubling: Here) -> None:
    with doubling.robot() as witness, doubling.robot() as robot:
        robot.raw(sent)
        assert robot.end() in (1002, 1007, 1008, 1009)
        assert witness.ask(1, state(1.0))["x"].tolist() == [2.0, 2.0]


MALFORMED = [
    b"\x16\x03\x01\x02\x00" + bytes(300), b"GET / HTTP/1.0\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n", b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    opening(**{"Sec-WebSocket-Key": ""}),
]  # fmt: skip


@pytest.mark.parametrize("sent", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_requests_are_refused_and_closed(sent: bytes, doubling: Here) -> None:
    answer = b""
    with doubling.side() as side, suppress(ConnectionError):
        side.sendall(sent)
        while data := side.recv(65536):
            answer += data
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))
    assert doubling.http("/healthz")[0] == 200


@pytest.mark.parametrize("pieces", [2, 7])
def test_a_message_may_come_in_fragments_with_pings_between(pieces: int, doubling: Here) -> None:
    payload = encode(ask(Request(state(1.0), HERE), doubling.contract, "infer", 1, 60_000.0))
    size = -(-len(payload) // pieces)
    parts = [payload[start : start + size] for start in range(0, len(payload), size)]
    with doubling.robot() as robot:
        for number, part in enumerate(parts):
            robot.raw(frame(0x0 if number else 0x2, part, number == len(parts) - 1) + frame(0x9, b"?"))
        assert robot.receive().id == 1


FLOODS = {
    "pings": frame(0x9, b"x") * 1000, "pongs": frame(0xA) * 1000,
    "fragments": frame(0x2, b"x", fin=False) + frame(0x0, b"x", fin=False) * 1000,
    "empty fragments": frame(0x2, b"", fin=False) + frame(0x0, b"", fin=False) * 5_000_000,
    "a long message": frame(0x2, bytes(60_000), fin=False) + frame(0x0, bytes(60_000), fin=False) * 500,
    "messages that are none": frame(0x2, b"\xc1") * 1000,
}  # fmt: skip


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_ends_its_connection_and_others_are_answered(flood: bytes, doubling: Here) -> None:
    with doubling.robot() as witness, doubling.crowd(1, flood) as sent:
        wait_for(lambda: len(sent) > 1, "it came again", lambda: witness.ask(1, state(1.0)))
        assert sent[0] < 24 << 20
    wait_for(lambda: not doubling.status()["robots"], "both are gone")


def test_a_message_of_the_largest_size_is_read_and_one_byte_more_is_not(doubling: Here) -> None:
    with doubling.connect() as robot:
        limit = robot.hello().max_message_bytes
        robot.connection.send(bytes(limit))
        assert robot.receive().code == "bad_message"
    with doubling.robot() as robot:
        robot.connection.send(bytes(limit + 1))
        assert robot.end() == 1009


class Talkative(Doubling):
    """Its replies have a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        reply = Layout({"x": ArraySpec((250_000,), np.float32)})
        self.contract = dataclasses.replace(self.contract, kinds={"infer": Kind(Layout({}), reply)})

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        return [{"x": np.zeros(250_000, np.float32)} for _ in super().answer(kind, requests)]


def test_who_does_not_read_is_not_answered_without_end() -> None:
    with Here(Talkative()) as server, server.robot() as witness, server.side() as silent:
        silent.sendall(opening() + HELLO)
        silent.sendall(requests(server.contract, state(2.0), 60))
        for number in range(100):
            witness.ask(number, state(1.0))
        # What the system's buffers hold, and a few more; the rest of its requests wait.
        assert server.exchange.batches.count([2.0]) < 50


HALF = (b"", opening()[:60], b"GET /healthz HTTP/1.1\r\n", opening())


def test_half_open_handshakes_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("serve", "session"):
        monkeypatch.setattr(f"specact.server.{module}.HELLO_TIMEOUT_S", 0.1)
    with Here(load_exchange("ball-chase-flow")) as server:
        sides = [server.side() for _ in range(20)]
        for number, side in enumerate(sides):
            side.sendall(HALF[number % len(HALF)])
        for number, side in enumerate(sides):
            data = b"?"
            while data and b"no hello" not in data:
                data = side.recv(4096)
            assert (b"no hello" in data) == (number % len(HALF) >= 3)
            side.close()
        with server.robot() as robot:
            robot.ask(1, server.contract.observation.zeros())


EDGES = (
    b"\xc0", b"\xc1", b"\xcb\x7f\xf0" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\x91" * 2000, b"\xa5infer", b"\xd9\xff", b"\xc7\x08\x01", b"\x80", b"\xff",
)  # fmt: skip


def mutated(rng: random.Random, valid: bytes) -> bytes:
    """A message with a few bytes changed, lost, doubled or put in; often still a valid one."""
    data = bytearray(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        place, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 40))
        put = rng.choice((b"", rng.randbytes(size), rng.choice(EDGES), data[place : place + size] * 2))
        data[place : place + rng.choice((0, size))] = put
    return bytes(data[:60_000])


def visit(server: Listening, path: str, valid: Sequence[bytes], rng: random.Random) -> socket.socket:
    """A connection that says hello, sends 50 frames, most of them mutated, and nothing more."""
    side, sent = server.side(), [opening(path)]
    if path == PATH:
        sent.append(mutated(rng, HELLO) if rng.random() < 0.1 else HELLO)
    for _ in range(50):
        payload = rng.choice(valid)
        whole = frame(0x2, mutated(rng, payload) if rng.random() < 0.7 else payload)
        sent.append(whole if rng.random() < 0.99 else mutated(rng, whole[:20]) + whole[20:])
    with suppress(OSError):  # a server that refuses the opening has hung up by now
        side.sendall(b"".join(sent))
        side.shutdown(socket.SHUT_WR)
    return side


def memory_kb(pid: int) -> int:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_whatever_is_sent_the_server_goes_on_and_its_memory_is_bounded(count: int) -> None:
    """So many frames, over connections of both protocols that come and go."""
    contract, rng, warm = load_exchange("ball#target").contract, random.Random(count), 0
    window = contract.observation.zeros()
    plain: dict[str, object] = {f"observation/{name}": array for name, array in window.arrays.items()} | {"prompt": "x"}
    asks = [ask(Request(window, HERE, contract.kinds[kind].request.example()), contract, kind, 1, deadline_ms)
            for kind in contract.kinds for deadline_ms in (0.0, 60_000.0)]  # fmt: skip
    valid = {
        PATH: list(map(encode, asks)),
        "/": [openpi.encode(message) for message in (plain, {"endpoint": "reset"}, plain | {"address": [1, 2, 3, 4]})],
    }
    with Process(contract, "ball#target") as server, server.robot() as witness:
        chunk = witness.ask(0, window)["chunk"].tobytes()
        for number in range(count // 500):
            for side in [visit(server, path, messages, rng) for path, messages in valid.items() for _ in range(5)]:
                with side, suppress(ConnectionError):
                    while side.recv(1 << 20):
                        pass
            assert witness.ask(number, window)["chunk"].tobytes() == chunk
            warm = memory_kb(server.pid) if number == 5 else warm
        assert memory_kb(server.pid) - warm < 40_000
        wait_for(lambda: len(server.status()["robots"]) == 1, "the others are gone")
        outcomes = {outcome for _, outcome in server.outcomes()}
        assert server.stop() == 0 and "Traceback" not in server.output
    assert {"ok", "bad_message", "expired"} <= outcomes and "internal" not in outcomes
