"""``specact report`` makes one HTML page from run folders and recordings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from specact.cli.options import Maybe, Options
from specact.cli.output import print_result, progress_bars, remark
from specact.errors import ConfigError


@dataclass(frozen=True)
class Report(Options):
    """Write one self-contained HTML page from run folders and recordings: tables, figures, films, what is missing."""

    # run folders of specact eval, folders that contain some at any depth, or files of specact run --record
    runs: Positional[tuple[Path, ...]]
    out: Path = Path("report.html")  # the page
    # folder for the figures as PNG, SVG and CSV, and the tables as CSV; PAGE_files beside the page if not given
    files: Maybe[Path] = None
    films: bool = True  # render rollouts as films; they are simulated again and cached in the run folders
    json: bool = False  # print what was written as JSON

    def run(self) -> None:
        from specact.lab.report.report import write_report

        if not self.runs:
            raise ConfigError("give at least one run folder, as in: specact report runs/ball --out report.html")
        files = self.files or self.out.with_name(f"{self.out.stem}_files")
        with progress_bars() as update:
            made = write_report(self.runs, self.out, files, update, films=self.films)
        for skipped in made.skipped:
            remark(f"skipped {skipped.folder}: {skipped.reason}", warn=True)
        for title, gaps in made.missing.items():
            for gap in gaps:
                remark(f"{title}: {gap}")
        found = {
            "page": str(made.page), "files": [str(path) for path in made.files], "runs": made.runs,
            "recordings": made.recordings,
            "skipped": [{"folder": str(each.folder), "reason": each.reason} for each in made.skipped],
            "missing": {title: [str(gap) for gap in gaps] for title, gaps in made.missing.items()},
        }  # fmt: skip
        counts = f"{made.runs} runs, {made.recordings} recordings; {len(made.files)} figures and tables beside it"
        print_result(self.json, found, [f"{made.page}: {counts}"])
