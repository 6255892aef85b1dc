"""ADAHI's study: its tables on results that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.adahi import tables
from experiments.adahi.thresholds import spread, thresholds
from experiments.grid import Experiment, Run


def test_the_two_families_share_no_contrast_and_leave_none_out() -> None:
    study = tables.study_of(Experiment.load("adahi").stored())
    methods, gates = (tables.contrasts_of(study, gates=gates) for gates in (False, True))
    keys = [(row["on"], row["measure"], row["first"], row["second"]) for row in (*methods, *gates)]
    assert len(keys) == len(set(keys)) == sum(
        len(summary["contrasts"]) * len(tables.measures_of(summary))
        for summary in study.values() if not summary["realtime"]
    )  # fmt: skip
    assert ("relocate, rate 0.6", "score", "adahi", "random") in keys[: len(methods)]
    assert ("relocate, rate 0.6", "score", "learned", "head_draft") in keys[len(methods) :]


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
    assert row["undefined"] == sum(threshold["rate"] is None for threshold in rows) and row["of"] == 30
    assert 0.0 < row["fitted"]["low"] <= row["fitted"]["high"] < 1.0
