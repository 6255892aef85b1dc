"""Verdicts on claims follow from the facts: when a number turns, so does its verdict."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
from experiments.claims import VERDICTS, claims_table, judged, stored_claims
from experiments.grid import NAMES
from experiments.report import RESULTS

FACTS: dict[str, Any] = {
    "time": {
        "a": {"relative": 0.8, "relative_low": 0.7, "relative_high": 0.9},
        "b": {"mean": 1.2, "low": 0.9, "high": 1.5},
    },
    "gain": {"difference": 0.1, "low": 0.05, "high": 0.15, "p_holm": 0.01},
    "unclear": {"difference": -0.1, "low": -0.3, "high": 0.1, "p_holm": 0.3},
    "share": 0.4,
}


def claim(**conditions: list[str]) -> dict[str, Any]:
    return {"paper": "P", "claim": "c", "number": "{time[a]:ci2}", "conditions": conditions}


@pytest.mark.parametrize(("condition", "met"), [
    ("time[a] < 1", True), ("time[a] < 0.85", False), ("time[b] < 1", False), ("time[b] > 1", False),
    ("time[b] > 0.8", True), ("share < 0.5", True), ("share > 0.5", False), ("gain better", True),
    ("gain worse", False), ("unclear better", False), ("unclear worse", False), ("unclear not worse", True),
])  # fmt: skip
def test_a_condition_is_met_by_the_whole_interval_and_after_correction(condition: str, met: bool) -> None:
    assert judged(claim(here=[condition]), FACTS)["verdict"] == ("holds" if met else "fails")


def test_a_verdict_turns_with_its_number() -> None:
    tested = claim(here=["time[a] < 1", "gain not worse"], there=["unclear better"])
    assert judged(tested, FACTS) == {"verdict": "holds only here", "kind": "holds only", "number": "0.80 [0.70, 0.90]"}
    places = claim(far=["gain worse"], here=["gain better"], there=["gain better"], everywhere=["gain better"])
    assert judged(places, FACTS)["verdict"] == "holds only here, there and everywhere"
    turned = deepcopy(FACTS)
    turned["gain"]["difference"] = -0.1
    assert judged(tested, turned)["verdict"] == "fails"
    better = deepcopy(FACTS)
    better["unclear"] = FACTS["gain"]
    assert judged(tested, better)["verdict"] == "holds"


@pytest.mark.parametrize("condition", ["time[a]", "gain is good", "time[a] < one"])
def test_a_condition_that_cannot_be_read_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(condition))):
        judged(claim(here=[condition]), FACTS)


def test_an_untyped_verdict_is_the_only_one() -> None:
    """Of what a file of claims may say, nothing is a verdict, and no number of ours is typed."""
    for name in NAMES:
        for row in stored_claims(name):
            either = {"untestable"} if "untestable" in row else {"number", "conditions"}
            assert set(row) == {"paper", "claim"} | either, row
            typed = re.sub(r"\{[^}]*\}", "", row.get("number", ""))
            assert not re.search(r"(?<![\w.])[-+]?\.?\d", typed), f"{name}: {typed}"
            assert "|" not in "".join(map(str, row.values())), row


def test_claims_stand_by_paper_and_what_fails_stands_first() -> None:
    lines = [line.split(" | ") for line in (RESULTS / "claims.md").read_text().splitlines() if line.startswith("| ")]
    rows = [(paper.strip("| "), verdict.strip("*")) for paper, _, verdict, *_ in lines[2:]]
    papers = list(dict.fromkeys(paper for paper, _ in rows))
    kinds = [next(at for at, kind in enumerate(VERDICTS) if said.startswith(kind)) for _, said in rows]
    order = [(papers.index(paper), kind) for (paper, _), kind in zip(rows, kinds, strict=True)]
    assert rows and order == sorted(order)
    assert claims_table({}).count("\n") == 1
