"""Cells of a plan: what is finished is not run again, several folders merge, and a page changes between its marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from experiments.grid import CELL, STAMP, Cell, Experiment, Run
from experiments.report import Report

from specact.errors import ConfigError


def counting(results: Path, fails: str = "") -> tuple[Experiment, list[str]]:
    """An experiment whose cells are counted as they run."""
    ran: list[str] = []

    def work(name: str) -> Cell:
        def do(folder: Path, run: Run) -> Any:
            if name == fails:
                raise InterruptedError
            ran.append(name)
            return {"seed": run.seed}

        return Cell(name, do)

    names = ("a", "group/b", "group/c")
    return Experiment("a count", lambda run: [work(name) for name in names], lambda results: Report([]), results), ran


def test_a_stopped_run_goes_on_with_what_is_left(tmp_path: Path) -> None:
    failing, ran = counting(tmp_path / "results", fails="group/c")
    with pytest.raises(InterruptedError):
        failing.run(Run(tmp_path / "out"))
    experiment, rest = counting(tmp_path / "results")
    assert experiment.run(Run(tmp_path / "out")) == ["a", "group/b", "group/c"]
    assert (ran, rest) == (["a", "group/b"], ["group/c"])
    assert json.loads((tmp_path / "out" / "group" / "c" / CELL).read_text()) == {"seed": 1}


@pytest.mark.parametrize("changes", [{"seed": 2}, {"quick": True}])
def test_a_folder_of_another_run_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    experiment, ran = counting(tmp_path / "results")
    experiment.run(Run(tmp_path / "out"))
    with pytest.raises(ConfigError, match=str(tmp_path / "out")):
        experiment.run(Run(tmp_path / "out", **changes))
    assert len(ran) == 3


def test_some_cells_here_and_some_there_are_one_result(tmp_path: Path) -> None:
    experiment, _ = counting(tmp_path / "results")
    for number, only in enumerate(("a", "group/*")):
        experiment.run(Run(tmp_path / f"out{number}", seed=number, quick=number == 1), only)
    stored = experiment.store([tmp_path / "out0", tmp_path / "out1"])
    assert stored == {"a": {"seed": 0}, "group": {"b": {"seed": 1}, "c": {"seed": 1}}}
    stamps = experiment.provenance()
    quick = "1, only two episodes"
    assert {name: stamp["seeds"] for name, stamp in stamps.items()} == {"a": "0", "group/b": quick, "group/c": quick}
    assert stamps["a"] == json.loads((tmp_path / "out0" / "a" / STAMP).read_text())
    assert stamps["a"]["load"] >= 0.0 and "cores" in stamps["a"]["machine"]
    assert experiment.stored() == stored
    before = (tmp_path / "results" / "group.json").stat().st_mtime_ns
    experiment.store([tmp_path / "out0"])
    assert (tmp_path / "results" / "group.json").stat().st_mtime_ns == before, "nothing changed"
    with pytest.raises(ConfigError, match="nope"):
        experiment.run(Run(tmp_path / "out0", seed=0), "nope*")
    with pytest.raises(ConfigError, match="nowhere"):
        experiment.store([tmp_path / "out0", tmp_path / "nowhere"])
