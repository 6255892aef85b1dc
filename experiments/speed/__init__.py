"""Speed: server and client beside openpi's, neighbours and capacity, as benchmarks measure them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from experiments.figures import Point, draw_series
from experiments.grid import ROOT, Cell, Results, Run
from experiments.report import Picture, Report, Table, contrast_table, one_family
from specact.lab.rollout.statistics import mean_interval

# Servers by the names in results.
OURS, ENDPOINT, THEIRS = SIDES = ("specact", "endpoint", "openpi")
POLICIES = ("ball", "ball#target", "metaworld-tokens", "metaworld-flow")
CELLS = (*(f"openpi/{policy}" for policy in POLICIES), "device", "neighbours", "transports", "capacity", "soak")


def plan(run: Run) -> Iterator[Cell]:
    """What benchmarks measure, in under half an hour, with a checkout of openpi as data."""
    for name in CELLS:
        yield Cell(name, partial(benchmark, name))


def benchmark(name: str, folder: Path, run: Run) -> Any:
    """What a benchmark measures."""
    folder.mkdir(parents=True, exist_ok=True)
    file, few = folder / "measured.json", ["--rounds", "1", "--seconds", "0.1", "--steps", "10"] * run.quick
    words: dict[str, list[str]] = {
        "neighbours": ["server.py", *few[4:]], "soak": ["server.py", "--soak", "0.1" if run.quick else "10"],
        "transports": ["transports.py", *few], "capacity": ["capacity.py", *(few[2:4] or ["--seconds", "2"])],
    }  # fmt: skip
    script, *rest = words.get(name) or ["peers.py", name, *few, "--openpi", str(run.needed("a checkout of openpi"))]
    subprocess.run([sys.executable, ROOT / "benchmarks" / script, *rest, "--out", file], check=True)
    return json.loads(file.read_text())


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most over rounds."""
    return {"mean": float(np.median(values)), "low": float(min(values)), "high": float(max(values))}


def spreads(rounds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The spread of the rounds of each kind of value."""
    return {name: spread(values) for name, values in rounds.items()}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The spread of ours over theirs, round by round."""
    return spread((np.array(ours) / np.array(theirs)).tolist())


def report(results: Results) -> Report:
    """docs/results/speed.md."""
    sides, held = list(of_sides(results["openpi"])), list(at_20_hz(results["openpi"]))
    device, crowds, loads = list(on_device(results["device"]["requests"])), results["neighbours"], results["capacity"]
    bare, rounds = results["transports"], results["openpi"]["ball"]["rounds"]
    acts = [{"step": step, **spreads(times)} for step, times in results["device"]["act"].items()]
    tests, three = one_family(contrasts(results)), "specact | openpi's clients at our server | openpi"
    tables = [
        Table(
            "steps", f"Steps per second of robots that ask without pause, {rounds} rounds in turn: medians (range of "
            "the ratio). The last column: of what the network alone could do in batches on this processor.",
            f"policy, robots | {three} | specact / openpi | of the bound",
            "{on} | " + " | ".join(f"{{{side}[steps_per_s][mean]:.0f}}" for side in SIDES)
            + " | {ratio:ci2} | {reached[mean]:.0%}", sides,
        ),
        Table(
            "held", f"Robots at 20 Hz of which, in each of {rounds} rounds, 99 % of the steps were answered in 50 ms.",
            f"policy | {three} | specact / openpi", "{policy} | {specact} | {endpoint} | {openpi} | {ratio:.1f}", held,
        ),
        Table(
            "device", "On the robot's computer: ratio to openpi's client, which neither drafts nor verifies.",
            "policy: call, pace | wall [ms] | processor [ms] | wall, ratio | processor, ratio",
            "{policy}: {name}, {pace} | {wall[mean]:.2f} | {cpu[mean]:.2f} | {wall_ratio:ci2} | {cpu_ratio:ci2}",
            device,
        ),
        Table(
            "act", "`act` of ball with the target in the same process, beside its networks alone [ms].",
            "step | act | networks | over them", "{step} | {act:ci3} | {run:ci3} | {over:+ci3}", acts,
        ),
        Table(
            "neighbours", "A robot at 20 Hz with a deadline of 50 ms, beside connections that ask without pause.",
            "they | connections | on | steps missed | p50 [ms] | p99 [ms] | server busy",
            "{crowd} | {connections} | {on} | {share:.1%} of {steps} | {p50_ms:.1f} | {p99_ms:.1f} | {busy:.0%}",
            crowds,
        ),
        Table(
            "capacity", "Robots of each kind that a server holds: `specact capacity`, and measured.",
            "load | predicted | measured | ratio", "{load} | {predicted} | {measured} | {ratio:.2f}", loads,
        ),
        Table(
            "soak", "Robots that come, ask without pause and go: memory and open files at start, middle and end.",
            "minutes | robots | answered | errors | resident [MB] | files",
            "{minutes:g} | {robots} | {answered} | {errors} | {resident_mb[0]:.1f}, {resident_mb[1]:.1f}, "
            "{resident_mb[2]:.1f} | {files[0]:.0f}, {files[1]:.0f}, {files[2]:.0f}",
            [results["soak"]],
        ),
        Table(
            "transports", "Bare servers: requests per second of 1, 16 and 64 robots that ask without pause.",
            "server | echo: 1 | 16 | 64 | ball's network, one by one: 1 | 16 | 64",
            "{name} | " + " | ".join(f"{{{work}[{at}]:.0f}}" for work in ("echo", "network") for at in range(3)),
            [{"name": name, **{work: [float(np.median(steps)) for steps in bare[work][name].values()]
              for work in ("echo", "network")}} for name in bare["echo"]],
        ),
        Table(
            "clients", "Bare clients of an echo on the device.", "client, pace | wall [ms] | processor [ms]",
            "{name}, {pace} | {wall:ci3} | {cpu:ci3}", [{"name": name, "pace": pace, **spreads(times)}
            for pace, calls in bare["clients"].items() for name, times in calls.items()],
        ),
        contrast_table(tests, family="this report"),
    ]  # fmt: skip
    facts: dict[str, Any] = {row["on"]: row for row in sides} | {f"{row['policy']} held": row for row in held}
    facts |= {f"{row['policy']} {row['name']} {row['pace']}": row for row in device}
    facts |= {f"{row['measure']}, {row['on']}": row for row in tests} | {f"act, {row['step']}": row for row in acts}
    alone, theirs = (bare["network"][library]["1"] for library in ("picows, uvloop", "websockets, asyncio"))
    facts |= {"worst": max(crowds, key=lambda row: float(row["share"])), "greedy": crowds[1],
              "predicted": spread([row["ratio"] for row in loads]),
              "bare": ratio(alone, theirs)}  # fmt: skip
    picture = partial(draw_servers, results["openpi"]["ball#target"]["hot"])
    return Report(tables, facts, [Picture("speed-servers.svg", picture)])


def of_sides(policies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every server by policy and number of robots, and how near ours is to the bound that batching has."""
    for policy, measured in policies.items():
        for robots, sides in measured["hot"].items():
            row: dict[str, Any] = {"on": f"{policy}, {robots}"}
            row |= {side: spreads(sides[side]) if side in sides else {"steps_per_s": {"mean": None}} for side in SIDES}
            row["ratio"] = ratio(sides[OURS]["steps_per_s"], sides[THEIRS]["steps_per_s"])
            if "rows" in measured:
                sizes = [spread(ms) for size, ms in measured["rows"].items() if int(size) <= int(robots)]
                row["network_ms"] = best = min(sizes, key=lambda of_size: of_size["mean"])
                row["reached"] = spread([1e-3 * best["mean"] * steps for steps in sides[OURS]["steps_per_s"]])
            yield row


def at_20_hz(policies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Robots that each server holds."""
    for policy, measured in policies.items():
        most: dict[str, Any] = {side: measured["20 Hz"].get(side, {}).get("robots") for side in SIDES}
        yield {"policy": policy, **most, "ratio": most[OURS] / most[THEIRS] if most[THEIRS] else None}


def on_device(policies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Calls on the device beside openpi's client."""
    for policy, paces in policies.items():
        for pace, calls in paces.items():
            base = calls["openpi infer"]
            for name, row in calls.items():
                ratios = {f"{kind}_ratio": ratio(times, base[kind]) for kind, times in row.items()}
                yield {"policy": policy, "name": name, "pace": pace, **ratios, **spreads(row)}


def contrasts(results: Results) -> Iterator[dict[str, Any]]:
    """Ours against openpi's over rounds: logarithms of steps per second, and of requests per second on the device."""
    compared = [
        (f"{policy}, {robots}", "log steps/s", *(sides[side]["steps_per_s"] for side in (OURS, THEIRS)))
        for policy, measured in results["openpi"].items() for robots, sides in measured["hot"].items()
    ]  # fmt: skip
    for policy, paces in results["device"]["requests"].items():
        for pace, calls in paces.items():
            for kind in ("wall", "cpu"):
                ours, theirs = (calls[name][kind] for name in ("specact request", "openpi infer"))
                compared.append((f"{policy}, {pace}", f"log requests/s, {kind}", theirs, ours))
    for on, measure, first, second in compared:
        logs = np.log(np.array(first) / np.array(second))
        p = float(stats.ttest_1samp(logs, 0.0).pvalue) if len(logs) > 1 else 1.0
        yield {"on": on, "measure": measure, "first": OURS, "second": THEIRS, "p": p,
               "difference": asdict(mean_interval(logs))}  # fmt: skip


def draw_servers(robots: Mapping[str, Any]) -> Figure:
    """Steps per second of every server over the number of robots, a small policy."""
    names = {"adahi": "specact", "hybrid": "specact, openpi's clients", "target": "openpi"}
    series = {key: [Point(x, *spread(sides[side]["steps_per_s"]).values()) for x, sides in enumerate(robots.values())]
              for key, side in zip(names, SIDES, strict=True)}  # fmt: skip
    figure = draw_series(series, "robots that ask without pause", "replies per second", "A small policy", names)
    figure.axes[0].set_xticks(range(len(robots)), list(robots))
    return figure
