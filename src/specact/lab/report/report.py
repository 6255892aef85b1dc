"""The HTML report of run folders and recordings: tables, figures, films, manifests, and missing parts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from specact import __version__
from specact.errors import DataError, SpecactError
from specact.files import write_whole
from specact.lab.data.recordings import Recorded, read_recording
from specact.lab.evaluation.runs import Run, Skipped, Study, find_runs, group, unused_slug
from specact.lab.report import film
from specact.lab.report.drawing import Drawing, as_csv, save, style
from specact.lab.report.figures import draw_rejection, draw_sweep, draw_times, time_of
from specact.lab.report.film import Film, show_film
from specact.lab.report.recordings import draw_recording, gaps_of_recording, steps_rows, tables_of
from specact.lab.report.tables import NONE, Rows, Table, contrasts_table, methods_table, runs_table, summary_table

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Report:
    """A written report.

    Attributes:
        page: its path.
        files: figures and tables beside it.
        runs, recordings: numbers of those in it.
        skipped: folders and files that are not in it, with reasons.
        missing: missing parts per pair and recording, each with the command that makes it, where one does.
    """

    page: Path
    files: list[Path]
    runs: int
    recordings: int
    skipped: list[Skipped]
    missing: dict[str, list[str]]


@dataclass
class Section:
    """What the page shows of one pair or recording.

    Attributes:
        title, slug: its heading, and the heading as part of file names.
        facts: names and values; long ones have a line of their own.
        gaps: what is missing.
        tables, figures: each with links to its files; film: of an episode; files: links to further files.
        details: folded texts by title.
    """

    title: str
    slug: str
    facts: dict[str, str | list[str]]
    gaps: list[str]
    tables: list[tuple[Table, list[str]]] = field(default_factory=list)
    figures: list[tuple[Drawing, str, list[str]]] = field(default_factory=list)
    film: Film | None = None
    files: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)


def write_report(paths: Sequence[Path], out: Path, files: Path, progress: Progress, *, films: bool = True) -> Report:
    """Writes a self-contained page, and its figures (PNG, SVG, CSV) and tables (CSV) beside it.

    Args:
        paths: run folders, parents of them, or files of recordings.
        out: the page; files: folder of the figures and tables.
        progress: called with (stage, done, total).
        films: whether to show rollouts as films; missing ones are simulated and stored in the run folders.

    Raises :exc:`ConfigError` if there is no run and no recording, or a file cannot be written.
    """
    recorded, skipped = _read_recordings([path for path in paths if path.is_file()])
    runs: list[Run] = []
    folders = [path for path in paths if not path.is_file()]
    if folders or not recorded:
        runs, skipped = find_runs(folders, skipped)
    studies, output = group(runs), _Output(out, files)
    sections = []
    # Films are rendered in child processes, one per pair, while this one draws the figures.
    with style(), ExitStack() as stack:
        executor = ThreadPoolExecutor(os.cpu_count())
        # On an interrupt, queued films are cancelled.
        stack.callback(executor.shutdown, cancel_futures=True)
        # Policies whose times are measured in one process are not simulated again.
        jobs = [
            executor.submit(show_film, study.table).result if films and study.table.summary["link"] != "none" else None
            for study in studies
        ]
        for done, (study, make_film) in enumerate(zip(studies, jobs, strict=True)):
            progress("bundles", done, len(studies))
            sections.append(_of_study(study, output, make_film))
        progress("bundles", len(studies), len(studies))
        slugs = {study.slug for study in studies}
        for recording in recorded:
            sections.append(_of_recording(recording, output, unused_slug(recording.path.stem, slugs)))
            slugs.add(sections[-1].slug)
    missing = {section.title: section.gaps for section in sections}
    lacking: dict[str, list[str]] = {}
    for title, gaps in missing.items():
        for gap in gaps:
            lacking.setdefault(gap.partition("; run: ")[0], []).append(title)
    page = _render(
        runs=runs, studies=studies, recordings=recorded, sections=sections,
        summary=[output.table(summary_table(studies), "")] if studies else [],
        skipped=[f"{each.folder}: {each.reason}" for each in skipped],
        missing=[f"{what} ({', '.join(those)})" for what, those in lacking.items()],
    )  # fmt: skip
    write_whole(out, page.encode())
    return Report(out, output.written, len(runs), len(recorded), skipped, missing)


def _read_recordings(paths: Sequence[Path]) -> tuple[list[Recorded], list[Skipped]]:
    read: list[Recorded] = []
    skipped: list[Skipped] = []
    for path in paths:
        try:
            read.append(read_recording(path))
        except DataError as error:
            skipped.append(Skipped(path, str(error).removeprefix(f"{path}").lstrip(": ")))
    return read, skipped


def _of_study(study: Study, output: _Output, make_film: Callable[[], Film] | None) -> Section:
    run, evaluation = study.table, study.table.evaluation
    gates = [
        f"{name}: transmits above {gate['threshold']:.4g}, rate {gate['held_out_rate']:.3f} on "
        f"{gate['held_out_episodes']:g} held-out episodes"
        for name, gate in run.summary["calibration"].items()
    ]
    facts: dict[str, str | list[str]] = {
        "environment": evaluation["env"],
        "episodes": f"{evaluation['episodes']} per method, the same for all",
        "seed": str(evaluation["seed"]),
        "rate": f"gates calibrated for {evaluation['rate']:g}",
        "weights": evaluation["fingerprint"],
        "machine": ", ".join(f"{part} {value}" for part, value in run.manifest["machine"].items()),
        "run folder": str(run.folder),
        "gates": gates or NONE,
        "times in the figures": time_of(study.timed),
        "command": run.manifest["command"] or NONE,
    }
    section = Section(study.title, study.slug, facts, _gaps(study))
    tables = [methods_table(run), *([contrasts_table(run)] if run.summary["contrasts"] else []), runs_table(study)]
    section.tables = [output.table(table, study.slug) for table in tables]
    for draw in (draw_rejection, draw_times, draw_sweep):
        try:
            section.figures += output.figures(draw(study), study.slug)
        except DataError as error:
            section.gaps.append(str(error))
    try:
        section.film = None if make_film is None else make_film()
    except SpecactError as error:
        section.gaps.append(f"no films: {error}")
    for each in {id(each): each for each in (run, study.timed)}.values():
        text = json.dumps({**each.manifest, "gates": each.summary["gates"]}, indent=2)
        section.details[f"Manifest of {each.folder}"] = text
    return section


def _gaps(study: Study) -> list[str]:
    """The gaps that the summaries reveal, with the commands that fill them; those of gates concern action codes."""
    run, codes = study.table, study.table.of_codes
    start, out = f"specact eval {shlex.quote(str(run.evaluation['bundle']))}", f"--out runs/{study.slug}"
    like = f"--episodes {run.summary['episodes']} --seed {run.evaluation['seed']}"
    candidates = (
        (
            codes and study.realtime is None,
            "no run over real sockets: times are accounted in virtual time; run: "
            f"{start} --methods draft,target,hybrid,random,adahi --episodes 20 --realtime {out}-realtime",
        ),
        (
            codes and len({each.summary["rate"] for each in study.sweep}) < 2,
            f"no runs at other rates: no figure over the rate; run: {start} --rate 0.3 {like} {out}-0.3 (and others)",
        ),
        (codes and study.rejections is None, "no method adahi: no figure of its rejections"),
        (
            codes and all(m.get("gate_efficiency") is None for m in run.methods.values()),
            "no gate efficiency: it needs the methods random and oracle",
        ),
        (all(m.get("mse") is None for m in run.methods.values()), "no mean squared error on held-out demonstrations"),
    )
    return [gap for missing, gap in candidates if missing]


def _of_recording(recorded: Recorded, output: _Output, slug: str) -> Section:
    about = recorded.about
    facts: dict[str, str | list[str]] = {
        "policies": about.get("policy") or NONE,
        "robot": about.get("robot") or f"simulated, {about.get('env')}",
        "weights": about.get("fingerprint") or NONE,
        "gate": about.get("gate") or NONE,
        "began": about.get("began") or NONE,
        "recording": str(recorded.path),
        "command": about.get("command") or NONE,
    }
    section = Section(f"Recording {recorded.path.name}", slug, facts, gaps_of_recording(recorded))
    section.tables = [output.table(table, slug) for table in tables_of(recorded)]
    section.files = output.rows(f"{slug}-steps", steps_rows(recorded))
    section.figures = output.figures(draw_recording(recorded), slug)
    return section


@dataclass(frozen=True)
class _Output:
    """Writes figures and tables into a folder, returns links to them from the page, and collects their paths."""

    page: Path
    folder: Path
    written: list[Path] = field(default_factory=list)

    def figures(self, drawings: Iterable[Drawing], slug: str) -> list[tuple[Drawing, str, list[str]]]:
        """Each figure, its SVG as a data URL, and links to its files."""
        shown = []
        for drawing in drawings:
            svg, paths = save(drawing, self.folder, f"{slug}-{drawing.name}")
            shown.append((drawing, f"data:image/svg+xml;base64,{_base64(svg)}", self._links(paths)))
        return shown

    def table(self, table: Table, slug: str) -> tuple[Table, list[str]]:
        """The table, and the link to its rows."""
        return table, self.rows("-".join(filter(None, (slug, table.name))), table.csv)

    def rows(self, stem: str, rows: Rows) -> list[str]:
        """Writes the rows as CSV, if there are any, and returns the link."""
        path = self.folder / f"{stem}.csv"
        if rows:
            write_whole(path, as_csv(rows))
        return self._links([path] if rows else [])

    def _links(self, paths: Sequence[Path]) -> list[str]:
        self.written.extend(paths)
        base = self.page.resolve().parent
        return [Path(os.path.relpath(path.resolve(), base)).as_posix() for path in paths]


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _render(**variables: Any) -> str:
    # Autoescaping: names in manifests must not become markup.
    loader = PackageLoader("specact.lab.report")
    templates = Environment(
        autoescape=True, loader=loader, lstrip_blocks=True, trim_blocks=True, undefined=StrictUndefined
    )
    templates.filters["base64"] = _base64
    css = templates.get_template("style.css").render(width=film.WIDTH_PX, height=film.HEIGHT_PX, ground=film.GROUND)
    return templates.get_template("page.html").render(
        variables,
        style=Markup(css),
        style_hash=f"sha256-{_base64(hashlib.sha256(css.encode()).digest())}",
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
