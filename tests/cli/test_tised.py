"""``specact tised`` from a sweep to a sentence, as a user types it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def swept(specact_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two levers, one that asks a server, at two paces on two machines."""
    out = tmp_path_factory.mktemp("tised") / "sweep"
    made = specact_run(
        "tised", "sweep", "--bundle", "ball", "--out", out, "--levers", "naive=0,2", "late=1,0.5,0",
        "--paces", "0", "0.02", "--hardware", "this-machine", "vla-rtx-4070", "--links", "loopback+delay=40",
        "--episodes", "3", "--workers", "1", "--idle", "hold", "neutral", "--calibration-episodes", "2",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert f"specact tised analyse {out}" in made.stderr
    return out


def test_a_sweep_is_analysed_and_one_lever_explained(specact_run: Run, swept: Path) -> None:
    analysed = specact_run("tised", "analyse", swept)
    assert analysed.returncode == 0, analysed.stderr
    for part in ("naive on ball at pace 0, idle hold", "late on ball at pace 0.02, idle neutral", "for a rate of 0.5;"):
        assert part in " ".join(analysed.stdout.split()), part
    found = json.loads((swept / "analysis.json").read_text())
    assert len(found["cells"]) == 2 * 2 * 2 * 5
    assert {row["n"] for row in found["cells"]} == {3}
    assert [(row["rate"], row["episodes"]) for row in found["calibrations"]] == [(0.5, 2)] * (2 * 2 * 2)
    explained = specact_run("tised", "analyse", swept, "--lever", "naive")
    assert explained.returncode == 0, explained.stderr
    assert explained.stdout.count("at 2 against 0") == 2 * 2 * 2 and "late on ball" not in explained.stdout
    missing = specact_run("tised", "analyse", swept, "--lever", "steps")
    assert missing.returncode == 2 and "naive" in missing.stderr
    assert "--lever NAME" in specact_run("tised", "explain", swept).stderr


def test_mistakes_are_answered_with_what_there_is(specact_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    base = ("tised", "sweep", "--bundle", "ball", "--out", out, "--levers")
    for levers, said in (("nave", "'naive'"), ("naive=a", "'a'"), ("steps", "needs a flow policy")):
        refused = specact_run(*base, levers)
        assert refused.returncode == 2
        assert said in " ".join(refused.stderr.split()), refused.stderr
    assert not (out / "manifest.json").exists()
    assert specact_run("tised", "analyse", out).returncode == 2
    for content, said in (('{"format": 1}', "is damaged"), ("[" * 100_000, "is damaged")):
        out.mkdir(exist_ok=True)
        (out / "manifest.json").write_text(content)
        refused = specact_run("tised", "analyse", out)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
        assert said in " ".join(refused.stderr.split()), refused.stderr
    listed = specact_run("tised", "levers")
    assert "roll_forward" in listed.stdout and "agx-50w" in listed.stdout
