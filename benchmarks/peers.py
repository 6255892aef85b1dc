"""This package's servers and clients compared with other projects', with the same network behind each.

``--parts throughput,paced,device``: the ball pair's target. openpi's server answers with its outputs as they are; ours
checks the request, makes distributions of them and keeps its books. Both are asked by the same load generator, in turn.

``--parts peers``: all answer with chunks of actions of one policy: ours on its own stream and at its endpoint of
openpi's protocol, openpi's server class, JSON over HTTP with Flask as in ADAHI's test bed, and gRPC with the calls of
LeRobot's policy server. In turn 1, 16, 64 and 256 robots ask as fast as they can, then at 20 Hz.

Run: python benchmarks/peers.py --openpi CHECKOUT [--rounds N] [--seconds S] [--steps N] [--parts PARTS]

CHECKOUT is a checkout of https://github.com/Physical-Intelligence/openpi: its server class and its client are loaded
from there. The part peers also needs: pip install flask grpcio requests. The results are kept for
the report: python -m experiments speed page.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from others import FLASK, GRPC, GRPC_SERVICE, OPENPI, GrpcRobot, HttpRobot, json_request, other_server
from server import Load, Robot, Workload, run_load, run_robots, workload_of

from specact import Pair, SpeculativePolicy, connect, load_pair
from specact.families.chunks.policy import chunk_contract
from specact.gates import Always
from specact.lab.rollout.processes import ServerProcess, serving
from specact.load import load_policy
from specact.observation import ObservationSpec, Window
from specact.remote import Client, Endpoint, RemoteTarget, remote_verifier
from specact.rng import StepAddress
from specact.wire import openpi

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "experiments" / "speed" / "results" / "peers.json"
ROBOTS, PACED = (1, 16, 64), (60, 120, 170, 240, 340)
RATE_HZ, WITHIN_MS = 20.0, 50.0
OURS, ENDPOINT, THEIRS = "specact", "endpoint", OPENPI
POLICIES, PEER_ROBOTS, ROWS = ("ball#target", "relocate-tokens", "ball-chase-flow"), (1, 16, 64, 256), (1, 16, 64)
NEEDED = ("flask", "grpcio", "requests", "websockets")
Call = Callable[[], object]
# Asks a server with so many robots, for so many seconds, at a rate of all together or as fast as they can.
Ask = Callable[[int, float, float | None], Load]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--openpi", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parts", default="throughput,paced,device")
    parser.add_argument("--policy", default="", help="of the part peers, instead of all")
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.openpi / "packages" / "openpi-client" / "src"))
    pair = load_pair("ball")
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if "peers" in asked.parts:
        try:
            versions = {name: importlib.metadata.version(name) for name in NEEDED}
        except importlib.metadata.PackageNotFoundError as error:
            parser.error(f"the part peers needs {error.name}; install it: pip install {' '.join(NEEDED)}")
        measured = {policy: peers(asked, policy) for policy in [asked.policy] if policy} or {
            policy: peers(asked, policy) for policy in POLICIES
        }
        found["peers"] = {**found.get("peers", {}), **measured, "versions": versions}
    if {"throughput", "paced", "device"} & set(asked.parts.split(",")):
        whole_requests(asked, pair, found)
    # A list of numbers is one line.
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(found, indent=1))
    KEPT.write_text(text + "\n")
    print("next: python -m experiments speed page")


def whole_requests(asked: argparse.Namespace, pair: Pair[Any], found: dict[str, Any]) -> None:
    """Distributions beside the network's outputs."""
    found |= {"rounds": asked.rounds, "seconds": asked.seconds, "steps": asked.steps}
    with serving("ball") as ours, other_server(asked.openpi) as (port, _):
        sides = {OURS: (ours.port, workload_of(pair.exchange.contract)), THEIRS: (port, openpi_speech(pair))}
        if "throughput" in asked.parts:
            found["throughput"] = throughput(sides, asked.rounds, asked.seconds)
        if "paced" in asked.parts:
            found["paced"] = paced(sides, asked.rounds, asked.seconds)
        if "device" in asked.parts:
            found["device"] = device(pair, ours.port, port, asked.rounds, asked.steps)


def peers(asked: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Every measurement of each round, by pace, number of robots and side; and of each side's client on the device."""
    spec = load_policy(policy).policy.spec
    seen = observations(spec.observation, 64)
    found: dict[str, Any] = {"rounds": asked.rounds, "seconds": asked.seconds, "load": os.getloadavg()[1]}
    found |= {"rows": rows(policy, seen, asked.rounds), "hot": {}, "20 Hz": {}}
    with ExitStack() as stack:
        ours = stack.enter_context(ServerProcess(["serve", "--policy", policy, "--port", "0"]))
        others = {like: stack.enter_context(other_server(asked.openpi, policy, like)) for like in (THEIRS, FLASK, GRPC)}
        ports = {OURS: ours.port, ENDPOINT: ours.port, **{like: port for like, (port, _) in others.items()}}
        processes = {OURS: ours.pid, ENDPOINT: ours.pid, **{like: pid for like, (_, pid) in others.items()}}
        sides = askers(ports, spec, seen)
        for ask in sides.values():
            ask(16, asked.seconds, None)  # warms up
        for turn in range(asked.rounds):
            for robots in PEER_ROBOTS:
                for pace, seconds, offered in (("hot", asked.seconds, None), ("20 Hz", 1.0, RATE_HZ * robots)):
                    for name, ask in in_turn(sides, turn):
                        before = processor_s(processes[name])
                        load = ask(robots, seconds, offered)
                        of_side = found[pace].setdefault(str(robots), {}).setdefault(name, {})
                        for figure, value in measured(load, processor_s(processes[name]) - before, seconds).items():
                            of_side.setdefault(figure, []).append(round(value, 4))
        found["device"] = clients(ports, seen, asked.rounds, asked.steps)
    return found


def rows(policy: str, seen: list[dict[str, np.ndarray]], rounds: int) -> dict[str, list[float]]:
    """Processor time [ms] of the policy for one chunk, by the size of the batch: what no server can do without."""
    loaded, found = load_policy(policy).policy, dict[str, list[float]]()
    for turn in range(rounds + 1):
        for size in ROWS:
            windows = [Window(one) for one in seen[:size]]
            before, times = time.process_time(), max(1, 64 // size)
            for _ in range(times):
                loaded.infer_batch(windows, [np.random.default_rng(row) for row in range(size)])
            if turn:
                spent = 1e3 * (time.process_time() - before) / (size * times)
                found.setdefault(str(size), []).append(spent)
    return found


def measured(load: Load, server_s: float, seconds: float) -> dict[str, float]:
    """Of one load: figures of the table. A robot is served if each step that was due was answered within 50 ms."""
    told, due = load.summary(), load.robots * RATE_HZ * seconds
    in_time = np.bincount(load.robot[load.latencies_ms <= WITHIN_MS], minlength=load.robots)
    return {
        "steps_per_s": told["steps_per_s"],
        "p50_ms": told["p50_ms"],
        "p99_ms": told["p99_ms"],
        "server_ms": 1e3 * server_s / max(1, told["answered"]),
        "errors": told["errors"],
    } | ({} if load.offered_hz is None else {
        "in_time": float(in_time.sum()) / due,
        "served": int((in_time >= RATE_HZ * seconds).sum()),
    })  # fmt: skip


def askers(ports: dict[str, int], spec: Any, seen: list[dict[str, np.ndarray]]) -> dict[str, Ask]:
    """How robots ask each side, in its own protocol."""
    packed = [openpi.encode(one) for one in seen]
    asking = Workload("/", None, packed, lambda reply: int(b"actions" in reply))
    bodies = [json_request(one) for one in seen]
    arrays = [b"".join(value.tobytes() for value in one.values()) for one in seen]

    def sockets(port: int, speech: Workload) -> Ask:
        return lambda robots, seconds, offered: run_load(port, speech, robots, seconds, offered)

    def others(robot: Callable[[asyncio.AbstractEventLoop], Robot]) -> Ask:
        async def join() -> Robot:
            return robot(asyncio.get_running_loop())

        return lambda robots, seconds, offered: uvloop.run(run_robots(join, robots, seconds, offered))

    return {
        OURS: sockets(ports[OURS], workload_of(chunk_contract(spec))),
        ENDPOINT: sockets(ports[ENDPOINT], asking),
        THEIRS: sockets(ports[THEIRS], asking),
        FLASK: others(lambda loop: HttpRobot(loop, ports[FLASK], bodies)),
        GRPC: others(lambda loop: GrpcRobot(loop, ports[GRPC], arrays)),
    }


def clients(
    ports: dict[str, int], seen: list[dict[str, np.ndarray]], rounds: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Wall and processor time [ms] of a step on the device at 20 Hz, with the client that each side's users have."""
    import grpc
    import requests
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    count = iter(range(10**9))

    def one() -> dict[str, np.ndarray]:
        return seen[next(count) % len(seen)]

    channel = grpc.insecure_channel(f"127.0.0.1:{ports[GRPC]}")
    observe = channel.stream_unary(f"/{GRPC_SERVICE}/SendObservations")
    get = channel.unary_unary(f"/{GRPC_SERVICE}/GetActions")

    def ask_grpc() -> object:
        observe(iter([b"".join(value.tobytes() for value in one().values())]))
        return np.frombuffer(get(b""), np.float32)

    def ask_flask() -> object:
        body = {name: value.tolist() for name, value in one().items()}
        reply = requests.post(f"http://127.0.0.1:{ports[FLASK]}/infer", json=body, timeout=10.0)
        return np.array(reply.json()["actions"], np.float32)

    with channel, connect(f"ws://127.0.0.1:{ports[OURS]}", deadline_ms=10_000.0) as target:
        at_ours, at_theirs = (WebsocketClientPolicy("127.0.0.1", ports[side]) for side in (ENDPOINT, THEIRS))
        calls: dict[str, Call] = {
            OURS: lambda: target.ask(Window(one()), StepAddress(0, 0, 0, next(count))),
            ENDPOINT: lambda: at_ours.infer(one())["actions"],
            THEIRS: lambda: at_theirs.infer(one())["actions"],
            FLASK: ask_flask,
            GRPC: ask_grpc,
        }
        found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in calls}
        for turn in range(rounds + 1):
            for name, (wall, cpu) in timed(dict(in_turn(calls, turn)), max(20, steps // 5), 1 / RATE_HZ).items():
                if turn:
                    found[name]["wall"].append(wall)
                    found[name]["cpu"].append(cpu)
        return found


def processor_s(process: int) -> float:
    """What a process has had of a processor so far [s], with the threads that have ended."""
    return time.clock_gettime(~process << 3 | 2)  # Linux: the clock of another process


def observations(spec: ObservationSpec, count: int) -> list[dict[str, np.ndarray]]:
    rng, fields = np.random.default_rng(0), spec.fields
    return [
        {name: rng.uniform(-1, 1, field.window_shape).astype(np.float32) for name, field in fields.items()}
        for _ in range(count)
    ]


def openpi_speech(pair: Pair[Any]) -> Workload:
    from openpi_client import msgpack_numpy

    requests = [msgpack_numpy.packb(seen) for seen in observations(pair.parts.spec.target, 64)]
    return Workload("/", None, requests, lambda reply: int(b"offsets" in reply))


def throughput(
    sides: dict[str, tuple[int, Workload]], rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Steps per second of robots that ask again as soon as they are answered, by their number and the server."""
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for robots in ROBOTS:
            for name, (port, speech) in in_turn(sides, turn):
                steps = run_load(port, speech, robots, seconds, None).summary()["steps_per_s"]
                if turn:  # the first round warms up
                    found.setdefault(str(robots), {}).setdefault(name, []).append(steps)
    return found


def paced(sides: dict[str, tuple[int, Workload]], rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """p99 of robots at 20 Hz [ms] by their number and the server; with more only where most rounds were in time."""
    found: dict[str, dict[str, list[float]]] = {}
    left = dict(sides)
    for robots in PACED:
        for turn in range(rounds):
            for name, (port, speech) in in_turn(left, turn):
                p99 = run_load(port, speech, robots, 2 * seconds, RATE_HZ * robots).summary()["p99_ms"]
                found.setdefault(str(robots), {}).setdefault(name, []).append(p99)
        left = {name: side for name, side in left.items() if np.median(found[str(robots)][name]) <= WITHIN_MS}
        if not left:
            break
    return found


def in_turn(sides: dict[str, Any], turn: int) -> list[tuple[str, Any]]:
    both = list(sides.items())
    return both[::-1] if turn % 2 else both


def device(pair: Pair[Any], port: int, openpi_port: int, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Wall and processor time [ms] of a step on the device, of all its threads: medians of each round."""
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    theirs = WebsocketClientPolicy("127.0.0.1", openpi_port)
    seen = observations(pair.parts.spec.target, 64)
    shapes = pair.observation.fields
    rng = np.random.default_rng(0)
    inputs = [{name: rng.uniform(-1, 1, field.shape) for name, field in shapes.items()} for _ in range(64)]
    windows = [pair.parts.spec.target.zeros()]
    # Each control step is an inference; otherwise most steps would play what the last one gave.
    eager = pair.composed(spec=msgspec.structs.replace(pair.parts.spec, execute=1))
    with Client(Endpoint.parse(f"ws://127.0.0.1:{port}"), pair.exchange.contract) as client:
        client.connect(10.0)
        policy = SpeculativePolicy(eager, Always(), verifier=remote_verifier(client, pair, 1000.0))
        target = RemoteTarget(client, pair.exchange, 1000.0)
        count = iter(range(10**9))

        def act() -> None:
            policy.act(inputs[next(count) % 64])
            assert policy.record is not None and policy.record.outcome is not None

        calls: dict[str, Call] = {
            f"{OURS} step": act,
            f"{OURS} request": lambda: target.submit(windows[0], StepAddress(0, 0, 0, next(count))).result(),
            f"{THEIRS} infer": lambda: theirs.infer(seen[next(count) % 64]),
        }
        found: dict[str, dict[str, Any]] = {}
        for pace, pause_s, wanted in (("hot", 0.0, steps), ("20 Hz", 1 / RATE_HZ, max(20, steps // 5))):
            rows: dict[str, list[list[float]]] = {name: [] for name in calls}
            for turn in range(rounds + 1):
                found_now = timed(dict(in_turn(calls, turn)), wanted, pause_s)
                for name, medians in found_now.items():
                    if turn:
                        rows[name].append(medians)
            found[pace] = {
                name: dict(zip(("wall", "cpu"), np.array(r).T.tolist(), strict=True)) for name, r in rows.items()
            }
    return found


def timed(calls: dict[str, Call], steps: int, pause_s: float) -> dict[str, list[float]]:
    """Medians of wall time and means of processor time of each call [ms].

    At a pace all calls are made in each period, a part of it apart; hot each is repeated by itself.
    """
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu = dict.fromkeys(calls, 0.0)
    order = list(calls) * steps if pause_s else [name for name in calls for _ in range(steps)]
    due = time.perf_counter()
    for name in order:
        if pause_s:
            due += pause_s / len(calls)
            time.sleep(max(0.0, due - time.perf_counter()))
        spent, start = time.process_time(), time.perf_counter()
        calls[name]()
        wall[name].append(1e3 * (time.perf_counter() - start))
        cpu[name] += 1e3 * (time.process_time() - spent)
    return {name: [float(np.median(wall[name])), cpu[name] / steps] for name in calls}


if __name__ == "__main__":
    main()
