"""``specact tised`` asks what a faster step does to the task: sweeps over levers, and what came of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from specact.cli.options import Maybe, Options, Rare
from specact.cli.output import command_line, print_result, progress_bars, remark, rows_of, say, table_of
from specact.errors import ConfigError
from specact.files import check_folder, write_json
from specact.records import Count, NotNegative, Seed


@dataclass(frozen=True)
class Details(Options):
    """Options that few need."""

    task: Maybe[str] = None  # environment, a name or MODULE:TASK; the bundle's own if not given
    steps: Count = 10  # Euler steps of a flow policy alone, wherever they are not the lever
    # actions executed of each chunk; if not given, the bundle's own, for a flow policy half of the chunk
    execute: Maybe[Count] = None
    # episodes per round to calibrate a gate, and to check it, for each pace, idle, hardware and link
    calibration_episodes: Count = 40
    # for levers that query a server: time of its inference [ms], whatever the robot's hardware; measured if not given
    target_ms: Maybe[NotNegative] = None
    workers: Maybe[Count] = None  # processes; one per core if not given
    # where they run: here, ray for a Ray cluster that is started here, or ray:ADDRESS; docs/how-to/scale.md
    on: str = "here"


@dataclass(frozen=True, kw_only=True)
class Sweep(Options):
    """Run levers at several strengths, paces and hardware profiles on the same episodes; resumes."""

    bundle: str  # a pair, or a flow policy or token policy, by path or name
    levers: tuple[str, ...]  # NAME, or NAME=STRENGTH,...; specact tised levers lists them
    out: Path  # folder of the sweep
    paces: tuple[NotNegative, ...] = (0.0,)  # how fast the environment changes by itself, in the task's unit
    hardware: tuple[str, ...] = ("this-machine",)  # profiles: names, PATH.toml:NAME, or 480ms for every inference
    # for levers that query a server; see specact proxy --help. loopback+delay=50 is a round trip of 50 ms
    links: tuple[str, ...] = ()
    # what the robot does while it waits, each in turn: the task's holding action, the last command, or zeros
    idle: tuple[Literal["hold", "last", "neutral"], ...] = ("hold",)
    # draft on the device, which makes a token policy or a flow policy the target of a pair; see specact pair
    draft: Maybe[str] = None
    decoding: str = ""  # of such a pair: how chunks are drafted and verified, see specact eval
    episodes: Count = 200  # number of paired episodes for each setting
    seed: Seed = 1  # random seed
    details: Rare[Details] = field(default_factory=Details)

    def run(self) -> None:
        from specact.lab.envs import env_of
        from specact.lab.rollout.pool import Pool
        from specact.lab.tised.drivers import ON_BOARD
        from specact.lab.tised.levers import read_settings, subject_of
        from specact.lab.tised.sweep import Sweep as Request
        from specact.lab.tised.sweep import run_sweep, sweep_folder
        from specact.lab.train.variants import BundleVariants

        details = self.details
        subject = subject_of(
            self.bundle, lambda loaded: BundleVariants(loaded, self.out / "variants"), self.draft, self.decoding,
            details.execute, details.steps,
        )  # fmt: skip
        request = Request(
            subject.bundle.fingerprint, read_settings(self.levers, subject),
            details.task or env_of(subject.bundle.env), self.paces, self.hardware, self.links or (ON_BOARD,),
            self.episodes, self.seed, self.idle, details.calibration_episodes, details.target_ms,
        )  # fmt: skip
        check_folder(self.out)
        subject.variants.make()
        with Pool(details.workers, details.on) as pool, progress_bars() as update:
            run_sweep(request, self.out, update, pool, command=command_line())
        for label, parts in (manifest := sweep_folder(self.out).manifest())["latency_ms"].items():
            remark(f"{label:24} {' + '.join(f'{part:.3f}' for part in parts)} ms, {manifest['latency']}")
        remark(f"next: specact tised analyse {self.out}")
        say(f"sweep: {self.out}")


# Columns that are printed, on 80 characters: times in seconds; N, T chunk and T task over successes.
_SHOWN = {
    "strength": "at", "success.mean": "success", "success.low": "low", "success.high": "high", "chunks": "N",
    "chunk_s": "T chunk", "task_s": "T task", "restricted_s.mean": "restricted", "inference_s": "T inf",
}  # fmt: skip


@dataclass(frozen=True)
class Analyse(Options):
    """Analyse sweeps: every setting with intervals, and against its lever's baseline on the same episodes."""

    runs: Positional[tuple[Path, ...]]  # folders of sweeps
    lever: Maybe[str] = None  # only this lever, and what each of its settings gains over the baseline, in words
    out: Maybe[Path] = None  # file for the results; analysis.json in the first sweep if not given
    json: bool = False  # print everything as JSON

    def run(self) -> None:
        from specact.lab.tised.analysis import as_row, contrasts_of, read_calibrations, read_sweeps, sort_curves

        if not self.runs:
            raise ConfigError("name at least one folder of a sweep; make one with: specact tised sweep")
        table, baselines, _ = read_sweeps(self.runs)
        curves = sort_curves(table, baselines)
        contrasts, gates = contrasts_of(curves), read_calibrations(self.runs)
        known = dict.fromkeys(curve.place.lever for curve in curves)
        if self.lever not in (None, *known):
            raise ConfigError(f"these sweeps have no lever {self.lever!r}; choose among {', '.join(known)}")
        cells = [as_row(asdict(cell)) for curve in curves for cell in curve.cells]
        everything = {"cells": cells, "contrasts": [as_row(asdict(row)) for row in contrasts], "calibrations": gates}
        out = self.out or self.runs[0] / "analysis.json"
        write_json(out, everything)
        levers = known if self.lever is None else {self.lever}
        lines: list[Any] = []
        for curve in (curve for curve in curves if curve.place.lever in levers):
            title = f"{curve.place}, {curve.cells[0].n} episodes"
            lines.append(table_of(title, map(asdict, curve.cells), _SHOWN))
        lines += [
            "gate of {lever} {strength:g} at pace {pace:g}, idle {idle}, {hardware} over {link} for a rate of "
            "{rate:g}; {held_out_rate:.3f} of {inferences} inferences on held-out episodes".format(**gate)
            for gate in gates
        ]
        if self.lever is not None:
            lines += [f"{row.place}: {row.explain()}" for row in contrasts if row.place.lever == self.lever]
        print_result(self.json, everything, lines)
        remark(f"written: {out}")


@dataclass(frozen=True)
class Levers(Options):
    """List the levers and the hardware profiles."""

    def run(self) -> None:
        from specact.lab.tised.levers import KINDS, LEVERS
        from specact.lab.tised.sweep import named_hardware

        levers = {name: f"{lever.about}; on {KINDS[lever.on]}" for name, lever in LEVERS.items()}
        profiles = {name: f"{profile.times}; {profile.about}" for name, profile in named_hardware().items()}
        say("\n".join([*rows_of(levers, 20), "", *rows_of(profiles, 20)]))


Tised = (
    Annotated[Sweep, tyro.conf.subcommand("sweep")]
    | Annotated[Analyse, tyro.conf.subcommand("analyse")]
    | Annotated[Levers, tyro.conf.subcommand("levers")]
)
