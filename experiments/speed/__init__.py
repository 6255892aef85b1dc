"""Speed: servers and clients beside others', latency over a link, several servers (docs/results/speed.md).

What benchmarks/peers.py and benchmarks/scale.py measure lies among the results, too; latency and deadline are of an
earlier version's commands.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import Point, draw_series, draw_times
from experiments.grid import ROOT, Cell, Results, Run
from experiments.report import Picture, Report, Table
from specact.lab.report.figures import style_of

# Servers by the names in results, and the ways over a link on the page.
SIDES = {
    "specact": "specact", "endpoint": "specact, openpi's clients", "openpi": "openpi", "flask": "Flask, JSON",
    "grpc": "gRPC as LeRobot",
}  # fmt: skip
OURS, THEIRS, WITHIN_MS = "specact", "openpi", 50.0
POLICIES = ("ball", "ball#target", "metaworld-tokens", "metaworld-flow")
CELLS = (*(f"openpi/{policy}" for policy in POLICIES), "device", "neighbours", "transports", "capacity", "soak")


def plan(run: Run) -> Iterator[Cell]:
    """What benchmarks measure, in under half an hour, with a checkout of openpi as data; scale is run by itself."""
    for name in CELLS:
        yield Cell(name, partial(benchmark, name))


def benchmark(name: str, folder: Path, run: Run) -> Any:
    """What a benchmark measures."""
    folder.mkdir(parents=True, exist_ok=True)
    file, few = folder / "measured.json", ["--rounds", "1", "--seconds", "0.1", "--steps", "10"] * run.quick
    words: dict[str, list[str]] = {
        "neighbours": ["server.py", *few[4:]], "soak": ["server.py", "--soak", "0.1" if run.quick else "10"],
        "transports": ["transports.py", *few], "capacity": ["capacity.py", *few[2:4]],
    }  # fmt: skip
    command = words.get(name) or ["peers.py", name, *few, "--openpi", str(run.needed("a checkout of openpi"))]
    script, *options = command
    subprocess.run([sys.executable, ROOT / "benchmarks" / script, *options, "--out", file], check=True)
    return json.loads(file.read_text())


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most over rounds."""
    return {"mean": float(np.median(values)), "low": float(min(values)), "high": float(max(values))}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Round by round."""
    return spread((np.array(ours) / np.array(theirs)).tolist())


def report(results: Results) -> Report:
    """docs/results/speed.md."""
    found, peers = results["peers"], {k: v for k, v in results["peers"]["peers"].items() if k != "versions"}
    throughput = list(beside(found["throughput"]))
    sides = " | ".join(SIDES.values())
    device, costs, limits = list(on_device(found["device"])), list(of_peers(peers, "hot")), list(bounds(peers))
    paced, ways = list(in_time(found["paced"])), list(over_link(results))
    cell, per_policy = "{policy}, {robots}", [{"policy": name, **of["device"]} for name, of in peers.items()]
    tables = [
        Table(
            "throughput", "Robots that ask without pause, ball's target; medians (range) of five rounds in turn.",
            "robots | specact, steps/s | openpi, steps/s | ratio",
            "{robots} | {specact[mean]:.0f} | {openpi[mean]:.0f} | {ratio:ci2}", throughput,
        ),
        Table(
            "device", "On the robot's computer: ratio to openpi's client, which neither drafts nor verifies.",
            "call, pace | wall [ms] | processor [ms] | wall, ratio | processor, ratio",
            "{name}, {pace} | {wall[mean]:.2f} | {cpu[mean]:.2f} | {wall_ratio:ci2} | {cpu_ratio:ci2}", device,
        ),
        Table(
            "paced", "Robots at 20 Hz: rounds, of five, whose 99th percentile is at most 50 ms.",
            "robots | specact | openpi", "{robots} | {specact} | {openpi}", paced,
        ),
        Table(
            "peers", "Steps per second of robots that ask without pause; medians of five rounds, heavily loaded.",
            f"policy, robots | {sides}",
            " | ".join([cell, *(f"{{{side}[steps_per_s][mean]:.0f}}" for side in SIDES)]), costs,
        ),
        Table(
            "costs", "The server's processor time per step [ms], and openpi's through it, round by round.",
            f"policy, robots | {sides}",
            " | ".join([cell, *(f"{{{s}[server_ms][mean]:.2f}}; {{{s}[openpi_through]:ci2}}" for s in SIDES)]), costs,
        ),
        Table(
            "served", "Robots at 20 Hz of which each step was answered within 50 ms; p50 / p99 [ms].",
            f"policy, robots | {sides}",
            " | ".join([cell, *(
                f"{{{s}[served]:ci0}}; {{{s}[p50_ms][mean]:.1f}} / {{{s}[p99_ms][mean]:.1f}}" for s in SIDES
            )]), list(of_peers(peers, "20 Hz")),
        ),
        Table(
            "clients", "Processor time per step on the device at 20 Hz [ms].", f"policy | {sides}",
            " | ".join(["{policy}", *(f"{{{side}[cpu]:ci2}}" for side in SIDES)]),
            [{"policy": r["policy"], **{s: {k: spread(r[s][k]) for k in ("wall", "cpu")} for s in SIDES}}
             for r in per_policy],
        ),
        Table(
            "limits", "Processor time of the policy per chunk by the size of a batch, beside openpi's server [ms].",
            "policy | alone | batch of 16 | batch of 64 | openpi's server, 64 robots | at most",
            "{policy} | {one:ci2} | {sixteen:ci2} | {many:ci2} | {server:ci2} | {most:.1f}", limits,
        ),
        Table(
            "latency", "Mean time of an inference over the paper's Wi-Fi [ms], with a target of 38 ms.",
            "way | sent | draft of 0.5 ms | against hybrid, JSON | draft of 6.6 ms | against hybrid, JSON",
            "{way} | {sent:.2f} | {fast:ci1} | {fast_saved:+.0%} | {slow:ci1} | {slow_saved:+.0%}", ways,
        ),
        Table(
            "camera", "Requests with two camera frames over the paper's Wi-Fi: missed of 200, quantiles [ms].",
            "frames | pace [Hz] | missed | p50 | p95 | p99 | encoding [ms]",
            "{frames} | {rate_hz} | {lost} | {quantiles_ms[p50]:.1f} | {quantiles_ms[p95]:.1f} "
            "| {quantiles_ms[p99]:.1f} | {encode_ms:.2f}",
            [{**way, "lost": sum(way["missed"].values())} for way in results["deadline"]["ways"]],
        ),
        Table(
            "neighbours", "A robot at 20 Hz, deadline 50 ms, beside others with 32 requests under way each.",
            "others | missed | of | p50 [ms] | p99 [ms]",
            "{neighbours} | {missed} | {steps} | {p50_ms:.1f} | {p99_ms:.1f}", results["server"]["beside"],
        ),
        Table(
            "scale", f"Several servers in virtual batches; load {results['scale']['servers']['load']:.0f}.",
            "way | offered | robots | answered [1/s] | p50 [ms] | p99 [ms] | processor [ms]",
            "{way} | {offered_hz} | {robots} | {steps_per_s:.0f} | {p50_ms:.0f} | {p99_ms:.0f} | {processor_ms:.2f}",
            [{"way": way, **row} for kind in ("crowd", "paced")
             for way, rows in results["scale"]["servers"][kind].items() for row in rows],
        ),
        Table(
            "work", "Work on Ray and on processes of this machine: seconds by round.", "work | seconds",
            "{work} | {seconds:ci4}",
            [{"work": work, "seconds": spread(took)} for work, took in results["scale"]["work"]["seconds"].items()],
        ),
    ]  # fmt: skip
    by_way = {row["way"]: row for row in ways}
    facts = {f"ratio_{row['robots']}": row["ratio"] for row in throughput}
    facts |= {f"{row['name']} {row['pace']}": row for row in device}
    facts |= {f"{row['policy']} {row['robots']}": row for row in costs} | {row["policy"]: row for row in limits}
    facts |= {"saved": -by_way["adahi json"]["fast_saved"]}
    facts["load"] = spread([of["load"] for of in peers.values()])
    pictures = [
        Picture("speed-latency.svg", partial(draw_latency, ways)),
        Picture("speed-servers.svg", partial(draw_servers, peers["relocate-tokens"]["hot"])),
    ]
    return Report(tables, facts, pictures)


def beside(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Steps per second of both servers by the number of robots."""
    for robots, sides in found.items():
        yield {
            "robots": robots, **{side: spread(sides[side]) for side in (OURS, THEIRS)},
            "ratio": ratio(sides[OURS], sides[THEIRS]),
        }  # fmt: skip


def in_time(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rounds in time, and p99 of each, by the number of robots."""
    for robots, sides in found.items():
        counts = {
            side: sum(p99 <= WITHIN_MS for p99 in sides[side]) if side in sides else None for side in (OURS, THEIRS)
        }
        yield {"robots": robots, **counts, **{f"{side}_p99_ms": sides.get(side) for side in (OURS, THEIRS)}}


def on_device(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Calls on the device beside openpi's client."""
    for pace, calls in found.items():
        base = calls[f"{THEIRS} infer"]
        for name, row in calls.items():
            ratios = {f"{kind}_ratio": ratio(row[kind], base[kind]) for kind in ("wall", "cpu")}
            yield {"name": name, "pace": pace, **{kind: spread(row[kind]) for kind in ("wall", "cpu")}, **ratios}


def of_peers(peers: Mapping[str, Any], pace: str) -> Iterator[dict[str, Any]]:
    """Every server at a pace, by policy and number of robots."""
    for policy, of in peers.items():
        for robots, sides in of[pace].items():
            row: dict[str, Any] = {"policy": policy, "robots": robots}
            for side in SIDES:
                row[side] = {name: spread(values) for name, values in sides[side].items()}
                row[side]["openpi_through"] = ratio(sides[THEIRS]["server_ms"], sides[side]["server_ms"])
            yield row


def bounds(peers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What batching can gain: the policy's time in batches beside openpi's server."""
    for policy, of in peers.items():
        alone, theirs = of["rows"], of["hot"]["64"][THEIRS]["server_ms"]
        sizes = {"one": spread(alone["1"]), "sixteen": spread(alone["16"]), "many": spread(alone["64"])}
        most = np.median(theirs) / np.median(alone["64"])
        yield {"policy": policy, **sizes, "server": spread(theirs), "most": float(most)}


def over_link(results: Results) -> Iterator[dict[str, Any]]:
    """Every way over a link, with a fast draft and with a slow one."""
    both = {"fast": results["latency"]["ways"], "slow": results["latency-slow-draft"]["ways"]}
    for way, found in both["fast"].items():
        row = {"way": way, "method": found["method"], "sent": found["transmission_rate"], "missed": found["missed"]}
        for draft, ways in both.items():
            if way in ways:
                mean, base = ways[way]["mean_ms"], ways["hybrid json"]["mean_ms"]["mean"]
                row |= {
                    draft: mean,
                    f"{draft}_saved": mean["mean"] / base - 1.0,
                    f"{draft}_bound_ms": ways[way]["bound_ms"],
                }
        yield {"slow": None, "slow_saved": None, **row}


def draw_latency(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Mean time of an inference of every way, filled with this draft, empty with the slow one."""
    times = [
        (at, [row[draft][key] for key in ("mean", "low", "high")], style_of(row["method"]).colour, draft == "fast")
        for at, row in enumerate(rows) for draft in ("fast", "slow") if row[draft] is not None
    ]  # fmt: skip
    about = "Filled: a draft of 0.5 ms; empty: of 6.6 ms"
    return draw_times([row["way"] for row in rows], times, "mean time of an inference over Wi-Fi [ms]", about, 3.8)


def draw_servers(found: Mapping[str, Any]) -> Figure:
    """Steps per second of every server over the number of robots, a policy that decodes tokens."""
    keys = ("adahi", "hybrid", "target", "uncertainty", "random")
    series = {
        key: [Point(x, *spread(sides[side]["steps_per_s"]).values()) for x, sides in enumerate(found.values())]
        for key, side in zip(keys, SIDES, strict=True)
    }
    about = "A policy that decodes tokens: batches help most"
    names = dict(zip(keys, SIDES.values(), strict=True))
    figure = draw_series(series, "robots that ask without pause", "answers per second", about, names)
    figure.axes[0].set_xticks(range(len(found)), list(found))
    return figure
