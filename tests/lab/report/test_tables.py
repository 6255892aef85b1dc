"""What the tables of a page and of the command line say, for summaries whose numbers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from specact.cli.eval import contrast_lines, summary_table
from specact.lab.evaluation.runs import Run, group
from specact.lab.report import tables

COST = {
    "draft_parameters": 8_421, "head_parameters": 0, "target_parameters": 1_020_000, "draft_ms": 0.0812,
    "gate_ms": 0.031, "head_ms": 0.0, "target_ms": 0.94,
}  # fmt: skip
HEAD = {"head_parameters": 119_000, "head_ms": 0.052}
SHARE = {"n": 10, "k": 5, "rate": 0.5, "low": 0.24, "high": 0.76}
AT = {"0.95": SHARE | {"rate": 0.312}}


def metrics(**more: Any) -> dict[str, Any]:
    latency = dict.fromkeys(("per_action_ms", "actions_per_s", "inference_p50_ms", "inference_p99_ms"), 1.0)
    return {
        "success": SHARE, "score": {"mean": 0.5, "low": 0.2, "high": 0.8}, "sent": 0.6, "inferences": 10,
        "action_change_loss": 0.2, "latency": latency, **more,
    }  # fmt: skip


def run(bundle: str, p: float, p_holm: float, methods: dict[str, dict[str, Any]]) -> Run:
    end = {"difference": 0.034, "low": 0.006, "high": 0.062, "p": p, "p_holm": p_holm, "test": "exact McNemar"}
    summary = {
        "bundle": bundle, "env": "pusht", "rate": 0.6, "realtime": False, "episodes": 10, "link": "lan", "score": "s",
        "methods": methods, "contrasts": [{"first": "adahi", "second": "random", "success": end, "score": end}],
    }  # fmt: skip
    evaluation = {"env": "pusht", "fingerprint": bundle, "bundle": bundle, "seed": 1}
    return Run(Path(bundle), {"evaluation": evaluation}, summary)


def column(head: str, **methods: dict[str, Any]) -> list[tables.Cell]:
    """The column of the table of methods; empty if the table has none."""
    table = tables.methods_table(run("pusht", 0.02, 0.1, methods))
    return [row[table.heads.index(head)] for row in table.rows] if head in table.heads else []


def test_every_network_stands_with_its_parameters_and_its_time() -> None:
    learned = metrics(cost=COST | HEAD)
    texts = {"draft": "8.42 k, 0.081 ms", "head": "119 k, 0.052 ms", "target": "1.02 M, 0.94 ms"}
    assert tables.networks_of([metrics(cost=COST), learned]) == texts
    assert [*tables.networks_of([metrics(cost=COST)])] == ["draft", "target"]
    assert tables.networks_of([metrics()]) == {} and column("networks", adahi=metrics()) == []
    lines = tuple(("", f"{name} {text}") for name, text in texts.items())
    assert column("networks", learned=learned, other=metrics()) == [(*lines, ("", "gate 0.031 ms")), tables.NONE]


def test_a_family_has_the_columns_of_its_metrics_alone() -> None:
    assert column("success at", adahi=metrics(success_at=AT)) == [(("0.312 above 0.95", "0.240 to 0.760"),)]
    assert column("accepted", adahi=metrics(acceptance={"all": 0.7}), other=metrics()) == ["0.700", tables.NONE]
    assert column("passes", ar=metrics(passes=5.0)) == ["5.00"]
    assert column("full", flash=metrics(full=0.25)) == ["0.250"]
    assert not any(column(head, adahi=metrics()) for head in ("success at", "accepted", "passes", "full", "true skip"))


def test_the_summary_has_a_row_of_every_pair() -> None:
    methods = {"ball": {"adahi": metrics(), "random": metrics()}, "kitchen-tokens": {"ar": metrics()}}
    runs = [run(name, 0.02, 0.9, of_pair) for name, of_pair in methods.items()]
    summary = tables.summary_table(group(runs))
    assert list(summary.heads) == ["bundle, episodes", "random", "adahi", "ar"]
    success = (("0.500", "0.240 to 0.760"),)
    assert summary.rows == [
        ["ball, 10", success, success, tables.NONE],
        ["kitchen-tokens, 10", *[tables.NONE] * 2, success],
    ]
    assert [row["bundle"] for row in summary.csv] == ["ball", "ball", "kitchen-tokens"]
    (row,) = tables.contrasts_table(runs[0]).rows
    assert row[0] == "adahi \N{MINUS SIGN} random" and row[2] == (("p = 0.9", "alone 0.02, exact McNemar"),)


def test_the_command_line_says_the_same() -> None:
    summary = run("pusht", 0.01, 0.03, {"adahi": metrics(cost=COST | HEAD, success_at=AT)}).summary
    console = Console(width=80)
    with console.capture() as captured:
        console.print(summary_table(summary))
    text = " ".join(captured.get().split())
    assert "head 119 k, 0.052 ms; target 1.02 M, 0.94 ms" in text and "above 0.95: adahi 0.312" in text
    assert "+0.034 [+0.006, +0.062], p = 0.03" in contrast_lines(summary)[0]
