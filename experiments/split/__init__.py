"""RoboECC: a target in stages on device and server, over recorded links (docs/results/split.md).

``--data`` is the folder with ``mahimahi/`` and ``telerobot_rtt/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import draw_times
from experiments.grid import Cell, Experiment, Results, Run
from experiments.report import Picture, Report, Table, between, named
from experiments.split.forecast import forecast_errors, load_forecast, save_forecast, train_forecast
from experiments.split.simulated import PERIOD_S, PLACED, SIMULATED, StudyLink, bandwidths_of, simulated, study_links
from experiments.split.sockets import GATED, Device, calibrate_along, staged_client, target_windows
from experiments.tised.tables import systems_of
from specact.lab.evaluation.cost import median_ms
from specact.lab.report.figures import style_of
from specact.lab.rollout.processes import serving
from specact.lab.train.split import split_bundle
from specact.load import load_pair
from specact.rng import StepAddress
from specact.systems.roboecc import StageCosts, measure_costs
from specact.systems.staged import PRECISIONS, StagedFolder, load_staged, reader_of

BUNDLE, RATE, PROBES = "metaworld", 0.6, 20
# Slowdown of the device's networks, and upper bounds of the server's load.
FACTORS, BUDGETS = (20.0, 50.0), (1.0, 0.5)
LINKS = ("5g-like", "lte", "lte-driving", "wifi")
# The fourth link, on which an inference takes a second, is simulated in virtual time only.
OVER_SOCKETS = ("5g-like", "lte", "wifi")
# Where the task was played with every cut.
SWEPT = "split-ball, ball at 0, last, vla-agx-50w, {} ms"
NAMES = {
    "device": "everything on the device",
    "server": "everything on the server",
    "static": "static cut",
    "roboecc": "RoboECC's rule, forecast",
    "roboecc_oracle": "RoboECC's rule, oracle",
    "smallest_last": "smallest total, last value",
    "smallest": "smallest total, forecast",
    "smallest_apart": "smallest total, forecast, latency apart",
    "smallest_oracle": "smallest total, oracle",
    "smallest_printed": "smallest total as printed, forecast",
    "hybrid": "hybrid",
    "adahi": "ADAHI",
    "late": "target asked, nobody waits",
    "adahi_placed": "ADAHI, its target at the smallest total",
}


def plan(run: Run) -> Iterator[Cell]:
    """Costs and forecasts, which the other cells need; real sockets, virtual time, precision."""
    yield Cell("costs", measure)
    for name in LINKS:
        yield Cell(f"forecasts/{name}", partial(learn, name))
    yield Cell("simulated", simulate)
    yield Cell("precision", lambda folder, run: precision_errors(_stages(run), run.few(40), run.seed))
    for factor in FACTORS:
        for name in OVER_SOCKETS:
            yield Cell(f"sockets/{factor:g}/{name}", partial(over_sockets, factor, name))


def _stages(run: Run) -> StagedFolder:
    folder = run.out / "stages"
    if not (folder / "manifest.json").exists():
        split_bundle(BUNDLE, folder)
    return load_staged(folder)


def _link(name: str, run: Run) -> StudyLink:
    return study_links(run.needed("mahimahi/ and telerobot_rtt/"), run.out)[LINKS.index(name)]


def _costs(run: Run, factor: float) -> StageCosts:
    """The costs of stages on a device that is slower than this machine by a factor."""
    measured = run.result("costs")["costs"]
    arrays = {name: np.array(measured[name]) for name in ("server_s", "device_s", "cut_bytes", "load")}
    arrays["device_s"] *= factor
    return StageCosts(observation_bytes=measured["observation_bytes"], **arrays)


def _forecast(name: str, run: Run) -> Path:
    return run.out / "forecasts" / name / "forecast.safetensors"


def measure(folder: Path, run: Run) -> dict[str, Any]:
    """Times of the stages on this machine and on the server, and of the draft."""
    staged, bundle = _stages(run), load_pair(BUNDLE)
    windows = [window for _, window in target_windows(bundle, PROBES, run.seed)]
    with serving(staged.path) as server, staged_client(staged, server.port) as client:
        measure_costs(staged, client, windows[:3])  # to warm up both sides
        costs, _ = measure_costs(staged, client, windows)
    measured = {name: np.asarray(values).tolist() for name, values in vars(costs).items()}
    measured["draft_s"] = 1e-3 * median_ms({0: partial(bundle.parts.draft.infer, bundle.observation.zeros())})[0]
    return {"costs": measured}


def learn(name: str, folder: Path, run: Run) -> dict[str, float]:
    """Trains the forecast of a recording on its first part; its errors on the rest."""
    before, after = bandwidths_of(_link(name, run), _stages(run))
    forecast = train_forecast(before)
    save_forecast(forecast, _forecast(name, run))
    return forecast_errors(forecast.forecast, before, after)


def over_sockets(factor: float, name: str, folder: Path, run: Run) -> list[dict[str, Any]]:
    """Every method on one link, with a device that is slower by a factor."""
    bundle = load_pair(BUNDLE)
    seen = target_windows(bundle, run.few(60), run.seed)
    gate = calibrate_along(bundle, seen, RATE, run.seed)
    draft_s = factor * run.result("costs")["costs"]["draft_s"]
    device = Device(
        _stages(run), bundle, _link(name, run), _forecast(name, run), _costs(run, factor), draft_s, gate, seen, run.seed
    )
    found = device.measure((*PLACED, *GATED))
    return [{"link": name, "method": method, **cell_summary(cell)} for method, cell in found.items()]


def simulate(folder: Path, run: Run) -> dict[str, list[dict[str, Any]]]:
    """Every method on every link in virtual time, by slowdown and bound of the server's load."""
    tables: dict[str, list[dict[str, Any]]] = {}
    links = [_link(name, run) for name in LINKS]
    before = {link.name: bandwidths_of(link, _stages(run))[0] for link in links}
    for factor in FACTORS:
        costs = _costs(run, factor)
        for budget in BUDGETS:
            rows = tables.setdefault(f"{factor:g} times slower, server's load at most {budget:g}", [])
            methods = [name for name in SIMULATED if name != "server" or budget >= 1.0]
            for link in links:
                count = int((link.seconds - link.trained_s) / PERIOD_S)
                learned = load_forecast(_forecast(link.name, run)).forecast
                for method in methods:
                    cell = simulated(method, link, costs, before[link.name], learned, count, budget)
                    rows.append({"link": link.name, "method": method, **cell_summary(cell)})
    return tables


def cell_summary(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Mean, p95 and switches of a method's inferences."""
    latency, cuts = np.array(cell["latency_ms"]), cell["cuts"]
    changes = int(np.count_nonzero(np.diff(cuts))) if len(cuts) else None
    counts = zip(*np.unique(cuts, return_counts=True), strict=True)
    return {
        "mean_ms": float(latency.mean()), "median_ms": float(np.median(latency)),
        "p95_ms": float(np.quantile(latency, 0.95)), "inferences": len(latency), "missed": cell.get("missed", 0),
        "switches": cell.get("switches", changes), "cuts": {str(cut): int(count) for cut, count in counts},
    }  # fmt: skip


def precision_errors(staged: StagedFolder, inferences: int, seed: int) -> list[dict[str, Any]]:
    """By cut, on the target's own rollouts: ``bytes``, and what lower precision of the activations changes.

    For each precision the largest change of a ``probability``, and the share of most likely ``codes`` that change.
    """
    bundle = load_pair(BUNDLE)
    windows = [window for _, window in target_windows(bundle, inferences, seed)]
    reader, rows, here = reader_of(bundle, staged), list[dict[str, Any]](), StepAddress(0, 0, 0, 0)
    exact = [reader(staged.run([window]), window, here).probs for window in windows]
    for cut in range(1, staged.spec.stages):
        row: dict[str, Any] = {
            "cut": cut, "bytes": {name: staged.spec.reply_bytes(cut, name) for name in PRECISIONS},
        }  # fmt: skip
        for precision in PRECISIONS:
            lossy = [reader(staged.through(window, cut, precision), window, here).probs for window in windows]
            error, same = np.abs(np.array(lossy) - exact), np.argmax(lossy, -1) == np.argmax(exact, -1)
            row[precision] = {"probability": float(error.max()), "codes": float(1.0 - same.mean())}
        rows.append(row)
    return rows


def report(results: Results) -> Report:
    """docs/results/split.md."""
    sockets = {
        f"{factor} times": [cell for cells in by_link.values() for cell in cells]
        for factor, by_link in results["sockets"].items()
    }
    tables = [
        *(of_methods(f"sockets-{at.split()[0]}", f"A device {at} slower, over sockets", rows)
          for at, rows in sockets.items()),
        *(of_methods(f"simulated-{number}", f"Virtual time, a device {at}", rows)
          for number, (at, rows) in enumerate(results["simulated"].items())),
        Table(
            "forecasts", "Forecasts of the bandwidth one step ahead, on the held-out part of each recording [bytes/s].",
            "link | inferences | mean | error: LSTM | last value | squared: LSTM | last value | mean of the past",
            "{name} | {inferences:.0f} | {mean:.3g} | {forecast_mae:.3g} | {last_mae:.3g} | {forecast_rmse:.3g} "
            "| {last_rmse:.3g} | {mean_rmse:.3g}", named(results["forecasts"]),
        ),
        Table(
            "precision", "What fewer bits of the activations change: a probability at most, and the most likely code.",
            "cut | bytes: float32 | float16 | uint8 | probability: float16 | uint8 | codes: float16 | uint8",
            "{cut} | {bytes[float32]} | {bytes[float16]} | {bytes[uint8]} | {float16[probability]:.1e} "
            "| {uint8[probability]:.1e} | {float16[codes]:.3f} | {uint8[codes]:.3f}", results["precision"],
        ),
    ]  # fmt: skip
    virtual = {("virtual", at[:2], row["link"], row["method"]): row for at, rows in results["simulated"].items()
               if "at most 1" in at for row in rows}  # fmt: skip
    measured = {("sockets", at[:2], row["link"], row["method"]): row for at, rows in sockets.items() for row in rows}
    facts: dict[str, Any] = {" ".join(key): row for key, row in {**virtual, **measured}.items()}
    for kind, found in (("sockets", measured), ("virtual", virtual)):
        pairs = [
            (row["mean_ms"], found[*key[:3], "server"]["mean_ms"]) for key, row in found.items() if key[3] == "roboecc"
        ]
        facts[f"{kind} rule slower"] = {"of": len(pairs), "places": sum(rule > server for rule, server in pairs)}
    tised = Experiment.load("tised")
    systems = systems_of(tised.stored())
    facts |= {f"cut {cut} {link}": between(systems, SWEPT.format(link), f"split {cut}", "split 0")
              for cut, link in ((1, 50), (7, 1), (8, 20))}  # fmt: skip
    return Report(tables, facts, [Picture("split.svg", partial(draw_methods, sockets))], tised.elsewhere("split-ball"))


def of_methods(name: str, about: str, cells: Sequence[Mapping[str, Any]]) -> Table:
    """Mean and 95th percentile of every method on every link."""
    links = [link for link in LINKS if any(cell["link"] == link for cell in cells)]
    found = {(cell["method"], cell["link"]): cell for cell in cells}
    rows = [
        {"method": method, "name": NAMES[method], **{link: found[method, link] for link in links}}
        for method in dict.fromkeys(cell["method"] for cell in cells)
    ]
    shown = (f"{{{link}[mean_ms]:.0f}} / {{{link}[p95_ms]:.0f}}, {{{link}[missed]}}" for link in links)
    about += ": mean / 95th percentile of an inference [ms], and inferences without an answer."
    return Table(name, about, " | ".join(["placement", *links]), " | ".join(["{name}", *shown]), rows)


def draw_methods(sockets: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Mean time of an inference of every method over LTE, with a bar to the 95th percentile."""
    times = []
    for shift, cells in zip((-0.15, 0.15), sockets.values(), strict=True):
        lte = [cell for cell in cells if cell["link"] == "lte"]
        for at, cell in enumerate(lte):
            colour, mean = style_of("adahi" if cell["method"] in GATED else "target").colour, cell["mean_ms"]
            times.append((at + shift, (mean, mean, max(mean, cell["p95_ms"])), colour, shift < 0))
    names, about = [NAMES[cell["method"]] for cell in lte], "LTE. Filled: a device 20\ntimes slower; empty: 50"
    return draw_times(names, times, "mean, 95th percentile [ms]", about, 4.0)
