"""Every example runs as it is, from any folder, and shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, folder: Path, environment: dict[str, str]) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)], cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"},
        text=True, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "an example leaves nothing behind"
    return done.stdout


def rows(said: str, columns: str) -> list[list[float]]:
    """The numbers of each row of the table whose head begins so."""
    table = said[said.index(columns) :].partition("\n\n")[0].splitlines()[1:]
    return [[float(number) for number in re.findall(r"(?<![\w.])\d*\.\d+", row)] for row in table]


def test_a_decision_by_hand_follows_the_target(tmp_path: Path, environment: dict[str, str]) -> None:
    draft, target, drafted, verified = np.array(rows(run("decide_by_hand.py", tmp_path, environment), "first code")).T
    # 20,000 draws: five standard deviations are below .018.
    assert np.abs(drafted - draft).max() < 0.018 and np.abs(verified - target).max() < 0.018
    assert np.abs(draft - target).max() > 0.1


@pytest.mark.nightly
def test_a_calibrated_rate_holds_on_other_episodes(tmp_path: Path, environment: dict[str, str]) -> None:
    gates = rows(run("hold_a_rate.py", tmp_path, environment), "gate ")
    _, (calibrated, _), (stored, _), (always, _) = gates
    assert abs(calibrated - 0.4) < 0.15 and abs(stored - 0.4) < 0.15 and always == 1.0


def test_a_robot_whose_server_is_killed_ends_in_the_stop_action(tmp_path: Path, environment: dict[str, str]) -> None:
    said = run("serve_and_ask.py", tmp_path, environment)
    assert "all finite: True" in said and "the last one is the stop action: True" in said
    assert re.search(r"^ 61-120 .*disconnected.*stopped \d+$", said, re.MULTILINE)


def test_ones_own_target_behind_a_draft(tmp_path: Path, environment: dict[str, str]) -> None:
    never, third, more, always = rows(run("your_policy.py", tmp_path, environment), "gate ")
    assert never[0] == 0.0 and abs(third[0] - 0.3) < 0.05 and abs(more[0] - 0.6) < 0.05 and always[0] == 1.0
    assert always[2] < never[2] and 0.0 < always[1] < 1.0


@pytest.mark.nightly
def test_openpi_both_ways(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("openpi_client")
    said = run("openpi_both_ways.py", tmp_path, environment)
    assert "'action_horizon': 16" in said and "actions (16, 2)" in said
    (never, held, always) = rows(said, "gate ")
    assert never[:2] == [0.0, 1.0] and abs(held[0] - 0.5) < 0.1 and always[0] == 1.0
    assert held[3] > 0.0 and always[1] == 0.0 and always[3] > 0.0


@pytest.mark.nightly
def test_faster_steps(tmp_path: Path, environment: dict[str, str]) -> None:
    said = run("faster_steps.py", tmp_path, environment)
    gains = {line[0] + line[1]: line[2:] for line in map(str.split, said.splitlines()) if line[:1] == ["synchronous"]}
    # Equation (2): (rho + n) / (alpha rho + n) with rho 6 and n 8.
    assert [gains[f"synchronous{steps}"][2] for steps in (10, 5, 2, 1)] == ["1.00x", "1.27x", "1.52x", "1.63x"]


def test_each_is_tested_listed_and_short() -> None:
    tested, page = Path(__file__).read_text(), (ROOT / "docs/start/simulated.md").read_text()
    for path in EXAMPLES:
        assert f'"{path.name}"' in tested and f"(../../examples/{path.name})" in page, path.name
        assert len(path.read_text().splitlines()) < 100, path.name
    assert len(EXAMPLES) == 6
