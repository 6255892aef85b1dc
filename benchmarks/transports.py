"""Libraries for a WebSocket, as server and as the client of a device, in turn in every round.

Each server answers with what it was sent, or with the outputs of ball's target, one request at a time, unchecked.

Run: python benchmarks/transports.py [--rounds N] [--seconds S] [--steps N] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from others import listening, outputs_of
from peers import in_turn, short, timed_in_rounds
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect, ws_create_server
from server import core
from websockets.asyncio.server import ServerConnection, serve
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol
from websockets.sync.client import connect
from websockets.uri import parse_uri

from specact import load_pair
from specact.lab.rollout.load import Workload, run_load

SERVERS = ("picows, uvloop", "websockets, uvloop", "websockets, asyncio", "websockets sans-IO, uvloop")
WORK, ROBOTS = ("echo", "network"), (1, 16, 64)
# Floats of the target's observation, by name.
SHAPES = {name: field.window_shape for name, field in load_pair("ball").parts.spec.target.fields.items()}
MESSAGE = bytes(4 * sum(int(np.prod(shape)) for shape in SHAPES.values()))
Answer = Callable[[bytes], bytes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=3, metavar=("SERVER", "WORK", "PORT"), help="what its child processes do")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.serve:
        server, work, port = options.serve
        logging.disable()  # robots hang up without a word
        (uvloop.run if "uvloop" in server else asyncio.run)(serve_with(server, answer_of(work), int(port)))
        return
    measured: dict[str, Any] = {work: {} for work in WORK}
    with ExitStack() as stack, core(1):
        places = {}
        for place in ((work, server) for work in WORK for server in SERVERS):
            words = [sys.executable, __file__, "--serve", *reversed(place)]
            places[place] = stack.enter_context(listening(lambda port, words=words: [*words, str(port)]))[0]
        for turn in range(options.rounds):
            for robots in ROBOTS:
                for (work, server), port in in_turn(places, turn):
                    load = run_load(port, Workload("/", None, [MESSAGE], bool), robots, options.seconds, None)
                    rows = measured[work].setdefault(server, {}).setdefault(str(robots), [])
                    rows.append(short(load.summary()["steps_per_s"]))
            print(
                turn,
                {work: {name: rounds["16"][-1] for name, rounds in measured[work].items()} for work in WORK},
                flush=True,
            )
        clients = clients_of(places["echo", SERVERS[0]], stack)
        measured["clients"] = timed_in_rounds(clients, options.rounds, options.steps)
    print(measured["clients"])
    if options.out is not None:
        options.out.write_text(json.dumps(measured, indent=1) + "\n")


def answer_of(work: str) -> Answer:
    if work == "echo":
        return lambda message: message
    infer = outputs_of(load_pair("ball"))

    def answer(message: bytes) -> bytes:
        numbers, seen = np.frombuffer(message, np.float32), {}
        for name, shape in SHAPES.items():
            seen[name], numbers = numbers[: int(np.prod(shape))].reshape(shape), numbers[int(np.prod(shape)) :]
        return b"".join(value.tobytes() for value in infer(seen).values())

    return answer


async def serve_with(server: str, answer: Answer, port: int) -> None:
    """Serves until it is killed; the first message is the server's."""
    if server.startswith("picows"):
        await (await ws_create_server(lambda _: Picows(answer), "127.0.0.1", port)).serve_forever()
    elif "sans-IO" in server:
        loop = asyncio.get_running_loop()
        await (await loop.create_server(lambda: SansIo(answer), "127.0.0.1", port)).serve_forever()

    async def handle(connection: ServerConnection) -> None:
        await connection.send(b"welcome")
        async for message in connection:
            await connection.send(answer(bytes(message)))  # type: ignore[arg-type]

    async with serve(handle, "127.0.0.1", port, compression=None) as made:
        await made.serve_forever()


class Picows(WSListener):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def on_ws_connected(self, transport: WSTransport) -> None:
        transport.send(WSMsgType.BINARY, b"welcome")

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        transport.send(WSMsgType.BINARY, self._answer(frame.get_payload_as_bytes()))


class SansIo(asyncio.Protocol):
    def __init__(self, answer: Answer) -> None:
        self._answer, self._protocol = answer, ServerProtocol()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        protocol = self._protocol
        protocol.receive_data(data)
        for event in protocol.events_received():
            if not isinstance(event, Frame):
                protocol.send_response(protocol.accept(event))  # type: ignore[arg-type]
                protocol.send_binary(b"welcome")
            elif event.opcode is Opcode.BINARY:
                protocol.send_binary(self._answer(bytes(event.data)))
        self._transport.write(b"".join(protocol.data_to_send()))


def clients_of(port: int, stack: ExitStack) -> dict[str, Callable[[], object]]:
    """One request and its reply, with each library."""
    url = f"ws://127.0.0.1:{port}/"
    sync = stack.enter_context(connect(url, compression=None))
    raw, protocol = stack.enter_context(socket.create_connection(("127.0.0.1", port))), ClientProtocol(parse_uri(url))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    loop, replies = uvloop.new_event_loop(), list[asyncio.Future[None]]()
    stack.callback(loop.close)

    class Listener(WSListener):
        def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
            if replies:
                replies.pop().set_result(None)

    replies.append(loop.create_future())
    welcome = replies[0]
    transport, _ = loop.run_until_complete(ws_connect(Listener, url))
    loop.run_until_complete(welcome)
    sync.recv()

    def with_sync() -> None:
        sync.send(MESSAGE)
        sync.recv()

    def sans_io() -> None:
        protocol.send_binary(MESSAGE)
        exchange()

    def exchange() -> None:
        raw.sendall(b"".join(protocol.data_to_send()))
        while not any(isinstance(event, Frame) for event in protocol.events_received()):
            protocol.receive_data(raw.recv(8192))

    def with_picows() -> None:
        replies.append(loop.create_future())
        transport.send(WSMsgType.BINARY, MESSAGE)
        loop.run_until_complete(replies[0])

    protocol.send_request(protocol.connect())
    exchange()
    return {"websockets, blocking": with_sync, "websockets sans-IO": sans_io, "picows, uvloop": with_picows}


if __name__ == "__main__":
    main()
