"""The pages of verdicts and claims, and what the README says was found: the facts of all reports in their prose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.claims import claims_table
from experiments.grid import NAMES, ROOT, Experiment
from experiments.report import RESULTS, filled, marked

PROSE = {RESULTS / "index.md": "verdicts.md", RESULTS / "claims.md": "claims.md", ROOT / "README.md": "findings.md"}


def files() -> dict[Path, bytes]:
    """The text of the pages, by file; of the README only what stands between its marks is new."""
    facts: dict[str, Any] = {name: Experiment.load(name).published.facts for name in NAMES}
    facts["claims"] = claims_table(facts)
    texts = {page: filled(Path(__file__).with_name(prose).read_text(), facts) for page, prose in PROSE.items()}
    readme = ROOT / "README.md"
    texts[readme] = marked(readme.read_text(), "findings", texts[readme])
    return {file: text.encode() for file, text in texts.items()}
