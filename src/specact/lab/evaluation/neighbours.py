"""Deadline misses of one robot while other connections flood the same server."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from specact.errors import RemoteError
from specact.families.codes.bundle import Bundle, load_bundle
from specact.lab.evaluation.load import run_load, workload_of

# Requests that each neighbour keeps under way; rate and deadline of the robot.
UNDER_WAY, RATE_HZ, DEADLINE_MS = 32, 20.0, 50.0
_READY_WITHIN_S = 60.0


def run_beside(port: int, bundle: Bundle, neighbours: int, steps: int) -> dict[str, Any]:
    """Sends 20 requests a second to the server on this machine while neighbours flood it from another process.

    Args:
        port: of the server, on loopback.
        bundle: what it serves.
        neighbours: flooding connections, each with ``UNDER_WAY`` requests in flight; 0 for none.
        steps: requests of the robot; one that is answered after 50 ms, or with an error, is missed.

    Returns:
        Plain values; times in ms, of the steps that were answered.

    Raises:
        RemoteError: if the server refuses a connection or the neighbours do not start.
    """
    context = multiprocessing.get_context("spawn")
    # Half a period less, so that no further request becomes due.
    ready, seconds = context.Event(), (steps - 0.5) / RATE_HZ
    # It ends by itself some seconds later, should this process fail to kill it.
    flooding = context.Process(target=_flood, args=(port, bundle.path, neighbours, seconds + 10.0, ready))
    if neighbours:
        flooding.start()
    try:
        if neighbours and not ready.wait(_READY_WITHIN_S):
            raise RemoteError(f"{neighbours} neighbours did not start within {_READY_WITHIN_S:.0f} s")
        load = run_load(port, workload_of(bundle.exchange.contract, DEADLINE_MS), 1, seconds, RATE_HZ)
    finally:
        if neighbours:
            flooding.kill()
            flooding.join()
    return {
        "neighbours": neighbours,
        "under_way": UNDER_WAY,
        "rate_hz": RATE_HZ,
        "deadline_ms": DEADLINE_MS,
        "steps": steps,
        "missed": steps - int((load.latencies_ms <= DEADLINE_MS).sum()),
        "p50_ms": load.summary()["p50_ms"],
        "p99_ms": load.summary()["p99_ms"],
    }


def _flood(port: int, path: Path, robots: int, seconds: float, ready: Event) -> None:
    run_load(
        port,
        workload_of(load_bundle(path).exchange.contract),
        robots,
        seconds,
        None,
        under_way=UNDER_WAY,
        started=ready.set,
    )
