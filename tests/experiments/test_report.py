"""Reports: facts fill the prose, p is corrected once, tables keep their digits and say where they come from."""

from __future__ import annotations

import csv
import io
import re
from itertools import pairwise
from pathlib import Path

import pytest
from experiments.figures import Point, draw_series
from experiments.grid import NAMES, ROOT
from experiments.report import RESULTS, Report, Table, between, contrast_table, one_family

# As the summary of an evaluation has it, and as a contrast of outcomes does.
GAIN = {"success": {"difference": 0.2, "low": 0.1, "high": 0.3, "p": 0.01}}
LOSS = {"difference": {"mean": -0.1, "low": -0.2, "high": 0.1}, "p": 0.3}
OF = {"on": "ball", "measure": "success", "first": "a"}
CONTRASTS = one_family([{**OF, "second": "b", **GAIN}, {**OF, "second": "c", **LOSS}])
STAMP = {"a": {"seeds": "1", "commit": "abc", "machine": "m, 2 cores", "load": 1.5, "date": "2026-11-26"}}
# What prose may say in digits: names of settings and of parts of papers, and code.
_ALLOWED = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|\{[^}]*\}|95 %|arXiv \S+"
    r"|(equation|figure|table|section|seed|level)s? \d+(\.\d+)?( (and|to) \d+)?",
    re.DOTALL | re.IGNORECASE,
)


def report() -> Report:
    rows = [{"name": "a", "success": {"rate": 2 / 3, "low": 0.5, "high": 0.8}}]
    table = Table("success", "One row.", "method | success", "`{name}` | {success:ci2}", rows)
    facts = {"gain": between(CONTRASTS, "ball", "a", "b"), "loss": between(CONTRASTS, "ball", "a", "c")}
    return Report([table, contrast_table(CONTRASTS)], facts)


def test_facts_and_tables_fill_the_prose() -> None:
    prose = "# A\n\na is {gain:verdict} b ({gain:+ci2}) and {loss:verdict} c.\n\n{tables[success]}\n"
    files = report().files("trial", prose, STAMP)
    page = files[RESULTS / "trial.md"]
    assert "a is better than b (+0.20 [+0.10, +0.30]) and not shown to differ from c." in page
    assert "| `a` | 0.67 [0.50, 0.80] |" in page and "(tables/trial/success.csv)" in page
    assert "abc" in page and "m, 2 cores" in page and "1.5" in page
    with pytest.raises(KeyError):
        report().files("trial", "{absent:ci2}", STAMP)


def test_tables_keep_their_digits_below_their_stamp() -> None:
    files = report().files("trial", "", STAMP)
    stamp, _, body = files[RESULTS / "tables" / "trial" / "success.csv"].partition("\n")
    assert all(said in stamp for said in ("abc", "m, 2 cores", "1.5", "2026-11-26"))
    assert [float(row["success.rate"]) for row in csv.DictReader(io.StringIO(body))] == [2 / 3]
    assert "0.67 [0.50, 0.80]" in files[RESULTS / "tables" / "trial.html"]


def test_a_long_table_stands_across_on_the_page_and_whole_in_its_file() -> None:
    rows = [{"name": name, "d": d, "success": 0.5 + d / 4} for name, d in (("a", 0), ("a", 1), ("b", 1))]
    table = Table(
        "long", "Three.", "name | d | success", "{name} | {d} | {success}", rows, "{name} | d = {d} | {success}"
    )
    page = table.markdown("long.csv")
    assert page.splitlines()[:4] == [
        "|  | d = 0 | d = 1 |",
        "| --- | --- | --- |",
        "| a | 0.5 | 0.75 |",
        "| b |  | 0.75 |",
    ]
    assert len(list(csv.reader(io.StringIO(table.csv(""))))) == 2 + len(rows)


def test_p_is_corrected_over_the_whole_family() -> None:
    assert [row["p_holm"] for row in CONTRASTS] == [0.02, 0.3]
    assert [one_family([row])[0]["p_holm"] for row in CONTRASTS] == [0.01, 0.3], "alone, smaller"


def test_too_many_series_are_refused_and_labels_stay_apart() -> None:
    series = {f"method {number}": [Point(0.0, 0.5, 0.4, 0.6), Point(1.0, 0.5, 0.4, 0.6)] for number in range(7)}
    figure = draw_series(series, "share", "success")
    labels = sorted(text.xyann[1] for text in figure.axes[0].texts)  # type: ignore[attr-defined]
    assert min(later - earlier for earlier, later in pairwise(labels)) > 0.05
    with pytest.raises(AssertionError, match="8 series"):
        draw_series({**series, "one more": series["method 0"]}, "share", "success")


@pytest.mark.parametrize("name", [*(f"{name}/report" for name in NAMES), "verdicts", "findings"])
def test_no_number_of_the_prose_is_typed(name: str) -> None:
    prose = (ROOT / "experiments" / f"{name}.md").read_text()
    assert re.findall(r"[^\n]{0,30}(?<![\w.])[-+]?\.?\d[^\n]{0,20}", _ALLOWED.sub("", prose)) == []


def test_every_contrast_has_one_p() -> None:
    seen: dict[tuple[str, ...], Path] = {}
    for file in sorted((RESULTS / "tables").rglob("*.csv")):
        lines = file.read_text().partition("\n")[2]
        for row in csv.DictReader(io.StringIO(lines)):
            if "p_holm" in row:
                on = re.sub(r", \d+ episodes|^gates of ", "", row["on"])  # more episodes hold the fewer ones
                key = (on, row["measure"], *sorted((row["first"], row["second"])))
                assert key not in seen, f"{key} has a p in {file} and in {seen[key]}"
                seen[key] = file
    assert seen
