"""The study of FLASH: what its rounds cost, and that it resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specact.cli.reproduce import reproduce
from specact.errors import ConfigError
from specact.families.flash.rounds import ROUNDS
from specact.lab.evaluation import flow_study
from specact.lab.evaluation.flow_study import cost_of, plan_flow

COSTS = {
    name: {"ms": ms}
    for name, ms in {
        "full_10": 10.0, "full_2": 3.0, "check": 2.0, "failed": 11.0, "given": 1.5, "given_failed": 10.5, "stale": 1.0,
        "block": 0.25,
    }.items()
}  # fmt: skip


def metrics(full: float, failed: float, sent: float = 1.0, actions: float = 4.0) -> dict[str, float]:
    return {"full": full, "failed": failed, "transmission_rate": sent, "actions_per_round": actions}


@pytest.mark.parametrize(
    ("name", "found", "wanted"),
    [
        ("full", metrics(1.0, 0.0), 10.0 / 4),
        ("full_2", metrics(1.0, 0.0), 3.0 / 4),
        # A fifth of the rounds full at once, a tenth failed, the rest accepted.
        ("flash", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 11.0 + 0.7 * 2.0) / 4),
        ("flash_stale", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 11.0 + 0.7 * 1.0) / 4),
        ("flash_last", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 10.5 + 0.7 * 1.5) / 4),
        # The block runs on the device every time, and the target checks what it is given.
        ("flash_device", metrics(0.3, 0.1), (0.2 * 10.0 + 0.1 * 10.5 + 0.7 * 1.5 + 0.25) / 4),
        ("block", metrics(0.0, 0.0, 0.0), 0.25 / 4),
        ("unchecked", metrics(0.3, 0.0, 0.3), (0.25 + 0.3 * 10.0) / 4),
    ],
)
def test_every_round_is_charged_and_failed_ones_in_full(name: str, found: dict[str, float], wanted: float) -> None:
    assert cost_of(ROUNDS[name], found, COSTS) == pytest.approx(wanted)


def test_a_study_resumes_and_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chapter = next(chapter for chapter in plan_flow(seed=1, quick=True) if chapter.evaluation.bundle == "pusht-flow")
    evaluation = replace(chapter.evaluation, methods=("full", "full_2", "flash"), episodes=2, shard=2)
    monkeypatch.setattr(flow_study, "plan_flow", lambda **how: [replace(chapter, evaluation=evaluation)])
    reproduce("flow", tmp_path, workers=1)
    page = (tmp_path / "flow.md").read_text()
    assert "| `flash` |" in page and "(pusht-flow/flow.png)" in page
    assert (tmp_path / "pusht-flow" / "flow.png").stat().st_size > 10_000
    rounds = json.loads((tmp_path / "pusht-flow" / "rounds.json").read_text())
    assert rounds["costs"]["full_10"]["relative"] == 1.0
    # Measured once: the second time nothing is run.
    (tmp_path / "flow.md").unlink()
    reproduce("flow", tmp_path, workers=1)
    assert (tmp_path / "flow.md").read_text() == page
    with pytest.raises(ConfigError, match="choose among pusht-flow"):
        reproduce("flow", tmp_path, pairs="pushed", workers=1)
