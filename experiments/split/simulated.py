"""Recorded links of the study, and cut selection on them in virtual time: RoboECC's rule, its controls, an oracle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import ConfigError
from specact.files import write_whole
from specact.links.link import load_link
from specact.links.model import Link, round_trip
from specact.rng import Role, stream
from specact.systems import roboecc
from specact.systems.roboecc import Exchanges, Forecast, SmallestTotal, StageCosts, bandwidths, measured, total_s
from specact.types import Floats

PLACED = ("device", "server", "static", "roboecc", "smallest_last", "smallest", "smallest_apart", "smallest_oracle")
SIMULATED = (*PLACED, "roboecc_oracle", "smallest_printed")
# Time between two inferences: four actions at 20 Hz.
PERIOD_S = 0.2


@dataclass(frozen=True)
class StudyLink:
    """A link of the study without its start, and the recording's length [s]."""

    link: str
    seconds: float

    @property
    def trained_s(self) -> float:
        """Length of the part that forecasts are trained on; methods are measured on the rest."""
        return 0.6 * self.seconds

    def at(self, start_s: float) -> str:
        """The link from a moment of the recording on."""
        base, *more = self.link.split("+")
        return "+".join([base, f"start={start_s:g}", *more])


def study_links(data: Path, out: Path) -> dict[str, StudyLink]:
    """The recorded links by name; ``out`` gets the LTE recording with ten packets for each original one.

    Raises:
        ConfigError: if a recording is missing.
    """
    lte = [data / "mahimahi" / f"TMobile-LTE-short.{way}" for way in ("up", "down")]
    car = [data / "mahimahi" / f"ATT-LTE-driving.{way}" for way in ("up", "down")]
    radio = data / "telerobot_rtt" / "tyrell_roundtrip035.csv"
    missing = [file for file in (*lte, *car, radio) if not file.is_file()]
    if missing:
        raise ConfigError(f"there is no {missing[0]}; --data is the folder with mahimahi/ and telerobot_rtt/")
    fast = [out / f"fast.{file.suffix[1:]}" for file in lte]
    for file, slow in zip(fast, lte, strict=True):
        write_whole(file, b"".join(10 * (line + b"\n") for line in slow.read_bytes().split()))

    def pair(files: Sequence[Path]) -> str:
        return "mahimahi:" + ",".join(map(str, files))

    return {
        "5g-like": StudyLink(f"{pair(fast)}+delay=20", _duration_s(lte)),
        "lte": StudyLink(f"{pair(lte)}+delay=40", _duration_s(lte)),
        "lte-driving": StudyLink(f"{pair(car)}+delay=40", _duration_s(car)),
        "wifi": StudyLink(f"rtt:{radio}+rate=50", sum(map(float, radio.read_bytes().split())) / 1e3),
    }


def _duration_s(deliveries: Sequence[Path]) -> float:
    return min(float(file.read_bytes().split()[-1]) for file in deliveries) / 1e3


def bandwidths_of(link: StudyLink, costs: StageCosts) -> tuple[np.ndarray, np.ndarray]:
    """The bandwidth that a device measures at every inference: in the training part, and in the rest."""
    up, down = int(costs.observation_bytes), int(costs.cut_bytes[-1])
    counts = int(link.trained_s / PERIOD_S), int((link.seconds - link.trained_s) / PERIOD_S)
    first, second = (
        series(load_link(link.link), up, down, PERIOD_S, count, start_s=start)
        for count, start in zip(counts, (0.0, link.trained_s), strict=True)
    )
    return first, second


def series(
    link: Link, up_bytes: int, down_bytes: int, period_s: float, count: int, *, start_s: float = 0.0, seed: int = 0
) -> Floats:
    """Simulated measurements of a device with one exchange per period, each with the link to itself [bytes/s]."""
    rng = stream(seed, Role.LINK)
    moments = (start_s + period_s * np.arange(count)).tolist()
    taken = [round_trip(link, up_bytes, down_bytes, at, rng) for at in moments]
    return np.array([measured(up_bytes + down_bytes, seconds) for seconds in taken])


def oracle_of(link: Link, now: Callable[[], float], up_bytes: int, down_bytes: int) -> Forecast:
    """Forecasts an exchange's bandwidth from the link's own model at this time [s]: an upper bound for every forecast.

    The link's randomness is drawn independently.
    """

    def forecast(past: Sequence[float]) -> float:
        seconds = round_trip(link, up_bytes, down_bytes, max(0.0, now()), stream(0, Role.LINK))
        return measured(up_bytes + down_bytes, seconds)

    return forecast


class LatencyApart(SmallestTotal):
    """Separates the latency from the bandwidth: it is the shortest time on the link so far."""

    def total(self, past: Exchanges) -> Floats:
        return total_s(self.costs, *split_latency(past, self.forecast(bandwidths(past))))


class Printed(SmallestTotal):
    """Takes the total as published."""

    def total(self, past: Exchanges) -> Floats:
        return total_s(self.costs, self.forecast(bandwidths(past)), accounting="printed")


def split_latency(past: Exchanges, bytes_s: float) -> tuple[float, float]:
    """Splits a predicted bandwidth B^ into one without latency B' [bytes/s], and the latency L0 [s].

    The predicted time of the last exchange is preserved: ``bytes / B^ = L0 + bytes / B'``.
    """
    crossed, taken_s = past[-1][0], past[-1][0] / bytes_s
    latency_s = min(taken_s, min(network_s for _, network_s in past))
    return measured(crossed, taken_s - latency_s), latency_s


def chooser_of(
    method: str, costs: StageCosts, before: np.ndarray, learned: Forecast, oracle: Forecast, budget: float
) -> roboecc.Chooser:
    """Makes what chooses the cuts of a method of :data:`SIMULATED`; ``before`` are bandwidths of the training part."""
    cuts = range(costs.stages + 1)
    affordable = [cut for cut in range(1, costs.stages) if costs.loads[cut] <= budget]
    if method in ("device", "server", "static", "behind"):
        static = {"device": 0, "server": costs.stages, "behind": costs.stages - 1}.get(method)
        if static is None:
            static = roboecc.best_cut(total_s(costs, float(np.median(before))), costs.loads, affordable)
        return lambda current, past: static
    if method.startswith("roboecc"):
        return roboecc.RoboeccRule(costs, affordable, oracle if method.endswith("oracle") else learned)
    forecast = {"smallest_last": roboecc.last_value, "smallest_oracle": oracle}.get(method, learned)
    kind = {"smallest_apart": LatencyApart, "smallest_printed": Printed}.get(method, SmallestTotal)
    return kind(costs, cuts, forecast, budget, 0 if method == "smallest_oracle" else 10)


def simulated(
    method: str, link: StudyLink, costs: StageCosts, before: np.ndarray, learned: Forecast, count: int,
    budget: float = np.inf,
) -> dict[str, Any]:  # fmt: skip
    """Simulates a method in virtual time, with the measured times of stages, on the recorded link.

    Returns:
        ``latency_ms`` and ``cuts`` of each inference.
    """
    model, rng = load_link(link.at(link.trained_s)), stream(0, Role.LINK)
    past = deque[tuple[float, float]](maxlen=roboecc.MAX_EXCHANGES)
    up, downs = int(costs.observation_bytes), costs.cut_bytes.astype(int).tolist()
    clock = [0.0]
    largest = max(cut for cut in range(costs.stages + 1) if costs.loads[cut] <= budget)
    oracle = oracle_of(model, lambda: clock[0], up, downs[largest])
    chooser = chooser_of(method, costs, before, learned, oracle, budget)
    server = np.concatenate([[0.0], np.cumsum(costs.server_s)]).tolist()
    device = np.concatenate([np.cumsum(costs.device_s[::-1])[::-1], [0.0]]).tolist()
    cut, latencies, cuts = 0, [], []
    for inference in range(count):
        clock[0] = max(clock[0], inference * PERIOD_S)
        started, cut = clock[0], chooser(cut, past)
        network = 0.0
        if cut:
            network = model.delay(up, True, started, rng)
            network += model.delay(downs[cut], False, started + network + server[cut], rng)
            past.append((up + downs[cut], network))
        clock[0] = started + network + server[cut] + device[cut]
        latencies.append(1e3 * (clock[0] - started))
        cuts.append(cut)
    return {"latency_ms": latencies, "cuts": cuts}
