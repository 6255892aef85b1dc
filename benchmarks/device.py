"""Success in real time: policies on devices of different speed, and a server behind real sockets.

A simulated robot whose world does not wait (``specact run --live``), a device that has a share of one core
(``--device-share``), the pair's target on a server in a process of its own, and a link between them. Nothing of the
world, the server or the link counts against the device.

Run: python benchmarks/device.py --pair PAIR --target BUNDLE --out DIR [--shares 1,.5,...] [--links NAME,...]
     python benchmarks/device.py --target BUNDLE [--out DIR] --table

Every cell of the table is a run of its own, kept in DIR as it ends; run again after a stop with the same settings, what
is there is not run again. Run it on a machine with nothing else to do. With ``--links ""`` only what needs no server is
run. ``--table`` keeps the cells in benchmarks/results/device.json, by target, and writes the target's table of
docs/metaworld.md; without ``--out`` it writes the table of the kept cells again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pages import fill

from specact.families.chunks.folder import PairSettings, load_chunk_pair, make_pair
from specact.files import file_stem, write_json
from specact.lab.processes import linked, serving
from specact.lab.statistics import contrast, holm, wilson

COMMAND = [sys.executable, "-m", "specact"]
ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "results" / "device.json"
# In a folder of cells.
SETTINGS = "settings.json"
# Deadlines of a pair that waits for its target, a control period or the duration of its four actions, and of the
# asynchronous remote target [ms]. Late verdicts have that of specact run, the latter of the former two.
PERIOD_MS, CHUNK_MS, REMOTE_MS = 50.0, 200.0, 1000.0


@dataclass(frozen=True)
class Method:
    """A method of controlling the robot.

    Attributes:
        name: in the table.
        linked: whether it uses a server, and so depends on the link.
        options: verb and options; words in capitals are placeholders.
    """

    name: str
    linked: bool
    options: tuple[str, ...]


# With a slow target observations are old; the default limit on their age would stop the robot.
WAITING = ("--gate", "never", "--max-chunk-age-ms", "5000")
# The whole chunk may be executed, and the next one is requested at its start.
ASYNCHRONOUS = (
    "--execution", "aligned", "--execute-actions", "CHUNK", "--overlap-actions", "OVERLAP", "--idle", "nothing",
    "--max-chunk-age-ms", "5000",
)  # fmt: skip
METHODS = (
    Method("target, waited for", False, ("run", "ALONE", *WAITING)),
    Method("target, asynchronous", False, ("play", "TARGET", *ASYNCHRONOUS)),
    Method("target, fewer steps", False, ("run", "FEWER", *WAITING)),
    Method("draft", False, ("run", "PAIR", "--gate", "never")),
    Method("ADAHI", True, ("run", "PAIR", "--gate", "deviation", "--deadline-ms", str(PERIOD_MS))),
    Method("hybrid", True, ("run", "PAIR", "--gate", "always", "--deadline-ms", str(PERIOD_MS))),
    Method("ADAHI, 200 ms", True, ("run", "PAIR", "--gate", "deviation", "--deadline-ms", str(CHUNK_MS))),
    Method("hybrid, 200 ms", True, ("run", "PAIR", "--gate", "always", "--deadline-ms", str(CHUNK_MS))),
    Method("late ADAHI", True, ("run", "PAIR", "--gate", "deviation", "--execution", "late")),
    Method("remote target, asynchronous", True, ("play", "SERVER", *ASYNCHRONOUS, "--deadline-ms", str(REMOTE_MS))),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pair", help="a pair of chunk policies, calibrated; the server serves its target")
    parser.add_argument("--target", required=True, help="the same target alone, as specact play takes it")
    parser.add_argument("--shares", default="1,0.5,0.25,0.1,0.05")
    parser.add_argument("--links", default="wifi-paper,lte")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--rate", default="0.4", help="of ADAHI's transmissions")
    parser.add_argument(
        "--fewer", type=int, default=0, help="Euler steps of the target with fewer steps, if it is a flow"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="keep and show what is there, and run nothing")
    arguments = parser.parse_args()
    results, name = json.loads(KEPT.read_text()), Path(arguments.target).name
    if not arguments.table:
        if arguments.pair is None or arguments.out is None:
            parser.error("a run needs --pair and --out")
        run_all(arguments)
    elif arguments.out is not None:
        cells = list(kept(arguments.out))
        results[name] = {"cells": [summary(cell) for cell in cells], "contrasts": contrasts(cells)}
        write_json(KEPT, results)
    if not arguments.table:
        print(table([summary(cell) for cell in kept(arguments.out)]))
    else:
        print(found := table(results[name]["cells"]))
        fill(ROOT / "docs" / "metaworld.md", f"device {name}", found)


def run_all(arguments: argparse.Namespace) -> None:
    """Runs the cells that are not there yet: those without a server once, the others over every link."""
    pair = load_chunk_pair(Path(arguments.pair))
    check_same(arguments.out, pair.fingerprint, arguments)
    methods = [method for method in METHODS if "FEWER" not in method.options or arguments.fewer]
    with ExitStack() as stack:
        chunk = pair.target_spec.chunk
        stands = {
            "PAIR": arguments.pair, "TARGET": arguments.target, "CHUNK": str(chunk), "OVERLAP": str(chunk - 1)
        }  # fmt: skip
        # As many actions of a chunk as in the pair: executing more of them is a different policy.
        settings = PairSettings(execute=pair.execute, draft_steps=10)
        stands["ALONE"] = alone(arguments.out / "alone", arguments.target, settings)
        if arguments.fewer:
            fewer = PairSettings(execute=pair.execute, draft_steps=arguments.fewer)
            stands["FEWER"] = alone(arguments.out / "fewer", arguments.target, fewer)
        servers = {
            source: stack.enter_context(serving(source)) for source in dict.fromkeys([arguments.pair, arguments.target])
        }
        for link in ["", *filter(None, arguments.links.split(","))]:
            ports = {
                source: stack.enter_context(linked(server.port, link, arguments.seed)).port if link else server.port
                for source, server in servers.items()
            }
            stands["SERVER"] = f"ws://127.0.0.1:{ports[arguments.target]}"
            pair_server = f"ws://127.0.0.1:{ports[arguments.pair]}"
            for method in methods:
                if method.linked == bool(link):
                    run_cells(method, link_name(link), stands, pair_server, arguments)


def check_same(out: Path, fingerprint: str, arguments: argparse.Namespace) -> None:
    """Refuses a folder with cells of another pair or of other settings: they would be compared as if paired."""
    settings = {name: getattr(arguments, name) for name in ("target", "episodes", "rate", "fewer", "seed")}
    settings["fingerprint"] = fingerprint
    path = out / SETTINGS
    if not path.exists():
        write_json(path, settings)
    elif (stored := json.loads(path.read_text())) != settings:
        raise SystemExit(f"{out} holds cells of other settings: {stored}, not {settings}; choose another --out")


def run_cells(method: Method, link: str, stands: dict[str, str], server: str, arguments: argparse.Namespace) -> None:
    """A method's cells for every share of a core."""
    for share in map(float, arguments.shares.split(",")):
        cell = {"method": method.name, "link": link, "share": share}
        path = arguments.out / f"{file_stem('-'.join(map(str, cell.values())))}.json"
        if not path.exists():
            write_json(path, result := cell | run_one(method, stands, server, share, arguments))
            where = " · ".join(filter(None, (method.name, link, f"{share:g} of a core")))
            print(f"{where}: {entry(summary(result))}", flush=True)


def link_name(link: str) -> str:
    """The name of a link, without the folder of its recording."""
    kind, _, where = link.partition(":")
    return f"{kind}:{Path(where).name}" if where else link


def alone(folder: Path, target: str, settings: PairSettings) -> str:
    """A pair whose draft is the target: without queries, this is the target in the control loop."""
    if not folder.exists():
        make_pair(folder, target, target, settings)
    return str(folder)


def run_one(
    method: Method, stands: dict[str, str], pair_server: str, share: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One cell: the output of ``specact run``, or its error."""
    options = [stands.get(option, option) for option in method.options]
    if options[0] == "run":
        options += ["--server", pair_server]
    if "deviation" in options:
        options += ["--rate", arguments.rate]
    command = [
        *COMMAND, *options, "--env", "metaworld", "--live", "--device-share", str(share), "--episodes",
        str(arguments.episodes), "--seed", str(arguments.seed), "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return {"command": command[3:], **json.loads(done.stdout)}


def kept(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(set(folder.glob("*.json")) - {folder / SETTINGS}):
        yield json.loads(path.read_text())


def summary(cell: dict[str, Any]) -> dict[str, Any]:
    """The published part of a cell, without episodes and local paths."""
    episodes = cell["episodes"]
    keys = ("method", "link", "share", "inferences", "transmission_rate", "misses", "late")
    numbers = {key: cell.get(key) for key in keys}
    return numbers | {
        "episodes": len(episodes),
        "successes": sum(episode["success"] for episode in episodes),
        "steps": sum(episode["steps"] for episode in episodes),
        "held": sum(episode["held"] for episode in episodes),
        "world_late_ms": max(episode["world_late_ms"] for episode in episodes),
        "inference_ms": cell["inference_ms"],
    }


# Paired contrasts of methods, at the same share, on the same episodes.
COMPARED = (
    ("late ADAHI", "draft"), ("ADAHI", "draft"), ("hybrid", "draft"), ("target, waited for", "draft"),
    ("target, asynchronous", "draft"), ("target, waited for", "remote target, asynchronous"),
    ("target, asynchronous", "remote target, asynchronous"), ("ADAHI, 200 ms", "draft"), ("hybrid, 200 ms", "draft"),
    ("ADAHI, 200 ms", "late ADAHI"), ("late ADAHI", "target, waited for"), ("late ADAHI", "target, asynchronous"),
    ("late ADAHI", "remote target, asynchronous"), ("target, fewer steps", "target, waited for"),
    ("target, fewer steps", "draft"), ("target, fewer steps", "remote target, asynchronous"),
)  # fmt: skip


def contrasts(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Paired, exact McNemar, with Holm's correction over all of them."""
    won = {
        (cell["method"], cell["link"], cell["share"]): np.array([e["success"] for e in cell["episodes"]], np.float64)
        for cell in cells
    }
    tests = []
    for (method, link, share), first in won.items():
        for one, other in COMPARED:
            # Over every link against one that needs none, and the other way round.
            for over in sorted({where for which, where, _ in won if which == other and "" in (where, link)} | {link}):
                second = won.get((other, over, share))
                if one == method and second is not None:
                    names = {"first": one, "second": other, "link": link or over, "share": share}
                    tests.append((names, contrast(first, second)))
    return [
        {**names, "difference": asdict(one.difference), "p": p}
        for (names, one), p in zip(tests, holm([one.p for _, one in tests]), strict=True)
    ]


def table(cells: list[dict[str, Any]]) -> str:
    """Methods and links by shares: success with its interval, and the share of periods in which the robot held."""
    shares = sorted({cell["share"] for cell in cells}, reverse=True)
    rows = dict.fromkeys((cell["method"], cell["link"]) for cell in cells)
    order = [method.name for method in METHODS]
    lines = [
        "| method | link | " + " | ".join(f"{share:g} of a core" for share in shares) + " |",
        "|---" * (2 + len(shares)) + "|",
    ]
    for method, link in sorted(rows, key=lambda row: (order.index(row[0]), row[1])):
        found = {cell["share"]: cell for cell in cells if (cell["method"], cell["link"]) == (method, link)}
        lines.append(f"| {method} | {link} | " + " | ".join(entry(found.get(share)) for share in shares) + " |")
    return "\n".join(lines)


def entry(cell: dict[str, Any] | None) -> str:
    """Success with its interval, the share of periods in which the robot held, and of requests that were missed."""
    if cell is None:
        return ""
    won = wilson(cell["successes"], cell["episodes"])
    found = f"{won.mean:.2f} [{won.low:.2f}, {won.high:.2f}], held {cell['held'] / max(1, cell['steps']):.0%}"
    missed = missed_share(cell)
    return found if missed is None else f"{found}, missed {missed:.0%}"


def missed_share(cell: dict[str, Any]) -> float | None:
    """The share of the requests without an answer in time; None where nothing is requested, or where it is unknown."""
    if cell["method"] == "late ADAHI":
        # A verdict's miss comes after its inference's tick, so it is counted apart.
        late = cell.get("late")
        return None if late is None else late["missed"] / max(1, late["transmitted"])
    if not cell["link"]:
        return None
    # What runs a policy alone has no gate.
    rate = 1.0 if cell["transmission_rate"] is None else cell["transmission_rate"]
    return sum(cell["misses"].values()) / max(1.0, rate * cell["inferences"])


if __name__ == "__main__":
    main()
