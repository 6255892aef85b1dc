"""The study of RoboECC: placement of a target's stages and the resulting latency, over real sockets.

The robot infers periodically, on an emulated device whose networks are several times slower than this machine's. The
server is another process, and the link a relay that replays a recording; every cell (one method on one link) begins at
the same time of the recording.
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
# Slowdown of the device's networks, and upper bounds of the server's load.
FACTORS, BUDGETS = (20.0, 50.0), (1.0, 0.5)
_DEADLINE_MS, _CONNECT_S, _RATE, _PROBES = 5_000.0, 60.0, 0.6, 20
GATED = ("hybrid", "adahi", "late", "adahi_placed")
# The fourth link, on which an inference takes a second, is simulated in virtual time only.
OVER_SOCKETS = ("5g-like", "lte", "wifi")


# An episode's number and an observation.
_Seen = tuple[int, Any]


class SlowNetwork:
    """Emulates a slower device: delays the stages' results.

    Args:
        network: the stages.
        device_s: time of each stage on the device [s], ``[N]``; longer than on this machine.
    """

    def __init__(self, network: StagedNetwork, device_s: Floats) -> None:
        self._network, self._remaining_s = network, [*np.cumsum(device_s[::-1])[::-1].tolist(), 0.0]

    def run(self, windows: Sequence[Window]) -> list[Array]:
        """See :class:`~specact.families.staged.stages.StagedNetwork`."""
        return self._delayed(self._remaining_s[0], self._network.run, windows)

    def finish(self, activation: Array, cut: int) -> list[Array]:
        """See :class:`~specact.families.staged.stages.StagedNetwork`."""
        return self._delayed(self._remaining_s[cut], self._network.finish, activation, cut)

    def _delayed(self, seconds: float, work: Callable[..., list[Array]], *arguments: Any) -> list[Array]:
        until = time.monotonic() + seconds
        answer = work(*arguments)
        time.sleep(max(0.0, until - time.monotonic()))
        return answer


@dataclass(frozen=True)
class SplitStudy:
    """The study over real sockets.

    Attributes:
        folder: of the stages.
        out: folder of the results.
        links: recorded ones; their forecasts are ``forecast-NAME.onnx`` in ``out``.
        factors: slowdowns of the device.
        inferences: per cell.
        seed: random seed.
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
        """Measures every cell without a file; resumable."""
        cells = list(self.cells())
        cells_left = [cell for cell in cells if not cell[3].exists()]
        if not cells_left:
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
            for number, (link, factor, method, file) in enumerate(cells_left):
                progress("cells", number, len(cells_left))
                costs = self.costs(factor)
                drafter = CodeDrafter(SlowDraft(bundle.draft, factor * self.draft_s), bundle.tokenizer)
                network = cast(StagedNetwork, SlowNetwork(staged.network, costs.device_s))
                device = replace(staged, network=network)
                cell = _Cell(device, bundle, link, self.out, costs, gate, drafter, self.inferences, self.seed)
                write_json(file, cell.measure(method, servers, seen))
            progress("cells", len(cells_left), len(cells_left))

    @cached_property
    def staged(self) -> StagedFolder:
        """The stages."""
        return load_staged(self.folder)

    def results(self) -> dict[str, Any]:
        """The measured results, and the simulated ones that follow from them."""
        forecasts = {link.name: RecurrentForecast(self.out / f"forecast-{link.name}.onnx") for link in self.links}
        bandwidths = {link.name: bandwidths_of(link, self.staged) for link in self.links}
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
                    before, _ = bandwidths[link.name]
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
                name: forecast_errors(forecasts[name], before, after) for name, (before, after) in bandwidths.items()
            },
            "precision": precision_errors(self.staged, load_bundle(BUNDLE), self.seed),
        }  # fmt: skip

    def costs(self, factor: float) -> StageCosts:
        """The costs of stages on a device that is slower than this machine by a factor."""
        measured = self._measured_costs
        arrays = {name: np.array(measured[name]) for name in ("server_s", "device_s", "cut_bytes", "load")}
        arrays["device_s"] *= factor
        return StageCosts(observation_bytes=measured["observation_bytes"], **arrays)

    @property
    def draft_s(self) -> float:
        """Time of the draft's inference on this machine [s]."""
        return float(self._measured_costs["draft_s"])

    @property
    def _measured_costs(self) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads((self.out / "costs.json").read_text())
        return stored

    def _measure_costs(self, staged: StagedFolder, port: int, bundle: Bundle, seen: Sequence[_Seen]) -> None:
        if (self.out / "costs.json").exists():
            return
        windows = [window_of(bundle, observation) for _, observation in seen[:_PROBES]]
        with _client(staged, port) as client:
            measure_costs(staged, client, windows[:3])  # to warm up both sides
            costs, _ = measure_costs(staged, client, windows)
        draft_s = measure_inference(bundle.draft, bundle.spec.draft)
        measured = {name: np.asarray(values).tolist() for name, values in vars(costs).items()}
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
                return self._target_only(target, seen)
            return self._gated(method, verifier, target, seen)

    def _target_only(self, target: SplitTarget[Any], seen: Sequence[_Seen]) -> dict[str, Any]:
        """The target without a draft; the robot waits for every answer."""
        windows = [window_of(self.bundle, observation) for _, observation in seen]
        latencies, cuts, missed = [], [], 0
        for inference, due in self._schedule():
            started = due()
            answer = target.submit(windows[inference], StepAddress(self.seed, 0, 0, inference)).result()
            latencies.append(1e3 * (time.monotonic() - started))
            missed += isinstance(answer, Miss)
            cuts.append(target.cut)
        return {"latency_ms": latencies, "cuts": cuts, "missed": missed, "switches": target.counts["switches"]}

    def _gated(
        self, method: str, verifier: Verifier, target: SplitTarget[Any] | None, seen: Sequence[_Seen]
    ) -> dict[str, Any]:
        """A draft and a gated target."""
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
        for inference, due in self._schedule():
            started, (episode, observation) = due(), seen[inference]
            if policy.record is None or policy.record.address.episode != episode:
                policy.reset(episode)
            policy.act(observation)
            latencies.append(1e3 * (time.monotonic() - started))
            # The rest of the chunk, each action when it is due: a late verdict replaces the remaining actions.
            for action in range(1, self.bundle.execute):
                time.sleep(max(0.0, started + action * period_s - time.monotonic()))
                if not policy.wants_inference:
                    policy.act(observation)
        counts = {
            name: policy.counts[name] for name in ("steps", "wanted", "transmitted", "missed", "in_time", "replaced")
        }
        switches = None if target is None else target.counts["switches"]
        return {"latency_ms": latencies, "cuts": [], "missed": counts["missed"], "switches": switches, "counts": counts}

    def _schedule(self) -> Iterator[tuple[int, Callable[[], float]]]:
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
    """The change of the target's answers at lower precision of each cut's activations, on its own rollouts.

    Returns:
        Per cut: ``bytes``, and for each precision the largest change of a ``probability`` and the share of most
        likely ``codes`` that change.
    """
    windows = [window_of(bundle, observation) for _, observation in islice(observations(bundle, seed), episodes)]
    reader, rows = code_reader(bundle, staged), []
    exact = [reader(staged.network.run([window])).probs for window in windows]
    for cut, shape in enumerate(staged.spec.activations, 1):
        row: dict[str, Any] = {
            "cut": cut, "bytes": {name: reply_bytes(staged.spec, cut, name) for name in PRECISIONS},
        }  # fmt: skip
        for precision in PRECISIONS:
            lossy = []
            for window in windows:
                received = unpack(pack(staged.network.begin([window], cut)[0], precision), shape)
                lossy.append(reader(staged.network.finish(received, cut)).probs)
            error, same = np.abs(np.array(lossy) - exact), np.argmax(lossy, -1) == np.argmax(exact, -1)
            row[precision] = {"probability": float(error.max()), "codes": float(1.0 - same.mean())}
        rows.append(row)
    return rows


def window_of(bundle: Bundle, observation: Any) -> Window:
    """The window of an episode's first observation."""
    return ObservationHistory(bundle.observation).push(observation)
