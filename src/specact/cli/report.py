"""``specact report`` makes one HTML page from run folders and recordings."""

from __future__ import annotations

from pathlib import Path

import tyro

from specact.cli.output import print_json, progress_bars, remarks, results
from specact.errors import ConfigError


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    /,
    out: Path = Path("report.html"),
    files: Path | None = None,
    films: bool = True,
    json: bool = False,
) -> None:
    """Write one self-contained HTML page from run folders and recordings: tables, figures, films, and what is missing.

    Args:
        runs: run folders of specact eval, folders that contain some at any depth, or files of specact run --record.
        out: the page.
        files: folder for the figures as PNG, SVG and CSV, and the tables as CSV; PAGE_files beside it if not given.
        films: render rollouts as films. They are simulated again and cached in the run folders.
        json: print what was written as JSON.
    """
    from specact.lab.report.report import write_report

    if not runs:
        raise ConfigError("give at least one run folder, as in: specact report runs/ball --out report.html")
    with progress_bars() as update:
        written = write_report(runs, out, files or out.with_name(f"{out.stem}_files"), update, films=films)
    for skipped in written.skipped:
        remarks.print(f"skipped {skipped.folder}: {skipped.reason}", style="yellow", highlight=False, soft_wrap=True)
    if json:
        print_json(
            {
                "page": str(written.page),
                "files": [str(path) for path in written.files],
                "runs": written.runs,
                "recordings": written.recordings,
                "skipped": [{"folder": str(one.folder), "reason": one.reason} for one in written.skipped],
                "missing": {title: [str(gap) for gap in gaps] for title, gaps in written.missing.items()},
            }
        )
        return
    for title, gaps in written.missing.items():
        for gap in gaps:
            remarks.print(f"{title}: {gap}", highlight=False, soft_wrap=True)
    results.print(
        f"{written.page}: {written.runs} runs, {written.recordings} recordings; "
        f"{len(written.files)} figures and tables beside it",
        highlight=False,
    )
