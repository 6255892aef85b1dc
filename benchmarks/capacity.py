"""Predicted against measured: how many robots a server holds.

Of each load the service time is fitted as ``specact capacity`` does, without pauses, and the queue is simulated. Then
more and fewer robots ask a server at the load's rates, until the largest number is found of which no kind misses more
than 1 % of the replies; each number is tried up to three times, since other processes only delay. No load was used for
a fit. Requests are evenly spaced here, which is kinder than the random phases of the prediction, and a robot waits for
its reply before it asks again.

Run: python benchmarks/capacity.py [--seconds S] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from server import ROOM

from specact.lab.rollout.load import Load, connected_robot, measure_service, run_robots, workload_of
from specact.lab.rollout.processes import serving
from specact.load import load_exchange
from specact.server.capacity import Demand, ServiceTime, missed
from specact.wire.exchange import Contract

MAX_BATCH, ALLOWED = 16, 0.01


@dataclass(frozen=True)
class Mix:
    """A target, and the robots of a load: as many of each demand."""

    policy: str
    demands: Sequence[Demand]

    def __str__(self) -> str:
        kinds = (f"{demand.rate_hz:g} Hz/{1e3 * demand.deadline_s:g} ms" for demand in self.demands)
        return f"{self.policy} {' and '.join(kinds)}"


MIXES = (
    Mix("ball", (Demand(20.0, 0.05),)),
    Mix("ball", (Demand(50.0, 0.02),)),
    Mix("ball", (Demand(50.0, 0.02), Demand(5.0, 0.2))),
    Mix("metaworld-flow", (Demand(2.0, 0.25),)),
)


def compare(mixes: Sequence[Mix] = MIXES, seconds: float = 3.0) -> list[dict[str, Any]]:
    """A row of each load: the largest number of robots of each kind, predicted and measured."""
    rows, services = list[dict[str, Any]](), dict[str, ServiceTime]()
    for mix in mixes:
        if mix.policy not in services:
            services[mix.policy] = measure_service(partial(load_exchange, mix.policy), MAX_BATCH)
        rows.append(row_of(mix, services[mix.policy], seconds))
        print(rows[-1], flush=True)
    return rows


def row_of(mix: Mix, service: ServiceTime, seconds: float) -> dict[str, Any]:
    """What is predicted of a load from this service time, and what is measured."""
    most = int(service.most_hz(MAX_BATCH) / sum(demand.rate_hz for demand in mix.demands))

    def simulated(robots: int) -> bool:
        share = missed([*mix.demands] * robots, service, MAX_BATCH, np.random.default_rng(0), 20_000)
        return share <= ALLOWED

    contract = load_exchange(mix.policy).contract
    with serving(mix.policy, "--max-batch", str(MAX_BATCH), *ROOM) as server:
        measured = largest(lambda robots: holds(server.port, contract, mix, robots, seconds), 2 * most)
    predicted = largest(simulated, most)
    return {
        "load": str(mix), "base_ms": 1e3 * service.base_s, "per_request_ms": 1e3 * service.per_request_s,
        "predicted": predicted, "measured": measured, "ratio": predicted / max(1, measured),
    }  # fmt: skip


def holds(port: int, contract: Contract, mix: Mix, robots: int, seconds: float) -> bool:
    """Whether so many robots of each demand get their replies in one of three trials."""

    async def trial() -> list[Load]:
        joins = [
            partial(connected_robot, port, workload_of(contract, 1e3 * demand.deadline_s)) for demand in mix.demands
        ]
        rates = [robots * demand.rate_hz for demand in mix.demands]
        together = (run_robots(join, robots, seconds, rate) for join, rate in zip(joins, rates, strict=True))
        return await asyncio.gather(*together)

    def share(load: Load, demand: Demand) -> float:
        late = np.count_nonzero(load.latencies_ms > 1e3 * demand.deadline_s)
        return float(late + load.errors) / (len(load.latencies_ms) + load.errors)

    trials = (uvloop.run(trial()) for _ in range(3))
    return any(max(map(share, loads, mix.demands)) <= ALLOWED for loads in trials)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number, at most ``most``, that fits; by bisection to 2 %."""
    few, many = 0, most + 1
    while many - few > max(1.0, 0.02 * few):
        between = (few + many) // 2
        few, many = (between, many) if fits(between) else (few, between)
    return few


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = compare(seconds=options.seconds)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
