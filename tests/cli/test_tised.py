"""``specact tised`` from a sweep to a sentence, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Typed


def test_a_sweep_is_analysed_and_one_lever_explained(typed: Typed, tmp_path: Path) -> None:
    """Two levers, one that asks a server, at two paces on two machines."""
    out = tmp_path / "sweep"
    made = typed(
        "tised", "sweep", "--bundle", "ball", "--out", out, "--levers", "naive=0,2", "late=1,0.5,0", "--paces", 0, 0.02,
        "--hardware", "this-machine", "vla-rtx-4070", "--links", "loopback+delay=40", "--episodes", 3, "--workers", 1,
        "--idle", "hold", "neutral", "--calibration-episodes", 2,
    )  # fmt: skip
    assert made.status == 0, made.remarks
    assert f"specact tised analyse {out}" in made.remarks
    analysed = typed("tised", "analyse", out)
    assert analysed.status == 0, analysed.remarks
    for part in ("naive on ball at pace 0, idle hold", "late on ball at pace 0.02, idle neutral", "for a rate of 0.5;"):
        assert part in " ".join(analysed.out.split()), part
    analysis = json.loads((out / "analysis.json").read_text())
    assert len(analysis["cells"]) == 2 * 2 * 2 * 5
    assert {row["n"] for row in analysis["cells"]} == {3}
    assert [(row["rate"], row["episodes"]) for row in analysis["calibrations"]] == [(0.5, 2)] * (2 * 2 * 2)
    explained = typed("tised", "analyse", out, "--lever", "naive")
    assert explained.status == 0 and explained.out.count("at 2 against 0") == 2 * 2 * 2
    assert "late on ball" not in explained.out
    typed("tised", "analyse", out, "--lever", "steps").refuses("naive")


@pytest.mark.parametrize(("levers", "named"), [("nave", "'naive'"), ("naive=a", "'a'"), ("steps", "flow")])
def test_levers_that_cannot_be_are_refused(typed: Typed, tmp_path: Path, levers: str, named: str) -> None:
    typed("tised", "sweep", "--bundle", "ball", "--out", tmp_path / "sweep", "--levers", levers).refuses(named)
    assert not (tmp_path / "sweep" / "manifest.json").exists()


def test_a_folder_that_is_no_sweep_is_refused(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    typed("tised", "analyse", tmp_path).refuses(str(tmp_path))


def test_levers_and_machines_are_listed(typed: Typed) -> None:
    listed = typed("tised", "levers").out
    assert "roll_forward" in listed and "agx-50w" in listed
