"""Which execution is enough at a delay, on made-up studies and on the stored one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specact.lab.evaluation import executions as module
from specact.lab.evaluation.executions import WAYS, executions

ROWS = [
    ["synchronous", 1, 0.98, 0.93, 0.99], ["append", 1, 1.0, 0.96, 1.0], ["corrected", 1, 1.0, 0.96, 1.0],
    ["synchronous", 4, 0.0, 0.0, 0.04], ["append", 4, 0.84, 0.8, 0.88], ["aligned", 4, 0.9, 0.83, 0.94],
    ["corrected", 4, 0.95, 0.89, 0.98], ["a control", 4, 1.0, 0.96, 1.0],
    ["aligned", 8, 0.3, 0.2, 0.4], ["corrected", 8, 0.2, 0.1, 0.3],
]  # fmt: skip


# By the delay whose rows count: a reply within one control step has a delay of 1, and what was not measured counts as
# the next longer delay.
@pytest.mark.parametrize(
    ("reply_ms", "delay", "rows_of", "chosen"),
    [(1.0, 1, 1, "synchronous"), (50.0, 1, 1, "synchronous"), (51.0, 2, 4, "aligned"), (200.0, 4, 4, "aligned"),
     (201.0, 5, 8, None), (400.0, 8, 8, None), (401.0, 9, None, None)],
)  # fmt: skip
def test_the_simplest_that_is_as_good_as_the_best_is_advised_and_none_where_nothing_works(
    reply_ms: float, delay: int, rows_of: int | None, chosen: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "table.json").write_text(json.dumps({"chase": {"about": "100 episodes", "rows": ROWS}}))
    monkeypatch.setattr(module, "TABLE", tmp_path / "table.json")
    report = executions(reply_ms, 50.0)
    assert report["delay"] == delay and len(report["advice"]) == 1
    assert [way for way in WAYS.values() if way in report["advice"][0]] == ([WAYS[chosen]] if chosen else [])
    assert [row["method"] for row in report["rows"]] == [row[0] for row in ROWS if row[1] == rows_of and row[0] in WAYS]


def test_the_stored_study_has_every_delay_of_one_step_and_more() -> None:
    table = executions(1.0, 50.0)
    assert (
        table["delay"] == 1 and table["advice"] and {"synchronous", "aligned"} <= {r["method"] for r in table["rows"]}
    )
