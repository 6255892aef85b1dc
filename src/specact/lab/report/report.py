"""The HTML report of run folders and recordings: tables, figures, films, manifests, and missing parts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
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
from specact.lab.report.figures import Drawing, draw_rejection, draw_sweep, draw_times, save, style, time_of
from specact.lab.report.recordings import draw_recording, gaps_of_recording, tables_of
from specact.lab.report.tables import NONE, Table, as_csv, contrasts_table, methods_table, runs_table, summary_table

Progress = Callable[[str, int, int], None]


@dataclass
class Section:
    """What the page shows of one pair or recording, and its files.

    Attributes:
        title, slug: its heading, and the heading as part of the names of its files.
        folder: where its files are written.
        facts: names and values; long ones have a line of their own.
        gaps: what is missing.
        tables, figures: each with its files, the latter with the SVG; film: of an episode.
        details: folded texts by title.
    """

    title: str
    slug: str
    folder: Path
    facts: dict[str, str | list[str]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)
    tables: list[tuple[Table, list[Path]]] = field(default_factory=list)
    figures: list[tuple[Drawing, bytes, list[Path]]] = field(default_factory=list)
    film: film.Film | None = None
    details: dict[str, str] = field(default_factory=dict)

    def show(self, *tables: Table) -> None:
        """Adds tables, and writes their rows, if they have any."""
        for table in tables:
            path = self.folder / ("-".join(filter(None, (self.slug, table.name))) + ".csv")
            if table.csv:
                write_whole(path, as_csv(table.csv))
            self.tables.append((table, [path] if table.csv else []))

    def draw(self, drawings: Iterable[Drawing]) -> None:
        """Adds figures, and writes them; they are missing if a table cannot be read."""
        try:
            for drawing in drawings:
                files = save(drawing, self.folder, f"{self.slug}-{drawing.name}")
                self.figures.append((drawing, next(iter(files.values())), [*files]))
        except DataError as error:
            self.gaps.append(str(error))

    @property
    def files(self) -> list[Path]:
        """Everything that was written."""
        groups = [*(files for _, files in self.tables), *(files for *_, files in self.figures)]
        return [path for files in groups for path in files]


def write_report(
    paths: Sequence[Path], out: Path, files: Path, progress: Progress, *, films: bool = True
) -> dict[str, Any]:
    """Writes a self-contained page, and its figures (PNG, SVG, CSV) and tables (CSV) into a folder ``files``.

    The paths are run folders, parents of them, or files of recordings. ``progress`` is called with (stage, done,
    total). Films of rollouts that are missing are simulated, and stored in the run folders. Returns as plain values
    what was written and what was skipped, and by section what is missing, with the command that makes it.

    Raises :exc:`ConfigError` if there is no run and no recording, or a file cannot be written.
    """
    recorded, skipped = _read_recordings([path for path in paths if path.is_file()])
    runs: list[Run] = []
    folders = [path for path in paths if not path.is_file()]
    if folders or not recorded:
        runs, skipped = find_runs(folders, skipped)
    studies = group(runs)
    summary, sections = Section("", "", files), list[Section]()
    if studies:
        summary.show(summary_table(studies))
    with style():
        for done, study in enumerate(studies):
            progress("bundles", done, len(studies))
            sections.append(_of_study(study, files, films))
        progress("bundles", len(studies), len(studies))
        for recording in recorded:
            slug = unused_slug(recording.path.stem, {section.slug for section in sections})
            sections.append(_of_recording(recording, slug, files))
    left_out = [{"folder": str(item.folder), "reason": item.reason} for item in skipped]
    page = _render(out, runs=runs, studies=studies, recordings=recorded, summary=summary, sections=sections,
                   skipped=[f"{row['folder']}: {row['reason']}" for row in left_out])  # fmt: skip
    write_whole(out, page.encode())
    return {
        "page": str(out),
        "files": [str(path) for section in [summary, *sections] for path in section.files],
        "runs": len(runs),
        "recordings": len(recorded),
        "skipped": left_out,
        "missing": {section.title: section.gaps for section in sections},
    }


def _read_recordings(paths: Sequence[Path]) -> tuple[list[Recorded], list[Skipped]]:
    read: list[Recorded] = []
    skipped: list[Skipped] = []
    for path in paths:
        try:
            read.append(read_recording(path))
        except DataError as error:
            skipped.append(Skipped(path, str(error).removeprefix(f"{path}").lstrip(": ")))
    return read, skipped


def _of_study(study: Study, files: Path, films: bool) -> Section:
    run, evaluation = study.table, study.table.evaluation
    section = Section(study.title, study.slug, files, gaps=_gaps(study))
    gates = [
        f"{name}: transmits above {gate['threshold']:.4g}, rate {gate['held_out_rate']:.3f} on "
        f"{gate['held_out_episodes']:g} held-out episodes"
        for name, gate in run.summary["calibration"].items()
    ]
    section.facts = {
        "environment": evaluation["env"],
        "weights": evaluation["fingerprint"],
        "machine": ", ".join(f"{part} {value}" for part, value in run.manifest["machine"].items()),
        "gates": gates or NONE,
        "times in the figures": time_of(study.timed),
    }
    contrasts = [contrasts_table(run)] if run.summary["contrasts"] else []
    section.show(methods_table(run), *contrasts, runs_table(study))
    for draw in (draw_rejection, draw_times, draw_sweep):
        section.draw(draw(study))
    # Policies whose times are measured in one process are not simulated again.
    if films and run.summary["link"] != "none":
        try:
            section.film = film.show_film(run)
        except SpecactError as error:
            section.gaps.append(f"no films: {error}")
    for part in {id(part): part for part in (run, study.timed)}.values():
        text = json.dumps({**part.manifest, "gates": part.summary["gates"]}, indent=2)
        section.details[f"Manifest of {part.folder}"] = text
    return section


def _gaps(study: Study) -> list[str]:
    """The gaps that the summaries reveal, with the commands that fill them; those of gates concern action codes."""
    run, codes = study.table, study.table.of_codes
    start, out = f"specact eval {shlex.quote(str(run.evaluation['bundle']))}", f"--out runs/{study.slug}"
    like = f"--episodes {run.summary['episodes']} --seed {run.evaluation['seed']}"
    gaps = []
    if codes and study.realtime is None:
        gaps.append(
            "no run over real sockets: times are accounted in virtual time; run: "
            f"{start} --methods draft,target,hybrid,random,adahi --episodes 20 --realtime {out}-realtime"
        )
    if codes and len({run.summary["rate"] for run in study.sweep}) < 2:
        gaps.append(f"no runs at other rates: no figure over the rate; run: {start} --rate 0.3 {like} {out}-0.3")
    return gaps


def _of_recording(recorded: Recorded, slug: str, files: Path) -> Section:
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
    section = Section(f"Recording {recorded.path.name}", slug, files, facts, gaps_of_recording(recorded))
    section.show(*tables_of(recorded))
    section.draw(draw_recording(recorded))
    return section


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _render(out: Path, **variables: Any) -> str:
    # Autoescaping: names in manifests must not become markup.
    loader = PackageLoader("specact.lab.report")
    templates = Environment(
        autoescape=True, loader=loader, lstrip_blocks=True, trim_blocks=True, undefined=StrictUndefined
    )
    base = out.resolve().parent
    templates.filters["base64"] = _base64
    templates.filters["link"] = lambda path: Path(os.path.relpath(path.resolve(), base)).as_posix()
    css = templates.get_template("style.css").render(width=film.WIDTH_PX, height=film.HEIGHT_PX, ground=film.GROUND)
    return templates.get_template("page.html").render(
        variables,
        style=Markup(css),
        style_hash=f"sha256-{_base64(hashlib.sha256(css.encode()).digest())}",
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
