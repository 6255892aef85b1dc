"""``specact report`` makes one page of evaluations, ``specact advise`` recommends what to run on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from tyro.conf import Positional

from specact.cli.doctor import execution_lines
from specact.cli.options import Flat, Maybe, Options, Parts
from specact.cli.output import lines_of, print_result, progress_bars, remark, table_of
from specact.errors import ConfigError
from specact.records import NotNegative, Positive

# Columns of the ways that advice is about.
_SHOWN = {
    "method": "method", "rate": "sent", "device_ms": "device", "mean_ms": "mean", "success.mean": "success",
    "success.low": "low", "success.high": "high", "over_chance.mean": "gain",
}  # fmt: skip


@dataclass(frozen=True)
class Report(Options):
    """Write one self-contained HTML page from run folders and recordings: tables, figures, films, what is missing."""

    # run folders of specact eval, folders that contain some at any depth, or files of specact run --record
    runs: Positional[tuple[Path, ...]]
    out: Path = Path("report.html")  # the page
    # folder for the figures as PNG, SVG and CSV, and the tables as CSV; PAGE_files beside the page if not given
    files: Maybe[Path] = None
    no_films: bool = False  # leave out the films of rollouts, which are simulated again and cached in the run folders
    json: bool = False  # print what was written as JSON

    def run(self) -> None:
        from specact.lab.report.report import write_report

        if not self.runs:
            raise ConfigError("give at least one run folder, as in: specact report runs/ball --out report.html")
        files = self.files or self.out.with_name(f"{self.out.stem}_files")
        with progress_bars() as update:
            report = write_report(self.runs, self.out, files, update, films=not self.no_films)
        for skipped in report["skipped"]:
            remark(f"skipped {skipped['folder']}: {skipped['reason']}", warn=True)
        lines = lines_of({name: report[name] for name in ("page", "runs", "recordings")})  # not every file
        gaps = [f"missing of {title}: {gap}" for title, gaps in report["missing"].items() for gap in gaps]
        print_result(self.json, report, [*lines, *gaps])


@dataclass(frozen=True, kw_only=True)
class Advise(Options):
    """Recommend what to run on a device with a budget for inference, from your own evaluations of a pair.

    Inferences are timed on this machine. Success and the share sent are those of the run folders.
    Missing measurements are listed, with the commands that make them.
    """

    pair: Positional[str]  # path or name of a pair, or MODULE:NAME
    budget_ms: NotNegative  # time of one core that is available for an inference on the device [ms]
    link: str = "wifi-paper"  # to the server; see specact proxy --help
    runs: tuple[Path, ...] = ()  # run folders of specact eval, or folders that contain some at any depth
    kappa: Positive = 1.0  # how many times slower the device is than this machine; 1 if this is the device
    json: bool = False  # print everything as JSON
    parts: Flat[Parts] = field(default_factory=Parts)

    def run(self) -> None:
        from specact.lab.evaluation.advice import advise, parts_of, runs_of
        from specact.links.link import load_link

        pair = self.parts.load(self.pair)
        load_link(self.link)  # before anything is timed
        runs, left_out = runs_of(pair, self.runs)
        for folder, reason in left_out.items():
            remark(f"left out {folder}: {reason}", warn=True)
        advice = advise(pair, runs, self.budget_ms, parts_of(pair, runs), kappa=self.kappa, link=self.link)
        print_result(self.json, advice, _lines(advice))


def _lines(advice: Mapping[str, Any]) -> Iterator[str | Table]:
    about = ("bundle", "budget_ms", "measured_here_ms", "kappa", "link", "modelled_round_trip_ms", "control_step_ms")
    yield from lines_of({name: advice[name] for name in about})
    if advice["ways"]:
        counts = sorted({way["episodes"] for way in advice["ways"]})
        episodes = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        caption = (
            f"{episodes} episodes each; device: ms of an inference on the device; mean: with link and server, whose "
            "target takes what it takes here; gain: over chance"
        )
        yield table_of("", map(_named, advice["ways"]), _SHOWN, caption)
    yield from lines_of({name: advice[name] for name in ("advice", "no_server_from_ms", "others")})
    yield from execution_lines(advice["execution"])
    for missing in advice["missing"]:
        yield f"not measured: {missing}"


def _named(way: Mapping[str, Any]) -> dict[str, Any]:
    where = ", on the device" if way["on_device"] and way["method"] != "target_on_device" else ""
    return {**way, "method": f"{way['method']}{where}" + (f" {way['asked']:g}" if 0.0 < way["asked"] < 1.0 else "")}
