"""ADAHI's study: its plan, and its tables on results that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.adahi import plan, tables
from experiments.adahi.thresholds import spread, thresholds
from experiments.grid import Experiment, Run


def evaluations() -> dict[str, Any]:
    return {cell.name: cell.work.args[0] for cell in plan(Run(Path("x")))}  # type: ignore[attr-defined]


def test_the_plan_covers_every_pair_and_is_broad_before_it_is_deep() -> None:
    found = evaluations()
    assert list(found)[: len(tables.PAIRS)] == [f"{pair}/table" for pair in tables.PAIRS]
    for pair, episodes in {"ball": 500, "pusht": 200, "kitchen": 30}.items():
        names = {method.name for method in found[f"{pair}/table"].methods}
        assert found[f"{pair}/table"].episodes == episodes
        # What the head is worth without a gate, and chance with the privileges of either gate, stand in every table.
        assert {"draft", "head_draft", "head_random", "target_on_device", "random", "random_learned"} < names
        assert found[f"{pair}/rate-0.4"].rate == 0.4
        if pair != "kitchen":
            assert found[f"{pair}/real-time"].realtime
    # At most four skips in a row are a rate of .2 already, whatever the deviation says.
    assert "pusht/rate-0.2" not in found
    assert not {"adahi", "random"} & {method.name for method in found["pusht/rate-0.2-unlimited"].methods}
    # Demonstrations that an expert makes can be had anywhere.
    assert found["ball/table"].mse and not found["pusht/table"].mse


def test_the_two_families_share_no_contrast_and_leave_none_out() -> None:
    study = tables.study_of(Experiment.load("adahi").stored())
    own, gates = (tables.contrasts_of(study, gates=gates) for gates in (False, True))
    keys = [(row["on"], row["measure"], row["first"], row["second"]) for row in (*own, *gates)]
    assert len(keys) == len(set(keys)) == sum(
        len(summary["contrasts"]) * len(tables.measures_of(summary))
        for summary in study.values() if not summary["realtime"]
    )  # fmt: skip
    assert ("relocate, rate 0.6", "score", "adahi", "random") in keys[: len(own)]
    assert ("relocate, rate 0.6", "score", "learned", "head_draft") in keys[len(own) :]


def test_where_a_method_is_better_is_said_in_words() -> None:
    def row(on: str, measure: str, difference: float, p: float) -> dict[str, Any]:
        return {"on": on, "measure": measure, "first": "a", "second": "b", "difference": difference, "p_holm": p}

    rows = [
        row("ball, rate 0.6", "success", 0.1, 0.01), row("peg, rate 0.6", "score", 0.2, 0.01),
        row("swarm, rate 0.6", "success", -0.1, 0.01), row("pusht, rate 0.6", "success", 0.1, 0.06),
        row("relocate, rate 0.4", "success", 0.1, 0.01),
    ]  # fmt: skip
    assert tables.where(rows, "a", "b", 1) == "`ball` and `peg` (score)"
    assert tables.where(rows, "a", "b", -1) == "`swarm`"
    assert tables.where(rows, "b", "a", 1) == "no pair"
    assert tables.where(rows, "a", "b", 1, ", rate 0.4") == "`relocate`"


def test_a_threshold_beyond_all_scores_has_its_rate_and_a_fit_that_falls_has_none(tmp_path: Path) -> None:
    rows = thresholds("ball", tmp_path, Run(tmp_path, quick=True))
    assert len(rows) == 5 * (3 * 2 + 1) and {row["outcome"] for row in rows} >= {"threshold", "undefined"}
    for row in rows:
        known = {"always": 1.0, "never": 0.0, "undefined": None}
        assert row["rate"] == known[row["outcome"]] if row["outcome"] in known else 0.0 <= row["rate"] <= 1.0
        assert (row["outcome"] == "undefined") == (row.get("slope", 1.0) <= 0.0)
    (row,) = spread({"ball": rows})
    assert row["undefined"] == sum(of["rate"] is None for of in rows) and row["of"] == 30
    assert 0.0 < row["fitted"]["low"] <= row["fitted"]["high"] < 1.0
