"""RoboECC: a target in stages on device and server, over recorded links (docs/results/split.md).

``--data`` is the folder with ``mahimahi/`` and ``telerobot_rtt/``. A cell of virtual time names device and link, as in
``--only virtual/metaworld/20/lte``; it takes the stored times of stages, unless the run has measured them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.grid import CELL, Cell, Experiment, Results, Run
from experiments.measure import connected, interleaved, seconds_of
from experiments.report import Picture, Report, Table, between, named
from experiments.split.forecast import forecast_errors, load_forecast, save_forecast, train_forecast
from experiments.split.simulated import PERIOD_S, SIMULATED, StudyLink, bandwidths_of, simulated, study_links
from experiments.split.sockets import GATED, STRETCH, TURNS, Device, calibrate_along, target_windows
from experiments.tised.tables import systems_of
from specact.families.tokens.policy import load_tokens
from specact.lab.evaluation.cost import median_ms
from specact.lab.report.figures import style_of
from specact.lab.rollout.processes import serving
from specact.lab.rollout.statistics import mean_interval
from specact.lab.train.split import split_bundle
from specact.load import load_pair
from specact.rng import Role, StepAddress, stream
from specact.systems.roboecc import StageCosts, measure_costs
from specact.systems.staged import (
    PRECISIONS,
    StagedFolder,
    TokenStages,
    load_staged,
    pack,
    reader_of,
    split_contract,
    unpack,
)
from specact.types import Floats

BUNDLE, RATE, PROBES = "metaworld", 0.6, 20
# Policies that write their chunk token by token, by the name of their tables.
TOKENS = {"tokens": "metaworld-tokens", "libero": "libero-spatial-tokens"}
SIMULATIONS = {"virtual": BUNDLE, **TOKENS}
# Slowdown of the device's networks, and upper bounds of the server's load.
FACTORS, BUDGETS = (20.0, 50.0), (1.0, 0.5)
LINKS = ("5g-like", "lte", "lte-driving", "wifi")
# The fourth link, on which an inference takes a second, is simulated in virtual time only.
OVER_SOCKETS = ("5g-like", "lte", "wifi")
# Placements that are measured over sockets as well.
OVER = ("device", "server", "static", "roboecc", "smallest")
# The condition of TISED's sweep in which the task was played with every cut.
SWEPT = "split-ball, ball at 0, last, vla-agx-50w, {} ms"
NAMES = {
    "device": "everything on the device", "server": "everything on the server", "static": "static cut",
    "roboecc": "RoboECC's rule, forecast", "behind": "prefill on the server",
    "roboecc_oracle": "RoboECC's rule, oracle", "smallest_last": "smallest total, last value",
    "smallest": "smallest total, forecast", "smallest_apart": "smallest total, forecast, latency apart",
    "smallest_oracle": "smallest total, oracle", "smallest_printed": "smallest total as printed, forecast",
    "hybrid": "hybrid", "adahi": "ADAHI", "late": "target asked, nobody waits",
    "adahi_placed": "ADAHI, its target at the smallest total",
}  # fmt: skip
_VIRTUAL = "in virtual time: mean of an inference [ms], with a 95 % interval from blocks of 5 s"
ABOUT = {
    **{kind: f"{bundle} {_VIRTUAL}" for kind, bundle in SIMULATIONS.items()},
    "sockets": f"{BUNDLE} over sockets: mean of an inference [ms], with a 95 % interval over turns / 95th percentile, "
    "and inferences without an answer",
}


def plan(run: Run) -> Iterator[Cell]:
    """Costs and forecasts, which the other cells need; real sockets, virtual time, precision."""
    yield Cell("costs", measure)
    for name in LINKS:
        yield Cell(f"forecasts/{name}", partial(learn, name))
    yield from (Cell(f"tokens/{bundle}", partial(token_costs, bundle)) for bundle in TOKENS.values())
    for bundle in SIMULATIONS.values():
        for factor in FACTORS:
            for name in LINKS:
                yield Cell(f"virtual/{bundle}/{factor:g}/{name}", partial(simulate, bundle, factor, name))
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
    return study_links(run.needed("mahimahi/ and telerobot_rtt/"), run.out)[name]


def _measured(cell: str, run: Run) -> Any:
    """The result of a cell, as measured in this run, or else as stored."""
    if (run.out / cell / CELL).exists():
        return run.result(cell)
    result: Any = Experiment.load("split").stored()
    for part in cell.split("/"):
        result = result[part]
    return result


def _costs(run: Run, factor: float, bundle: str = BUNDLE) -> StageCosts:
    """The costs of stages on a device that is slower than this machine by a factor."""
    measured = _measured("costs" if bundle == BUNDLE else f"tokens/{bundle}", run)["costs"]
    arrays = {name: np.array(measured[name]) for name in ("server_s", "device_s", "cut_bytes", "load")}
    arrays["device_s"] *= factor
    return StageCosts(observation_bytes=measured["observation_bytes"], **arrays)


def _forecast(name: str, run: Run) -> Path:
    file = run.out / "forecasts" / name / "forecast.safetensors"
    if not file.exists():
        save_forecast(train_forecast(bandwidths_of(_link(name, run), _costs(run, 1.0))[0]), file)
    return file


def measure(folder: Path, run: Run) -> dict[str, Any]:
    """Times of the stages on this machine and on the server, and of the draft."""
    staged, bundle = _stages(run), load_pair(BUNDLE)
    windows = [window for _, window in target_windows(bundle, PROBES, run.seed)]
    contract = split_contract(staged.spec, staged.fingerprint)
    with serving(staged.path) as server, connected(server.port, contract, "costs") as client:
        measure_costs(staged, client, windows[:3])  # to warm up both sides
        costs, _ = measure_costs(staged, client, windows)
    measured = {name: np.asarray(values).tolist() for name, values in vars(costs).items()}
    measured["draft_s"] = 1e-3 * median_ms({0: partial(bundle.parts.draft.infer, bundle.observation.zeros())})[0]
    return {"costs": measured}


def learn(name: str, folder: Path, run: Run) -> dict[str, float]:
    """Trains the forecast of a recording on its first part; its errors on the rest, and its time on this machine."""
    before, after = bandwidths_of(_link(name, run), _costs(run, 1.0))
    forecast, past = load_forecast(_forecast(name, run)).forecast, after[:64].tolist()
    return forecast_errors(forecast, before, after) | {"seconds": seconds_of(partial(forecast, past), 100)}


def token_costs(name: str, folder: Path, run: Run) -> dict[str, Any]:
    """Times of encoder, prefill and decoding on this machine, bytes, and what fewer bits of the KV cache change.

    Stages are taken in turns; a time is the fastest of many, since the work is the same for every observation, and the
    server is as fast as this machine. ``same``: the share of chunks whose tokens are those of the policy as a whole, by
    the precision of the KV cache.
    """
    bundle, pair = load_tokens(name), load_pair(name)
    stages, spec = TokenStages(bundle), TokenStages(bundle).spec
    windows = [window for _, window in target_windows(pair, run.few(PROBES), run.seed)]
    given = [(window, stages.begin([window], 1), stages.begin([window], 2)) for window in windows]
    kinds = {"encoder": lambda item: stages.begin([item[0]], 1), "prefill": lambda item: stages.prefilled(item[1]),
             "decoding": lambda item: stages.finish(item[2], 2)}  # fmt: skip
    seconds = interleaved(kinds, given, stream(run.seed, Role.GATE), 5)
    spent = np.array([min(seconds[kind]) for kind in kinds])
    exact = [bundle.policy().decode([window])[0].tokens for window in windows]
    same = {
        precision: float(np.mean([
            np.array_equal(stages.finish(unpack(pack(cache[0], precision), spec.activations[1]), 2)[0][0], tokens)
            for (_, _, cache), tokens in zip(given, exact, strict=True)
        ]))
        for precision in PRECISIONS
    }  # fmt: skip
    cut_bytes = [float(spec.reply_bytes(cut, "float16")) for cut in range(spec.stages + 1)]
    costs = StageCosts(spent, spent, np.array(cut_bytes), float(spec.observation.nbytes), spent / spent.sum())
    plain = {name: np.asarray(values).tolist() for name, values in vars(costs).items()}
    return {"costs": plain, "same": same, "chunks": len(windows), "tokens": bundle.networks.length}


def over_sockets(factor: float, name: str, folder: Path, run: Run) -> list[dict[str, Any]]:
    """Every method on one link, with a device that is slower by a factor."""
    bundle = load_pair(BUNDLE)
    seen = target_windows(bundle, run.few(STRETCH * TURNS), run.seed)
    gate = calibrate_along(bundle, seen, RATE, run.seed)
    draft_s = factor * _measured("costs", run)["costs"]["draft_s"]
    device = Device(
        _stages(run), bundle, _link(name, run), _forecast(name, run), _costs(run, factor), draft_s, gate, seen, run.seed
    )
    cells = device.measure((*OVER, *GATED))
    return [
        {"link": name, "method": method, **cell_summary(cell), "mean": turns_interval(cell["latency_ms"])}
        for method, cell in cells.items()
    ]


def turns_interval(latency_ms: Sequence[float]) -> dict[str, float]:
    """The mean time of an inference [ms], with Student's 95 % interval over the turns."""
    turns = [latency_ms[first : first + STRETCH] for first in range(0, len(latency_ms), STRETCH)]
    return asdict(mean_interval(np.array([np.mean(turn) for turn in turns])))


def simulate(bundle: str, factor: float, name: str, folder: Path, run: Run) -> list[dict[str, Any]]:
    """Every method in virtual time, with a device that is slower by a factor, by bound of the server's load."""
    costs, link, rows = _costs(run, factor, bundle), _link(name, run), list[dict[str, Any]]()
    before = bandwidths_of(link, costs)[0]
    count = int((link.seconds - link.trained_s) / PERIOD_S)
    learned = load_forecast(_forecast(name, run)).forecast
    for budget in BUDGETS if bundle == BUNDLE else BUDGETS[:1]:
        cells = {
            method: simulated(method, link, costs, before, learned, count, budget)
            for method in (*SIMULATED, *(("behind",) if bundle != BUNDLE else ()))
            if method != "server" or budget >= 1.0
        }
        spent = {method: np.array(cell["latency_ms"]) for method, cell in cells.items()}
        baselines = [method for method in ("device", "static", "server") if method in cells]
        rows += [
            {"link": name, "method": method, "budget": budget, **cell_summary(cell),
             "mean": block_interval(spent[method]),
             "speedup": {other: block_interval(spent[method], spent[other]) for other in baselines}}
            for method, cell in cells.items()
        ]  # fmt: skip
    return rows


def block_interval(spent: Floats, baseline: Floats | None = None, block: int = 25) -> dict[str, float]:
    """The mean time of inferences in a row, or how many times faster than a baseline's it is, with a 95 % interval.

    Of 2,000 bootstrap samples of blocks of 5 s: what a link does lasts for many inferences.
    """
    count = len(spent)
    starts = stream(0, Role.GATE).integers(0, count, (2000, -(-count // block), 1))
    rows = ((starts + np.arange(block)) % count).reshape(2000, -1)[:, :count]
    means = [np.append(times[rows].mean(axis=1), times.mean()) for times in (spent, baseline) if times is not None]
    values = means[0] if baseline is None else means[1] / means[0]
    low, high = np.quantile(values[:-1], (0.025, 0.975)).tolist()
    return {"mean": float(values[-1]), "low": low, "high": high}


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
    """What lower precision of the activations changes on the target's own rollouts, and their ``bytes``, at each cut.

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
    kinds = {
        **{kind: results["virtual"][bundle] for kind, bundle in SIMULATIONS.items() if bundle in results["virtual"]},
        "sockets": results["sockets"],
    }  # fmt: skip
    groups = {
        (kind, factor, budget): rows
        for kind, factors in kinds.items() for factor, links in factors.items() for budget in BUDGETS
        if (rows := [row for cell in links.values() for row in cell if row.get("budget", 1.0) == budget])
    }  # fmt: skip
    tables = [
        *(of_methods(f"{kind}-{factor}{'-limited' * (budget < 1.0)}", f"{ABOUT[kind]}; a device {factor} times slower, "
                     f"the server's load at most {budget:g}.", rows,
                     "{LINK[mean]:ci0}" + " / {LINK[p95_ms]:.0f}, {LINK[missed]}" * (kind == "sockets"))
          for (kind, factor, budget), rows in groups.items()),
        Table("forecasts", "Forecasts of the bandwidth one step ahead, on the held-out part of each recording "
              "[bytes/s].", rows=named(results["forecasts"])),
        Table("precision", "What fewer bits of the activations change: a probability at most, and the most likely "
              "code.", rows=results["precision"]),
    ]  # fmt: skip
    facts: dict[str, Any] = {
        f"{kind} {factor} {row['link']} {row['method']}": row
        for (kind, factor, budget), rows in groups.items() if budget == 1.0 for row in rows
    }  # fmt: skip
    for kind in kinds:
        slower = [row["mean_ms"] > facts[name.replace("roboecc", "server")]["mean_ms"] for name, row in facts.items()
                  if name.startswith(kind) and name.endswith(" roboecc")]  # fmt: skip
        facts[f"{kind} rule slower"] = {"of": len(slower), "places": sum(slower)}
    tokens = results["tokens"][TOKENS["tokens"]]
    costs, names = tokens["costs"], ("encoder", "prefill", "decoding")
    facts["tokens"] = tokens | dict(zip(names, (1e3 * seconds for seconds in costs["server_s"]), strict=True))
    facts["tokens"] |= {"kilobytes": costs["cut_bytes"][2] / 1e3, "observation": costs["observation_bytes"] / 1e3}
    facts["overhead"] = {link: 20e3 * row["seconds"] / facts[f"virtual 20 {link} roboecc"]["mean_ms"]
                         for link, row in results["forecasts"].items()}  # fmt: skip
    tised = Experiment.load("tised")
    systems = systems_of(tised.stored())
    facts |= {f"cut {cut} {link}": between(systems, SWEPT.format(link), f"split {cut}", "split 0")
              for cut, link in ((1, 50), (7, 1), (8, 20))}  # fmt: skip
    sockets = [rows for (kind, *_), rows in groups.items() if kind == "sockets"]
    return Report(tables, facts, [Picture("split.svg", partial(draw_methods, sockets))], tised.elsewhere("split-ball"))


def of_methods(name: str, about: str, cells: Sequence[Mapping[str, Any]], template: str) -> Table:
    """Every method on every link, whose name is LINK in the ``template`` of a cell."""
    links = [link for link in LINKS if any(cell["link"] == link for cell in cells)]
    grid = {(cell["method"], cell["link"]): cell for cell in cells}
    rows = [
        {"method": method, "name": NAMES[method], **{link: grid[method, link] for link in links}}
        for method in dict.fromkeys(cell["method"] for cell in cells)
    ]
    columns = (template.replace("LINK", link) for link in links)
    return Table(name, about, " | ".join(["placement", *links]), " | ".join(["{name}", *columns]), rows)


def draw_methods(sockets: Sequence[Sequence[Mapping[str, Any]]]) -> Figure:
    """Mean time of an inference of every method over LTE, with a bar to the 95th percentile."""
    figure = Figure(figsize=(4.8, 4.0), layout="constrained")
    axes = figure.subplots()
    for shift, face, cells in zip((-0.15, 0.15), (None, "none"), sockets, strict=True):
        lte = [cell for cell in cells if cell["link"] == "lte"]
        for at, cell in enumerate(lte):
            colour, mean = style_of("adahi" if cell["method"] in GATED else "target").colour, cell["mean_ms"]
            bar = [[0.0], [max(0.0, cell["p95_ms"] - mean)]]
            axes.errorbar(mean, at + shift, xerr=bar, fmt="o", color=colour, mfc=face or colour, capsize=2)
    axes.set_yticks(range(len(lte)), [NAMES[cell["method"]] for cell in lte])
    axes.invert_yaxis()
    axes.set(xlabel="mean, 95th percentile [ms]", xlim=(0, None))
    axes.set_title("LTE. Filled: a device 20\ntimes slower; empty: 50", fontsize=10, loc="left")
    return figure
