"""Small runs of the ball pair, and a report on them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import made_once, quiet

from specact.lab.evaluation.run import Evaluation, evaluate
from specact.lab.report.report import write_report
from specact.lab.rollout.pool import Pool

EVERY = ("draft", "target", "hybrid", "random", "adahi", "oracle")
RUNS = {
    "table": Evaluation("ball", None, EVERY, episodes=6, seed=1, calibration_episodes=2),
    "rate-0.3": Evaluation("ball", None, ("random", "adahi"), episodes=4, seed=1, rate=0.3, calibration_episodes=2),
    "realtime": Evaluation("ball", None, ("draft", "hybrid", "adahi"), episodes=1, link="loopback", realtime=True),
}


@pytest.fixture(scope="session")
def runs(shared: Path) -> Path:
    """A folder with a run per entry of :data:`RUNS`. Read only: copy before damaging it."""

    def make(folder: Path) -> None:
        for name, what in RUNS.items():
            evaluate(what, folder / "runs" / name, quiet, Pool(1), command=f"specact eval {name}")

    return made_once(shared / "report-runs", make) / "runs"


@pytest.fixture(scope="session")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report on :func:`runs` without films."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    return write_report([runs], out, out.parent / "files", quiet, films=False)


@pytest.fixture(scope="session")
def filmed(runs: Path, shared: Path) -> dict[str, Any]:
    """A report with a film, on the run folder ``table`` beside it; skipped where nothing can be drawn."""

    def make(folder: Path) -> None:
        shutil.copytree(runs / "table", folder / "table")
        report(folder)

    def report(folder: Path) -> dict[str, Any]:
        return write_report([folder / "table"], folder / "report.html", folder / "files", quiet)

    written = report(made_once(shared / "report-filmed", make))
    for gap in written["missing"]["ball"]:
        if "cannot draw" in gap:
            pytest.skip(gap)
    return written
