"""``specact capacity`` says how many robots a server on this machine holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from rich.table import Table
from tyro.conf import Positional

from specact.bundle.network import Compute
from specact.cli.options import Flat, Maybe, Options
from specact.cli.output import print_result, table_of
from specact.records import Count, RateHz
from specact.server.capacity import SEARCH_REQUESTS, Demand, ServiceTime, capacity, latencies
from specact.wire.messages import MAX_DEADLINE_MS

# The share of replies that may be missed; and the rows, as parts of the capacity.
_ALLOWED, _PARTS = 0.01, (0.25, 0.5, 0.75, 0.9, 1.0, 1.1)
_SHOWN = {"robots": "robots", "load": "load", "missed": "missed", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
_BINDS = {
    "throughput": "its throughput binds: another server, a larger --max-batch or a faster target help",
    "deadline": "the deadline binds: a longer one or a faster target help",
}
_ASSUMED = f"""\
assumed: robots ask periodically, from random phases, and each interval varies by up to a tenth;
  a robot may miss {_ALLOWED:.0%} of its replies, and nothing but other requests delays them;
  there is no link: take its round trip off the deadline;
  the server is one process, and its robots take no time of its processor;
  this machine is as busy with other things as it was now"""


@dataclass(frozen=True)
class Capacity(Options):
    """Say how many robots a server on this machine holds: it is measured on loopback, and its queue simulated.

    For some seconds robots ask it without pause, which shows how long a batch takes.
    """

    # pair, whose target is served, or any chunk policy, as specact serve takes them
    policy: Positional[str] = "ball"
    rate_hz: RateHz = 20.0  # requests a second of each robot
    deadline_ms: Annotated[float, Meta(gt=0.0, le=MAX_DEADLINE_MS)] = 50.0  # within which it needs a reply
    max_batch: Count = 16  # requests in one inference, as of specact serve
    target: Maybe[str] = None  # of a pair of chunk policies or of FLASH's block, as of specact serve
    steps: Maybe[Count] = None  # Euler steps of a flow policy; 10 if not given
    compute: Flat[Compute] = field(default_factory=Compute)
    json: bool = False  # print the result as JSON

    def run(self) -> None:
        from specact.lab.rollout.load import measure_service
        from specact.load import load_exchange

        load = partial(load_exchange, self.policy, target=self.target, steps=self.steps, compute=self.compute)
        service = measure_service(load, self.max_batch)
        demand, most_hz = Demand(self.rate_hz, self.deadline_ms / 1e3), service.most_hz(self.max_batch)
        robots = capacity(demand, service, self.max_batch, 0, _ALLOWED)
        counts = sorted({max(1, round(part * robots)) for part in _PARTS} | {robots + 1})
        result = {
            "robots": robots, "base_ms": 1e3 * service.base_s, "per_request_ms": 1e3 * service.per_request_s,
            "most_hz": most_hz, "binds": "throughput" if robots > 0.9 * most_hz / self.rate_hz else "deadline",
            "rows": [self._row(demand, count, service) for count in counts],
        }  # fmt: skip
        print_result(self.json, result, self._lines(result))

    def _row(self, demand: Demand, robots: int, service: ServiceTime) -> dict[str, Any]:
        """What so many robots would see."""
        times, _ = latencies([demand] * robots, service, self.max_batch, np.random.default_rng(0), SEARCH_REQUESTS)
        p50, p99 = (None if np.isinf(p) else float(1e3 * p) for p in np.quantile(times, (0.5, 0.99), method="higher"))
        load, missed = robots * demand.rate_hz / service.most_hz(self.max_batch), (times > demand.deadline_s).mean()
        return {"robots": robots, "load": load, "missed": float(missed), "p50_ms": p50, "p99_ms": p99}

    def _lines(self, result: dict[str, Any]) -> Iterator[str | Table]:
        wanted = f"ask {self.rate_hz:g} times a second and need the reply within {self.deadline_ms:g} ms"
        yield f"this server holds {result['robots']} robots that {wanted}"
        yield (
            f"a batch of b takes {result['base_ms']:.3g} + {result['per_request_ms']:.3g} b ms; with at most "
            f"{self.max_batch} in one it answers {result['most_hz']:.0f} requests a second"
        )
        yield _BINDS[result["binds"]]
        yield table_of("", result["rows"], _SHOWN)
        yield _ASSUMED
