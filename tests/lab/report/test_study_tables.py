"""The study's tables for docs, on the summaries that are kept beside the script that writes them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study_tables", BENCHMARKS / "study_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((BENCHMARKS / "results/study").glob("*.json"))}


def cells(table: str) -> list[list[str]]:
    """Rows of a Markdown table, heads first."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert len({len(row) for row in rows}) == 1, "every row has every column"
    return [rows[0], *rows[2:]]


def test_every_table_can_be_made_of_what_is_kept(tables: ModuleType, study: dict[str, Any]) -> None:
    for make in (tables.overview, tables.costs, tables.sockets, tables.rates, tables.rows):
        assert len(cells(make(study))) > 3, make.__name__
    for name, summary in study.items():
        assert tables.whole(name, summary).startswith(f"### {name}")


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("docs/results.md", "overview"), ("docs/results.md", "costs"), ("docs/gates.md", "rates"),
        ("docs/reproduce.md", "rows"), ("docs/speed.md", "sockets"),
    ],
)  # fmt: skip
def test_published_tables_are_those_of_the_stored_results(
    tables: ModuleType, study: dict[str, Any], page: str, name: str
) -> None:
    text = (BENCHMARKS.parent / page).read_text()
    assert f"<!-- {name} -->\n{getattr(tables, name)(study)}\n<!-- end of {name} -->" in text


def test_p_is_holms_over_all_contrasts_of_a_table(tables: ModuleType) -> None:
    """Three pairs: the smallest p counts three times, the next twice, in whichever line they stand."""
    study = {
        f"{pair}-table": made(("adahi", "random", p)) for pair, p in (("ball", 0.02), ("swarm", 0.5), ("peg", 0.01))
    }
    table = tables.overview(study)
    column = cells(table)[0].index("adahi - random")
    assert [row[column].rsplit("p = ")[1] for row in cells(table)[1:]] == ["0.04", "0.5", "0.03"]
    assert table.endswith("p after Holm's correction over the 3 contrasts of this table.")


def test_a_learned_gate_stands_beside_the_chance_with_its_own_privileges(tables: ModuleType) -> None:
    both = made(("learned", "random", 0.3), ("learned", "random_learned", 0.01))
    table = tables.overview({"ball-table": both, "swarm-table": made(("learned", "random", 0.02))})
    column = cells(table)[0].index("learned - random_learned or random")
    assert [row[column].rsplit("p = ")[1] for row in cells(table)[1:]] == ["0.02", "0.02"]


def test_gates_at_their_rates_show_uncertainty_against_adahi(tables: ModuleType) -> None:
    table = cells(tables.rates({"ball-rate-0.4": made(("uncertainty", "adahi", 0.03), ("learned", "random", 0.5))}))
    column = table[0].index("uncertainty - adahi")
    assert [row[column].rsplit("p = ")[1] for row in table[1:]] == ["0.06"]


def test_the_contrasts_of_one_run_are_one_family(tables: ModuleType) -> None:
    text = tables.whole("ball-table", made(("adahi", "random", 0.01), ("hybrid", "target", 0.02)))
    assert re.findall(r"\| (\w+) - .*?p = ([\d.]+) \| .*?p = ([\d.]+) \|", text) == [
        ("adahi", "0.02", "0.02"),
        ("hybrid", "0.02", "0.02"),
    ]


def test_methods_and_costs_appear_as_they_run(tables: ModuleType) -> None:
    sizes = {"draft_parameters": 2609, "head_parameters": 85056, "target_parameters": 753428}
    cost = sizes | {"draft_ms": 0.08, "gate_ms": 0.03, "head_ms": 0.05, "target_ms": 0.9}
    before, low = {"ball-table": made()}, made()
    after = {"ball-table": made(), "ball-rate-0.4": low, "ball-distilled-rate-0.4": made(rate=0.76)}
    methods = after["ball-table"]["methods"]
    methods["head_draft"] = method(0.97, cost=cost)
    for metrics in methods.values():
        metrics["success_at"] = {"0.95": {"rate": 0.31, "low": 0.2, "high": 0.4}}
    heads, old, new = cells(tables.overview(before))[0], *(cells(tables.overview(one))[1] for one in (before, after))
    for name, value in (("head as draft", "0.97 [0.90, 1.00]"), ("distilled draft", "0.76 [0.90, 1.00]")):
        assert (old[heads.index(name)], new[heads.index(name)]) == ("-", value)
    assert cells(tables.costs(before))[1][1:5] == ["-"] * 4
    assert cells(tables.costs(after))[1][1:5] == ["2.61 k, 0.08 ms", "85.1 k, 0.05 ms", "-", "753 k, 0.9 ms"]
    # What has no rate stands beside the other rates too.
    rates = cells(tables.rates(after))
    shown = {row[0]: row[rates[0].index("head_draft")] for row in rates[1:]}
    assert shown == {"ball, 0.4, 10": "0.970", "ball, 0.6, 10": "0.970", "ball-distilled, 0.4, 10": "-"}
    assert "| ball | here, score above 0.95 | 0.310 | 0.310 |" in tables.rows(after)
    assert "above 0.95 [95 %]" in tables.whole("ball-table", after["ball-table"])
    assert "draft 2.61 k, 0.08 ms; head 85.1 k, 0.05 ms" in tables.whole("ball-table", after["ball-table"])


def method(rate: float, **more: Any) -> dict[str, Any]:
    return {
        "success": {"n": 10, "rate": rate, "low": 0.9, "high": 1.0}, "score": {"mean": rate, "low": 0.9, "high": 1.0},
        "transmission_rate": 0.6, "true_skip_ratio": 0.5, "acceptance": {"all": 0.5}, "gated_loss": 0.1,
        "action_change_loss": 0.1, "gate_efficiency": None, "choice_efficiency": None,
        "latency": {"per_action_ms": 1.0}, **more,
    }  # fmt: skip


def made(*contrasts: tuple[str, str, float], rate: float = 0.5) -> dict[str, Any]:
    """A summary of ball's methods, with these contrasts and their p."""
    end = {"difference": 0.1, "low": 0.0, "high": 0.2}
    rows = [
        {"first": first, "second": second, "success": end | {"p": p}, "score": end | {"p": p}}
        for first, second, p in contrasts
    ]
    methods = {name: method(rate) for name in ("draft", "target", "hybrid", "random", "adahi", "learned")}
    return {
        "episodes": 10, "seed": 1, "rate": 0.6, "link": "lan", "realtime": False, "seconds": 1.0, "calibration": {},
        "methods": methods, "contrasts": rows,
    }  # fmt: skip
