"""One server, many robots: does it pay to select inferences, or is it enough to limit their rate?

Real policies in virtual time, in lock step by control step: the world does not wait, robots have phases of their own,
and all share one uplink and one target. A robot that waits for a reply holds; one with late verdicts executes its draft
until the verdict comes. A reply is due before the chunk's end; without one the draft is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.delay.corrected import training_cells
from experiments.fleet import sockets, tables
from experiments.fleet.robots import (
    CHASE,
    CORRECTOR,
    DISCIPLINES,
    EPISODES,
    FLEETS,
    LINK,
    MOST,
    PAIRS,
    REQUEST_BYTES,
    TOGETHER,
    WARM_UP,
    control_step,
    disciplines,
    fair_share,
    granted_together,
    member,
    service,
)
from experiments.fleet.server import Request, Server
from experiments.grid import Cell, Run
from experiments.report import Report, glossary
from specact import load_pair
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import METHODS


def plan(run: Run) -> Iterator[Cell]:
    """A cell per pair, discipline and size of the fleets; the draft asks nobody, and a small fleet may always ask."""
    needed = {CORRECTOR.needs, replace(CORRECTOR, method="first").needs}
    yield from (cell for cell in training_cells() if cell.name in needed)
    for size in reversed(FLEETS):
        for name in PAIRS:
            scarce = fair_share(name, size) < 1.0
            for discipline in disciplines(name):
                how = DISCIPLINES[discipline]
                if (scarce or how.score is None) and (size == 1 or how.asks != "never"):
                    yield Cell(f"{name}/{discipline}/{size}", partial(measure, name, discipline, size, False))
    for discipline in sockets.SENT:
        virtual = partial(measure, sockets.PAIR, discipline, sockets.ROBOTS, True)
        yield Cell(f"{tables.NEAR}/{discipline}/virtual", virtual)
        yield Cell(f"{tables.NEAR}/{discipline}/sockets", partial(sockets.measure, discipline))


def report(results: Mapping[str, Any]) -> Report:
    """Success over sizes, contrasts, and what the disciplines are."""
    found = tables.report(results)
    return replace(found, tables=[*found.tables, glossary(DISCIPLINES, "disciplines")])


def measure(name: str, discipline: str, size: int, near: bool, folder: Path, run: Run) -> dict[str, Any]:
    """Fleets of a size, together as many robots in every cell; ``near`` a server that answers one by one: no link."""
    if name == CHASE:
        run.result(CORRECTOR.needs)
    pair, how = load_pair(CORRECTOR.folder(run.out) if name == CHASE else name), DISCIPLINES[discipline]
    family = rollout_of(pair, replace(METHODS["hybrid"], verifier=how.verifier))
    robots, episodes = (size, 1) if run.quick else (TOGETHER, EPISODES)
    most = 1 if near else granted_together() if how.asks == "granted" else MOST
    link = (0.0, 0.0) if near else (LINK.busy(REQUEST_BYTES, True, 0.0), LINK.rtt_ms / 2e3)
    servers = [Server(service(), most, *link, how.asks == "granted") for _ in range(robots // size)]
    members = [member(family, how, servers[place // size], size, place, run.seed) for place in range(robots)]
    members.sort(key=lambda each: each.phase % 1.0)
    step, end, before = 0, WARM_UP + episodes, 0
    while left := sum(len(each.won) < end for each in members):
        if not before and all(len(each.won) >= WARM_UP for each in members):
            before = sum(each.policy.counts["steps"] for each in members)
            for server in servers:
                server.sent.clear()
        control_step([each for each in members if each.phase < step + 1], family)
        for each in members:
            each.policy.clock.sleep(1.0 / pair.rate_hz)
        step += 1
        run.update("robots", robots - left, robots)
    members.sort(key=lambda each: each.place)
    return summary(
        np.array([each.won[WARM_UP:end] for each in members], float),
        [request for server in servers for request in server.sent],
        sum(each.policy.counts["steps"] for each in members) - before,
    )


def summary(won: NDArray[np.float64], requests: Sequence[Request], inferences: int) -> dict[str, Any]:
    """Of ``won [robots, episodes]``, all requests and the number of inferences."""
    served = [request for request in requests if np.isfinite(request.started)]
    queued = [1e3 * (request.started - request.arrived) for request in served]
    took = [1e3 * (request.replied - request.at) for request in served]
    return {
        "won": ["".join(str(int(each)) for each in row) for row in won],
        "asked": len(requests) / inferences, "served": len(served) / inferences,
        "in_time": sum(request.replied <= request.due for request in served) / inferences,
        "queue_p99_ms": float(np.quantile(queued, 0.99)) if served else None,
        "reply_p50_ms": float(np.quantile(took, 0.5)) if served else None,
        "reply_p99_ms": float(np.quantile(took, 0.99)) if served else None,
    }  # fmt: skip
