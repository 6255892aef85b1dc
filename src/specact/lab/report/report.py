"""The HTML report of run folders and recordings: tables, figures, films, manifests, and missing parts."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Sequence
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
from specact.lab.evaluation import film
from specact.lab.report import tables
from specact.lab.report.drawing import STYLES, Drawing, Rows, as_csv, inline, save, style, style_of
from specact.lab.report.films import EpisodeFilm, show_film
from specact.lab.report.missing import Gap, by_gap, gaps_of
from specact.lab.report.recordings import draw_recording, gaps_of_recording, steps_rows, tables_of
from specact.lab.report.rejection import draw_rejection
from specact.lab.report.runs import Run, Skipped, Study, find_runs, group, unused_slug
from specact.lab.report.sweep import draw_sweep
from specact.lab.report.tradeoff import draw_tradeoffs, time_of
from specact.lab.rollout.methods import METHODS

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Report:
    """A written report.

    Attributes:
        page: its path.
        files: figures and tables beside it.
        runs: number of runs in it.
        recordings: number of recordings in it.
        skipped: folders and files that are not in it, with reasons.
        missing: missing parts per bundle and recording.
    """

    page: Path
    files: list[Path]
    runs: int
    recordings: int
    skipped: list[Skipped]
    missing: dict[str, list[Gap]]


def write_report(paths: Sequence[Path], out: Path, files: Path, progress: Progress, *, films: bool = True) -> Report:
    """Writes a self-contained page, and its figures (PNG, SVG, CSV) and tables (CSV) beside it.

    Args:
        paths: run folders, parents of them, or files of recordings.
        out: the page.
        files: folder of the figures and tables.
        progress: called with (stage, done, total).
        films: whether to show rollouts as films; missing ones are simulated and stored in the run folders.

    Raises:
        ConfigError: if there is no run and no recording, or a file cannot be written.
    """
    recorded, skipped = _read_recordings([path for path in paths if path.is_file()])
    runs: list[Run] = []
    folders = [path for path in paths if not path.is_file()]
    if folders or not recorded:
        runs, skipped = find_runs(folders, skipped, of_codes=True)
    studies, output = group(runs), _OutputFiles(out, files)
    sections = []
    # Films are rendered in child processes, one per bundle, while this one draws the figures.
    with style(), ExitStack() as stack:
        executor = ThreadPoolExecutor(os.cpu_count())
        # On an interrupt, queued films are cancelled.
        stack.callback(executor.shutdown, cancel_futures=True)
        film_jobs = [executor.submit(show_film, study.table).result if films else _no_film for study in studies]
        for done, (study, make_film) in enumerate(zip(studies, film_jobs, strict=True)):
            progress("bundles", done, len(studies))
            sections.append(_section(study, output, make_film))
        progress("bundles", len(studies), len(studies))
        slugs = {study.slug for study in studies}
        recordings = [_recording_section(one, output, slugs) for one in recorded]
    missing = {section["study"].title: section["lacking"] for section in sections}
    missing |= {section["title"]: section["lacking"] for section in recordings}
    page = _render(
        runs=runs,
        sections=sections,
        recordings=recordings,
        summary=tables.summary_table(studies),
        summary_files=output.table("summary", tables.summary_rows(studies)),
        skipped=skipped,
        missing=by_gap(missing),
    )
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


def _recording_section(recorded: Recorded, output: _OutputFiles, slugs: set[str]) -> dict[str, Any]:
    """The variables of one recording for ``templates/recording.html``."""
    slug = unused_slug(recorded.path.stem, slugs)
    slugs.add(slug)
    return {
        "recorded": recorded,
        "title": f"Recording {recorded.path.name}",
        "slug": slug,
        "lacking": gaps_of_recording(recorded),
        "tables": [
            (table, output.table(f"{slug}-{name}", tables.csv_rows(table))) for name, table in tables_of(recorded)
        ],
        "steps_files": output.table(f"{slug}-steps", steps_rows(recorded)),
        "figures": [output.figure(drawing, slug) for drawing in draw_recording(recorded)],
    }


def _no_film() -> None:
    return None


def _section(study: Study, output: _OutputFiles, make_film: Callable[[], EpisodeFilm | None]) -> dict[str, Any]:
    """The variables of one study for ``templates/study.html``."""
    run, slug = study.table, study.slug
    gaps, figures = gaps_of(study), list[tuple[Drawing, Markup, list[str]]]()
    for draw in (draw_rejection, draw_tradeoffs, draw_sweep):
        try:
            figures += [output.figure(drawing, slug) for drawing in draw(study)]
        except DataError as error:
            gaps.append(Gap(str(error)))
    episode_film = None
    try:
        episode_film = make_film()
    except SpecactError as error:
        gaps.append(Gap(f"no films: {error}"))
    manifests = {"Manifest of the table's run": run}
    if study.timed is not run:
        manifests["Manifest of the run over real sockets"] = study.timed
    return {
        "study": study,
        "lacking": gaps,
        "methods": tables.methods_table(run),
        "methods_files": output.table(f"{slug}-methods", tables.methods_rows(run)),
        "contrasts": tables.contrasts_table(run),
        "contrasts_files": output.table(f"{slug}-contrasts", tables.contrasts_rows(run)),
        "figures": figures,
        "shown": episode_film,
        "manifests": manifests,
    }


@dataclass(frozen=True)
class _OutputFiles:
    """Writes figures and tables, and collects their paths.

    Attributes:
        page: the report.
        folder: of the figures and tables.
        written: the files so far.
    """

    page: Path
    folder: Path
    written: list[Path] = field(default_factory=list)

    def figure(self, drawing: Drawing, slug: str) -> tuple[Drawing, Markup, list[str]]:
        """The figure, its inline SVG, and links to its files."""
        svg, paths = save(drawing, self.folder, f"{slug}-{drawing.name}")
        return drawing, Markup(inline(svg, f"{drawing.title}. {drawing.caption}")), self._links(paths)

    def table(self, stem: str, rows: Rows) -> list[str]:
        """Writes the rows as CSV, if there are any, and returns the link."""
        path = self.folder / f"{stem}.csv"
        if rows:
            write_whole(path, as_csv(rows))
        return self._links([path] if rows else [])

    def _links(self, paths: Sequence[Path]) -> list[str]:
        self.written.extend(paths)
        base = self.page.resolve().parent
        return [Path(os.path.relpath(path.resolve(), base)).as_posix() for path in paths]


def _render(**variables: Any) -> str:
    # Autoescaping: names in manifests must not become markup.
    templates = Environment(
        autoescape=True,
        loader=PackageLoader("specact.lab.report"),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters["base64"] = lambda content: base64.b64encode(content).decode()
    templates.globals |= {
        "columns": {column.head: column.description for column in tables.COLUMNS},
        "count": lambda things, name: f"{len(things)} {name}{'' if len(things) == 1 else 's'}",
        "dash": tables.NONE,
        "methods": METHODS,
        "style_of": style_of,
        "time_of": time_of,
    }
    css = templates.get_template("style.css").render(
        styles=STYLES, width=film.WIDTH_PX, height=film.HEIGHT_PX, ground=film.GROUND
    )
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return templates.get_template("page.html").render(
        variables,
        style=Markup(css),
        style_hash=f"sha256-{digest}",
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
