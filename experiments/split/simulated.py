"""Cut selection on recorded links in virtual time: RoboECC's rule, its controls, forecasts and an oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.split.recordings import PERIOD_S, StudyLink
from specact.links.link import load_link
from specact.links.model import Link, round_trip
from specact.rng import Role, stream
from specact.systems.roboecc import (
    Accounting,
    Bandwidths,
    Chooser,
    Forecast,
    LastValue,
    RoboeccRule,
    SmallestTotal,
    StageCosts,
    StaticCut,
    best_cut,
    measured,
    total_s,
)

PLACED = ("device", "server", "static", "roboecc", "smallest_last", "smallest", "smallest_apart", "smallest_oracle")
SIMULATED = (*PLACED, "roboecc_oracle", "smallest_printed")


class Oracle:
    """Forecasts the bandwidth from the link's own model: an upper bound for every forecast.

    Args:
        link: the model.
        now: time on the link [s].
        up_bytes, down_bytes: of the exchange that is forecast.
    """

    def __init__(self, link: Link, now: Callable[[], float], up_bytes: int, down_bytes: int) -> None:
        self._link, self._now, self._sizes = link, now, (up_bytes, down_bytes)

    def forecast(self, past: Sequence[float]) -> float:
        """See :class:`~specact.systems.roboecc.Forecast`; the link's randomness is drawn independently."""
        seconds = round_trip(self._link, *self._sizes, max(0.0, self._now()), stream(0, Role.LINK))
        return measured(sum(self._sizes), seconds)


def chooser_of(
    method: str, costs: StageCosts, before: np.ndarray, learned: Forecast, oracle: Forecast, budget: float
) -> Chooser:
    """Makes the object that chooses a method's cuts.

    Args:
        method: one of :data:`SIMULATED`.
        costs: of the stages.
        before: bandwidths of the training part of the recording.
        learned, oracle: forecasts.
        budget: upper bound of the server's load.
    """
    cuts = range(costs.stages + 1)
    affordable = [cut for cut in range(1, costs.stages) if costs.loads[cut] <= budget]
    if method == "device":
        return StaticCut(0)
    if method == "server":
        return StaticCut(costs.stages)
    if method == "static":
        return StaticCut(best_cut(total_s(costs, float(np.median(before))), costs.loads, affordable))
    if method.startswith("roboecc"):
        return RoboeccRule(costs, affordable, oracle if method.endswith("oracle") else learned)
    forecasts = {"smallest_last": LastValue(), "smallest_oracle": oracle}
    accounting: Accounting = "printed" if method == "smallest_printed" else "faithful"
    return SmallestTotal(
        costs, cuts, forecasts.get(method, learned), budget, accounting,
        latency_apart=method == "smallest_apart", look_every=0 if method == "smallest_oracle" else 10,
    )  # fmt: skip


def simulated(
    method: str, link: StudyLink, costs: StageCosts, before: np.ndarray, learned: Forecast, count: int,
    budget: float = np.inf,
) -> dict[str, Any]:  # fmt: skip
    """Simulates a method in virtual time, with the measured times of stages, on the recorded link.

    Returns:
        ``latency_ms`` and ``cuts`` of each inference.
    """
    model, rng, bandwidths = load_link(link.at(link.trained_s)), stream(0, Role.LINK), Bandwidths()
    up, downs = int(costs.observation_bytes), costs.cut_bytes.astype(int).tolist()
    clock = [0.0]
    largest = max(cut for cut in range(costs.stages + 1) if costs.loads[cut] <= budget)
    oracle = Oracle(model, lambda: clock[0], up, downs[largest])
    chooser = chooser_of(method, costs, before, learned, oracle, budget)
    server = np.concatenate([[0.0], np.cumsum(costs.server_s)]).tolist()
    device = np.concatenate([np.cumsum(costs.device_s[::-1])[::-1], [0.0]]).tolist()
    cut, latencies, cuts = 0, [], []
    for inference in range(count):
        clock[0] = max(clock[0], inference * PERIOD_S)
        started, cut = clock[0], chooser.choose(cut, bandwidths)
        network = 0.0
        if cut:
            network = model.delay(up, True, started, rng)
            network += model.delay(downs[cut], False, started + network + server[cut], rng)
            bandwidths.add(up + downs[cut], network)
        clock[0] = started + network + server[cut] + device[cut]
        latencies.append(1e3 * (clock[0] - started))
        cuts.append(cut)
    return {"latency_ms": latencies, "cuts": cuts}
