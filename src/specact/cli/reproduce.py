"""``specact reproduce`` runs a paper's study on our pairs and writes its page."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from specact.cli.output import command_line, progress_bars, remarks, results
from specact.cli.report import report
from specact.errors import ConfigError


def reproduce(
    paper: tyro.conf.Positional[Literal["adahi"]],
    /,
    out: Path,
    pairs: str | None = None,
    quick: bool = False,
    data: Path | None = None,
    seed: int = 1,
    films: bool = True,
    workers: int | None = None,
) -> None:
    """Run ADAHI's study: tables, sweeps over the transmission rate, rejection over deviation, real time; then a page.

    An interrupted study resumes.

    Args:
        paper: the study to run.
        out: folder of the study: one run folder per part, and report.html.
        pairs: comma-separated bundles; all bundles of the study if not given.
        quick: run a few episodes of each part, to check that everything works. The results are not meaningful.
        data: folder with the demonstrations, for errors along them; see the recipes.
        seed: random seed. Seed 0 was used to choose the settings of the bundles.
        films: add films of rollouts to the page.
        workers: processes; one per core if not given.
    """
    from specact.lab.evaluation.run import evaluate, finished
    from specact.lab.evaluation.study import PAIRS, plan
    from specact.lab.rollout.pool import Pool

    wanted = PAIRS if pairs is None else tuple(name.strip() for name in pairs.split(","))
    if not all(wanted):
        raise ConfigError(f"--pairs must be bundle names separated by commas, got {pairs!r}")
    chapters = plan(wanted, seed=seed, quick=quick, data=data)
    left = [chapter for chapter in chapters if not finished(chapter.what, out / chapter.folder)]
    remarks.print(f"{paper}: {len(chapters)} runs, {len(chapters) - len(left)} of them done", highlight=False)
    with Pool(workers) as pool:
        for number, chapter in enumerate(left):
            remarks.print(f"{chapter.folder}, {len(left) - number} left", highlight=False)
            with progress_bars() as update:
                summary = evaluate(chapter.what, out / chapter.folder, update, pool, command=command_line())
            remarks.print(f"  {summary['seconds']:.0f} s", highlight=False)
    if data is None:
        remarks.print("without --data there are no errors along recorded demonstrations", style="yellow")
    report((out,), out / "report.html", films=films)
    results.print(f"study: {out}", highlight=False)
