"""``specact bench`` measures the latency of steps over a link, and the throughput of a server for many robots."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.table import Table

from specact.cli.output import command_line, print_json, progress_bars, remarks, results
from specact.cli.unused import changed, refuse_unused
from specact.errors import ConfigError
from specact.files import check_folder, write_json
from specact.ranges import INSIDE, NOT_NEGATIVE, POSITIVE, SEED, Range, check_ranges


@dataclass
class Latency:
    """Measure the latency of draft, remote target, hybrid and ADAHI on the same steps.

    With a deadline, count instead how many verified steps miss it, with camera frames raw and as JPEG.
    """

    bundle: str = "ball"
    """Path or name of the pair."""
    link: str = "wifi-paper"
    """See specact proxy --help."""
    steps: int = 400
    """Inferences per way."""
    rate: float = 0.6
    """Without a deadline: ADAHI's transmission rate; its threshold is found on the steps that are timed."""
    stand_in: bool = True
    """Without a deadline: add a 12-layer transformer of width 768 to the target, to model a large policy; needs the
    extra train."""
    draft_ms: float | None = None
    """Without a deadline: time of a draft inference, to model a slower device [ms]; measured on this machine if not
    given."""
    deadline_ms: float | None = None
    """Deadline of a verified step's request [ms]; steps follow each other without a pause, and at the rate below."""
    rate_hz: float = 20.0
    """With a deadline: inferences per second."""
    jpeg_quality: int = 90
    """With a deadline: of camera frames as JPEG, 1 to 95."""
    seed: int = 0
    """Random seed."""
    out: Path | None = None
    """Folder for latency.json or deadline.json and, with the extra report, pictures."""
    json: bool = False
    """Print the measurement as JSON."""

    def run(self) -> None:
        from specact.families.codes.bundle import load_bundle
        from specact.lab.evaluation.latency import measure_deadline, measure_latency
        from specact.links.link import load_link

        ranges = {"steps": Range(2), "rate": INSIDE, "draft_ms": NOT_NEGATIVE, "seed": SEED}
        own = {"deadline_ms": POSITIVE, "rate_hz": POSITIVE, "jpeg_quality": Range(1, 95)}
        check_ranges(self, ranges | own)
        if self.deadline_ms is None:
            refuse_unused(changed(self, ["rate_hz", "jpeg_quality"]), "is for --deadline-ms; add that, or leave it out")
        else:
            refuse_unused(changed(self, ["rate", "draft_ms"]), "has no effect with --deadline-ms; leave it out")
        load_link(self.link)
        _check_out(self.out)
        pair = load_bundle(self.bundle)
        if self.deadline_ms is not None:
            with progress_bars() as update:
                found = measure_deadline(
                    pair, self.link, self.steps, self.deadline_ms, self.rate_hz, self.jpeg_quality, self.seed,
                    lambda done, total: update("steps", done, total),
                )  # fmt: skip
            self._report(found, pair.name, "deadline.json", _deadline_table)
            return
        with tempfile.TemporaryDirectory() as folder, progress_bars() as update:
            served = str(pair.path)
            if self.stand_in:
                served = str(_heavy_target(pair, Path(folder) / "stand-in"))
            found = measure_latency(
                pair, served, self.link, self.steps, self.rate, self.draft_ms, self.seed,
                lambda done, total: update("steps", done, total),
            )  # fmt: skip
        found |= {"stand_in": self.stand_in}
        self._report(found, pair.name, "latency.json", _latency_table)
        if self.out is not None:
            _draw(found, self.out)

    def _report(self, found: dict[str, Any], name: str, file: str, table: Callable[[dict[str, Any]], Table]) -> None:
        found |= {"bundle": name, "command": command_line()}
        if self.out is not None:
            write_json(self.out / file, found)
        if self.json:
            print_json(found)
        else:
            results.print(table(found))


@dataclass
class Server:
    """Measure the throughput of one server with 1, 16, 64 and 256 clients, with and without batching, interleaved.

    Then measure what one robot misses beside neighbours that keep many requests in flight.
    """

    bundle: str = "ball"
    """Path or name of the bundle."""
    robots: tuple[int, ...] = (1, 16, 64, 256)
    """Numbers of robots."""
    offered_hz: float = 1000.0
    """Offered load of the second measurement: requests per second of all clients. The first one is unlimited."""
    seconds: float = 4.0
    """Duration of each measurement [s]."""
    rounds: int = 3
    """Number of repetitions of each measurement; 0 for the neighbours alone."""
    neighbours: tuple[int, ...] = (0, 8, 32)
    """Numbers of clients with 32 requests in flight each, beside which one robot runs at 20 Hz, deadline 50 ms."""
    steps: int = 160
    """Steps of that robot for each number of neighbours; 0 for none."""
    soak_s: float = 0.0
    """Duration of a final soak test with 64 clients that measures the server's memory; 0 for none."""
    out: Path | None = None
    """Folder for server.json."""
    json: bool = False
    """Print the measurement as JSON."""

    def run(self) -> None:
        from specact.families.codes.bundle import load_bundle
        from specact.lab.evaluation.load import run_load, run_soak, workload_of
        from specact.lab.evaluation.neighbours import run_beside
        from specact.lab.processes import serving

        check_ranges(
            self,
            {
                "offered_hz": POSITIVE,
                "seconds": POSITIVE,
                "rounds": NOT_NEGATIVE,
                "steps": NOT_NEGATIVE,
                "soak_s": NOT_NEGATIVE,
            },
        )
        if min(self.robots, default=0) < 1:
            raise ConfigError(f"--robots must name at least one number, each at least 1; got {self.robots}")
        if min(self.neighbours, default=0) < 0:
            raise ConfigError(f"--neighbours must not be negative; got {self.neighbours}")
        _check_out(self.out)
        pair, rows = load_bundle(self.bundle), []
        workload = workload_of(pair.exchange.contract)
        with ExitStack() as stack, progress_bars() as update:
            servers = {
                size: stack.enter_context(serving(pair.path, "--max-batch", str(size), "--max-queue", "1024"))
                for size in (64, 1)
            }
            todo = [(robots, offered, size) for robots in self.robots for offered in (None, self.offered_hz)
                    for size in servers]  # fmt: skip
            for turn in range(self.rounds):
                for done, (robots, offered, size) in enumerate(todo):
                    update("measurements", turn * len(todo) + done, self.rounds * len(todo))
                    load = run_load(servers[size].port, workload, robots, self.seconds, offered)
                    rows.append({"max_batch": size, "round": turn, **load.summary()})
            update("measurements", self.rounds * len(todo), self.rounds * len(todo))
            beside = []
            if self.steps > 0:
                usual = stack.enter_context(serving(pair.path))
                for done, neighbours in enumerate(self.neighbours):
                    update("neighbours", done, len(self.neighbours))
                    beside.append(run_beside(usual.port, pair, neighbours, self.steps))
                update("neighbours", len(self.neighbours), len(self.neighbours))
            soak = None
            if self.soak_s > 0.0:
                soak = run_soak(servers[64], pair, self.soak_s, lambda done, total: update("soak", done, total))
        found = {"bundle": pair.name, "seconds": self.seconds, "rows": rows, "beside": beside, "soak": soak,
                 "command": command_line()}  # fmt: skip
        if self.out is not None:
            write_json(self.out / "server.json", found)
        if self.json:
            print_json(found)
            return
        if rows:
            results.print(_server_table(rows))
        for row in beside:
            results.print(
                f"beside {row['neighbours']} neighbours with {row['under_way']} requests under way each, a robot at "
                f"{row['rate_hz']:.0f} Hz missed {row['missed']} of {row['steps']} steps with a deadline of "
                f"{row['deadline_ms']:.0f} ms (p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms)",
                highlight=False,
            )
        if soak is not None:
            results.print(
                f"memory over {soak['seconds']:.0f} s with 64 robots: {soak['first_mib']:.1f} MiB at first, "
                f"{soak['last_mib']:.1f} at last, {soak['slope_mib_per_min']:+.3f} MiB a minute in the second half",
                highlight=False,
            )


def bench(
    action: Annotated[
        Annotated[Latency, tyro.conf.subcommand("latency")] | Annotated[Server, tyro.conf.subcommand("server")],
        tyro.conf.arg(name=""),
    ],
) -> None:
    """Measure the latency of steps over a link, or the throughput of a server; on loopback only."""
    action.run()


def _check_out(out: Path | None) -> None:
    if out is not None:
        check_folder(out)


def _heavy_target(pair: Any, folder: Path) -> Path:
    from specact.lab.train.heavy import make_heavy_target

    make_heavy_target(pair, folder)
    return folder


def _draw(found: dict[str, Any], out: Path) -> None:
    try:
        from specact.lab.report.latency import draw_latency
    except ModuleNotFoundError:
        remarks.print("no figures: pip install 'specact[report]'")
        return
    draw_latency(found, out / "latency.png")


def _latency_table(found: dict[str, Any]) -> Table:
    target = "heavy target" if found["stand_in"] else "target"
    title = (
        f"{found['bundle']}, {found['steps']} steps, link {found['link']}, "
        f"draft {found['draft_ms']:.2f} ms, {target} {found['target_ms']:.1f} ms"
    )
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for name in ("way", "sent", "mean ms", "95 %", "p50", "p99", "actions/s", "bound", "over"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for name, way in found["ways"].items():
        mean, quantiles = way["mean_ms"], way["quantiles_ms"]
        table.add_row(
            name, f"{way['transmission_rate']:.2f}", f"{mean['mean']:.2f}", f"{mean['low']:.2f}-{mean['high']:.2f}",
            f"{quantiles['p50']:.2f}", f"{quantiles['p99']:.2f}", f"{1e3 / mean['mean']:.1f}", f"{way['bound_ms']:.2f}",
            f"{way['over_bound']:+.1%}",
        )  # fmt: skip
    table.caption = "bound: draft + sent x (link + target), one after the other; over: median of blocks relative to it"
    return table


def _deadline_table(found: dict[str, Any]) -> Table:
    title = f"{found['bundle']}, {found['steps']} verified steps each, link {found['link']}"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for name in ("frames", "pace", f"missed {found['deadline_ms']:g} ms", "p50 ms", "p95 ms", "p99 ms", "encode ms"):
        table.add_column(name, justify="left" if name == "frames" else "right", no_wrap=True)
    for way in found["ways"]:
        pace = "hot" if way["rate_hz"] is None else f"{way['rate_hz']:g} Hz"
        times = (f"{way['quantiles_ms'][name]:.1f}" for name in ("p50", "p95", "p99"))
        table.add_row(way["frames"], pace, str(sum(way["missed"].values())), *times, f"{way['encode_ms']:.2f}")
    return table


def _server_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="verified steps of many robots, medians over rounds", box=None, padding=(0, 2, 0, 0))
    for name in ("robots", "offered/s", "max batch", "steps/s", "p50 ms", "p99 ms", "batch", "errors"):
        table.add_column(name, justify="right", no_wrap=True)
    for key in dict.fromkeys((row["robots"], row["offered_hz"], row["max_batch"]) for row in rows):
        mine = [row for row in rows if (row["robots"], row["offered_hz"], row["max_batch"]) == key]
        steps, p50, p99, batch = (
            float(np.median([row[name] for row in mine])) for name in ("steps_per_s", "p50_ms", "p99_ms", "batch")
        )
        offered = "all it can" if key[1] is None else f"{key[1]:.0f}"
        errors = sum(row["errors"] for row in mine)
        table.add_row(
            str(key[0]), offered, str(key[2]), f"{steps:.0f}", f"{p50:.2f}", f"{p99:.2f}", f"{batch:.1f}", str(errors)
        )
    return table
