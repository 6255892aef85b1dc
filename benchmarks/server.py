"""Throughput of one server for many robots, with and without batching, interleaved; and one robot beside a crowd.

Run: python benchmarks/server.py [--seconds 3] [--rounds 2] [--soak-s 600] [--out FOLDER]
"""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from specact import load_bundle
from specact.cli.output import progress_bars, say, table_of
from specact.files import write_json
from specact.lab.evaluation.load import run_load, run_soak, workload_of
from specact.lab.evaluation.neighbours import run_beside
from specact.lab.processes import serving


def main(
    bundle: str = "ball",
    robots: tuple[int, ...] = (1, 16, 64, 256),
    offered_hz: float = 1000.0,
    seconds: float = 4.0,
    rounds: int = 3,
    neighbours: tuple[int, ...] = (0, 8, 32),
    steps: int = 160,
    soak_s: float = 0.0,
    out: Path | None = None,
) -> None:
    """Measures on loopback.

    Args:
        bundle: pair whose target is served.
        robots: numbers of robots.
        offered_hz: requests per second of all of them in the second measurement; the first one is unlimited.
        seconds: duration of each measurement [s].
        rounds: repetitions of each.
        neighbours: numbers of clients with 32 requests in flight each, beside which one robot runs at 20 Hz.
        steps: steps of that robot for each number of neighbours; 0 for none.
        soak_s: duration of a final test of the server's memory with 64 robots; 0 for none.
        out: folder for server.json.
    """
    pair, rows, soak = load_bundle(bundle), list[dict[str, Any]](), None
    workload = workload_of(pair.exchange.contract)
    with ExitStack() as stack, progress_bars() as update:
        servers = {
            size: stack.enter_context(serving(bundle, "--max-batch", str(size), "--max-queue", "1024"))
            for size in (64, 1)
        }
        settings = [(count, offered, size) for count in robots for offered in (None, offered_hz) for size in servers]
        for turn in range(rounds):
            for done, (count, offered, size) in enumerate(settings):
                update("measurements", turn * len(settings) + done, rounds * len(settings))
                load = run_load(servers[size].port, workload, count, seconds, offered)
                rows.append({"max_batch": size, "round": turn, **load.summary()})
        port = stack.enter_context(serving(bundle)).port
        beside = [run_beside(port, pair, crowd, steps) for crowd in neighbours if steps > 0]
        if soak_s > 0.0:
            soak = run_soak(servers[64], pair, soak_s, lambda done, total: update("soak", done, total))
    found = {"bundle": pair.name, "seconds": seconds, "rows": rows, "beside": beside, "soak": soak}
    if out is not None:
        write_json(out / "server.json", found | {"command": shlex.join(["python", *sys.argv])})
    if rows:
        say(table_of("verified steps of many robots, medians over rounds", medians(rows)))
    for row in beside:
        say(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if soak is not None:
        say(f"memory over {soak['seconds']:.0f} s: {soak['first_mib']:.1f} to {soak['last_mib']:.1f} MiB")


def medians(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    table = []
    for key in dict.fromkeys((row["robots"], row["offered_hz"], row["max_batch"]) for row in rows):
        same = [row for row in rows if (row["robots"], row["offered_hz"], row["max_batch"]) == key]
        names = {"steps_per_s": "steps/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "batch": "batch"}
        table.append(
            {"robots": str(key[0]), "offered/s": "all" if key[1] is None else f"{key[1]:.0f}", "max batch": str(key[2])}
            | {title: f"{np.median([row[name] for row in same]):.1f}" for name, title in names.items()}
            | {"errors": str(sum(row["errors"] for row in same))}
        )
    return table


if __name__ == "__main__":
    tyro.cli(main)
