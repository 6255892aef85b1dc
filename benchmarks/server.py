"""Load on a server of this machine: greedy neighbours, and minutes of work.

One robot at 20 Hz with a deadline of 50 ms runs beside crowds that send as fast as they can. With ``--soak`` 64 robots
ask without pause for so many minutes, in which memory and open files of the server must not grow. Servers have the
first core, everything else the second.

Run: python benchmarks/server.py [--bundle NAME] [--steps N] [--soak MINUTES] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from specact.errors import RemoteError
from specact.lab.rollout.load import Robot, run_load, run_robots, workload_of
from specact.lab.rollout.processes import ServerProcess, serving
from specact.load import load_pair
from specact.rng import StepAddress
from specact.wire.exchange import Request
from specact.wire.messages import ask, encode

# For more robots than a server takes by itself.
ROOM = ("--max-robots", "4096", "--max-per-address", "4096")
RATE_HZ, DEADLINE_MS = 20.0, 50.0
# Of crowds: connections, and requests that each keeps in flight.
CROWDS = {
    "nobody": (0, 0), "32 in flight each": (32, 32), "4 in flight each": (128, 4), "malformed requests": (32, 32),
    "one token": (32, 32), "no token": (32, 1), "rounds of a flow": (1, 32),
}  # fmt: skip
FLOW, TOKENS = "ball-chase-flow", {"robot": "the-token-of-the-robot", "crowd": "the-token-of-the-crowd"}
SOAK_ROBOTS, SOAK_PIECES, SOAK_REST_S, GROWTH = 64, 40, 2.0, 1.02
_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def core(number: int) -> Iterator[None]:
    """This process, and those that it starts, on one core, if the machine has two or more."""
    if len(_CORES) > 1:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_CORES[number]})
    try:
        yield
    finally:
        if len(_CORES) > 1:
            os.sched_setaffinity(0, before)


def run_beside(server: ServerProcess, bundle: str, crowd: str, steps: int) -> dict[str, Any]:
    """The steps that one robot misses while a crowd floods the same server from another process."""
    context = multiprocessing.get_context("spawn")
    # Half a period less, so that no further request becomes due.
    ready, seconds = context.Event(), (steps - 0.5) / RATE_HZ
    # It ends by itself some seconds later, should this process fail to kill it.
    flooding = context.Process(target=_flood, args=(server.port, bundle, crowd, seconds + 10.0, ready))
    if CROWDS[crowd][0]:
        flooding.start()
    try:
        if CROWDS[crowd][0] and not ready.wait(60.0):
            raise RemoteError(f"the crowd, {crowd}, did not start within a minute")
        watched = workload_of(load_pair(bundle).exchange.contract, DEADLINE_MS, token=TOKENS["robot"])
        before = processor_s(server.pid)
        load = run_load(server.port, watched, 1, seconds, RATE_HZ)
        busy = (processor_s(server.pid) - before) / load.seconds
    finally:
        if CROWDS[crowd][0]:
            flooding.kill()
            flooding.join()
    missed = steps - int((load.latencies_ms <= DEADLINE_MS).sum())
    told = load.summary()
    return {
        "crowd": crowd, "connections": CROWDS[crowd][0], "steps": steps, "missed": missed, "share": missed / steps,
        "busy": busy, "p50_ms": told["p50_ms"], "p99_ms": told["p99_ms"],
    }  # fmt: skip


def processor_s(process: int) -> float:
    """What a process has had of a processor so far [s], with the threads that have ended."""
    return time.clock_gettime(~process << 3 | 2)  # Linux: the clock of another process


def _flood(port: int, bundle: str, crowd: str, seconds: float, ready: Event) -> None:
    # The robot, which has the same core, goes first.
    os.nice(10)
    robots, under_way = CROWDS[crowd]
    pair = load_pair(bundle)
    contract = pair.exchange.contract
    workload = workload_of(contract, token=TOKENS["crowd"])
    if crowd == "no token":
        from others import HttpRobot

        async def join() -> Robot:
            unnamed = b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            return HttpRobot(asyncio.get_running_loop(), port, [unnamed])

        uvloop.run(run_robots(join, robots, seconds, None, under_way, ready.set))
        return
    still = Request(contract.observation.zeros(), StepAddress(0, 0, 0, 0))
    if crowd == "malformed requests":
        short, strange = (ask(still, contract, "infer", 0, DEADLINE_MS) for _ in range(2))
        del short.window[1:]
        strange.window[:] = np.full(len(strange.window) // 4, np.nan, np.float32).tobytes()
        workload = replace(workload, requests=[encode(short), encode(strange)])
    elif crowd == "rounds of a flow":
        proposal = pair.drafter().propose(pair.observation.zeros(), np.random.default_rng(0))
        arrays = pair.exchange.request(proposal)  # type: ignore[attr-defined]
        workload = workload_of(contract, kind="verify", requests=[replace(still, arrays=arrays)], token=TOKENS["crowd"])
    run_load(port, workload, robots, seconds, None, under_way, ready.set)


def beside(bundle: str, steps: int) -> list[dict[str, Any]]:
    """What a robot at 20 Hz misses beside every crowd."""
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokens = folder / "tokens"
        tokens.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
        usual, flow = (stack.enter_context(started(name)) for name in (bundle, FLOW))
        locked = stack.enter_context(started(bundle, "--tokens", str(tokens)))
        for crowd in CROWDS:
            name, server = (FLOW, flow) if "flow" in crowd else (bundle, locked if "token" in crowd else usual)
            rows.append({"on": name, **run_beside(server, name, crowd, steps)})
            print(rows[-1], flush=True)
    return rows


def soak(bundle: str, minutes: float) -> dict[str, Any]:
    """Memory and open files of a server through many robots that come, ask without pause and go."""
    workload, rows = workload_of(load_pair(bundle).exchange.contract), []
    with started(bundle) as server:
        for piece in range(SOAK_PIECES + 1):
            load = run_load(server.port, workload, SOAK_ROBOTS, 60 * minutes / SOAK_PIECES - SOAK_REST_S, None)
            time.sleep(SOAK_REST_S)  # until the connections of these robots have ended
            status = Path(f"/proc/{server.pid}/status").read_text()
            resident = int(status.partition("VmRSS:")[2].split()[0]) / 1024
            row = {"resident_mb": resident, "files": len([*Path(f"/proc/{server.pid}/fd").iterdir()])}
            if piece:  # the first one warms up
                rows.append({**row, "answered": len(load.latencies_ms), "errors": load.errors})
                print(rows[-1], flush=True)
    third = SOAK_PIECES // 3
    ends = {name: [float(np.median([row[name] for row in part])) for part in (rows[:third], rows[third:-third],
            rows[-third:])] for name in ("resident_mb", "files")}  # fmt: skip
    grew = any(end > GROWTH * start for start, _, end in ends.values())
    totals = {name: sum(row[name] for row in rows) for name in ("answered", "errors")}
    return {"minutes": minutes, "robots": SOAK_ROBOTS, **ends, **totals, "grew": grew}


@contextmanager
def started(bundle: str, *options: str) -> Iterator[ServerProcess]:
    """``specact serve`` on the first core."""
    server = serving(bundle, *ROOM, *options)
    with core(0):
        server.__enter__()
    try:
        yield server
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", default="ball")
    parser.add_argument("--steps", type=int, default=240, help="of the robot beside crowds")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with core(1):
        measured: Any = soak(options.bundle, options.soak) if options.soak else beside(options.bundle, options.steps)
    if options.out is not None:
        options.out.write_text(json.dumps(measured, indent=1) + "\n")
    if options.soak:
        print(measured)
        sys.exit("the server grew" if measured["grew"] else 0)


if __name__ == "__main__":
    main()
