"""The study of device budgets: its plan, its cells, and what its tables say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from experiments import budget
from experiments.budget import Draft, finish, gathered, tables
from experiments.grid import Run
from msgspec import structs

from specact.lab.evaluation.advice import TABLE, Way
from specact.lab.rollout.pool import Pool
from specact.lab.train.recipe import load_recipe

N = 60


def way(method: str, rate: float, cost: float, lost: int, draft: str = "draft") -> Way:
    """A way that loses the first of N episodes at each of three training seeds."""
    return Way(draft, method, rate, rate, cost, {seed: {str(k): k >= lost for k in range(N)} for seed in range(3)})


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Any]]:
    """The plain draft of ball's own size, hardly trained, with two episodes of everything."""
    run = Run(tmp_path_factory.mktemp("budget"), quick=True, pool=Pool(1))
    draft = Draft("ball", 1, 1, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "load_recipe", lambda *names: structs.replace(load_recipe(*names), generate_episodes=20))
        return run, finish(draft, run.out / draft.cell, run)


@pytest.mark.nightly  # trains
def test_every_method_of_a_cell_is_in_the_results(cell: tuple[Run, dict[str, Any]]) -> None:
    run, results = cell
    rates: dict[str, set[float]] = {}
    for row in results["rows"]:
        rates.setdefault(row["method"], set()).add(row["asked"])
        assert len(row["seeds"]["1"]["successes"]) == 2
        assert row["draft"] == ("" if row["method"].startswith("target") else "draft x1")
    assert rates == {
        "draft": {0.0}, "head_draft": {0.0}, "hybrid": {1.0}, "target": {1.0}, "target_on_device": {0.0},
    } | {name: {0.2, 0.4, 0.6} for name in ("random_learned", "adahi", "uncertainty", "learned")}  # fmt: skip
    counts = results["parameters"]["ball"]["draft x1"]
    assert counts["draft"] < counts["head"] < counts["target"]
    # Calibrations have other episodes than the evaluations, which are seeded beside them.
    manifest = json.loads(next((run.out / "ball/seed-1/ball-one").glob("ends/manifest.json")).read_text())
    assert manifest["evaluation"]["seed"] == 1001


@pytest.mark.nightly
def test_a_cell_is_added_to_those_of_other_seeds(cell: tuple[Run, dict[str, Any]]) -> None:
    result = cell[1] | {"rows": [row | {"seeds": {"9": row["seeds"]["1"]}} for row in cell[1]["rows"]]}
    both = gathered([result, cell[1]], {})
    assert len(both["rows"]) == len(cell[1]["rows"]) and {*both["rows"][0]["seeds"]} == {"1", "9"}


def test_the_advice_names_every_change_and_the_package_ships_it() -> None:
    ways = (
        way("target_on_device", 0.0, 1.0, 1, ""), way("target", 1.0, 0.0, 1, ""), way("hybrid", 1.0, 0.2, 1),
        way("learned", 0.4, 0.5, 2), way("head_draft", 0.0, 0.5, 1), way("draft", 0.0, 0.2, 20),
    )  # fmt: skip
    rows = list(tables.advice("ball", ways))
    assert [(row["budget"], row["what"]) for row in rows] == [
        (0.2, "the target on a server at every inference, without a draft"),
        (0.5, "the learned gate's head on the draft as the draft, alone"), (1.0, "the target on the device"),
    ]  # fmt: skip
    assert round(rows[1]["success"]["mean"], 2) == 0.98
    assert list(tables.advice("ball", ())) == []
    assert json.loads(TABLE.read_text())["ball"][0][1].startswith("the target on a server")


def test_a_study_is_compared_at_the_seeds_that_all_ways_have() -> None:
    def row(method: str, rate: float, **seeds: str) -> dict[str, object]:
        outcomes = {seed[1:]: {"rate": rate, "successes": won} for seed, won in seeds.items()}
        return {"task": "ball", "draft": "draft x1", "method": method, "asked": rate, "seeds": outcomes}

    times = {"ball": {"parts": {"1": {"draft": 1.0, "target": 4.0, "ask": 0.5}, "4": {}}}}
    rows = [row("draft", 0.0, s1="0011", s2="1111"), row("hybrid", 1.0, s1="1111")]
    results = {"rows": rows, "times": times}
    draft, hybrid = tables.study_ways(results, "ball", paired=True)
    assert list(draft.successes) == list(hybrid.successes) == [1]
    assert draft.success.mean == 0.5
    assert draft.cost == 1.0 / 4.0 and hybrid.cost == 1.5 / 4.0, "asking takes time, too"
    whole, _ = tables.study_ways(results, "ball")
    assert whole.success.mean == 0.75 and whole.episodes == 8
    assert tables.study_ways(results, "pusht", paired=True) == []
    with pytest.raises(KeyError, match="ball"):
        tables.study_ways(results | {"times": {}}, "ball")
