"""``specact tised`` asks what a faster step does to the task: sweeps over levers, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from specact.cli.output import command_line, print_json, progress_bars, remarks, results
from specact.cli.unused import changed, refuse_unused
from specact.errors import ConfigError
from specact.files import check_folder, write_json

if TYPE_CHECKING:
    from specact.lab.tised.aggregates import Aggregate
    from specact.lab.tised.analysis import Analysis
    from specact.lab.tised.contrasts import LeverContrast
    from specact.lab.tised.curves import Place
    from specact.lab.tised.frontier import MethodContrast
    from specact.lab.tised.settings import Subject
    from specact.lab.train.variants import BundleVariants


@dataclass
class Sweep:
    """Run levers at several strengths, paces and hardware profiles on the same episodes; resumes."""

    bundle: str
    """A pair, or a flow policy or token policy, by path or name."""
    out: Path
    """Folder of the sweep."""
    levers: tuple[str, ...]
    """NAME, or NAME=STRENGTH,...; specact tised levers lists them."""
    task: str | None = None
    """Environment, a name or MODULE:TASK; the bundle's own if not given."""
    paces: tuple[float, ...] = (0.0,)
    """How fast the environment changes by itself, in the task's unit."""
    hardware: tuple[str, ...] = ("this-machine",)
    """Profiles: names, or PATH.toml:NAME."""
    links: tuple[str, ...] = ()
    """For levers that query a server; see specact proxy --help. loopback+delay=50 is a round trip of 50 ms."""
    steps: int = 10
    """Euler steps of a flow policy alone, wherever they are not the lever."""
    draft: str | None = None
    """Draft on the device, which makes a token policy or a flow policy the target of a pair; see specact pair."""
    decoding: str = ""
    """Of such a pair: how chunks are drafted and verified, see specact eval."""
    execute: int | None = None
    """Actions executed of each chunk; if not given, the bundle's own, for a flow policy half of the chunk."""
    episodes: int = 200
    """Number of paired episodes for each setting."""
    seed: int = 1
    """Random seed."""
    idle: tuple[Literal["hold", "last", "neutral"], ...] = ("hold",)
    """What the robot does while it waits, each in turn: the task's holding action, the last command, or zeros."""
    calibration_episodes: int = 40
    """Episodes per round to calibrate a gate, and to check it, for each pace, idle, hardware and link."""
    target_ms: float | None = None
    """For levers that query a server: time of its inference [ms], whatever the robot's hardware; measured if not
    given."""
    workers: int | None = None
    """Processes; one per core if not given."""
    on: str = "here"
    """Where they run: here, ray for a Ray cluster that is started here, or ray:ADDRESS; see docs/scale.md."""

    def run(self) -> None:
        from specact.lab.envs import env_of
        from specact.lab.rollout.pool import Pool
        from specact.lab.tised.curves import ON_BOARD
        from specact.lab.tised.levers import settings_of
        from specact.lab.tised.records import read_manifest
        from specact.lab.tised.sweep import Sweep as Request
        from specact.lab.tised.sweep import offloads, run_sweep

        subject, variants = _subject(self)
        asked = [lever.partition("=") for lever in self.levers]
        what = Request(
            fingerprint=subject.bundle.fingerprint,
            settings=tuple(
                setting for name, given, numbers in asked
                for setting in settings_of(name, subject, _numbers(numbers) if given else None)
            ),
            task=self.task or env_of(subject.bundle, None),
            paces=self.paces,
            hardware=self.hardware,
            links=self.links or (ON_BOARD,),
            episodes=self.episodes,
            seed=self.seed,
            idles=self.idle,
            calibration=self.calibration_episodes,
            target_ms=self.target_ms,
        )  # fmt: skip
        if not any(map(offloads, what.settings)):
            refuse_unused(
                changed(self, ["links", "target_ms"]), "is for a server, and no lever queries one; leave it out"
            )
        check_folder(self.out)
        variants.make()
        with Pool(self.workers, self.on) as pool, progress_bars() as update:
            run_sweep(what, self.out, update, pool, command=command_line())
        for label, parts in read_manifest(self.out)["latency_ms"].items():
            remarks.print(f"{label:24} {' + '.join(f'{part:.3f}' for part in parts)} ms here", highlight=False)
        remarks.print(f"next: specact tised analyse {self.out}", highlight=False)
        results.print(f"sweep: {self.out}", highlight=False)


@dataclass
class Analyse:
    """Analyse sweeps: tables, sweet spots, the three findings, predictions and figures."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of sweeps."""
    out: Path | None = None
    """Folder for analysis.json and the figures (PNG, SVG, CSV); the first sweep's own if not given."""
    figures: bool = True
    """Draw the figures."""
    json: bool = False
    """Print everything as JSON."""

    def run(self) -> None:
        analysis, links = _analysed(self.runs)
        from specact.lab.tised.analysis import as_rows
        from specact.lab.tised.records import read_calibrations

        gates = read_calibrations(self.runs)
        everything = {name: as_rows(values) for name, values in vars(analysis).items()} | {"calibrations": gates}
        out = self.out or self.runs[0] / "analysis"
        write_json(out / "analysis.json", everything)
        if self.json:
            print_json(everything)
        else:
            results.print("times in s; T inf, stall and age in ms; N and T over successes", highlight=False)
            for place in dict.fromkeys(cell.place for cell in analysis.cells):
                results.print(_table(place, [cell for cell in analysis.cells if cell.place == place]))
            for row in gates:
                results.print(_calibration_line(row), highlight=False)
            for line in _contrast_lines(analysis.methods):
                results.print(line, highlight=False)
            for finding in analysis.findings:
                mark = "seen" if finding.seen else "not seen"
                results.print(f"{finding.number}. {finding.about}: {mark}. {finding.words}", highlight=False)
        if self.figures:
            _draw(analysis, out, links)
        remarks.print(f"written: {out}", highlight=False)


@dataclass
class Explain:
    """Explain one setting: what it gains over its lever's baseline, and at what cost."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of sweeps."""
    lever: str
    """Name of the lever."""
    strength: float
    """Strength of the setting."""
    pace: float | None = None
    """Only at this pace."""
    idle: str | None = None
    """Only with this way to idle."""
    hardware: str | None = None
    """Only on this hardware."""

    def run(self) -> None:
        analysis, _ = _analysed(self.runs)
        found = [row for row in analysis.contrasts if self._matches(row)]
        if not found:
            there = sorted({f"{row.place.lever}={row.strength:g}" for row in analysis.contrasts})
            raise ConfigError(f"unknown setting; available settings with a baseline: {', '.join(there)}")
        for row in found:
            results.print(f"{row.place}: {row.explain()}", highlight=False)

    def _matches(self, row: LeverContrast) -> bool:
        place = row.place
        return (
            (place.lever, row.strength) == (self.lever, self.strength)
            and self.pace in (None, place.pace)
            and self.idle in (None, place.idle)
            and self.hardware in (None, place.hardware)
        )


@dataclass
class Levers:
    """List the levers and the hardware profiles."""

    def run(self) -> None:
        from specact.lab.tised.levers import KINDS, LEVERS
        from specact.tised.hardware import named_hardware

        for name, lever in LEVERS.items():
            results.print(f"{name:20} {lever.about}; on {KINDS[lever.on]}", highlight=False, soft_wrap=True)
        results.print()
        for profile in named_hardware().values():
            results.print(
                f"{profile.name:20} kappa {profile.kappa:g}; {profile.about}", highlight=False, soft_wrap=True
            )


def tised(
    action: Annotated[
        Annotated[Sweep, tyro.conf.subcommand("sweep")]
        | Annotated[Analyse, tyro.conf.subcommand("analyse")]
        | Annotated[Explain, tyro.conf.subcommand("explain")]
        | Annotated[Levers, tyro.conf.subcommand("levers")],
        tyro.conf.arg(name=""),
    ],
) -> None:
    """Measure whether faster steps make a task faster or more successful in a dynamic environment."""
    action.run()


def _subject(asked: Sweep) -> tuple[Subject, BundleVariants]:
    """What the levers are applied to, and the variants of its networks, which are not made yet."""
    from specact.bundle.bundle import find_bundle
    from specact.bundle.manifest import read_manifest
    from specact.families.chunks.bundle import FlowBundle, load_flow
    from specact.families.load import load_pair
    from specact.lab.envs import env_of
    from specact.lab.tised.settings import Subject
    from specact.lab.tised.windows import typical_windows
    from specact.lab.train.variants import BundleVariants

    alone = asked.draft is None and not asked.decoding and read_manifest(find_bundle(asked.bundle)).kind == "flow"
    loaded = load_flow(asked.bundle) if alone else load_pair(asked.bundle, draft=asked.draft, decoding=asked.decoding)
    if not isinstance(loaded, FlowBundle):
        refuse_unused(
            changed(asked, ["steps"]), f"is for a flow policy alone, and {loaded.name} is a pair; leave it out"
        )
    execute = asked.execute
    if execute is None:
        execute = max(1, loaded.spec.chunk // 2) if isinstance(loaded, FlowBundle) else loaded.execute
    if execute < 1:
        raise ConfigError(f"--execute must be at least 1, got {execute}")
    played, env = execute, env_of(loaded, asked.task)
    variants = BundleVariants(loaded, asked.out / "variants", lambda: typical_windows(subject.driver, env, played))
    subject = Subject(loaded, played, variants, asked.steps)
    return subject, variants


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"strengths of a lever must be numbers separated by commas, got {text!r}") from None


def _analysed(runs: tuple[Path, ...]) -> tuple[Analysis, list[str]]:
    """The analysis of sweeps, and the links in them."""
    from specact.lab.tised.analysis import analyse
    from specact.lab.tised.records import read_sweeps

    if not runs:
        raise ConfigError("name at least one folder of a sweep; make one with: specact tised sweep")
    table, baselines, _ = read_sweeps(runs)
    return analyse(table, baselines), sorted(set(table["link"].tolist()))


def _draw(analysis: Analysis, out: Path, links: list[str]) -> None:
    from specact.lab.tised.curves import ON_BOARD
    from specact.links.link import load_link
    from specact.links.model import mean_round_trip_ms

    try:
        from specact.lab.report.tised.figures import save_figures
    except ModuleNotFoundError:
        remarks.print("no pictures: pip install 'specact[report]'")
        return
    save_figures(analysis, out, {name: mean_round_trip_ms(load_link(name)) for name in links if name != ON_BOARD})


def _calibration_line(row: dict[str, Any]) -> str:
    """A calibrated gate's threshold and its rate on held-out episodes, as text."""
    where = f"at pace {row['pace']:g}, idle {row['idle']}, {row['hardware']} over {row['link']}"
    return (
        f"gate of {row['lever']} {row['strength']:g} {where}: threshold {row['gate']['threshold']:.3f} for a rate of "
        f"{row['rate']:g}; {row['held_out_rate']:.3f} of {row['inferences']} inferences on held-out episodes"
    )


def _contrast_lines(methods: Sequence[MethodContrast]) -> list[str]:
    """The pairs of methods that differ significantly, as text."""
    from specact.lab.tised.contrasts import LEVEL, in_words

    if not methods:
        return []
    lines = [
        f"{row.first} minus {row.second} at pace {row.pace:g}, idle {row.idle}, {row.hardware} over {row.link}: "
        f"{in_words(row.success, row.p)}"
        for row in methods
        if row.p < LEVEL
    ]
    return [f"{len(lines)} of {len(methods)} pairs of methods differ (exact McNemar, Holm over all of them):", *lines]


def _table(place: Place, cells: list[Aggregate]) -> Table:
    """The settings of a lever at a place as a table of at most 80 columns."""
    title = f"{place}, {cells[0].n} episodes"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("at", "success", "95 %", "N", "T chunk", "T task", "restricted", "T inf", "stall", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(
            f"{cell.strength:g}", f"{cell.success.mean:.3f}", f"{cell.success.low:.2f}-{cell.success.high:.2f}",
            f"{cell.chunks:.1f}", f"{cell.chunk_s:.3f}", f"{cell.task_s:.2f}", f"{cell.restricted_s.mean:.2f}",
            f"{1e3 * cell.inference_s:.1f}", f"{1e3 * cell.stall_s:.1f}", f"{1e3 * cell.age_s:.1f}",
        )  # fmt: skip
    return table
