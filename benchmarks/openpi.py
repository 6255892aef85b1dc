"""This package's server and client beside openpi's own, with the same network behind both.

The network is the ball pair's target. openpi's server answers with its outputs as they are; ours checks the request,
makes distributions of them and keeps its books. Both servers are asked by the same load generator, in turn.

With ``--parts chunks`` both answer with chunks of actions of one policy, ours on its own stream and at its endpoint of
openpi's protocol: the ball pair's target, and a flow policy of ten steps.

Run: python benchmarks/openpi.py --openpi CHECKOUT [--rounds N] [--seconds S] [--steps N] [--parts PARTS]

CHECKOUT is a checkout of https://github.com/Physical-Intelligence/openpi: its server class and its client are loaded
from there. The results are kept in benchmarks/results/openpi.json, and the tables of docs/speed.md are written from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from pages import fill

from specact import SpeculativePolicy, load_bundle
from specact.families.chunks.sources import load_policy
from specact.families.chunks.wire import ChunkCodec
from specact.families.codes.bundle import Bundle
from specact.gates import Always
from specact.lab.evaluation.load import Speech, run_load, speech_of
from specact.lab.processes import ServerProcess, serving
from specact.observation import ObservationSpec, Window
from specact.remote import Client, Endpoint, RemoteTarget, remote_verifier
from specact.rng import StepAddress
from specact.wire import openpi

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "results" / "openpi.json"
ROBOTS, PACED = (1, 16, 64), (60, 120, 170, 240, 340)
RATE_HZ, WITHIN_MS = 20.0, 50.0
OURS, ENDPOINT, THEIRS = "specact", "endpoint", "openpi"
POLICIES = ("ball#target", "ball-chase-flow")
Call = Callable[[], object]
Infer = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--openpi", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parts", default="throughput,paced,device")
    parser.add_argument("--serve", type=int, help="serve as openpi does on this port; what the others start")
    parser.add_argument(
        "--policy", default="", help="with --serve: a chunk policy; the ball pair's network if not given"
    )
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.openpi / "packages" / "openpi-client" / "src"))
    pair = load_bundle("ball")
    if asked.serve is not None:
        serve_as_openpi(asked.openpi, chunks_of(asked.policy) if asked.policy else outputs_of(pair), asked.serve)
        return
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if "chunks" in asked.parts:
        found["chunks"] = {policy: chunks(asked.openpi, policy, asked.rounds, asked.seconds) for policy in POLICIES}
    if asked.parts != "chunks":
        whole_requests(asked, pair, found)
    KEPT.write_text(json.dumps(found, indent=1) + "\n")
    text = tables(found)
    print(text)
    fill(ROOT / "docs" / "speed.md", "openpi", text)


def whole_requests(asked: argparse.Namespace, pair: Bundle, found: dict[str, Any]) -> None:
    """Distributions beside the network's outputs."""
    found |= {"rounds": asked.rounds, "seconds": asked.seconds, "steps": asked.steps}
    with serving("ball") as ours, openpi_server(asked.openpi) as (port, _):
        sides = {OURS: (ours.port, speech_of(pair.codec.dialect)), THEIRS: (port, openpi_speech(pair))}
        if "throughput" in asked.parts:
            found["throughput"] = throughput(sides, asked.rounds, asked.seconds)
        if "paced" in asked.parts:
            found["paced"] = paced(sides, asked.rounds, asked.seconds)
        if "device" in asked.parts:
            found["device"] = device(pair, ours.port, port, asked.rounds, asked.steps)


def chunks(checkout: Path, policy: str, rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Steps per second of the server's processor time, by the number of robots and the way to ask for a chunk.

    What else the machine does changes them little.
    """
    dialect = ChunkCodec(load_policy(policy).policy.spec).dialect
    seen = [openpi.encode(one) for one in observations(dialect.observation, 64)]
    asking = Speech("/", None, seen, lambda reply: int(b"actions" in reply))
    found: dict[str, dict[str, list[float]]] = {}
    with ServerProcess(["serve", "--policy", policy, "--port", "0"]) as ours, openpi_server(checkout, policy) as theirs:
        sides = {
            OURS: (ours.port, ours.pid, speech_of(dialect)),
            ENDPOINT: (ours.port, ours.pid, asking),
            THEIRS: (*theirs, asking),
        }
        for turn in range(rounds + 1):
            for robots in ROBOTS:
                for name, (port, process, speech) in in_turn(sides, turn):
                    before = processor_s(process)
                    load = run_load(port, speech, robots, seconds, None)
                    steps = len(load.latencies_ms) / (processor_s(process) - before)
                    if turn:  # the first round warms up
                        found.setdefault(str(robots), {}).setdefault(name, []).append(steps)
    return found


def processor_s(process: int) -> float:
    """What all threads of a process have had of a processor so far [s]."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def chunks_of(policy: str) -> Infer:
    """A chunk policy as what is behind openpi's server."""
    loaded, rng = load_policy(policy).policy, np.random.default_rng(0)
    return lambda observation: {"actions": loaded.infer(Window(observation), rng)}


def outputs_of(pair: Bundle) -> Infer:
    """Nothing but ``session.run``."""
    session = pair.target._session

    def infer(observation: dict[str, Any]) -> dict[str, Any]:
        logits, offsets = session.run(None, {name: value[None] for name, value in observation.items()})
        return {"logits": logits[0], "offsets": offsets[0]}

    return infer


def serve_as_openpi(checkout: Path, infer: Infer, port: int) -> None:
    """Runs openpi's server class."""
    path = checkout / "src" / "openpi" / "serving" / "websocket_policy_server.py"
    spec = importlib.util.spec_from_file_location("websocket_policy_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logging.disable(logging.INFO)
    module.WebsocketPolicyServer(SimpleNamespace(infer=infer), host="127.0.0.1", port=port).serve_forever()


@contextmanager
def openpi_server(checkout: Path, policy: str = "") -> Iterator[tuple[int, int]]:
    """openpi's server in a process of its own; yields its port and the number of the process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, __file__, "--openpi", str(checkout), "--serve", str(port), "--policy", policy]
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ})
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
        process.terminate()
        process.wait()


def observations(spec: ObservationSpec, count: int) -> list[dict[str, np.ndarray]]:
    rng, fields = np.random.default_rng(0), spec.fields
    return [
        {name: rng.uniform(-1, 1, field.window_shape).astype(np.float32) for name, field in fields.items()}
        for _ in range(count)
    ]


def openpi_speech(pair: Bundle) -> Speech:
    from openpi_client import msgpack_numpy

    requests = [msgpack_numpy.packb(seen) for seen in observations(pair.spec.target, 64)]
    return Speech("/", None, requests, lambda reply: int(b"offsets" in reply))


def throughput(sides: dict[str, tuple[int, Speech]], rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Steps per second of robots that ask again as soon as they are answered, by their number and the server."""
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for robots in ROBOTS:
            for name, (port, speech) in in_turn(sides, turn):
                steps = run_load(port, speech, robots, seconds, None).summary()["steps_per_s"]
                if turn:  # the first round warms up
                    found.setdefault(str(robots), {}).setdefault(name, []).append(steps)
    return found


def paced(sides: dict[str, tuple[int, Speech]], rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
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


def device(pair: Bundle, port: int, openpi_port: int, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Wall and processor time [ms] of a step on the device, of all its threads: medians of each round."""
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    theirs = WebsocketClientPolicy("127.0.0.1", openpi_port)
    seen = observations(pair.spec.target, 64)
    shapes = pair.observation.fields
    rng = np.random.default_rng(0)
    inputs = [{name: rng.uniform(-1, 1, field.shape) for name, field in shapes.items()} for _ in range(64)]
    windows = [pair.spec.target.zeros()]
    # Each control step is an inference; otherwise most steps would play what the last one gave.
    eager = dataclasses.replace(pair, spec=dataclasses.replace(pair.spec, execute=1))
    with Client(Endpoint.parse(f"ws://127.0.0.1:{port}"), pair.codec.dialect) as client:
        client.connect(10.0)
        policy = SpeculativePolicy(eager, Always(), verifier=remote_verifier(client, pair, 1000.0))
        target = RemoteTarget(client, pair.codec, 1000.0)
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


def tables(found: dict[str, Any]) -> str:
    """Everything in words and numbers, for the page."""
    lines = [
        "| robots, as fast as possible | specact, steps/s | openpi, steps/s | ratio by round, median (range) |",
        "|---|---|---|---|",
    ]
    for robots, sides in found.get("throughput", {}).items():
        ours, theirs = sides[OURS], sides[THEIRS]
        lines.append(f"| {robots} | {np.median(ours):.0f} | {np.median(theirs):.0f} | {ratio(ours, theirs)} |")
    lines += ["", "| robots at 20 Hz | specact, p99 ms by round | openpi, p99 ms by round |", "|---|---|---|"]
    for robots, sides in found.get("paced", {}).items():
        cells = [" ".join(f"{p99:.0f}" for p99 in sides[name]) if name in sides else "-" for name in (OURS, THEIRS)]
        lines.append(f"| {robots} | {cells[0]} | {cells[1]} |")
    lines += [
        "",
        "| on the device | wall, ms | processor, ms | wall, ratio to openpi | processor, ratio |",
        "|---|---|---|---|---|",
    ]
    for pace, calls in found.get("device", {}).items():
        theirs = calls[f"{THEIRS} infer"]
        for name, row in calls.items():
            ratios = (
                "- | -" if row is theirs else " | ".join(ratio(row[kind], theirs[kind]) for kind in ("wall", "cpu"))
            )
            lines.append(f"| {name}, {pace} | {np.median(row['wall']):.2f} | {np.median(row['cpu']):.2f} | {ratios} |")
    lines += [
        "",
        "| chunks, robots, as fast as possible, steps per second of the server's processor time | specact's stream "
        "| specact for openpi's clients | openpi | stream, ratio by round | openpi's clients, ratio by round |",
        "|---|---|---|---|---|---|",
    ]
    for policy, counts in found.get("chunks", {}).items():
        for robots, sides in counts.items():
            medians = " | ".join(f"{np.median(sides[name]):.0f}" for name in (OURS, ENDPOINT, THEIRS))
            ratios = " | ".join(ratio(sides[name], sides[THEIRS]) for name in (OURS, ENDPOINT))
            lines.append(f"| {policy}, {robots} | {medians} | {ratios} |")
    return "\n".join(lines)


def ratio(ours: list[float], theirs: list[float]) -> str:
    found = np.array(ours) / np.array(theirs)
    return f"{np.median(found):.2f} ({found.min():.2f} to {found.max():.2f})"


if __name__ == "__main__":
    main()
