"""This package's server and client beside openpi's, with the same network behind each, in turn in every round.

A part is one of: ``openpi/POLICY``: robots that ask as fast as they can, and how many are served at 20 Hz, on three
sides: our own protocol, openpi's protocol at our server, and openpi's server class. ``device``: a request, and ``act``,
on the robot's computer. ``peers/POLICY``: as openpi/POLICY, beside Flask and gRPC as well, which needs: pip install
flask grpcio.

Of ball the server of openpi answers with the network's outputs, as ours does; of all others with chunks of actions.
Servers have the first core, everything else the second.

Run: python benchmarks/peers.py PART --openpi CHECKOUT [--rounds N] [--seconds S] [--steps N] [--out FILE]

CHECKOUT is one of https://github.com/Physical-Intelligence/openpi: its server class and client are loaded from there.
All parts, stored for the report: python -m experiments speed run --data CHECKOUT --out FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before NumPy: one thread per process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import act
import msgspec
import numpy as np
import uvloop
from others import FLASK, GRPC, OPENPI, GrpcRobot, HttpRobot, json_request, other_server
from server import DEADLINE_MS, RATE_HZ, core, processor_s, started

from specact import SpeculativePolicy, load_pair
from specact.bundle.network import open_session
from specact.gates import Always
from specact.lab.rollout.load import Load, Robot, Workload, run_load, run_robots, workload_of
from specact.load import load_exchange, load_policy
from specact.observation import ObservationSpec, Window
from specact.remote import Client, Endpoint, RemoteTarget, remote_verifier
from specact.remote.openpi import Key, OpenpiEndpoint
from specact.rng import StepAddress
from specact.types import Miss
from specact.wire import openpi
from specact.wire.exchange import Exchange, Request

ROOT = Path(__file__).parents[1]
OURS, ENDPOINT, THEIRS = "specact", "endpoint", OPENPI
ROBOTS, ROWS = (1, 4, 16, 64, 256), (1, 4, 16, 64)
# The rest is late in a round that holds; and steps of the search, of which the last tells 1/16 of the first guess.
LATE, SEARCH = 0.01, 4
Call = Callable[[], object]
# Has so many robots ask for so many seconds, at a rate of all together or as fast as they can.
Ask = Callable[[int, float, float | None], Load]


@dataclass(frozen=True)
class Side:
    """A server, by its process, and how robots ask it."""

    process: int
    ask: Ask


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", help="openpi/POLICY, peers/POLICY or device")
    parser.add_argument("--openpi", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(options.openpi / "packages" / "openpi-client" / "src"))
    group, _, policy = options.part.partition("/")
    with core(1):
        if group == "device":
            measured: Any = device(options)
        else:
            with source_of(policy) as source:
                measured = servers(options, source, (FLASK, GRPC) if group == "peers" else ())
    text = json.dumps(measured, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")


def servers(options: argparse.Namespace, source: str, others: tuple[str, ...]) -> dict[str, Any]:
    """Every measurement of each round, by number of robots and side; and robots at 20 Hz, by side."""
    exchange = load_exchange(source)
    with ExitStack() as stack:
        ours = stack.enter_context(started(source))
        places = {OURS: (ours.port, ours.pid)}
        if openpi.serves_chunks(exchange.contract):
            places[ENDPOINT] = places[OURS]
        for like in (THEIRS, *others):
            places[like] = stack.enter_context(other_server(options.openpi, source, like))
        sides = sides_of(places, exchange)
        for side in sides.values():
            side.ask(16, options.seconds, None)  # warms up
        network_ms = rows(source, options.rounds)
        print(network_ms, flush=True)
        hot_sides = hot(sides, options.rounds, options.seconds)
        held = most_in_time(sides, fastest(hot_sides), options.rounds)
    return {
        "rounds": options.rounds, "seconds": options.seconds, "rows": network_ms, "hot": hot_sides, "20 Hz": held,
    }  # fmt: skip


def hot(sides: Mapping[str, Side], rounds: int, seconds: float) -> dict[str, Any]:
    """Figures of robots that ask again as soon as they are answered, by their number, side and round."""
    by_robots: dict[str, Any] = {}
    for turn in range(rounds):
        for robots in ROBOTS:
            for name, side in in_turn(sides, turn):
                before, ours, began = processor_s(side.process), time.process_time(), time.perf_counter()
                load = side.ask(robots, seconds, None)
                took_s, spent, told = time.perf_counter() - began, processor_s(side.process) - before, load.summary()
                figures = {
                    "steps_per_s": told["steps_per_s"], "p50_ms": told["p50_ms"], "p99_ms": told["p99_ms"],
                    "server_ms": 1e3 * spent / max(1, told["answered"]), "errors": told["errors"],
                    "generator": (time.process_time() - ours) / took_s,
                }  # fmt: skip
                rounds_of_side = by_robots.setdefault(str(robots), {}).setdefault(name, {})
                for figure, value in figures.items():
                    rounds_of_side.setdefault(figure, []).append(short(value))
                print(turn, robots, name, f"{told['steps_per_s']:.0f}/s, p99 {told['p99_ms']:.1f} ms", flush=True)
    return by_robots


def fastest(crowds: Mapping[str, Any]) -> dict[str, float]:
    """The most steps per second of each side, over the figures that :func:`hot` returns."""
    return {
        name: max(float(np.median(sides[name]["steps_per_s"])) for sides in crowds.values())
        for name in next(iter(crowds.values()))
    }


def most_in_time(sides: Mapping[str, Side], most: Mapping[str, float], rounds: int) -> dict[str, Any]:
    """The most robots at 20 Hz whose 99th percentile is in time in every round, by bisection; all sides in turn.

    Requests that a late reply left no time for are late. Up to a quarter more than the ``most`` steps per second of a
    side is looked at. With the number, the shares in time that were measured, by number of robots.
    """
    low = dict.fromkeys(sides, 0)
    high = {name: math.ceil(1.25 * most[name] / RATE_HZ) + 1 for name in sides}
    shares: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for _ in range(SEARCH):
        trying = {name: (low[name] + high[name]) // 2 for name in sides if high[name] - low[name] > 1}
        fell = set[str]()
        for turn in range(rounds):
            for name, side in in_turn({name: sides[name] for name in trying if name not in fell}, turn):
                robots = trying[name]
                load = side.ask(robots, 1.0, RATE_HZ * robots)
                share = float((load.latencies_ms <= DEADLINE_MS).sum()) / (robots * RATE_HZ)
                shares[name].setdefault(str(robots), []).append(short(share))
                if share < 1.0 - LATE:
                    fell.add(name)
        for name, robots in trying.items():
            (high if name in fell else low)[name] = robots
        print("at 20 Hz:", low, high, flush=True)
    return {name: {"robots": low[name], "fails": high[name], "shares": shares[name]} for name in sides}


def rows(source: str, rounds: int) -> dict[str, list[float]]:
    """Processor time [ms] of the network for one request, by the size of the batch: what no server can do without."""
    if load_exchange(source).contract.family == "codes":
        pair = load_pair(source)
        assert pair.path is not None
        session, seen = open_session(pair.path / "target.onnx"), observations(pair.parts.spec.target, ROWS[-1])
        feeds = {size: {name: np.stack([arrays[name] for arrays in seen[:size]]) for name in seen[0]} for size in ROWS}
        infer: Callable[[int], object] = lambda size: session.run(None, feeds[size])  # noqa: E731
    else:
        policy = load_policy(source).policy
        windows = [window_of(arrays) for arrays in observations(policy.spec.observation, ROWS[-1])]
        infer = lambda size: policy.infer_batch(windows[:size], [np.random.default_rng(n) for n in range(size)])  # noqa: E731
    spent_ms: dict[str, list[float]] = {str(size): [] for size in ROWS}
    for turn in range(rounds + 1):
        for size in ROWS:
            before, times = time.process_time(), max(1, ROWS[2] // size)
            for _ in range(times):
                infer(size)
            if turn:
                spent_ms[str(size)].append(short(1e3 * (time.process_time() - before) / (size * times)))
    return spent_ms


def sides_of(places: Mapping[str, tuple[int, int]], exchange: Exchange[Any]) -> dict[str, Side]:
    """The sides by the ports and processes of their servers."""
    contract = exchange.contract
    seen = observations(contract.observation, 64)
    requests = [Request(window_of(arrays), StepAddress(0, 0, 0, 0)) for arrays in seen]
    spoken = {
        OURS: workload_of(contract, requests=requests),
        ENDPOINT: Workload("/", None, [openpi.encode(arrays) for arrays in seen], _answers),
        THEIRS: Workload("/", None, [openpi.encode(arrays) for arrays in seen], _answers),
    }

    def socket(port: int, speech: Workload) -> Ask:
        return lambda robots, seconds, offered: run_load(port, speech, robots, seconds, offered)

    def other(robot: Callable[[asyncio.AbstractEventLoop], Robot]) -> Ask:
        async def join() -> Robot:
            return robot(asyncio.get_running_loop())

        return lambda robots, seconds, offered: uvloop.run(run_robots(join, robots, seconds, offered))

    asks = {name: socket(port, spoken[name]) for name, (port, _) in places.items() if name in spoken}
    if FLASK in places:
        bodies = [json_request(arrays) for arrays in seen]
        asks[FLASK] = other(lambda loop: HttpRobot(loop, places[FLASK][0], bodies))
    if GRPC in places:
        messages = [b"".join(value.tobytes() for value in arrays.values()) for arrays in seen]
        asks[GRPC] = other(lambda loop: GrpcRobot(loop, places[GRPC][0], messages))
    return {name: Side(places[name][1], ask) for name, ask in asks.items()}


def _answers(reply: bytes) -> int:
    return int(b"actions" in reply or b"offsets" in reply)


def observations(spec: ObservationSpec, count: int) -> list[dict[str, Any]]:
    """Windows as openpi's clients send them."""
    rng = np.random.default_rng(0)
    prompt = {"prompt": "reach the goal and push the button"} if spec.instruction else {}
    return [
        {name: rng.integers(0, 256, field.window_shape, np.uint8) if field.is_image
         else rng.uniform(-1, 1, field.window_shape).astype(np.float32) for name, field in spec.fields.items()} | prompt
        for _ in range(count)
    ]  # fmt: skip


def window_of(seen: Mapping[str, Any]) -> Window:
    return Window({name: value for name, value in seen.items() if name != "prompt"}, seen.get("prompt"))


@contextmanager
def source_of(policy: str) -> Iterator[str]:
    """A policy's name, or the folder of a bundle that is only in the history of the checkout."""
    path = f"pretrained/{policy.partition('#')[0]}"
    git = ["git", "-C", str(ROOT)]
    removed = [*git, "log", "-1", "--diff-filter=D", "--format=%H", "--", f"{path}/manifest.json"]
    if (ROOT / path).exists() or not (commit := subprocess.check_output(removed, text=True).strip()):
        yield policy
        return
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.check_output([*git, "archive", f"{commit}^", path])
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        yield f"{folder}/{path}"


def in_turn(sides: Mapping[str, Any], turn: int) -> list[tuple[str, Any]]:
    both = list(sides.items())
    return both[::-1] if turn % 2 else both


def short(value: float) -> float:
    return float(f"{value:.5g}")


def device(options: argparse.Namespace) -> dict[str, Any]:
    """Wall and processor time [ms] on the device, of all its threads: requests, hot and at 20 Hz, and ``act``."""
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    pair, chunks = load_pair("ball"), load_exchange("ball#target")
    seen, rng = observations(pair.parts.spec.target, 64), np.random.default_rng(0)
    inputs = [{name: rng.uniform(-1, 1, field.shape) for name, field in pair.observation.fields.items()} for _ in seen]
    # Each control step is an inference; otherwise most steps would play what the last one gave.
    eager = pair.composed(spec=msgspec.structs.replace(pair.parts.spec, execute=1))
    count = iter(range(10**9))
    with ExitStack() as stack:
        at = [stack.enter_context(other_server(options.openpi, policy))[0] for policy in ("ball", "ball#target")]
        codes, chunk = (stack.enter_context(started(policy)) for policy in ("ball", "ball#target"))

        def client(endpoint: Endpoint, exchange: Exchange[Any]) -> Client:
            made = stack.enter_context(Client(endpoint, exchange.contract))
            made.connect(10.0)
            return made

        mine = client(Endpoint.parse(f"ws://127.0.0.1:{codes.port}"), pair.exchange)
        policy = SpeculativePolicy(eager, Always(), verifier=remote_verifier(mine, pair, 1000.0))
        raw, theirs = (WebsocketClientPolicy("127.0.0.1", port) for port in at)

        def step() -> None:
            policy.act(inputs[next(count) % 64])
            assert policy.record is not None and policy.record.outcome is not None

        def requests(target: RemoteTarget[Any]) -> Call:
            windows = [window_of(arrays) for arrays in seen]

            def request() -> None:
                number = next(count)
                reply = target.submit(windows[number % 64], StepAddress(0, 0, 0, number)).result()
                assert not isinstance(reply, Miss), reply

            return request

        def wanted(target: Any) -> Call:
            return lambda: target.infer(seen[next(count) % 64])

        keys = {name: Key(name) for name in chunks.contract.observation.fields}
        over = replace(OpenpiEndpoint.parse(f"ws://127.0.0.1:{at[1]}"), keys=keys)
        groups: dict[str, dict[str, Call]] = {
            "ball": {"specact step": step, "specact request": requests(RemoteTarget(mine, pair.exchange, 1000.0)),
                     "openpi infer": wanted(raw)},
            "ball#target": {
                "specact request": requests(RemoteTarget(
                    client(Endpoint.parse(f"ws://127.0.0.1:{chunk.port}"), chunks), chunks, 1000.0)),
                "specact, openpi's server": requests(RemoteTarget(client(over, chunks), chunks, 1000.0)),
                "openpi infer": wanted(theirs),
            },
        }  # fmt: skip
        times = {group: timed_in_rounds(calls, options.rounds, options.steps) for group, calls in groups.items()}
    return {"requests": times, "act": acts(options.rounds, 2 * options.steps)}


def acts(rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """``act`` over ``session.run`` in this process [ms]: medians of single calls, by kind of step and round."""
    medians: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        pair = load_pair("ball")
        for (_, step), calls in act.measure(pair, act.plain_gates(), steps).items():
            times, run = np.array(calls).T
            for name, value in (("act", times), ("run", run), ("over", times - run)):
                medians.setdefault(step, {}).setdefault(name, []).append(short(float(np.median(value))))
    return medians


def timed_in_rounds(calls: dict[str, Call], rounds: int, steps: int) -> dict[str, Any]:
    """The times of each round of :func:`timed`, by pace, call and kind of time; the first round warms up."""
    paces: dict[str, Any] = {}
    for pace, pause_s, count in (("hot", 0.0, steps), ("20 Hz", 1 / RATE_HZ, max(5, steps // 5))):
        for turn in range(rounds + 1):
            for name, times in timed(dict(in_turn(calls, turn)), count, pause_s).items():
                call = paces.setdefault(pace, {}).setdefault(name, {"wall": [], "cpu": []})
                for kind, value in zip(call, times, strict=True):
                    call[kind] += [short(value)] if turn else []
        print(pace, {name: call["wall"][-1] for name, call in paces[pace].items()}, flush=True)
    return paces


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
