"""Other projects' servers and robots, for peers.py: openpi's server class, ADAHI's Flask, and LeRobot's gRPC calls.

Run: python benchmarks/others.py --port PORT --like openpi|flask|grpc [--policy POLICY] [--openpi CHECKOUT]
serves one of them, which peers.py starts as a process.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from server import core

from specact import Pair, load_pair
from specact.bundle.network import open_session
from specact.lab.rollout.load import Robot
from specact.load import load_policy
from specact.observation import ObservationSpec, Window

OPENPI, FLASK, GRPC = "openpi", "flask", "grpc"
# LeRobot's: src/lerobot/async_inference/policy_server.py and transport/services.proto.
GRPC_SERVICE, GRPC_WORKERS = "transport.AsyncInference", 4
Infer = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--like", choices=(OPENPI, FLASK, GRPC), default=OPENPI)
    parser.add_argument("--policy", default="ball", help="ball, the network of its target alone, or a chunk policy")
    parser.add_argument("--openpi", type=Path, help="a checkout of openpi, whose server class is loaded from it")
    options = parser.parse_args()
    infer = outputs_of(load_pair("ball")) if options.policy == "ball" else chunks_of(options.policy)
    if options.like == OPENPI:
        serve_as_openpi(options.openpi, infer, options.port)
    elif options.like == FLASK:
        serve_as_flask(infer, options.port)
    else:
        serve_as_lerobot(infer, load_policy(options.policy).policy.spec.observation, options.port)


def chunks_of(policy: str) -> Infer:
    """A chunk policy as what is behind the servers of others."""
    loaded, rng = load_policy(policy).policy, np.random.default_rng(0)

    shapes = {name: field.window_shape for name, field in loaded.spec.observation.fields.items()}

    def infer(observation: dict[str, Any]) -> dict[str, Any]:
        # Clients send a window of one observation without its first axis, too.
        seen = {name: observation[name].reshape(shape) for name, shape in shapes.items()}
        return {"actions": loaded.infer(Window(seen, observation.get("prompt")), rng)}

    return infer


def serve_as_flask(infer: Infer, port: int) -> None:
    """ADAHI's test bed: JSON over a REST route of Flask, with its own server, a thread for each request."""
    from flask import Flask, request

    app = Flask("peer")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    @app.post("/infer")
    def answer() -> dict[str, Any]:
        seen = {name: np.array(value, np.float32) for name, value in request.get_json().items()}
        return {"actions": infer(seen)["actions"].tolist()}

    app.run("127.0.0.1", port, threaded=True)


def serve_as_lerobot(infer: Infer, spec: ObservationSpec, port: int) -> None:
    """The calls of LeRobot's policy server, with its four threads and an observation kept for each client.

    LeRobot's own keeps one, for one robot, and both messages are pickles there; here they are the bytes of the arrays.
    """
    import grpc

    waiting: dict[str, bytes] = {}

    def observe(messages: Iterator[bytes], context: Any) -> bytes:
        waiting[context.peer()] = b"".join(messages)
        return b""

    def act(_: bytes, context: Any) -> bytes:
        seen, start = {}, 0
        numbers = np.frombuffer(waiting.pop(context.peer()), np.float32)
        for name, field in spec.fields.items():
            size = int(np.prod(field.window_shape))
            seen[name] = numbers[start : start + size].reshape(field.window_shape)
            start += size
        actions: bytes = np.asarray(infer(seen)["actions"], np.float32).tobytes()
        return actions

    handlers = {
        "SendObservations": grpc.stream_unary_rpc_method_handler(observe),
        "GetActions": grpc.unary_unary_rpc_method_handler(act),
    }
    server = grpc.server(ThreadPoolExecutor(GRPC_WORKERS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GRPC_SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def outputs_of(pair: Pair[Any]) -> Infer:
    """Nothing but ``session.run``."""
    assert pair.path is not None
    session = open_session(pair.path / "target.onnx")

    def infer(observation: dict[str, Any]) -> dict[str, Any]:
        logits, offsets = session.run(None, {name: value[None] for name, value in observation.items()})
        return {"logits": logits[0], "offsets": offsets[0]}

    return infer


def serve_as_openpi(checkout: Path, infer: Infer, port: int) -> None:
    """Runs openpi's server class."""
    sys.path.insert(0, str(checkout / "packages" / "openpi-client" / "src"))
    path = checkout / "src" / "openpi" / "serving" / "websocket_policy_server.py"
    spec = importlib.util.spec_from_file_location("websocket_policy_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logging.disable(logging.INFO)
    module.WebsocketPolicyServer(SimpleNamespace(infer=infer), host="127.0.0.1", port=port).serve_forever()


def other_server(checkout: Path, policy: str, like: str = OPENPI) -> AbstractContextManager[tuple[int, int]]:
    """One of these servers; see :func:`listening`."""
    words = ["--openpi", str(checkout), "--like", like, "--policy", policy]
    return listening(lambda port: [sys.executable, __file__, *words, "--port", str(port)])


@contextmanager
def listening(command: Callable[[int], list[str]]) -> Iterator[tuple[int, int]]:
    """A server in a process of its own, on the first core; yields its port and the number of the process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    with core(0):
        process = subprocess.Popen(command(port), env={"OMP_NUM_THREADS": "1", **os.environ})
    try:
        until = time.monotonic() + 60.0
        while time.monotonic() < until and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


class HttpRobot(Robot):
    """A connection for each request, as ``requests.post`` makes one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int, requests: list[bytes]) -> None:
        super().__init__(loop)
        self._port, self._requests, self._sent = port, requests, 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def send(self) -> None:
        task = self._loop.create_task(self._post(self._requests[self._sent % len(self._requests)]))
        self._sent += 1
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, request: bytes) -> None:
        try:
            await self._loop.create_connection(lambda: Post(request, self.answered), "127.0.0.1", self._port)
        except OSError:
            self.answered(0)

    def hang_up(self) -> None:
        """There is nothing to hang up between two requests."""


class Post(asyncio.Protocol):
    """One request. It hangs up once the reply is whole: Flask's server would wait some time for that."""

    def __init__(self, request: bytes, answered: Callable[[int], None]) -> None:
        self._request, self._take, self._reply, self._whole = request, answered, bytearray(), False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._reply += data
        head, _, body = self._reply.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if length is not None and len(body) >= int(length[1]):
            self._whole = True
            self._transport.close()
            self._take(int(b"actions" in body))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._whole:
            self._take(0)


def json_request(seen: dict[str, np.ndarray]) -> bytes:
    body = json.dumps({name: value.tolist() for name, value in seen.items()}).encode()
    head = "POST /infer HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class GrpcRobot(Robot):
    """A channel of its own; a step is SendObservations and then GetActions, as LeRobot's client calls them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int, requests: list[bytes]) -> None:
        super().__init__(loop)
        import grpc.aio

        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._observe = self._channel.stream_unary(f"/{GRPC_SERVICE}/SendObservations")
        self._get = self._channel.unary_unary(f"/{GRPC_SERVICE}/GetActions")
        self._requests, self._sent = requests, 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def send(self) -> None:
        self._later(self._exchange(self._requests[self._sent % len(self._requests)]))
        self._sent += 1

    async def _exchange(self, observation: bytes) -> None:
        await self._observe(iter([observation]))
        self.answered(int(bool(await self._get(b""))))

    def hang_up(self) -> None:
        self._later(self._channel.close(None))

    def _later(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work, loop=self._loop)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


if __name__ == "__main__":
    main()
