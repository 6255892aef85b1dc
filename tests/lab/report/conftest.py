"""Small runs of the ball pair, a report on them, and a browser to read it with."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.browser import Browser, running_browser

from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.run import evaluate
from specact.lab.report.report import Report, write_report
from specact.lab.rollout.pool import Pool

EVERY = ("draft", "target", "hybrid", "random", "adahi", "oracle")
RUNS = {
    "table": Evaluation("ball", None, EVERY, episodes=6, seed=1, calibration_episodes=2),
    "rate-0.3": Evaluation("ball", None, ("random", "adahi"), episodes=4, seed=1, rate=0.3, calibration_episodes=2),
    "realtime": Evaluation("ball", None, ("draft", "hybrid", "adahi"), episodes=1, link="loopback", realtime=True),
}


@contextmanager
def shared(name: str, factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Path]:
    """A folder that all processes of one test run share, for one of them at a time."""
    base = factory.getbasetemp()
    if worker_id != "master":
        base = base.parent
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield base / name


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder with a run per entry of :data:`RUNS`. Read only: copy before damaging it."""
    with shared("report-runs", tmp_path_factory, worker_id) as folder:
        for name, what in RUNS.items():
            if not (folder / name / "summary.json").exists():
                evaluate(what, folder / name, lambda *_: None, Pool(1), command=f"specact eval {name}")
    return folder


@pytest.fixture(scope="session")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A report on :func:`runs` without films."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    return write_report([runs], out, out.parent / "files", lambda *_: None, films=False)


@pytest.fixture(scope="session")
def filmed(runs: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Report:
    """A report with a film, on the run folder ``table`` beside it; skipped where nothing can be drawn."""
    with shared("report-filmed", tmp_path_factory, worker_id) as folder:
        if not folder.exists():
            shutil.copytree(runs / "table", folder / "table")
        written = write_report([folder / "table"], folder / "report.html", folder / "files", lambda *_: None)
    for gap in written.missing["ball"]:
        if "cannot draw" in gap.what:
            pytest.skip(gap.what)
    return written


@pytest.fixture
def browser() -> Iterator[Browser]:
    with running_browser(1200) as running:
        yield running


@pytest.fixture
def phone() -> Iterator[Browser]:
    with running_browser(390) as running:
        yield running
