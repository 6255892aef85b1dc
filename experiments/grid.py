"""The one shape of every study: cells of a plan that run and resume, results that merge, and a report.

A cell is the unit of work and of resuming. Several machines run some cells each (``--only``); ``table`` merges what the
folders hold into the stored results, and ``page`` writes the pages from these alone.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib as mpl

from experiments.report import RESULTS, Picture, Report
from specact.errors import ConfigError
from specact.families.chunks.pair import PairSettings
from specact.files import write_json, write_whole
from specact.lab.data.folder import locked
from specact.lab.evaluation.run import Evaluation, evaluate
from specact.lab.report.figures import style
from specact.lab.rollout.pool import Pool
from specact.load import make_pair

ROOT = Path(__file__).parents[1]
NAMES = sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py"))
CPUINFO = Path("/proc/cpuinfo")
# What is kept of an evaluation's summary.
KEPT = ("env", "bundle", "episodes", "seed", "methods", "contrasts")
# Times that an evaluation need not measure, because they are not used.
UNTIMED: dict[str, Any] = dict.fromkeys(("draft_ms", "gate_ms", "head_ms", "target_ms"), 1.0)
# Files: the result of a finished cell, how the cell was measured, and the settings of the run.
CELL, STAMP, RUN = "cell.json", "stamp.json", "run.json"

# Results of an experiment's cells: that of ``a/b/c`` is ``["a"]["b"]["c"]``, stored in the file ``results/a.json``.
Results = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """How an experiment is run.

    Attributes:
        out: folder of the cells.
        data: folder of demonstrations or recordings, for the cells that need it.
        seed: random seed.
        quick: two episodes instead of all, to check that everything works.
        pool: worker pool.
        update: called with (stage, done, total).
    """

    out: Path
    data: Path | None = None
    seed: int = 1
    quick: bool = False
    pool: Pool = field(default_factory=lambda: Pool(1))
    update: Callable[[str, int, int], None] = lambda stage, done, total: None

    def few(self, count: int) -> int:
        """The number of episodes to run: so many, or at most two in a quick run."""
        return min(2, count) if self.quick else count

    def result(self, cell: str) -> Any:
        """The result of a finished cell that another one needs.

        Raises:
            ConfigError: if it is not finished.
        """
        file = self.out / cell / CELL
        if not file.exists():
            raise ConfigError(f"this needs the cell {cell}, which is not finished; run it first")
        return json.loads(file.read_text())

    def needed(self, what: str) -> Path:
        """The folder of data, which holds ``what`` a cell needs.

        Raises:
            ConfigError: if none was given.
        """
        if self.data is None:
            raise ConfigError(f"this needs {what}; give their folder with --data FOLDER")
        return self.data


@dataclass(frozen=True)
class Cell:
    """One piece of an experiment's work.

    Attributes:
        name: of its folder, below the run's.
        work: does the work in that folder, where it resumes what is there, and returns the result as plain values.
    """

    name: str
    work: Callable[[Path, Run], Any]


@dataclass(frozen=True)
class Experiment:
    """A study: what the module of its folder defines.

    Attributes:
        about: one line.
        plan: its cells, the most informative ones first.
        report: what is written from stored results.
        results: folder of the stored results; beside it ``report.md``, the prose, and ``provenance.json``.
    """

    about: str
    plan: Callable[[Run], Iterable[Cell]]
    report: Callable[[Results], Report]
    results: Path

    @classmethod
    @cache
    def load(cls, name: str) -> Experiment:
        """The experiment of this name."""
        module: Any = import_module(f"experiments.{name}")
        about = module.__doc__.partition("\n")[0]
        return cls(about, module.plan, module.report, Path(module.__file__).parent / "results")

    def run(self, run: Run, only: str = "*") -> list[str]:
        """Runs the cells that are not finished, in order; returns the names of all that match ``only``.

        Raises:
            ConfigError: if no cell matches, or the folder holds another run or is locked.
        """
        cells = [cell for cell in self.plan(run) if fnmatch(cell.name, only)]
        if not cells:
            raise ConfigError(f"no cell matches {only!r}; choose among {', '.join(c.name for c in self.plan(run))}")
        with locked(run.out):
            _claim(run)
            for number, cell in enumerate(cells):
                run.update("cells", number, len(cells))
                file = run.out / cell.name / CELL
                if not file.exists():
                    started = os.getloadavg()[0]
                    result = cell.work(file.parent, run)
                    write_json(file.with_name(STAMP), _stamp(run, max(started, os.getloadavg()[0])))
                    write_json(file, result)
            run.update("cells", len(cells), len(cells))
        return [cell.name for cell in cells]

    def stored(self) -> Results:
        """The stored results, by file."""
        return {file.stem: json.loads(file.read_text()) for file in sorted(self.results.glob("*.json"))}

    def store(self, folders: Iterable[Path]) -> Results:
        """Merges the finished cells of folders into the stored results; a folder without any is refused."""
        results, provenance = self.stored(), self.provenance()
        for folder in folders:
            if not (cells := sorted(folder.rglob(CELL))):
                raise ConfigError(f"there is no finished cell in {folder}; give the --out of a run")
            for file in cells:
                *groups, cell = file.parent.relative_to(folder).parts
                if (stamp := file.with_name(STAMP)).exists():
                    provenance["/".join((*groups, cell))] = json.loads(stamp.read_text())
                place = results
                for group in groups:
                    place = place.setdefault(group, {})
                place[cell] = json.loads(file.read_text())
        contents = {f"results/{name}": values for name, values in results.items()} | {"provenance": provenance}
        for name, values in contents.items():
            file, text = self.results.parent / f"{name}.json", json.dumps(values, indent=1) + "\n"
            if not file.exists() or file.read_text() != text:
                write_whole(file, text.encode())
        return results

    def provenance(self) -> Results:
        """How the stored cells were measured: ``commit``, ``machine``, ``load``, ``seeds`` and ``date`` of each."""
        file = self.results.with_name("provenance.json")
        return json.loads(file.read_text()) if file.exists() else {}

    def elsewhere(self, cells: str = "*") -> Results:
        """How the cells of this pattern were measured, for another experiment that shows them."""
        name = self.results.parent.name
        return {f"{name}: {cell}": row for cell, row in self.provenance().items() if fnmatch(cell, cells)}

    @cached_property
    def published(self) -> Report:
        """The report of the stored results."""
        return self.report(self.stored())

    def files(self) -> dict[Path, bytes]:
        """Its page, tables and pictures, from the stored results."""
        report, prose = self.published, self.results.with_name("report.md").read_text()
        texts = report.files(self.results.parent.name, prose, self.provenance())
        pictures = {RESULTS / picture.file: drawn(picture) for picture in report.pictures}
        return {file: text.encode() for file, text in texts.items()} | pictures


def drawn(picture: Picture) -> bytes:
    """A figure as SVG, or a film as GIF; the same bytes each time."""
    file, content = Path(picture.file), io.BytesIO()
    with style(), mpl.rc_context({"svg.hashsalt": file.stem}):
        picture.draw().savefig(content, format=file.suffix[1:], metadata={"Date": None})
    return content.getvalue()


def _stamp(run: Run, load: float) -> dict[str, Any]:
    """How a cell was measured."""
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False)
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return {
        "seeds": f"{run.seed}{', only two episodes' * run.quick}", "machine": f"{model}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip() or "no checkout", "load": round(load, 1), "date": f"{datetime.now(UTC):%F}",
    }  # fmt: skip


def _claim(run: Run) -> None:
    """Writes the settings of a run into its folder, or refuses a folder with others."""
    settings = {"seed": run.seed, "quick": run.quick}
    file = run.out / RUN
    if not file.exists():
        write_json(file, settings)
    elif (stored := json.loads(file.read_text())) != settings:
        raise ConfigError(f"{run.out} holds a run with {stored}, not {settings}; choose another --out")


def evaluation_cell(name: str, evaluation: Evaluation, kept: Sequence[str] | None = KEPT) -> Cell:
    """The cell of an evaluation; its folder is the evaluation's, too."""
    return Cell(name, partial(evaluated, evaluation, kept=kept))


def evaluated(evaluation: Evaluation, folder: Path, run: Run, kept: Sequence[str] | None = KEPT) -> dict[str, Any]:
    """Runs an evaluation, in a quick run with two episodes; returns the ``kept`` parts of its summary, None for all."""
    if run.quick:
        evaluation = replace(evaluation, episodes=2, shard=2, calibration_episodes=2)
    summary = evaluate(evaluation, folder, run.update, run.pool, command=" ".join(sys.argv))
    return summary if kept is None else {part: summary[part] for part in kept}


def specact(*words: object, folder: Path | None = None, **environment: str) -> str:
    """Runs a command of the package in a folder, as a user would type it; returns what it prints."""
    command = [sys.executable, "-m", "specact", *map(str, words)]
    variables = os.environ | environment
    return subprocess.run(command, check=True, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True).stdout


def trained(recipe: str, folder: Path, run: Run, *options: object) -> Path:
    """The bundle that a recipe, given as its text, trains in the folder of a cell."""
    file = folder.resolve() / "recipe.toml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(recipe)
    specact("train", file, "--out", file.with_name("run"), "--jobs", run.pool.workers, *options, folder=ROOT)
    return bundle_in(folder)


def bundle_in(folder: Path) -> Path:
    """The bundle that :func:`trained` made in a folder."""
    (bundle,) = (folder.resolve() / "run" / "bundles").iterdir()
    return bundle


def made_pair(path: Path, draft: str, target: str, **settings: Any) -> str:
    """The pair of two policies in this folder, which is made with these :class:`PairSettings` if it is not there."""
    if not path.exists():
        make_pair(path, draft, target, PairSettings(**settings))
    return str(path)
