"""ADAHI's study: its plan, and its tables on results that are known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from experiments.adahi import plan, tables
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


def test_p_is_holms_over_all_contrasts_of_a_table() -> None:
    """Three pairs: the smallest p counts three times, the next twice, in whichever line they stand."""
    stored, study = Experiment.load("adahi").stored(), dict[str, Any]()
    for pair, p in {"ball": 0.02, "swarm": 0.5, "peg": 0.01}.items():
        summary = stored[pair]["table"]
        rows = [row for row in summary["contrasts"] if (row["first"], row["second"]) == ("adahi", "random")]
        study[f"{pair}-table"] = summary | {"contrasts": [row | {"score": row["score"] | {"p": p}} for row in rows]}
    assert re.findall(r"p = ([\d.]+)", tables.overview(study)) == ["0.04", "0.5", "0.03"]
