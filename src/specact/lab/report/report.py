"""One HTML page from run folders: tables, figures, films and manifests of every bundle, and what is missing."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from specact import __version__
from specact.errors import DataError
from specact.files import write_whole
from specact.lab.report import tables
from specact.lab.report.artifacts import ArtifactWriter
from specact.lab.report.drawing import Drawing, style
from specact.lab.report.films import Films, show_films
from specact.lab.report.goals import count, goals_of, goals_rows, goals_tables
from specact.lab.report.html import Html, fill, html, items, join
from specact.lab.report.metadata import manifests, run_metadata, runs_table
from specact.lab.report.missing import Gap, by_gap, gaps_of
from specact.lab.report.rejection import draw_rejection
from specact.lab.report.runs import Skipped, find_runs
from specact.lab.report.studies import Study, group
from specact.lab.report.style import dark_rules
from specact.lab.report.sweep import draw_sweep
from specact.lab.report.tradeoff import draw_tradeoffs

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        page: the report.
        files: figures and tables beside it.
        runs: how many runs are in it.
        skipped: folders that are not, and why.
        missing: per bundle, what could not be shown.
    """

    page: Path
    files: list[Path]
    runs: int
    skipped: list[Skipped]
    missing: dict[str, list[Gap]]


def write_report(paths: Sequence[Path], out: Path, files: Path, progress: Progress, *, films: bool = True) -> Written:
    """Writes a self-contained page, and its figures (PNG, SVG, CSV) and tables (CSV) beside it.

    Args:
        paths: run folders, or folders above them.
        out: the page.
        files: folder of the figures and tables.
        progress: told (what is going on, done, in all).
        films: whether to show rollouts as films; those not made yet are simulated and kept in the run folders.

    Raises:
        ConfigError: if there is no run, or something cannot be written.
    """
    runs, skipped = find_runs(paths)
    studies, artifacts = group(runs), ArtifactWriter(out, files)
    sections, missing = [], dict[str, list[Gap]]()
    # Films are made by processes of their own, a bundle each, while figures are drawn in this one.
    with style(), ExitStack() as stack:
        filming = ThreadPoolExecutor(os.cpu_count())
        # Whoever stops the report does not wait for films that have not begun.
        stack.callback(filming.shutdown, cancel_futures=True)
        filmed = [filming.submit(show_films, study.table).result if films else _no_films for study in studies]
        for done, (study, shown) in enumerate(zip(studies, filmed, strict=True)):
            progress("bundles", done, len(studies))
            section, missing[study.title] = _section(study, artifacts, shown)
            sections.append(section)
        progress("bundles", len(studies), len(studies))
    page = fill(
        "page.html",
        dark=Html(dark_rules()),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        count=f"{_count(runs, 'run')} of {_count(studies, 'bundle')}",
        links=join(Html(f'<a href="#{study.slug}">{html(study.title)}</a> ') for study in studies),
        summary=join([tables.summary_table(studies), artifacts.table("summary", tables.summary_rows(studies))]),
        goals=_goals(studies, artifacts),
        skipped=_box("Skipped folders", [f"{one.folder}: {one.reason}" for one in skipped]),
        missing=_box("What is missing", by_gap(missing)),
        sections=join(sections),
    )
    write_whole(out, _sealed(page).encode())
    return Written(out, artifacts.written, len(runs), skipped, missing)


def _no_films() -> Films:
    return Html(), None


def _section(study: Study, artifacts: ArtifactWriter, films: Callable[[], Films]) -> tuple[Html, list[Gap]]:
    """The part of one study, and what is missing in it."""
    run, slug = study.table, study.slug
    lacking, figures = gaps_of(study), []
    for draw in (_rejections, draw_tradeoffs, draw_sweep):
        try:
            figures += [artifacts.figure(drawing, slug) for drawing in draw(study)]
        except DataError as error:
            lacking.append(Gap(str(error)))
    shown, no_films = films()
    lacking += [Gap(no_films)] if no_films else []
    section = fill(
        "study.html",
        slug=slug,
        title=study.title,
        facts=run_metadata(study),
        methods=join([tables.methods_table(run), artifacts.table(f"{slug}-methods", tables.methods_rows(run))]),
        explained=tables.columns_explained(run),
        contrasts=join([tables.contrasts_table(run), artifacts.table(f"{slug}-contrasts", tables.contrasts_rows(run))]),
        figures=join(figures),
        films=shown,
        missing=_box("Missing here", [_gap(gap) for gap in lacking]),
        runs=runs_table(study),
        manifests=manifests(study),
        count=_count(study.runs, "run"),
    )
    return section, lacking


def _goals(studies: Sequence[Study], artifacts: ArtifactWriter) -> Html:
    goals = goals_of(studies)
    if not goals:
        return Html()
    return fill(
        "goals.html", count=count(goals), tables=goals_tables(goals), link=artifacts.table("goals", goals_rows(goals))
    )


def _rejections(study: Study) -> Iterator[Drawing]:
    drawing = draw_rejection(study)
    if drawing is not None:
        yield drawing


def _gap(gap: Gap) -> Html:
    return Html(f"{html(gap.what)}: <code>{html(gap.how)}</code>") if gap.how else html(gap.what)


def _box(title: str, texts: Sequence[str]) -> Html:
    return fill("box.html", title=title, list=items(texts)) if texts else Html()


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _sealed(page: str) -> str:
    """The page with a policy that allows its own style sheet and script, by their content, and nothing else."""
    for kind in ("style", "script"):
        found = re.search(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        assert found is not None
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        page = page.replace(f"SEAL-OF-{kind.upper()}", f"'sha256-{digest}'", 1)
    return page
