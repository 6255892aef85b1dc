"""The page of verdicts, and what the README says was found: the facts of all reports in two pieces of prose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.grid import NAMES, ROOT, Experiment
from experiments.report import RESULTS, filled, marked
from specact.files import write_whole

PROSE = {RESULTS / "index.md": "verdicts.md", ROOT / "README.md": "findings.md"}


def files() -> dict[Path, str]:
    """The text of both pages, by file; of the README only what stands between its marks is new."""
    facts: dict[str, Any] = {}
    for name in NAMES:
        experiment = Experiment.load(name)
        facts[name] = experiment.report(experiment.stored()).facts
    texts = {page: filled(Path(__file__).with_name(prose).read_text(), facts) for page, prose in PROSE.items()}
    readme = ROOT / "README.md"
    return texts | {readme: marked(readme.read_text(), "findings", texts[readme])}


def write() -> list[Path]:
    """Writes both pages; returns their files."""
    for file, text in (texts := files()).items():
        write_whole(file, text.encode())
    return list(texts)
