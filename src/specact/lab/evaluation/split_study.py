"""RoboECC over recorded links: where the stages of a target run, and what an inference then takes, over real sockets.

The robot infers at fixed moments, on a device whose networks take several times as long as here. The server is another
process, and the link a relay that replays a recording; every cell, one method on one link, begins at the same moment.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from specact.execution.verdicts import WAIT, LateVerdicts
from specact.families.codes.bundle import Bundle, load_bundle
from specact.families.codes.timing import measure_inference
from specact.families.codes.verify import CodeDrafter
from specact.families.staged.stages import Array, StagedFolder, StagedNetwork, load_staged
from specact.families.staged.wire import PRECISIONS, pack, reply_bytes, split_dialect, unpack
from specact.files import write_json
from specact.gates import Always, Gate
from specact.gates.settings import GateSettings
from specact.lab.evaluation.latency import SlowDraft, calibrated_on, observations
from specact.lab.evaluation.split_links import PERIOD_S, StudyLink, bandwidths_of, forecast_errors
from specact.lab.evaluation.split_simulated import PLACED, SIMULATED, Oracle, chooser_of, simulated
from specact.lab.processes import linked, serving
from specact.links.link import load_link
from specact.observation import ObservationHistory, Window
from specact.placement.bandwidth import RecurrentForecast
from specact.placement.planner import StageCosts
from specact.placement.target import SplitTarget, code_reader, measure_costs, reader_of
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.target import remote_verifier
from specact.remote.transport import Endpoint
from specact.rng import StepAddress
from specact.types import Floats, Miss
from specact.verification import Verifier

BUNDLE = "metaworld"
# How much longer networks take on the device than here; and the most of the target that the server takes.
FACTORS, BUDGETS = (20.0, 50.0), (1.0, 0.5)
_DEADLINE_MS, _CONNECT_S, _RATE, _PROBES = 5_000.0, 60.0, 0.6, 20
GATED = ("hybrid", "adahi", "late", "adahi_placed")
# The other one, on which an inference takes a second, is in virtual time alone.
OVER_SOCKETS = ("5g-like", "lte", "wifi")
_COUNTED = ("steps", "wanted", "transmitted", "missed", "in_time", "replaced")


# An episode and what the robot saw.
_Seen = tuple[int, Any]


class SlowNetwork:
    """Stages on a slower device: they answer as before, as late as they would there.

    Args:
        network: the stages.
        device_s: of each of them there [s], ``[N]``; longer than here.
    """

    def __init__(self, network: StagedNetwork, device_s: Floats) -> None:
        self._network, self._left_s = network, [*np.cumsum(device_s[::-1])[::-1].tolist(), 0.0]

    def run(self, windows: Sequence[Window]) -> list[Array]:
        """See :class:`~specact.families.staged.stages.StagedNetwork`."""
        return self._after(self._left_s[0], self._network.run, windows)

    def finish(self, activation: Array, cut: int) -> list[Array]:
        """See :class:`~specact.families.staged.stages.StagedNetwork`."""
        return self._after(self._left_s[cut], self._network.finish, activation, cut)

    def _after(self, seconds: float, work: Callable[..., list[Array]], *arguments: Any) -> list[Array]:
        until = time.monotonic() + seconds
        answer = work(*arguments)
        time.sleep(max(0.0, until - time.monotonic()))
        return answer


@dataclass(frozen=True)
class SplitStudy:
    """The study over real sockets.

    Attributes:
        folder: of the stages.
        out: where cells are kept.
        links: recorded ones; forecasts lie in ``out`` as ``forecast-NAME.onnx``.
        factors: by which the device is slower.
        inferences: of each cell.
        seed: of everything random.
    """

    folder: Path
    out: Path
    links: tuple[StudyLink, ...]
    factors: tuple[float, ...]
    inferences: int
    seed: int

    def cells(self) -> Iterator[tuple[StudyLink, float, str, Path]]:
        """Every cell and its file."""
        for link in self.links:
            for factor in self.factors if link.name in OVER_SOCKETS else ():
                for method in (*PLACED, *GATED):
                    yield link, factor, method, self.out / "cells" / f"{link.name}-{factor:g}-{method}.json"

    def run(self, progress: Callable[[str, int, int], None]) -> None:
        """Measures every cell that is not there yet."""
        cells = list(self.cells())
        left = [cell for cell in cells if not cell[3].exists()]
        if not left:
            return
        staged, bundle = self.staged, load_bundle(BUNDLE)
        seen = list(islice(observations(bundle, self.seed), self.inferences))
        gate = calibrated_on(bundle, seen, _RATE, self.seed)
        with ExitStack() as stack:
            servers = {
                "placed": stack.enter_context(serving(self.folder)).port,
                "gated": stack.enter_context(serving(bundle.path)).port,
            }
            self._measure_costs(staged, servers["placed"], bundle, seen)
            for number, (link, factor, method, file) in enumerate(left):
                progress("cells", number, len(left))
                costs = self.costs(factor)
                drafter = CodeDrafter(SlowDraft(bundle.draft, factor * self.draft_s), bundle.tokenizer)
                network = cast(StagedNetwork, SlowNetwork(staged.network, costs.device_s))
                device = replace(staged, network=network)
                cell = _Cell(device, bundle, link, self.out, costs, gate, drafter, self.inferences, self.seed)
                write_json(file, cell.measure(method, servers, seen))
            progress("cells", len(left), len(left))

    @cached_property
    def staged(self) -> StagedFolder:
        """The stages."""
        return load_staged(self.folder)

    def found(self) -> dict[str, Any]:
        """What was measured, and what follows from it in virtual time."""
        forecasts = {link.name: RecurrentForecast(self.out / f"forecast-{link.name}.onnx") for link in self.links}
        carried = {link.name: bandwidths_of(link, self.staged) for link in self.links}
        sockets: dict[str, list[dict[str, Any]]] = {}
        for link, factor, method, file in self.cells():
            summary = cell_summary(json.loads(file.read_text()))
            sockets.setdefault(f"{factor:g}", []).append({"link": link.name, "method": method, **summary})
        virtual: dict[str, list[dict[str, Any]]] = {}
        for factor in self.factors:
            costs = self.costs(factor)
            for budget in BUDGETS:
                rows = virtual.setdefault(f"{factor:g} times slower, server's load at most {budget:g}", [])
                for link in self.links:
                    before, _ = carried[link.name]
                    count = int((link.seconds - link.trained_s) / PERIOD_S)
                    for method in SIMULATED:
                        if method == "server" and budget < 1.0:
                            continue
                        cell = simulated(method, link, costs, before, forecasts[link.name], count, budget)
                        rows.append({"link": link.name, "method": method, **cell_summary(cell)})
        return {
            "machine": platform.machine(), "seed": self.seed, "inferences": self.inferences, "period_s": PERIOD_S,
            "costs": self._measured_costs,
            "sockets": sockets, "simulated": virtual,
            "forecasts": {
                name: forecast_errors(forecasts[name], before, after) for name, (before, after) in carried.items()
            },
            "precision": precision_errors(self.staged, load_bundle(BUNDLE), self.seed),
        }  # fmt: skip

    def costs(self, factor: float) -> StageCosts:
        """The costs of stages on a device that is so much slower than this machine."""
        found = self._measured_costs
        arrays = {name: np.array(found[name]) for name in ("server_s", "device_s", "cut_bytes", "load")}
        arrays["device_s"] *= factor
        return StageCosts(observation_bytes=found["observation_bytes"], **arrays)

    @property
    def draft_s(self) -> float:
        """What the draft takes here [s]."""
        return float(self._measured_costs["draft_s"])

    @property
    def _measured_costs(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "costs.json").read_text())
        return found

    def _measure_costs(self, staged: StagedFolder, port: int, bundle: Bundle, seen: Sequence[_Seen]) -> None:
        if (self.out / "costs.json").exists():
            return
        windows = [window_of(bundle, observation) for _, observation in seen[:_PROBES]]
        with _client(staged, port) as client:
            measure_costs(staged, client, windows[:3])  # to warm up both sides
            costs, _ = measure_costs(staged, client, windows)
        draft_s = measure_inference(bundle.draft, bundle.spec.draft)
        measured = {name: np.asarray(found).tolist() for name, found in vars(costs).items()}
        write_json(self.out / "costs.json", {**measured, "draft_s": draft_s})


@dataclass(frozen=True)
class _Cell:
    staged: StagedFolder
    bundle: Bundle
    link: StudyLink
    out: Path
    costs: StageCosts
    gate: GateSettings
    drafter: CodeDrafter
    inferences: int
    seed: int

    def measure(self, method: str, servers: dict[str, int], seen: Sequence[_Seen]) -> dict[str, Any]:
        placed = method not in ("hybrid", "adahi", "late")
        learned = RecurrentForecast(self.out / f"forecast-{self.link.name}.onnx")
        before, _ = bandwidths_of(self.link, self.staged)
        with ExitStack() as stack:
            began = time.monotonic()
            relay = linked(servers["placed" if placed else "gated"], self.link.at(self.link.trained_s), self.seed)
            port = stack.enter_context(relay).port
            began = time.monotonic()
            model = load_link(self.link.at(self.link.trained_s))
            up, down = int(self.costs.observation_bytes), int(self.costs.cut_bytes[-1])
            oracle = Oracle(model, lambda: time.monotonic() - began, up, down)
            target: SplitTarget[Any] | None = None
            verifier: Verifier
            if placed:
                client = stack.enter_context(_client(self.staged, port))
                named = "smallest" if method == "adahi_placed" else method
                chooser = chooser_of(named, self.costs, before, learned, oracle, np.inf)
                reader = reader_of(self.bundle, self.staged)
                target = SplitTarget(self.staged, reader, client, chooser, _DEADLINE_MS)
                verifier = self.bundle.verifier(target)
            else:
                endpoint = Endpoint("ws", "127.0.0.1", port)
                client = stack.enter_context(Client(endpoint, self.bundle.codec.dialect, method))
                client.connect(_CONNECT_S)
                verifier = remote_verifier(client, self.bundle, _DEADLINE_MS)
            if method in PLACED:
                assert target is not None
                return self._alone(target, seen)
            return self._gated(method, verifier, target, seen)

    def _alone(self, target: SplitTarget[Any], seen: Sequence[_Seen]) -> dict[str, Any]:
        """The target by itself, waited for."""
        windows = [window_of(self.bundle, observation) for _, observation in seen]
        latencies, cuts, missed = [], [], 0
        for inference, due in self._moments():
            started = due()
            found = target.submit(windows[inference], StepAddress(self.seed, 0, 0, inference)).result()
            latencies.append(1e3 * (time.monotonic() - started))
            missed += isinstance(found, Miss)
            cuts.append(target.cut)
        return {"latency_ms": latencies, "cuts": cuts, "missed": missed, "switches": target.counts["switches"]}

    def _gated(
        self, method: str, verifier: Verifier, target: SplitTarget[Any] | None, seen: Sequence[_Seen]
    ) -> dict[str, Any]:
        """A draft, and a target that is asked by a gate."""
        gate: Gate = Always()
        if method.startswith("adahi"):
            gate = self.gate.build(self.bundle)
        late = LateVerdicts(np.inf) if method == "late" else None
        policy = SpeculativePolicy(
            self.bundle,
            gate,
            drafter=self.drafter,
            verifier=verifier,
            verdicts=WAIT if late is None else late,
            seed=self.seed,
        )
        period_s = 1.0 / self.bundle.rate_hz
        latencies = []
        for inference, due in self._moments():
            started, (episode, observation) = due(), seen[inference]
            if policy.record is None or policy.record.address.episode != episode:
                policy.reset(episode)
            policy.act(observation)
            latencies.append(1e3 * (time.monotonic() - started))
            # The rest of the chunk, each action when it is due: a late verdict replaces what is left of it.
            for action in range(1, self.bundle.execute):
                time.sleep(max(0.0, started + action * period_s - time.monotonic()))
                if not policy.wants_inference:
                    policy.act(observation)
        counts = {
            name: policy.counts[name] for name in ("steps", "wanted", "transmitted", "missed", "in_time", "replaced")
        }
        switches = None if target is None else target.counts["switches"]
        return {"latency_ms": latencies, "cuts": [], "missed": counts["missed"], "switches": switches, "counts": counts}

    def _moments(self) -> Iterator[tuple[int, Callable[[], float]]]:
        first = time.monotonic()
        for inference in range(self.inferences):

            def due(inference: int = inference) -> float:
                time.sleep(max(0.0, first + inference * PERIOD_S - time.monotonic()))
                return time.monotonic()

            yield inference, due


def _client(staged: StagedFolder, port: int) -> Client:
    client = Client(Endpoint("ws", "127.0.0.1", port), split_dialect(staged.spec, staged.fingerprint), "placed")
    try:
        client.connect(_CONNECT_S)
    except BaseException:
        client.close()
        raise
    return client


def cell_summary(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Mean, p95 and switches of a cell."""
    latency, cuts = np.array(cell["latency_ms"]), cell["cuts"]
    changes = int(np.count_nonzero(np.diff(cuts))) if len(cuts) else None
    return {
        "mean_ms": float(latency.mean()),
        "median_ms": float(np.median(latency)),
        "p95_ms": float(np.quantile(latency, 0.95)),
        "inferences": len(latency),
        "missed": cell.get("missed", 0),
        "switches": cell.get("switches", changes),
        "cuts": {str(cut): int(count) for cut, count in zip(*np.unique(cuts, return_counts=True), strict=True)},
        "counts": cell.get("counts"),
    }


def precision_errors(staged: StagedFolder, bundle: Bundle, seed: int, episodes: int = 40) -> list[dict[str, Any]]:
    """What fewer bits at each cut change of the target's answers, on observations that it drives.

    Returns:
        By cut: ``bytes``, and for each precision the largest change of a ``probability`` and the share of most likely
        ``codes`` that change.
    """
    seen = [window_of(bundle, observation) for _, observation in islice(observations(bundle, seed), episodes)]
    reader, rows = code_reader(bundle, staged), []
    wanted = [reader(staged.network.run([window])).probs for window in seen]
    for cut, shape in enumerate(staged.spec.activations, 1):
        row: dict[str, Any] = {
            "cut": cut, "bytes": {name: reply_bytes(staged.spec, cut, name) for name in PRECISIONS},
        }  # fmt: skip
        for precision in PRECISIONS:
            found = []
            for window in seen:
                crossed = unpack(pack(staged.network.begin([window], cut)[0], precision), shape)
                found.append(reader(staged.network.finish(crossed, cut)).probs)
            error, same = np.abs(np.array(found) - wanted), np.argmax(found, -1) == np.argmax(wanted, -1)
            row[precision] = {"probability": float(error.max()), "codes": float(1.0 - same.mean())}
        rows.append(row)
    return rows


def window_of(bundle: Bundle, observation: Any) -> Window:
    """The window of a robot that has just begun."""
    return ObservationHistory(bundle.observation).push(observation)
